"""The doctor's plan beside what tiny models on two ranks measured; for tests and bench/doctor_errors.py."""

from __future__ import annotations

import json
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import torch

from pnpo_megatron.convert.families import hf_shapes, read_architecture
from pnpo_megatron.convert.hf_folder import HfFolder
from pnpo_megatron.parallel.settings import ParallelSettings
from pnpo_megatron.planning.activations import Modules, saved_bytes
from pnpo_megatron.planning.shards import StateBytes, chunks_of, state_bytes
from pnpo_megatron.planning.traffic import micro_batch_traffic, update_traffic

Options = dict[str, Any]
Cases = dict[str, tuple[Path, Options]]
"""Model folder and options of every layout."""
Ranks = list[dict[str, Any]]
"""What `measure` found on each rank."""
Bytes = Counter[tuple[str, str]]
"""By group and operation."""

RANKS = 2
DENSE: dict[str, Options] = {
    "TP2": {"tensor": 2},
    "TP2+SP": {"tensor": 2, "sequence": True},
    "CP2": {"context": 2},
    "DP2": {},
    "DP2, not distributed": {"distributed": False},
    "DP2, bfloat16": {"dtype": "bfloat16"},
    "PP2": {"pipeline": 2},
    "full recomputation": {"recompute": "full", "tensor": 2, "sequence": True},
}
EXPERTS: dict[str, Options] = {
    "EP2": {"expert": 2},
    "TP2+SP+EP2": {"tensor": 2, "sequence": True, "expert": 2},
    "TP2+SP, experts": {"tensor": 2, "sequence": True},
    "DP2, experts": {},
}
LAYOUTS = (*DENSE, *EXPERTS)


def make_cases(folder: Path) -> Cases:
    """Two layers of a Qwen2 and of a Qwen3-MoE, saved into `folder`."""
    from hf_models import make_hf_model, save_hf_model

    dense = save_hf_model(make_hf_model("qwen2", num_hidden_layers=2), folder / "dense")
    experts = save_hf_model(make_hf_model("qwen3_moe", num_hidden_layers=2), folder / "experts")
    return {name: (dense, one) for name, one in DENSE.items()} | {
        name: (experts, one) for name, one in EXPERTS.items()
    }


def measure_all(cases: Cases) -> dict[str, Any]:
    """On one of two ranks, every layout in turn."""
    return {name: measure(folder, **options) for name, (folder, options) in cases.items()}


def measure(
    folder: Path,
    *,
    distributed: bool = True,
    dtype: str = "float32",
    recompute: str = "none",
    **layout: Any,
) -> dict[str, Any]:
    """One update of a learner: bytes in its buffers, bytes saved for backward, bytes sent by group."""
    from counted_bytes import SentByGroup
    from learner_parts import make_learner, random_sequences, share, with_old
    from measured_state import measured_state

    from pnpo_megatron.algorithm.presets import make_objective
    from pnpo_megatron.policy.forward import cut, hidden_states
    from pnpo_megatron.policy.optimizer import OptimizerSettings

    learner = make_learner(
        folder,
        ParallelSettings(**layout),
        max_tokens=512,
        dtype=getattr(torch, dtype),
        recompute=recompute,
        optimizer=OptimizerSettings(lr=1e-4, warmup_steps=0, distributed=distributed),
    )
    sequences = random_sequences(12, seed=1, longest=200)
    batch = share(with_old(sequences, [torch.zeros(len(one.ids)) for one in sequences]), "response")
    batch = share(with_old(sequences, learner.log_probs(batch)), "response")
    work = cut(batch, learner.layout, learner.groups, learner.device)
    saved = None
    if layout.get("pipeline", 1) == 1:  # a later stage has no input outside the schedule
        saved = bytes_saved(lambda: hidden_states(learner.chunks[0], work.micro_batches[0].packed), learner)
    with SentByGroup() as sent:
        metrics = learner.update(batch, make_objective("pnpo", gate_low=0.5, gate_high=0.5), step=1)
    assert metrics["update/skipped"] == 0
    return {
        "state": measured_state(learner),
        "saved": saved,
        "length": mean_length(work.micro_batches[0].packed.chunk_lengths * 2 * layout.get("context", 1)),
        "packs": [(len(one.packed.tokens), len(one.slots)) for one in work.micro_batches],
        "sent": {name: sent.by_operation(one.group_name) for name, one in _groups().items()},
    }


