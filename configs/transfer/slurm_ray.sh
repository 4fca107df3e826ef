#!/usr/bin/env bash
# A transfer grid on Slurm: a Ray cluster inside one allocation, one Ray node per machine, one job per GPU.
#
#   sbatch --nodes=4 --gpus-per-node=8 configs/transfer/slurm_ray.sh \
#       --config table5 --roots /shared/datasets --out /shared/runs/grid
#
# The arguments are those of transfer.py. --out must be on a file system that all nodes see. Submit the same line again
# to resume: finished jobs are not repeated, and the others continue from their last checkpoint. Slurm warns two minutes
# before the time limit. Then running jobs save. At the end, some GPUs are idle if fewer jobs than GPUs are left.
#
# Tried under Slurm 22.05 without GPUs, one machine as two nodes: once to its end, and once stopped by the warning and
# resumed by the same line. Add the partition, account, modules and Python environment of your site.
#
#SBATCH --job-name=idmm-grid
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --output=idmm-grid-%j.log
set -euo pipefail

port=$((20000 + SLURM_JOB_ID % 10000)) # other jobs on a shared node use other ports
head=${SLURMD_NODENAME:-$(hostname -s)} # the name that Slurm uses
address=${HEAD_IP:-$(hostname -I | awk '{print $1}')} # set HEAD_IP if the nodes use another address among themselves
cores=${SLURM_CPUS_ON_NODE:-1}
gpus=${SLURM_GPUS_ON_NODE:-0}
export RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token # others on these nodes cannot join
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))') && export RAY_AUTH_TOKEN
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT # the cluster ends with the script
resources=(--num-cpus="$cores" --num-gpus="$gpus")

# the batch script runs on the allocation's first node
srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
    ray start --head --block --node-ip-address="$address" --port="$port" --include-dashboard=false "${resources[@]}" &
for _ in $(seq 60); do
    ray status --address="$address:$port" >/dev/null 2>&1 && break
    sleep 2
done
others=$((SLURM_JOB_NUM_NODES - 1))
if [ "$others" -gt 0 ]; then
    srun --overlap --nodes="$others" --ntasks="$others" --exclude="$head" \
        ray start --block --address="$address:$port" "${resources[@]}" &
fi

# a job takes a GPU and its share of the cores
share=$((gpus > 0 ? cores / gpus : 1))
python transfer.py "$@" --engine ray --ray.address "$address:$port" \
    --ray.num_gpus "$((gpus > 0 ? 1 : 0))" --ray.num_cpus "$((share > 0 ? share : 1))" &
runner=$!
trap 'kill -TERM $runner' TERM # two minutes are left: jobs save, and the grid's tables are written
code=0
wait $runner || code=$?
while kill -0 $runner 2>/dev/null; do # the signal ended the first wait
    wait $runner || code=$?
done
exit $code
