"""Log-probs from a sharded vocabulary against a dense float64 softmax, both passes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pnpo_megatron.parallel import vocab_logprobs
from pnpo_megatron.parallel.gather import gather_first_dim
from pnpo_megatron.parallel.vocab_logprobs import chunked_logprobs

TOKENS, WIDTH, VOCAB, PADDED, TEMPERATURE = 48, 12, 50, 64, 0.7


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight with padding rows, labels, and the gradients of log-probs and entropy."""
    draw = torch.Generator().manual_seed(7)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=draw)
    labels[:3] = torch.tensor([0, VOCAB - 1, -100])
    weight = torch.randn(PADDED, WIDTH, generator=draw)
    weight[VOCAB:] = 100.0
    hidden = torch.randn(TOKENS, WIDTH, generator=draw)
    return hidden, weight, labels, torch.randn(TOKENS, generator=draw), torch.randn(TOKENS, generator=draw)


def dense(with_entropy: bool) -> list[Tensor]:
    """Log-probs, entropy, gradient of the hidden states and of the real rows, in float64."""
    hidden, weight, labels, grad, grad_entropy = inputs()
    leaves = [hidden.double().requires_grad_(), weight[:VOCAB].double().requires_grad_()]
    log_p = (leaves[0] @ leaves[1].T / TEMPERATURE).log_softmax(-1)
    logprobs = log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0].masked_fill(labels < 0, 0.0)
    entropy = -(log_p.exp() * log_p).sum(-1)
    ((logprobs * grad).sum() + with_entropy * (entropy * grad_entropy).sum()).backward()
    return [logprobs.detach(), entropy.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]


def shard(weight: Tensor) -> Tensor:
    return weight.chunk(dist.get_world_size())[dist.get_rank()].clone()


def every_case() -> dict[str, list[Tensor]]:
    """Log-probs, entropy and both gradients: with and without entropy, plain and sequence-parallel."""
    vocab_logprobs._BLOCK_ELEMENTS = 60  # six rows of ten tokens: several blocks in both directions
    results = {}
    for with_entropy, sequence_parallel in itertools.product((True, False), repeat=2):
        hidden, weight, labels, grad, grad_entropy = inputs()
        local = (shard(hidden) if sequence_parallel else hidden).requires_grad_()
        rows = shard(weight).requires_grad_()
        group = dist.group.WORLD
        whole = gather_first_dim(local, group) if sequence_parallel else local
        logprobs, entropy = chunked_logprobs(
            whole,
            rows,
            labels,
            temperature=TEMPERATURE,
            vocab_size=VOCAB,
            tp_group=group,
            chunk_tokens=10,
            partial_hidden_grad=sequence_parallel,
        )
        torch.autograd.backward(
            [logprobs, entropy][: 1 + with_entropy], [grad, grad_entropy][: 1 + with_entropy]
        )
        assert local.grad is not None and rows.grad is not None
        name = f"{with_entropy} {sequence_parallel}"
        results[name] = [logprobs.detach(), entropy.detach(), local.grad, rows.grad]
    return results


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_h17_h24_values_and_gradients_do_not_know_how_the_vocabulary_was_cut(
    spawn: Any, tp_size: int
) -> None:
    """Targets on the first and the last rank, an ignored one, padding rows that would win every softmax."""
    results = spawn(every_case, tp_size)
    for with_entropy, sequence_parallel in itertools.product((True, False), repeat=2):
        ranks = [result[f"{with_entropy} {sequence_parallel}"] for result in results]
        weight_grad = torch.cat([values[3] for values in ranks])
        assert not weight_grad[VOCAB:].any()
        expected = dense(with_entropy)
        torch.testing.assert_close(weight_grad[:VOCAB].double(), expected[3], rtol=2e-5, atol=2e-5)
        hidden_grads = [torch.cat([v[2] for v in ranks])] if sequence_parallel else [v[2] for v in ranks]
        for found in hidden_grads:
            torch.testing.assert_close(found.double(), expected[2], rtol=2e-5, atol=2e-5)
        for values in ranks:
            torch.testing.assert_close(values[0].double(), expected[0], rtol=2e-6, atol=2e-6)
            torch.testing.assert_close(values[1].double(), expected[1], rtol=2e-6, atol=5e-6)


def gradient_of_the_published_case() -> Tensor:
    """Logits [2, 1, 0, -1] as a weight of four rows and one hidden unit."""
    weight = shard(torch.tensor([[2.0], [1.0], [0.0], [-1.0]])).requires_grad_()
    logprobs, _ = chunked_logprobs(
        torch.ones(1, 1), weight, torch.tensor([1]), temperature=1.0, vocab_size=4, tp_group=dist.group.WORLD
    )
    logprobs.sum().backward()
    assert weight.grad is not None
    return weight.grad[:, 0]


def test_h17_the_reference_gradient(spawn: Any) -> None:
    expected = torch.tensor([-0.64391426, 0.76311718, -0.08714432, -0.03205860])
    torch.testing.assert_close(
        torch.cat(spawn(gradient_of_the_published_case, 2)), expected, rtol=0, atol=1e-7
    )


