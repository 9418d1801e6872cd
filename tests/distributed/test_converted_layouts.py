"""One converted checkpoint under every layout: the logits of transformers each time (TRAPS H23-H25)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from converters import convert
from hf_models import hf_logits, make_hf_model, save_hf_model
from packs import pack
from torch import Tensor
from transformers import AutoModelForCausalLM

Layouts = dict[str, dict[str, dict[str, Any]]]
TWO_RANKS: Layouts = {
    "dense": {"TP2": {"tensor": 2}, "PP2 VPP2": {"pipeline": 2, "virtual_pipeline": 2}},
    "experts": {"EP2": {"expert": 2}, "PP2, 3 layers": {"pipeline": 2}},
}
MORE_OF_TWO: Layouts = {
    "dense": {"TP1 PP1": {}, "PP2": {"pipeline": 2}},
    "experts": {"EP1": {}, "TP2 EP2": {"tensor": 2, "sequence": True, "expert": 2}},
    "latent": {"EP2": {"expert": 2}, "PP2, the first layer dense": {"pipeline": 2}},
}
FOUR_RANKS: Layouts = {
    "dense": {
        "TP4": {"tensor": 4},
        "PP4": {"pipeline": 4},
        "TP2 PP2 VPP2": {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2},
    },
    "experts": {
        "EP2 PP2, 3 layers": {"expert": 2, "pipeline": 2},
        "EP4": {"expert": 4},
        "TP4 EP2": {"tensor": 4, "sequence": True, "expert": 2},
    },
}


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 131, (length,), generator=generator) for length in (24, 40)]


def logits_of(checkpoint: Path, sizes: dict[str, Any]) -> list[Tensor] | None:
    """Of every sequence on the last stage, from the checkpoint alone; None on the other stages."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from pnpo_megatron.convert.hf_folder import HfFolder
    from pnpo_megatron.parallel.gather import gather_first_dim
    from pnpo_megatron.policy.checkpoint import load_checkpoint
    from pnpo_megatron.policy.model import build_model, hidden_states, output_weight
    from pnpo_megatron.policy.process_groups import ParallelSettings, initialize_parallel, release_parallel

    release_parallel()
    parallel = ParallelSettings(**sizes)
    groups = initialize_parallel(parallel, seed=1)
    arch = HfFolder(checkpoint / "hf").architecture
    chunks = build_model(arch, parallel, dtype=torch.float32)
    load_checkpoint(checkpoint, chunks, None, groups)
    packs = [pack([ids], multiple=8) for ids in sequences()]

    def last_stage(hidden: Tensor) -> Any:
        states = gather_first_dim(hidden[0], groups.tp) if parallel.sequence else hidden[0]
        shard = (states @ output_weight(chunks[-1]).T).T.contiguous()
        return states.sum(), torch.tensor(1), gather_first_dim(shard, groups.tp)[: arch.vocab].T

    def step(batches: Any, chunk: Any, *_: Any) -> Any:
        return hidden_states(chunk, next(batches)), last_stage

    with torch.no_grad():
        found = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(packs) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(packs),
            seq_length=max(len(one.tokens) for one in packs),
            micro_batch_size=1,
            forward_only=True,
        )
    return [logits[: len(ids)].clone() for logits, ids in zip(found, sequences(), strict=False)] or None


def every_layout(work: str, layouts: Layouts) -> dict[tuple[str, str], Any]:
    return {
        (kind, name): logits_of(Path(work) / kind, sizes)
        for kind, named in layouts.items()
        for name, sizes in named.items()
    }


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("converted")
    for kind in ("dense", "experts"):
        convert_one(work, kind)
    return work


def convert_one(work: Path, kind: str) -> None:
    family, shape = {
        "dense": ("qwen2", {"tie_word_embeddings": True}),
        "experts": ("qwen3_moe", {"num_hidden_layers": 3}),
        "latent": ("deepseek_v3", {"num_hidden_layers": 3}),
    }[kind]
    assert convert(save_hf_model(make_hf_model(family, **shape), work / f"{kind}-hf"), work / kind) == 0


def check(spawn: Any, work: Path, ranks: int, layouts: Layouts) -> None:
    results = spawn(every_layout, ranks, str(work), layouts, timeout_s=300)
    for kind, named in layouts.items():
        reference = AutoModelForCausalLM.from_pretrained(work / f"{kind}-hf", dtype=torch.float32)
        expected = [hf_logits(reference, ids) for ids in sequences()]
        for name in named:
            found = [result[kind, name] for result in results if result[kind, name] is not None]
            assert found, (kind, name)
            for logits in found:
                for ours, wanted in zip(logits, expected, strict=True):
                    gap = float((ours - wanted).abs().max())
                    assert gap <= (1e-5 if kind == "dense" else 1e-4), (kind, name, gap)


def test_h23_h25_a_converted_checkpoint_gives_the_same_logits_under_splits_of_two(spawn, converted):
    check(spawn, converted, 2, TWO_RANKS)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layouts"), [(2, MORE_OF_TWO), (4, FOUR_RANKS)])
def test_h23_h25_it_does_so_under_more_splits(spawn, converted, ranks, layouts):
    if "latent" in layouts:
        convert_one(converted, "latent")
    check(spawn, converted, ranks, layouts)
