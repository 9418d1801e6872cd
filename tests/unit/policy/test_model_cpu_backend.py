"""The CPU backend: its optimizer against float64 AdamW, and when it is loaded at all."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch

from pnpo_megatron.policy.plain_adam import PlainAdam


def adamw_by_hand(
    param: torch.Tensor, gradients: list[torch.Tensor], lr: float, decay: float
) -> torch.Tensor:
    """Decoupled weight decay, Loshchilov and Hutter, in float64."""
    value, first, second = param.double(), torch.zeros_like(param).double(), torch.zeros_like(param).double()
    for step, gradient in enumerate(gradients, start=1):
        first = 0.9 * first + 0.1 * gradient.double()
        second = 0.99 * second + 0.01 * gradient.double() ** 2
        update = (first / (1 - 0.9**step)) / ((second / (1 - 0.99**step)).sqrt() + 1e-8)
        value = value * (1 - lr * decay) - lr * update
    return value


def test_adam_equals_the_formula_and_keeps_its_step_in_the_group():
    param = torch.nn.Parameter(torch.randn(50))
    start, gradients = param.detach().clone(), [torch.randn(50) for _ in range(7)]
    optimizer = PlainAdam([{"params": [param]}, {"params": []}], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    for gradient in gradients:
        param.grad = gradient
        optimizer.step()
    expected = adamw_by_hand(start, gradients, lr=0.01, decay=0.1)
    torch.testing.assert_close(param.detach().double(), expected, atol=1e-6, rtol=0)
    assert [group.get("step") for group in optimizer.param_groups] == [7, None]
    assert set(optimizer.state[param]) == {"exp_avg", "exp_avg_sq"}


def test_a_restored_adam_goes_on_bitwise():
    def run(steps: range, param: torch.nn.Parameter, optimizer: PlainAdam) -> None:
        for step in steps:
            param.grad = torch.randn(9, generator=torch.Generator().manual_seed(step))
            optimizer.step()

    whole = torch.nn.Parameter(torch.ones(9))
    optimizer = PlainAdam([whole], lr=0.1)
    run(range(3), whole, optimizer)
    other = torch.nn.Parameter(whole.detach().clone())
    resumed = PlainAdam([other], lr=0.1)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(range(3, 6), whole, optimizer)
    run(range(3, 6), other, resumed)
    assert torch.equal(whole, other)


def test_adam_without_decoupled_decay_is_refused():
    with pytest.raises(ValueError, match="adam_w_mode = False.*use True"):
        PlainAdam([torch.nn.Parameter(torch.ones(1))], adam_w_mode=False)


def in_a_new_process(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )


def test_nothing_is_patched_or_loaded_where_cuda_is_available():
    result = in_a_new_process(
        "import sys, torch\n"
        "torch.cuda.is_available = lambda: True\n"
        "before = torch.zeros, torch.Tensor.cuda, torch.cuda.current_device\n"
        "import pnpo_megatron.policy\n"
        "assert before == (torch.zeros, torch.Tensor.cuda, torch.cuda.current_device)\n"
        "print('pnpo_megatron.policy.cpu_backend' in sys.modules)"
    )
    assert result.stdout.strip() == "False", result.stderr


def test_patches_that_would_come_too_late_are_an_error():
    result = in_a_new_process(
        "import sys\n"
        "sys.modules['megatron.core.tensor_parallel'] = sys\n"  # as if it had been imported
        "import pnpo_megatron.policy"
    )
    assert "import pnpo_megatron.policy first" in result.stderr


def test_no_compiler_is_loaded_for_what_is_not_compiled():
    """Importing it takes more seconds than everything else together."""
    result = in_a_new_process(
        "import sys, torch\n"
        "compile_function = torch.compile\n"
        "import pnpo_megatron.policy.learner\n"
        "print('torch._inductor' in sys.modules, torch.compile is compile_function)"
    )
    assert result.stdout.split() == ["False", "True"], result.stderr
