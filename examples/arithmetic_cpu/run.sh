#!/usr/bin/env bash
# Base model, training, summary. Arguments are settings: ./run.sh --steps=5 --run.folder=runs/short
set -euo pipefail
cd "$(dirname "$0")"
python make_base.py
pnpo-megatron train config.toml "$@"
python ../summary.py runs/arithmetic
