#!/usr/bin/env bash
# What only a GPU shows, in three commands of four minutes each, without a network. Repeat each until no row remains.
#
#   benchmarks/gpu.sh tests     # the tests that run on a GPU
#   benchmarks/gpu.sh speed     # images/s, side by side, and the share of the N-way layer
#   benchmarks/gpu.sh paper     # DeiT-Tiny on 2,048 windows of photographs at the paper's length
#   benchmarks/gpu.sh all --quick   # the same way on a CPU for a moment, to see that it runs
#
# Results go to $OUT, or runs/gpu if that is unset. Keep the folder between the commands: rows resume there. Further
# flags are those of benchmarks/gpu.py. 'paper' reads sets/windows, which 'python benchmarks/small_sets.py --windows --out
# sets' writes if scikit-image is installed.
#
# It takes .venv/bin/python if there is one, else python3, which must have torch, torchvision, timm and accelerate.
# What else that Python lacks may lie as wheels in the folder 'wheels', made on a machine with a network, by
#
#   python3 -m pip download -d wheels --no-deps --only-binary=:all: --python-version 3.12 \
#       --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux2014_x86_64 \
#       pydantic pydantic-core annotated-types typing-inspection typing-extensions imagehash pywavelets filelock \
#       imagecodecs lightly lightly-utils aenum
#
# They are unpacked for this command only. Without lightly, the tests of the methods that need it are skipped.
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
"$python" benchmarks/gpu.py --out "${OUT:-runs/gpu}" "$@" || code=$?
exit "$code"
