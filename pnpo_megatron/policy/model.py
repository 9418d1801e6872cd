"""A Megatron GPTModel from an HF architecture.

Its last stage returns hidden states, never logits: log-probs come from the chunked head
(`parallel/vocab_logprobs.py`), which takes them and the output weight.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor

from pnpo_megatron.convert.architecture import Architecture
from pnpo_megatron.parallel.settings import ParallelSettings, padded_vocab_size
from pnpo_megatron.policy.latent import latent_block_spec
from pnpo_megatron.policy.megatron_config import transformer_config
from pnpo_megatron.policy.rotary import use_packed_rotary
from pnpo_megatron.policy.spec import block_spec, uses_transformer_engine
from pnpo_megatron.types import PackedBatch


class HiddenStatesHead(ColumnParallelLinear):
    """Holds the output weight and hands the hidden states through.

    It is called in every forward pass, so the pre-hook by which Megatron waits for the gathered weight
    (`overlap_param_gather`) has run before the chunked head uses it.
    """

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """[T, 1, hidden] as it comes; no product with the weight."""
        return input_, None


class PolicyModel(GPTModel):
    """A GPTModel whose last stage returns hidden states, [1, T, hidden]; T / tensor of them under sequence
    parallelism."""

    output_layer: ColumnParallelLinear

    def __init__(self, arch: Architecture, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(
            config=config,
            vocab_size=padded_vocab_size(arch.vocab, config.tensor_model_parallel_size),
            max_sequence_length=arch.max_positions,
            share_embeddings_and_output_weights=arch.tied,
            position_embedding_type="rope",
            rotary_base=arch.rope.theta,
            **kwargs,
        )
        self.arch = arch
        # Megatron's own llama3 scaling has three of its four numbers fixed in the code.
        if arch.latent is None:  # there every layer has its own, without scaling
            self.rotary_pos_emb.inv_freq = arch.rope.inverse_frequencies(arch.head_dim)
        if self.post_process:
            self._replace_head()

    def _replace_head(self) -> None:
        plain = self.output_layer
        head = HiddenStatesHead(
            self.config.hidden_size,
            self.vocab_size,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            skip_weight_param_allocation=True,
            tp_group=plain.tp_group,
        )
        head.weight = plain.weight  # the same parameter, with the marks that tie it to the embedding
        self.output_layer = head


def build_model(
    arch: Architecture,
    parallel: ParallelSettings,
    *,
    dtype: torch.dtype,
    recompute: str = "none",
    attention_backend: str = "auto",
    engine: bool | None = None,
    **overrides: Any,
) -> list[PolicyModel]:
    """This rank's model chunks, one a virtual pipeline stage, with weights still to be loaded.

    Args:
        arch, parallel, dtype, recompute, overrides: as `transformer_config`.
        attention_backend: "auto", "flash", "fused", "unfused" of TransformerEngine, or "local".
        engine: whether layers are TransformerEngine's; None takes them where they are there.

    Raises:
        ConfigError, ConversionError: a setting or architecture that cannot be built.
    """
    use_packed_rotary()
    overrides = {"attention_backend": AttnBackend[attention_backend], **overrides}
    config = transformer_config(arch, parallel, dtype=dtype, recompute=recompute, **overrides)
    virtual: Sequence[int | None] = (
        range(parallel.virtual_pipeline) if parallel.virtual_pipeline > 1 else [None]
    )
    engine = uses_transformer_engine(attention_backend) if engine is None else engine
    return [
        PolicyModel(
            arch,
            config,
            transformer_layer_spec=latent_block_spec(config, vp_stage=stage)
            if arch.latent
            else block_spec(config, transformer_engine=engine, vp_stage=stage),
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage),
            vp_stage=stage,
        )
        for stage in virtual
    ]


def hidden_states(model: torch.nn.Module, packed: PackedBatch) -> Tensor:
    """Forward pass of one packed micro-batch through one model chunk, wrapped in DDP or not.

    Returns:
        [1, T, hidden] on the last stage, [T, 1, hidden] for the next stage elsewhere; T / tensor tokens under
        sequence parallelism.
    """
    return model(
        input_ids=packed.tokens.unsqueeze(0),
        position_ids=packed.position_ids.unsqueeze(0),
        attention_mask=None,
        packed_seq_params=packed_seq_params(packed.cu_seqlens, packed.max_seqlen),
    )


def packed_seq_params(lengths: Tensor, longest: int) -> PackedSeqParams:
    """Megatron's description of a pack, from its cumulative padded lengths [S+1] and the longest: the same in
    all four fields, since padding lies at each sequence's end, where attention is causal and the loss 0."""
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    return PackedSeqParams(
        qkv_format="thd", max_seqlen_q=longest, max_seqlen_kv=longest, **dict.fromkeys(names, lengths)
    )


def output_weight(model: torch.nn.Module) -> Tensor:
    """[padded vocabulary / tensor, hidden], of a chunk on the last stage: the embedding's own where tied."""
    policy: PolicyModel = unwrap_model(model)
    return policy.shared_embedding_or_output_weight() if policy.arch.tied else policy.output_layer.weight
