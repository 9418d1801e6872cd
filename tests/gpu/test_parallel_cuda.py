"""The CUDA branches of the scan, the vocabulary head and the attention, against the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pnpo_megatron.parallel.prefix_scan import preceding_min, prefix_scan
from pnpo_megatron.parallel.vocab_logprobs import chunked_logprobs
from pnpo_megatron.policy.cp_attention import packed_causal_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("special", [0.1, torch.nan, torch.inf, -torch.inf, 1e9])
def test_the_scan_gives_the_same_bits_on_both_devices(special: float) -> None:
    values, chunks = 0.05 * torch.randn(2 * 1040), torch.tensor([1, 7, 1000, 32])
    values[500] = special
    mask = torch.rand(values.shape) < 0.7
    here = [*prefix_scan(values, chunks, None), preceding_min(values, mask, chunks, None)]
    device = [x.cuda() for x in (values, chunks, mask)]
    there = [*prefix_scan(*device[:2], None), preceding_min(device[0], device[2], device[1], None)]
    for expected, found in zip(here, there, strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def head(device: str, main_grad: bool) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(300, 64, generator=draw).bfloat16().to(device).requires_grad_()
    weight = torch.randn(1024, 64, generator=draw).bfloat16().to(device).requires_grad_()
    if main_grad:
        weight.main_grad = torch.zeros(1024, 64, device=device)  # type: ignore[attr-defined]
    labels = torch.randint(0, 1000, (300,), generator=draw).to(device)
    logprobs, entropy = chunked_logprobs(
        hidden, weight, labels, temperature=0.8, vocab_size=1000, tp_group=None, chunk_tokens=128
    )
    (logprobs.sum() + entropy.sum()).backward()
    gradient = weight.main_grad if main_grad else weight.grad  # type: ignore[attr-defined]
    return [x.detach().float().cpu() for x in (logprobs, entropy, hidden.grad, gradient)]


@pytest.mark.parametrize("main_grad", [False, True])
def test_bfloat16_weights_are_multiplied_into_float32(main_grad: bool) -> None:
    """bfloat16 logits would be off by 0.06 here; gradients pass through one bfloat16 rounding."""
    here, there = head("cpu", main_grad), head("cuda", main_grad)
    for expected, found in zip(here[:2], there[:2], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    for expected, found in zip(here[2:], there[2:], strict=True):
        assert (found - expected).norm() < 0.01 * expected.norm()


def test_attention_gives_the_same_bits_with_and_without_gradients() -> None:
    lengths = [40, 8, 200]
    query, key, value = (torch.randn(248, heads, 32, device="cuda") for heads in (4, 2, 2))
    with torch.no_grad():
        scored = packed_causal_attention(query, key, value, lengths, 0.2, None)
    trained = packed_causal_attention(query.requires_grad_(), key, value, lengths, 0.2, None)
    assert torch.equal(scored, trained)
    expected = packed_causal_attention(query.cpu(), key.cpu(), value.cpu(), lengths, 0.2, None)
    torch.testing.assert_close(trained.cpu(), expected, rtol=1e-3, atol=1e-3)
