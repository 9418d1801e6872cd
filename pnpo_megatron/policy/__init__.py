"""The learner: the only folder that imports Megatron-Core."""

from importlib.util import find_spec

import torch

if not torch.cuda.is_available():
    from pnpo_megatron.policy.cpu_backend import install

    install()
elif find_spec("transformer_engine") is None:
    from pnpo_megatron.policy import plain_adam

    plain_adam.install()
