#!/usr/bin/env bash
# Model, prompts, training, summary. Arguments are settings: ./run.sh --steps=2
set -euo pipefail
cd "$(dirname "$0")"
python make_model.py && python make_prompts.py
pnpo-megatron train config.toml "$@"
python ../summary.py runs/smollm2