@pytest.mark.parametrize(
    ("logits", "expected"), [([1, 0.5, -0.5, 0], -0.78733867), ([-5, -6, -7, -8], -0.44018970)]
)
def test_h24_columns_of_padding_do_not_enter_the_softmax(logits: list[float], expected: float) -> None:
    weight = torch.tensor([*logits, 0.0, 0.0, 0.0, 0.0])[:, None]
    logprobs, _ = chunked_logprobs(
        torch.ones(1, 1), weight, torch.tensor([0]), temperature=1.0, vocab_size=4, tp_group=None
    )
    assert logprobs.item() == pytest.approx(expected, abs=1e-6)


def score(hidden: Tensor, weight: Tensor, labels: Tensor, **changes: Any) -> Tensor:
    settings = {
        "temperature": TEMPERATURE,
        "vocab_size": VOCAB,
        "tp_group": None,
        "chunk_tokens": 10,
        **changes,
    }
    return chunked_logprobs(hidden, weight, labels, **settings)[0]


def test_scoring_and_training_give_the_same_bits() -> None:
    hidden, weight, labels, _, _ = inputs()
    training = score(hidden.requires_grad_(), weight.requires_grad_(), labels)
    with torch.no_grad():
        assert torch.equal(score(hidden, weight, labels), training)


def test_keeping_logits_for_the_backward_pass_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels, grad, _ = inputs()
    rows = weight.requires_grad_()
    gradients = []
    for budget in (0, 700, 10**6):  # none, the first block, all
        monkeypatch.setattr(vocab_logprobs, "_KEPT_ELEMENTS", budget)
        logprobs = score(hidden, rows, labels)
        for _ in range(2):  # a second pass finds nothing kept
            gradients += torch.autograd.grad(logprobs, rows, grad, retain_graph=True)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


def test_bfloat16_states_are_multiplied_in_float32() -> None:
    """bfloat16 logits near 30 are multiples of 0.125; the log-probs here keep float32's digits."""
    hidden, weight, labels, _, _ = inputs()
    hidden, weight = (hidden * 4).bfloat16(), weight.bfloat16()
    exact = (hidden.double() @ weight[:VOCAB].double().T / TEMPERATURE).log_softmax(-1)
    exact = exact.gather(1, labels.clamp(min=0)[:, None])[:, 0].masked_fill(labels < 0, 0.0)
    torch.testing.assert_close(score(hidden, weight, labels).double(), exact, rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_main_grad_is_accumulated_in_place_and_autograd_gets_a_zero(dtype: torch.dtype) -> None:
    hidden, weight, labels, grad, _ = inputs()
    plain = weight.clone().requires_grad_()
    score(hidden, plain, labels).backward(grad)
    assert plain.grad is not None

    tied = weight.to(dtype).requires_grad_()
    main_grad = tied.main_grad = torch.ones(PADDED, WIDTH)  # type: ignore[attr-defined]
    (score(hidden.to(dtype), tied, labels) @ grad + tied.float().sum()).backward()
    assert tied.main_grad is main_grad and tied.grad_added_to_main_grad  # type: ignore[attr-defined]
    tolerance = 1e-6 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(main_grad - 1, plain.grad, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(tied.grad, torch.ones_like(tied))  # the embedding's share alone


def test_a_weight_used_by_the_head_alone_still_gets_a_gradient_for_the_hook() -> None:
    hidden, weight, labels, grad, _ = inputs()
    weight.requires_grad_().main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    seen: list[Tensor | None] = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    score(hidden, weight, labels).backward(grad)
    assert seen[0] is not None and not seen[0].to_dense().any()


class LargestFloat(TorchDispatchMode):
    """Notes the largest floating-point result of any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.elements = max(self.elements, tensor.numel())
        return result


def test_no_tensor_of_tokens_by_vocabulary_ever_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab_logprobs, "_BLOCK_ELEMENTS", 8000)
    hidden = torch.randn(200, 8, requires_grad=True)
    weight = torch.randn(1000, 8, requires_grad=True)
    with LargestFloat() as largest:
        score(
            hidden, weight, torch.randint(0, 1000, (200,)), vocab_size=1000, chunk_tokens=50
        ).sum().backward()
    assert largest.elements <= 8000 < 200 * 1000


def test_no_position_to_score_gives_zero_gradients() -> None:
    hidden, weight, labels, _, _ = inputs()
    empty, rows = hidden[:0].requires_grad_(), weight.requires_grad_()
    score(empty, rows, labels[:0]).sum().backward()
    assert rows.grad is not None and not rows.grad.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "temperature = 0.0"),
        ({"vocab_size": 65}, "vocab_size = 65, .* 64 rows on each of 1"),
    ],
)
def test_settings_that_define_nothing_are_refused(changes: dict[str, Any], message: str) -> None:
    hidden, weight, labels, _, _ = inputs()
    with pytest.raises(ValueError, match=message):
        score(hidden, weight, labels, **changes)


def test_a_label_beyond_the_vocabulary_is_not_scored_as_padding() -> None:
    hidden, weight, labels, _, _ = inputs()
    labels[5] = VOCAB
    assert score(hidden, weight, labels).isnan().nonzero().flatten().tolist() == [5]
