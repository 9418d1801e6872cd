import pytest
import torch

from pnpo_megatron.convert.layouts import (
    GATE_UP,
    QKV,
    SINGLE,
    VOCAB,
    Sizes,
    fuse_qkv,
    pad_vocab,
    shard,
    split_qkv,
    trim_vocab,
    unshard,
)

TRAP = Sizes(heads=4, kv_heads=2, head_dim=1, vocab=50, padded_vocab=64)


def rows(*labels: int, width: int = 3) -> torch.Tensor:
    return torch.tensor(labels, dtype=torch.float32)[:, None].expand(-1, width).contiguous()


def test_h23_queries_come_before_their_own_key_and_value():
    q, k, v = rows(0, 1, 2, 3), rows(10, 11), rows(20, 21)
    fused = fuse_qkv((q, k, v), TRAP)
    assert fused[:, 0].tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert shard(fused, 0, 2, 0)[:, 0].tolist() == [0, 1, 10, 20]


@pytest.mark.parametrize("kind", ["weight", "bias"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 1), (9, 3, 64), (8, 8, 16), (6, 1, 10)])
def test_h23_split_undoes_fuse_bit_for_bit(kind, heads, kv_heads, head_dim):
    sizes = Sizes(heads, kv_heads, head_dim, 0, 0)
    rest = (7,) if kind == "weight" else ()
    parts = [torch.randn(count * head_dim, *rest) for count in (heads, kv_heads, kv_heads)]
    for back, part in zip(split_qkv(fuse_qkv(parts, sizes), sizes), parts, strict=True):
        assert torch.equal(back, part)


def test_h24_padding_is_cut_whatever_it_holds():
    table = torch.randn(50, 4)
    padded = pad_vocab((table,), TRAP)
    assert padded.shape == (64, 4)
    padded[50:] = 1e9
    assert torch.equal(trim_vocab(padded, TRAP)[0], table)


def test_gate_and_up_are_cut_one_by_one():
    fused = GATE_UP.fuse((rows(0, 1, 2, 3), rows(10, 11, 12, 13)), TRAP)
    first = shard(fused, 0, 2, 0, GATE_UP.blocks)
    assert first[:, 0].tolist() == [0, 1, 10, 11]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("layout", [GATE_UP, QKV, SINGLE, VOCAB])
@pytest.mark.parametrize("dim", [0, 1])
def test_unshard_undoes_shard(layout, size, dim):
    full = torch.randn(16, 24)
    parts = [shard(full, dim, size, rank, layout.blocks) for rank in range(size)]
    assert torch.equal(unshard(parts, dim, layout.blocks), full)
