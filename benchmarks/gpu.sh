#!/usr/bin/env bash
# All benchmarks and the GPU tests on one CUDA device, in under 8 minutes and without a network.
#
#   benchmarks/gpu.sh                          # results go to $OUT, or runs/gpu where that is unset
#   benchmarks/gpu.sh --parts tests reference  # flags of benchmarks/run_all.py
#   benchmarks/gpu.sh --device cpu --quick     # the same way without a GPU, to see that it runs
#   benchmarks/gpu.sh --table2                 # instead: Table 2's IDMM and scratch on 2,040 photographs, 112 px, in 8 minutes
#
# --table2 reads sets/windows, which 'python benchmarks/small_sets.py --windows --out sets' writes if scikit-image is
# installed. Its JSON files go to $OUT; further flags are those of benchmarks/miniature.py.
#
# It takes .venv/bin/python where there is one, else python3, which must have torch, torchvision, timm and accelerate.
# What else that Python lacks may lie as wheels in the folder 'wheels', made where there is a network, by
#
#   python3 -m pip download -d wheels --no-deps --only-binary=:all: --python-version 3.12 \
#       --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux2014_x86_64 \
#       pydantic pydantic-core annotated-types typing-inspection typing-extensions imagehash pywavelets filelock \
#       imagecodecs lightly lightly-utils aenum
#
# They are unpacked for this run alone. Without lightly, the tests of the methods that need it are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if compgen -G 'wheels/*.whl' >/dev/null; then
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" wheels/*.whl
fi
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"
code=0
if [ "${1:-}" = --table2 ]; then
  "$python" benchmarks/miniature.py --photographs --minutes 3.4 --out "$site/runs" --results "${OUT:-runs/gpu}" "${@:2}" || code=$?
  exit "$code"
fi
"$python" benchmarks/run_all.py --device cuda --out "${OUT:-runs/gpu}" "$@" || code=$?
exit "$code"
