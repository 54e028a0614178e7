#!/usr/bin/env bash
# Measure on one CUDA GPU, from a bare checkout, in under 8 minutes; the arguments go to benchmarks/gpu.py.
# Needs a Python (PYTHON=..., else python3) with torch, einops, safetensors and accelerate; installs nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD"
# A last resort: gpu.py keeps its own time and has written what it measured by then.
exec timeout --kill-after=5 475 "${PYTHON:-python3}" -m benchmarks.gpu "$@"
