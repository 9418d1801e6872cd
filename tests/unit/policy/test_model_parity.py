"""The Megatron model against transformers, in float32, through the product's own hidden states and chunked
head."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_models import LLAMA3, hf_logits, make_hf_model, randomise, save_hf_model
from packs import pack
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from pnpo_megatron.convert.families import read_architecture
from pnpo_megatron.convert.hf_folder import HfFolder
from pnpo_megatron.convert.layouts import Sizes
from pnpo_megatron.convert.stream import load_hf_weights
from pnpo_megatron.errors import ConfigError, ConversionError
from pnpo_megatron.parallel.groups import ParallelGroups
from pnpo_megatron.parallel.settings import ParallelSettings, stage_layout
from pnpo_megatron.parallel.vocab_logprobs import chunked_logprobs
from pnpo_megatron.policy.megatron_config import transformer_config
from pnpo_megatron.policy.model import build_model, hidden_states, output_weight
from pnpo_megatron.policy.process_groups import initialize_parallel, release_parallel, start_distributed

YARN = {
    "rope_type": "yarn",
    "rope_theta": 123456.0,
    "factor": 8.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 256,
}
CASES = {
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "llama": ("llama", {"num_key_value_heads": 8}),
    "llama-tied-llama3-rope-wide-heads": (
        "llama",
        {"tie_word_embeddings": True, "rope_parameters": LLAMA3, "head_dim": 32, "num_key_value_heads": 1},
    ),
    "mistral-wide-heads": ("mistral", {"head_dim": 24}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-moe": ("qwen3_moe", {}),
    "qwen3-moe-not-renormalised": ("qwen3_moe", {"norm_topk_prob": False}),
    "mixtral": ("mixtral", {}),
    "deepseek": ("deepseek_v3", {}),
    "deepseek-yarn": ("deepseek_v3", {"rope_parameters": YARN}),
    "deepseek-without-groups-or-query-latent-tied": (
        "deepseek_v3",
        {"n_group": 1, "topk_group": 1, "q_lora_rank": None, "tie_word_embeddings": True},
    ),
    "llama-linear-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 123456.0, "factor": 4.0}},
    ),
}


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    start_distributed()
    yield initialize_parallel(ParallelSettings(), seed=1)
    release_parallel()
    dist.destroy_process_group()


def sequences() -> list[Tensor]:
    """One of 9 tokens and one that goes on past position 2,000, where a lost rope setting shows (TRAPS
    H26)."""
    return [torch.randint(0, 131, (length,)) for length in (9, 2010)]


def megatron_logits(folder: Path, groups: ParallelGroups, ids: list[Tensor]) -> list[Tensor]:
    source = HfFolder(folder)
    (model,) = build_model(source.architecture, ParallelSettings(), dtype=torch.float32)
    load_hf_weights([model], source, groups)
    packed = pack(ids, multiple=2)
    with torch.no_grad():
        logits = hidden_states(model, packed)[0] @ output_weight(model)[: source.architecture.vocab].T
    starts = packed.cu_seqlens.tolist()
    return [logits[start : start + len(one)] for start, one in zip(starts, ids, strict=False)]


@pytest.mark.parametrize("case", CASES)
def test_h23_h26_logits_equal_transformers_at_short_and_long_positions(case, groups, tmp_path):
    family, changes = CASES[case]
    reference = make_hf_model(family, **changes)
    ids = sequences()
    logits = megatron_logits(save_hf_model(reference, tmp_path / "hf"), groups, ids)
    bound = 1e-4 if hasattr(reference.config, "num_experts_per_tok") else 1e-5
    for ours, one in zip(logits, ids, strict=True):
        torch.testing.assert_close(ours, hf_logits(reference, one), atol=bound, rtol=0)


PUBLIC = Path(__file__).resolve().parents[4] / "shared" / "data" / "hf_configs"
INDEX: dict[str, Any] = json.loads((PUBLIC / "index.json").read_text()) if PUBLIC.is_dir() else {}


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """The same switches, spellings and ratios of heads on a model of two layers and a few experts."""
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    small = {**config, "num_hidden_layers": 2, "vocab_size": 131, "intermediate_size": 48}
    small |= {"initializer_range": 0.1, "dtype": "float32", "torch_dtype": "float32", "pad_token_id": None}
    small["num_attention_heads"] = 2 * heads // (kv_heads or heads)
    if kv_heads is not None:
        small["num_key_value_heads"] = 2
    sizes = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    for key, value in sizes.items():
        if config.get(key) is not None:
            small[key] = value
    if "moe_intermediate_size" in config:
        small["moe_intermediate_size"] = 24
    small["hidden_size"] = 8 * small["num_attention_heads"] * (2 if config.get("head_dim") else 1)
    small.pop("layer_types", None)
    return small


@pytest.mark.slow
@pytest.mark.skipif(not INDEX, reason="the public configs are not beside the project (../shared/data)")
@pytest.mark.parametrize("name", sorted(INDEX))
def test_h26_every_public_config_that_is_accepted_gives_the_logits_of_transformers(name, groups, tmp_path):
    config = json.loads((PUBLIC / f"{name}.json").read_text())
    try:
        read_architecture(config)
    except ConversionError:
        assert "refuse" in (INDEX[name]["expect"], INDEX[name].get("also_ok"))
        return
    (tmp_path / "config.json").write_text(json.dumps(shrunk(config)))
    reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=torch.float32)
    randomise(reference).eval().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(shrunk(config)))  # in the spelling it was published in
    ids = [torch.randint(0, 131, (length,)) for length in (9, 600)]
    bound = 1e-4 if HfFolder(tmp_path).architecture.experts else 1e-5
    for ours, one in zip(megatron_logits(tmp_path, groups, ids), ids, strict=True):
        torch.testing.assert_close(ours, hf_logits(reference, one), atol=bound, rtol=0)


def naive_qkv(parts: Any, sizes: Sizes) -> Tensor:
    return torch.cat(tuple(parts))


def swapped_gate_up(parts: Any, sizes: Sizes) -> Tensor:
    return torch.cat((parts[1], parts[0]))


@pytest.mark.parametrize(("layout", "fault"), [("QKV", naive_qkv), ("GATE_UP", swapped_gate_up)])
def test_h23_a_planted_wrong_layout_changes_the_logits(layout, fault, groups, tmp_path, monkeypatch):
    from pnpo_megatron.convert import layouts

    reference = make_hf_model("qwen2")
    folder = save_hf_model(reference, tmp_path / "hf")
    wrong = getattr(layouts, layout)
    right = wrong.fuse
    object.__setattr__(wrong, "fuse", fault)  # frozen: the fault is planted by force
    try:
        ids = sequences()[:1]
        (logits,) = megatron_logits(folder, groups, ids)
    finally:
        object.__setattr__(wrong, "fuse", right)
    assert (logits - hf_logits(reference, ids[0])).abs().max() > 0.1


@pytest.mark.parametrize("tied", [False, True])
def test_h24_what_the_padding_rows_hold_does_not_matter(tied, groups, tmp_path):
    reference = make_hf_model("qwen2", tie_word_embeddings=tied)
    source = HfFolder(save_hf_model(reference, tmp_path / "hf"))
    (model,) = build_model(source.architecture, ParallelSettings(), dtype=torch.float32)
    load_hf_weights([model], source, groups)
    assert output_weight(model).shape[0] == 256  # 131 rounded up: without padding this test says nothing
    ids = sequences()[0]
    packed = pack([ids], multiple=2)
    with torch.no_grad():
        for table in {output_weight(model), model.embedding.word_embeddings.weight}:
            table[131:] = 50.0 * torch.randn_like(table[131:])
        hidden = hidden_states(model, packed)[0]
        logprobs, _ = chunked_logprobs(
            hidden, output_weight(model), packed.labels, temperature=0.7, vocab_size=131, tp_group=None
        )
    expected = torch.log_softmax(hf_logits(reference, ids).double() / 0.7, dim=-1)[:-1].gather(
        1, ids[1:, None]
    )[:, 0]
    torch.testing.assert_close(logprobs[: len(ids) - 1].double(), expected, atol=1e-5, rtol=0)


def test_bfloat16_logits_stay_within_its_rounding_of_float32(groups, tmp_path):
    reference = make_hf_model("qwen2")
    source = HfFolder(save_hf_model(reference, tmp_path / "hf"))
    ids = sequences()[0]
    (model,) = build_model(source.architecture, ParallelSettings(), dtype=torch.bfloat16)
    load_hf_weights([model], source, groups)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        ours = (hidden_states(model, pack([ids], multiple=2))[0] @ output_weight(model)[:131].T)[
            : len(ids)
        ].float()
        rounded = hf_logits(reference.to(torch.bfloat16), ids)
        exact = hf_logits(make_hf_model("qwen2"), ids)
    # transformers' own bfloat16 error is the yardstick: the same arithmetic, rounded at slightly other
    # places.
    assert (ours - exact).norm() < 2.0 * (rounded - exact).norm()


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputing_activations_changes_no_gradient(recompute, groups, tmp_path):
    source = HfFolder(save_hf_model(make_hf_model("qwen2"), tmp_path / "hf"))
    packed = pack(sequences()[:1], multiple=2)
    gradients = []
    for mode in ("none", recompute):
        (model,) = build_model(source.architecture, ParallelSettings(), dtype=torch.float32, recompute=mode)
        load_hf_weights([model], source, groups)
        model.train()
        hidden_states(model, packed).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.decoder.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


def test_uneven_layers_leave_the_first_and_last_stage_the_fewest():
    layout = stage_layout(22, 4, 1)
    assert layout is not None
    assert [stage.count("decoder") for stage in layout] == [5, 6, 6, 5]
    assert layout[0][0] == "embedding"
    assert layout[-1][-1] == "loss"
    assert stage_layout(24, 4, 2) is None
    with pytest.raises(ConfigError, match=r"8 stages for 6 layers; use at most 6"):
        stage_layout(6, 4, 2)


def test_settings_that_cannot_be_built_are_refused_by_name(groups, tmp_path):
    arch = HfFolder(save_hf_model(make_hf_model("qwen2"), tmp_path / "hf")).architecture
    one = ParallelSettings()
    with pytest.raises(ConfigError, match=r"model\.recompute = 'some': use none, selective or full"):
        transformer_config(arch, one, dtype=torch.float32, recompute="some")
    with pytest.raises(ConfigError, match=r"model\.dtype = torch\.float16"):
        transformer_config(arch, one, dtype=torch.float16)
    with pytest.raises(
        ConversionError, match=r"parallel\.tensor = 3 does not divide 8 query heads.*use 1, 2, 4"
    ):
        transformer_config(arch, ParallelSettings(tensor=3), dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"= 3 does not divide the 1 ranks started; start a multiple of 3"):
        initialize_parallel(ParallelSettings(pipeline=3), seed=1)
