"""The learner: the only folder that imports Megatron-Core."""

import torch

if not torch.cuda.is_available():
    from pnpo_megatron.policy.cpu_backend import install

    install()
