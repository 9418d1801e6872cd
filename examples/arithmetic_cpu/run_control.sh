#!/usr/bin/env bash
# The same run with the rewards permuted inside each group: what it gains is format or luck, not arithmetic.
set -euo pipefail
cd "$(dirname "$0")"
python make_base.py
pnpo-megatron train config.toml --reward.permute=true --run.folder=runs/control "$@"
python ../summary.py runs/arithmetic runs/control
