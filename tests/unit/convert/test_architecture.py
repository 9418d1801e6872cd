"""Configs of published models and of transformers: read as they mean it, or refused by key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import CLASSES, EXTRA, LLAMA3, R1_DISTILL, SHAPE, make_hf_model
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pnpo_megatron.convert.families import check_tensor_parallel, hf_shapes, read_architecture
from pnpo_megatron.convert.hf_config import HfConfig, read_rope
from pnpo_megatron.errors import ConfigError, ConversionError
from pnpo_megatron.parallel.settings import ParallelSettings, check_layout

PUBLIC = Path(__file__).resolve().parents[4] / "shared" / "data" / "hf_configs"
INDEX: dict[str, Any] = json.loads((PUBLIC / "index.json").read_text()) if PUBLIC.is_dir() else {}
QWEN2 = {
    **R1_DISTILL,
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "use_sliding_window": False,
    "sliding_window": 4096,
}


@pytest.mark.skipif(
    not INDEX, reason="the public configs are not beside the project (../shared/data/hf_configs)"
)
@pytest.mark.parametrize("name", sorted(INDEX))
def test_public_configs_of_known_families_convert_and_all_others_are_refused(name):
    config, expected = json.loads((PUBLIC / f"{name}.json").read_text()), INDEX[name]
    try:
        arch = read_architecture(config, name)
    except ConversionError as error:
        assert "refuse" in (expected["expect"], expected.get("also_ok")), error
        assert name in str(error)
    else:
        assert "convert" in (expected["expect"], expected.get("also_ok"))
        assert sum(torch.Size(shape).numel() for shape in hf_shapes(arch).values()) == expected["parameters"]


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_h27_names_and_shapes_are_what_transformers_saves(family, tied):
    model = make_hf_model(family, tie_word_embeddings=tied)
    saved = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if tied:
        del saved["lm_head.weight"]
    assert hf_shapes(read_architecture(model.config.to_dict() | {"architectures": None})) == saved


@pytest.mark.parametrize(
    "rope",
    [LLAMA3, {**LLAMA3, "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 8.0}],
    ids=["32", "8"],
)
def test_h26_llama3_frequencies_equal_transformers(rope):
    config = LlamaConfig(**{**SHAPE, "head_dim": 64, "rope_parameters": rope})
    expected, scale = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    ours = read_rope(HfConfig(config.to_dict(), "x")).inverse_frequencies(64)
    assert scale == 1.0
    assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 123456.0},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 123456.0, "rope_type": "default"}},
        {"rope_theta": 123456, "rope_parameters": {"rope_theta": 123456.0, "rope_type": "default"}},
    ],
)
def test_h26_theta_is_read_in_either_spelling(spelling):
    assert read_architecture({**QWEN2, **spelling}).rope.theta == 123456.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma2"}, r"model_type = 'gemma2': supported are .*llama.*qwen2"),
        ({"model_type": None}, r"model_type = absent or null"),
        ({"architectures": ["Qwen2ForTokenClassification"]}, r"architectures = .*supported for qwen2 is"),
        ({"use_sliding_window": True}, r"use_sliding_window = true"),
        ({"rope_theta": None}, r"rope_theta = absent or null: neither rope_theta nor rope_parameters"),
        ({"rope_parameters": {"rope_theta": 1e6}}, r"rope_theta = 10000: rope_parameters says 1000000.0"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, r"rope type 'yarn' is not supported"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            r"rope_scaling.low_freq_factor = absent or null",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config\.quant_method = 'gptq'"),
        ({"quantization_config": "fp8"}, r"quantization_config\.quant_method = 'fp8'"),
        ({"compression_config": {"quant_method": "int"}}, r"compression_config\.quant_method = 'int'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types = .*only full_attention"),
        ({"attention_sinks": True}, r"attention_sinks = true: attention sinks are not supported"),
        ({"attention_bias": True}, r"attention_bias = true: not supported for this family"),
        ({"model_type": "llama", "architectures": None}, r"sliding_window = 4096: shorter than max_posit"),
        ({"model_type": "mixtral", "architectures": None}, r"sliding_window = 4096: shorter than max_posit"),
        ({"hidden_size": 1537}, r"num_attention_heads = 12: does not divide hidden_size = 1537"),
        ({"head_dim": 127}, r"head_dim = 127: must be even"),
        ({"rope_scaling": {"rope_type": "longrope"}}, r"rope_scaling = .*'longrope' is not supported"),
        ({"auto_map": {"AutoModel": "modeling.X"}}, r"auto_map = .*never run"),
        ({"num_key_value_heads": 5}, r"num_key_value_heads = 5: does not divide num_attention_heads = 12"),
        ({"hidden_size": "large"}, r"hidden_size = 'large': expected a positive whole number"),
        ({"hidden_act": "gelu"}, r"hidden_act = 'gelu': only silu"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0.5"),
        ({"tie_word_embeddings": 1}, r"tie_word_embeddings = 1: expected true or false"),
    ],
)
def test_what_cannot_be_represented_is_refused_with_key_and_value(change, message):
    with pytest.raises(ConversionError, match=message) as caught:
        read_architecture({**QWEN2, **change}, "models/x/config.json")
    assert str(caught.value).startswith("models/x/config.json: ")


def deepseek(**changes: Any) -> dict[str, Any]:
    config_class, _ = CLASSES["deepseek_v3"]
    return config_class(**{**SHAPE, **EXTRA["deepseek_v3"]}).to_dict() | {"architectures": None, **changes}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_nextn_predict_layers": 1}, r"num_nextn_predict_layers = 1: layers that predict further"),
        ({"scoring_func": "softmax"}, r"scoring_func = 'softmax': only 'sigmoid'"),
        ({"rope_interleave": False}, r"rope_interleave = false: only True"),
        ({"num_experts_per_tok": 6}, r"num_experts_per_tok = 6: only 2 x topk_group = 4 is supported"),
        ({"n_group": 3}, r"n_group = 3: 8 experts"),
        ({"num_key_value_heads": 2}, r"num_key_value_heads = 2: must be num_attention_heads = 8"),
        ({"kv_lora_rank": None}, r"kv_lora_rank = absent or null"),
        ({"rope_parameters": {**LLAMA3}}, r"rope_parameters = .*only default and yarn"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config\.quant_method = 'fp8'"),
    ],
)
def test_what_a_deepseek_cannot_be_is_refused_with_key_and_value(change, message):
    with pytest.raises(ConversionError, match=message):
        read_architecture(deepseek(**change))


def test_a_deepseek_that_names_its_own_code_is_read_since_transformers_has_the_family():
    own = {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    assert read_architecture(deepseek(auto_map=own)) == read_architecture(deepseek())


@pytest.mark.parametrize("key", ["tensor", "context"])
def test_latent_attention_is_not_cut(key):
    arch = read_architecture(deepseek())
    check_layout(arch, ParallelSettings(expert=2, pipeline=2))
    with pytest.raises(ConfigError, match=rf"parallel\.{key} = 2: deepseek_v3 has latent attention"):
        check_layout(arch, ParallelSettings(**{key: 2}))


def test_an_inactive_window_and_unknown_harmless_keys_are_no_reason_to_refuse():
    arch = read_architecture({**QWEN2, "max_window_layers": 21, "bos_token_id": 1, "use_mrope": False})
    assert (arch.head_dim, arch.qkv_bias, arch.tied) == (128, True, False)


def test_a_mistral_window_is_active_where_the_key_is_absent():
    config = {key: value for key, value in QWEN2.items() if key not in ("sliding_window", "architectures")}
    with pytest.raises(ConversionError, match=r"sliding_window = absent or null: .*4096 where absent"):
        read_architecture({**config, "model_type": "mistral"})
    assert read_architecture({**config, "model_type": "mistral", "sliding_window": None}).family == "mistral"


ODD = [None, True, False, -1, 0, 3, 1.5, float("nan"), 10**30, "x", "", [], [1], {}, {"type": []}]
KEYS = [*QWEN2, "head_dim", "rope_scaling", "rope_parameters", "layer_types", "quantization_config"]
KEYS += ["num_experts", "num_experts_per_tok", "norm_topk_prob"]


@pytest.mark.parametrize("family", ["qwen2", "mistral", "qwen3_moe", "mixtral"])
def test_whatever_a_key_holds_the_config_is_read_or_refused_and_nothing_else_is_raised(family):
    base = {**QWEN2, "model_type": family, "architectures": None, "sliding_window": None}
    base |= {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    refused = 0
    for key in KEYS:
        for value in ODD:
            try:
                read_architecture({**base, key: value})
            except ConversionError:
                refused += 1
    assert refused > 100


def test_tensor_parallel_sizes_that_do_not_divide_are_refused_with_those_that_do():
    arch = read_architecture({**QWEN2, "num_key_value_heads": 4})
    check_tensor_parallel(arch, 2)
    with pytest.raises(ConversionError, match=r"parallel\.tensor = 8 .*; use 1, 2, 4"):
        check_tensor_parallel(arch, 8)
