"""AdamW with the contract of FusedAdam for CPUs, and for GPUs without TransformerEngine and NVIDIA's apex.

Megatron's distributed optimizer has two code paths: one for FusedAdam, where the step count lives in the
parameter group, and one for torch.optim.AdamW, where every parameter has its own. Measured on 0.16.1, the
second one shares a single step tensor between all parameters after a load, so each update advances it many
times. With this class every machine takes the first path.
"""

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw


class PlainAdam(torch.optim.Optimizer):
    """AdamW whose ``step`` is an int in the parameter group.

    State per parameter: ``exp_avg`` and ``exp_avg_sq``, in the parameter's shape and dtype. A group without
    parameters does not count steps, as in FusedAdam.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        if not adam_w_mode:
            raise ValueError("adam_w_mode = False: only decoupled weight decay is supported; use True")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("closure: not supported; compute gradients first, then call step()")
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
                self._update_group(group)

    def _update_group(self, group: dict[str, Any]) -> None:
        params = [param for param in group["params"] if param.grad is not None]
        if not params:
            return
        states = [self._state_of(param) for param in params]
        beta1, beta2 = group["betas"]
        adamw(
            params,
            [param.grad for param in params],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            # The function adds 1 to each of these; the group's count stays the only one that is kept.
            [torch.tensor(float(group["step"] - 1), device=param.device) for param in params],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _state_of(self, param: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        return state


def install() -> None:
    """Put `PlainAdam` where Megatron-Core 0.16.1 found no fused Adam; a no-op where it found one."""
    optimizer = importlib.import_module("megatron.core.optimizer")
    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    if not optimizer.USING_PYTORCH_OPTIMIZER:
        return
    for module in (optimizer, distributed):
        vars(module)["Adam"] = PlainAdam
    vars(optimizer)["USING_PYTORCH_OPTIMIZER"] = False
    vars(distributed).update(HAVE_APEX_OR_TE=True, USING_APEX_OPTIMIZER=True)
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    # moe_utils.py:1192 tests a name that line 34 defines only where TransformerEngine is installed.
    vars(moe_utils).setdefault("te_general_gemm", None)
