#!/usr/bin/env bash
# A transfer grid on Slurm: a Ray cluster inside one allocation, one Ray node a machine, one job a GPU.
#
#   sbatch --nodes=4 --gpus-per-node=8 configs/transfer/slurm_ray.sh \
#       --config table5 --out /shared/runs/grid
#
# Arguments are transfer.py's; --out is on a file system that all nodes see. Submit the same line again to go on: what
# is done is not done again, and half-done jobs continue from their last checkpoint. Slurm's warning two minutes before
# the time limit makes running jobs save. Cost: idle GPUs once fewer jobs than GPUs are left.
#
# Tried under Slurm 22.05, one machine as two of its nodes, without GPUs: to the end, and through the warning and on by
# the same line. Partition, account, modules and the Python environment are your site's; add them where you see fit.
#
#SBATCH --job-name=idmm-grid
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --output=idmm-grid-%j.log
set -euo pipefail

port=$((20000 + SLURM_JOB_ID % 10000)) # another job's Ray on a shared node has another
head=${SLURMD_NODENAME:-$(hostname -s)} # by the name that Slurm knows it by
address=${HEAD_IP:-$(hostname -I | awk '{print $1}')} # set HEAD_IP where the first is not the one between nodes
cores=${SLURM_CPUS_ON_NODE:-1}
gpus=${SLURM_GPUS_ON_NODE:-0}
export RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token # nobody else on these nodes can join
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
