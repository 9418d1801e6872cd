"""What a step leaves behind beside a checkpoint: scores on benchmarks, and a Hugging Face folder."""

from dataclasses import asdict

from pnpo_megatron.build import Live
from pnpo_megatron.config import Config
from pnpo_megatron.convert.hf_writer import write_hf_folder
from pnpo_megatron.eval.evaluate import evaluate
from pnpo_megatron.eval.progress import Progress, problems_digest
from pnpo_megatron.loop import Metrics
from pnpo_megatron.run.sync import with_exported


def evaluate_step(config: Config, live: Live, step: int) -> Metrics:
    """Avg@k of the engine's weights on every benchmark, to RUN/eval. On rank 0."""
    inputs, folder = live.inputs, config.run.folder / "eval"
    request = {
        "weights": live.engine.weights_digest,
        "benchmarks": {one.name: problems_digest(one) for one in inputs.benchmarks},
        "samples": config.eval.samples,
        "sampling": asdict(inputs.eval_sampling),
        "seed": config.seed,
    }
    progress = Progress(folder / f"step_{step:06d}.responses.jsonl", request, restart=True)
    result = evaluate(
        live.engine,
        inputs.benchmarks,
        samples=config.eval.samples,
        sampling=inputs.eval_sampling,
        grade=live.graders.start,
        seed=config.seed,
        progress=progress,
    )
    result.write(folder, step, request=request)
    progress.finish()
    return result.to_metrics()


def export_step(config: Config, live: Live, step: int) -> None:
    """The learner's weights to RUN/hf. Collective; rank 0 writes."""
    target = config.run.folder / "hf" / f"step_{step:06d}"
    with_exported(
        live,
        lambda tensors: write_hf_folder(target, live.inputs.folder, tensors, overwrite=True),
        f"exporting step {step}",
    )
