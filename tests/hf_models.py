"""Random tiny models written by transformers: the independent side of every conversion test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 123456.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
R1_DISTILL: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
}
"""What R1-Distill-Qwen-1.5B's config.json says of its shape."""
SHAPE: dict[str, Any] = {
    "vocab_size": 131,  # odd: Megatron pads it to 256
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 123456.0},
}
CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
}
EXTRA: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "deepseek_v3": {
        "num_key_value_heads": 8,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 24,
        "num_nextn_predict_layers": 0,
    },
}
OTHER_FILES = {
    "tokenizer.json": '{"version": "1.0", "added_tokens": []}',
    "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast"}',
    "chat_template.jinja": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "special_tokens_map.json": '{"eos_token": "</s>"}',
    "generation_config.json": '{"eos_token_id": [2, 5], "do_sample": true, "temperature": 0.6}',
    "LICENSE": "Apache-2.0",
}


def make_hf_model(family: str, *, seed: int = 7, **changes: Any) -> PreTrainedModel:
    """A float32 model with every tensor random: zero biases and unit norms hide faults."""
    torch.manual_seed(seed)
    config_class, model_class = CLASSES[family]
    return randomise(model_class(config_class(**{**SHAPE, **EXTRA.get(family, {}), **changes}))).eval()


def randomise(model: PreTrainedModel) -> PreTrainedModel:
    """Biases far from 0 and norms far from 1, in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
    return model


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """As transformers loads it in ``dtype``: the correction of a router's scores stays float32."""
    model.to(dtype)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = buffer.data.float()
    return model


def save_hf_model(model: PreTrainedModel, folder: Path, max_shard_size: str = "5GB") -> Path:
    """As `save_pretrained` writes it, with the small files a published model carries."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    for name, text in OTHER_FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def hf_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """[n, V] float32 logits of one sequence."""
    with torch.no_grad():
        logits: Tensor = model(ids[None]).logits[0].float()
    return logits