def _groups() -> dict[str, Any]:
    from megatron.core import parallel_state  # not before pnpo_megatron.policy

    groups = {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "ep": parallel_state.get_expert_model_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "edp": parallel_state.get_expert_data_parallel_group(),
    }
    return {name: group for name, group in groups.items() if group.size() > 1}


def mean_length(lengths: torch.Tensor) -> float:
    """Tokens of the sequence that a token belongs to."""
    return float(lengths.square().sum() / lengths.sum())


def bytes_saved(run: Any, learner: Any) -> int:
    """Distinct storage that autograd holds after a forward pass, weights and indices aside."""
    known = {p.untyped_storage().data_ptr() for p in learner.chunks[0].parameters()}
    held: dict[int, tuple[int, Any]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and tensor.is_floating_point():
            held[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    total = sum(size for size, _ in held.values())
    del output
    return total


def layout_of(options: Options) -> ParallelSettings:
    """The options that are of the layout."""
    others = ("distributed", "dtype", "recompute")
    return ParallelSettings(**{key: value for key, value in options.items() if key not in others})


def optimizer_split(options: Options) -> dict[str, Any]:
    """What state and traffic of the optimizer depend on besides the layout."""
    parallel = layout_of(options)
    data = RANKS // (parallel.tensor * parallel.pipeline)  # data x context ranks
    return {
        "itemsize": itemsize_of(options),
        "distributed": options.get("distributed", True),
        "data": data,
        "expert_data": data * parallel.tensor // parallel.expert,
    }


def itemsize_of(options: Options) -> int:
    """Bytes of a weight."""
    return 2 if options.get("dtype") == "bfloat16" else 4


def planned_state(folder: Path, options: Options, rank: int) -> StateBytes:
    """Weights, gradients and optimizer of one rank."""
    parallel, split = layout_of(options), optimizer_split(options)
    chunks = chunks_of(HfFolder(folder).architecture, parallel, rank if parallel.pipeline > 1 else 0)
    return state_bytes(chunks, **split, rank=rank if split["data"] > 1 else 0)


def planned_saved(folder: Path, options: Options, ranks: Ranks) -> float:
    """Activations of the first micro-batch, of all ranks."""
    arch, parallel = HfFolder(folder).architecture, layout_of(options)
    recompute, total = options.get("recompute", "none"), 0.0
    for one in ranks:
        modules = Modules(itemsize_of(options), recompute, engine=False, length=one["length"])
        total += saved_bytes(arch, parallel, modules, tokens=one["packs"][0][0], layers=2, last=True)
    return total


def planned_traffic(folder: Path, options: Options, ranks: Ranks) -> Bytes:
    """What all ranks give to collectives in one update."""
    arch, parallel = HfFolder(folder).architecture, layout_of(options)
    stages, total = parallel.pipeline > 1, Bytes()
    for rank, found in enumerate(ranks):
        for tokens, scored in found["packs"]:
            for one in micro_batch_traffic(
                arch,
                parallel,
                tokens=tokens,
                scored=scored,
                layers=2 // parallel.pipeline,
                itemsize=itemsize_of(options),
                first=not stages or rank == 0,
                last=not stages or rank == 1,
                recompute=options.get("recompute") == "full",
            ):
                total[one.group, one.operation] += one.given
        chunks = chunks_of(arch, parallel, rank if stages else 0)
        for one in update_traffic(arch, parallel, chunks, **optimizer_split(options)):
            total[one.group, one.operation] += one.given
    return +total


def counted_traffic(ranks: Ranks) -> Bytes:
    """What all ranks gave; all-to-alls are comparable only so, as routing decides who gets what."""
    total = Bytes()
    for found in ranks:
        for group, operations in found["sent"].items():
            for operation, given in operations.items():
                total[group, operation] += given
    return +total


def planned_parameters(config: Path) -> int:
    """Parameters that the family's table gives a config.json."""
    values = json.loads(config.read_text(encoding="utf-8"))
    return sum(prod(shape) for shape in hf_shapes(read_architecture(values)).values())


def parameters_on_meta(config: Path) -> int:
    """Parameters of the model that transformers builds from a config.json, without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config))
    return sum(parameter.numel() for parameter in model.parameters())
