#!/usr/bin/env bash
# Checks one GPU in under 8 minutes: scripts/gpu_check.sh [RESULTS.json]
# Needs torch, triton, transformers, safetensors and pytest there; megatron-core may be carried along as a wheel in
# PNPO_WHEELS (a folder, default .whl), which is installed beside everything and removed again.
# NCCL, TransformerEngine, vLLM and several GPUs stay untested.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

results=${1:-gpu_check.json}
python=${PYTHON:-python3}
wheels=${PNPO_WHEELS:-.whl}
if compgen -G "$wheels/*.whl" > /dev/null; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    # By name, so that of several wheels pip takes the one this Python can use.
    basename -a "$wheels"/*.whl | cut -d- -f1 | sort -u | xargs \
        "$python" -m pip install --quiet --no-index --find-links "$wheels" --no-deps --no-compile --target "$site"
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export GPU_CHECK_JSON=$results PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=4

# The versions here are not the pinned ones: their own warnings are no failure.
code=0
timeout 470 "$python" -m pytest -q -p no:cacheprovider -o addopts= -o filterwarnings=default -m gpu --timeout 300 tests/gpu || code=$?
[ -f "$results" ] && cat "$results"
exit "$code"
