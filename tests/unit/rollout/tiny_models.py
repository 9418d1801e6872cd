"""Random tiny models on disk, and what transformers says about them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

VOCAB = 64
POSITIONS = 512
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ODD_GENERATION_CONFIG = {
    "do_sample": True,
    "temperature": 0.05,
    "top_k": 1,
    "top_p": 0.1,
    "min_p": 0.9,
    "repetition_penalty": 1.9,
    "max_new_tokens": 3,
    "eos_token_id": [2, 5, 7],
}
"""Values that no rollout may take over (TRAPS H34)."""


def save_qwen2(folder: Path, seed: int) -> Path:
    """Untied, with q/k/v bias, as Qwen2 has it."""
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=False))
    with torch.no_grad():  # random biases: the default of zero would hide a sync that drops them
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
    return _save(model, folder)


def save_tied_llama(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    return _save(LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)), folder)


def _save(model: torch.nn.Module, folder: Path) -> Path:
    model.to(torch.float32).save_pretrained(folder)  # type: ignore[operator]
    (folder / "generation_config.json").write_text(json.dumps(ODD_GENERATION_CONFIG))
    return folder


def hf_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors a learner would export: HF names, no tied alias."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tied = model.config.tie_word_embeddings
    return {
        name: tensor.detach().clone()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }


def hf_logprobs(
    folder: Path, prompt: tuple[int, ...], response: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """(log-prob of each response token [L], greedy token at each position [L]) by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.cat([torch.tensor(prompt), response])[None]
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(1, response[:, None])[:, 0], logits.argmax(-1)
