"""TRL 1.16's and verl 0.9.1's own loss functions, called from their installed packages.

TRL's loss is a method of its trainer: it runs on a stand-in that has the attributes the method reads. verl's
package wants a cluster to be imported, so its packages are opened without their `__init__`, and only the file
of losses, and what that imports, is run.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(policy_logprobs [B, T], old_logprobs [B, T], advantages [B], mask [B, T]) -> scalar."""
CLIP = {"gspo": (3e-4, 4e-4), "grpo": (0.2, 0.28)}
VERSIONS = {"trl": "1.16.0", "verl": "0.9.1"}


def check_versions() -> None:
    """Stop with what to type if the peers are not those of requirements/bench*.txt."""
    for name, wanted in VERSIONS.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "nothing"
        if found != wanted:
            raise SystemExit(f"error: found {name} {found}, expected {wanted}; `make bench` installs it")


def trl_loss(name: str) -> Loss:
    """`GRPOTrainer._compute_loss`, metrics included: sequence-level ratios for GSPO, token-level for GRPO."""
    from trl.trainer import grpo_trainer

    vars(grpo_trainer)["torch"] = _FreeJoin()
    low, high = CLIP[name]
    trainer: Any = SimpleNamespace(
        accelerator=SimpleNamespace(
            gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x, num_processes=1
        ),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        aux_loss_enabled=False,
        beta=0.0,
        current_gradient_accumulation_steps=1,
        epsilon_low=low,
        epsilon_high=high,
        importance_sampling_level="sequence" if name == "gspo" else "token",
        loss_type="grpo" if name == "gspo" else "bnpo",  # the mean over responses, or over tokens
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )

    def loss(policy: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        ids = torch.empty(mask.shape, dtype=torch.int64, device="meta")
        entropy = torch.zeros(len(mask), 1)  # logged only; a column of it costs nothing
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (policy, entropy, None)
        inputs = {
            "prompt_ids": ids[:, :0],
            "prompt_mask": mask[:, :0],
            "completion_ids": ids,
            "completion_mask": mask,
            "advantages": advantages,
            "old_per_token_logps": old,
        }
        return grpo_trainer.GRPOTrainer._compute_loss(trainer, None, inputs)  # type: ignore[no-any-return]

    return loss


class _FreeJoin:
    """torch for TRL's file: it joins prompt and response for the model, which is not the cost of a loss."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def cat(self, tensors: list[Tensor], dim: int) -> Tensor:
        """The response; the prompt is empty."""
        return tensors[-1]


def verl_loss(name: str) -> Loss:
    """`compute_policy_loss_gspo` or `compute_policy_loss_vanilla`; metrics included."""
    losses = _verl_losses()
    low, high = CLIP[name]
    config = sys.modules["verl.workers.config"].ActorConfig(low, high)  # type: ignore[attr-defined]
    function = losses.compute_policy_loss_gspo if name == "gspo" else losses.compute_policy_loss_vanilla
    mean = "seq-mean-token-mean" if name == "gspo" else "token-mean"

    def loss(policy: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        # Here advantages are [B, T], as its trainer keeps them.
        return function(old, policy, advantages, mask, loss_agg_mode=mean, config=config)[0]  # type: ignore[no-any-return]

    return loss


class _ActorConfig:
    """The fields of verl's actor configuration that its losses read."""

    def __init__(self, low: float, high: float) -> None:
        self.clip_ratio, self.clip_ratio_low, self.clip_ratio_high = low, low, high
        self.global_batch_info: dict[str, Any] = {}

    def get(self, key: str, default: Any) -> Any:
        return {"clip_ratio_c": 10.0}.get(key, default)


@cache
def _verl_losses() -> ModuleType:
    """verl/trainer/ppo/core_algos.py without the packages around it."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("error: verl is not installed; run `make bench`, which installs it")
    root = Path(spec.submodule_search_locations[0])
    for name in ("verl", "verl.utils", "verl.trainer", "verl.trainer.ppo", "verl.workers"):
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules.setdefault(name, package)
    for name, attributes in {
        "verl.trainer.config": {"AlgoConfig": type("AlgoConfig", (), {})},
        "verl.workers.config": {"ActorConfig": _ActorConfig},
    }.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        sys.modules.setdefault(name, module)
    vars(sys.modules["verl.utils"]).update(as_torch_index=None, group_mean_std=None)  # of advantages, not run
    return importlib.import_module("verl.trainer.ppo.core_algos")
