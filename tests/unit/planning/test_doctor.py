"""Plans from config.json alone: counts against transformers, times against the paper, and honest verdicts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from doctor_checks import parameters_on_meta, planned_parameters
from paper_times import PAPER_FOUR, PAPER_ONE, PLAUSIBLE, calibrated

from pnpo_megatron.cli import main
from pnpo_megatron.config import load_config
from pnpo_megatron.errors import ConfigError, ConversionError
from pnpo_megatron.parallel.settings import ParallelSettings
from pnpo_megatron.planning.activations import in_flight
from pnpo_megatron.planning.cluster import known_clusters, load_cluster
from pnpo_megatron.planning.doctor import read_shape
from pnpo_megatron.planning.job import Assumptions, Job
from pnpo_megatron.planning.layouts import better_layouts
from pnpo_megatron.planning.step_time import predict, train_flops

ROOT = Path(__file__).resolve().parents[3]
MODELS = sorted((ROOT / "examples" / "models").glob("*/config.json"))
PUBLIC = ROOT.parent / "shared" / "data" / "hf_configs"
CLUSTERS = {
    "pnpo_1p5b": "h20x32",
    "qwen2p5_7b": "h20x32",
    "qwen2p5_32b": "h20x64",
    "qwen3_30b_a3b": "h20x64",
    "qwen3_235b_a22b": "h20x256",
}
SHIPPED = [path for folder in CLUSTERS for path in sorted((ROOT / "examples" / folder).glob("*.toml"))]


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.parent.name)
def test_parameters_of_the_example_models_are_those_of_transformers(path: Path) -> None:
    assert planned_parameters(path) == parameters_on_meta(path)


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public configs are not beside the project")
@pytest.mark.slow
def test_parameters_of_every_supported_public_config_are_those_of_transformers() -> None:
    checked = 0
    for path in sorted(PUBLIC.glob("*.json")):
        try:
            here = planned_parameters(path) if path.stem != "index" else None
        except ConversionError:
            continue
        if here is not None:
            assert here == parameters_on_meta(path), path.stem
            checked += 1
    assert checked > 25


def job_of(path: Path, cluster: str, **assumed: float) -> Job:
    config = load_config(path)
    shape = read_shape(ROOT / config.model.hf)
    return Job.of(config, shape, load_cluster(cluster), replace(Assumptions(), **assumed))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_cluster_config_fits_the_cluster_it_names(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    cluster = CLUSTERS[path.parent.name]
    text = path.read_text(encoding="utf-8")
    assert f"doctor {path.relative_to(ROOT)} --cluster {cluster}" in text
    nodes = load_cluster(cluster).gpus // 8
    assert f"sbatch --nodes={nodes} scripts/slurm/train.sbatch {path.relative_to(ROOT)}" in text
    assert main(["doctor", str(path.relative_to(ROOT)), "--cluster", cluster]) == 0


def test_the_paper_s_times_need_no_implausible_constant() -> None:
    """283 s and 510 s a step on 32 H20: generation 207 s, 76 s an epoch (Figure 3, implementer's notes)."""
    job = job_of(ROOT / "examples/pnpo_1p5b/pnpo_1_epoch.toml", "h20x32")
    fitted = calibrated(job)
    for name, (low, high) in PLAUSIBLE.items():
        assert low < getattr(fitted.assumed, name) < high
        assert getattr(job.assumed, name) == pytest.approx(getattr(fitted.assumed, name), rel=0.01)
    four = job_of(ROOT / "examples/pnpo_1p5b/pnpo_4_epochs.toml", "h20x32")
    assert predict(job).total == pytest.approx(PAPER_ONE, rel=0.01)
    assert predict(four).total == pytest.approx(PAPER_FOUR, rel=0.01)
    with pytest.raises(ConfigError, match="needs mfu outside"):
        calibrated(job, one=283.0, four=3000.0)


def test_training_flops_by_hand() -> None:
    """6 x parameters x tokens and, of each layer, 6 q n^2 of causal attention."""
    job = job_of(ROOT / "examples/pnpo_1p5b/pnpo_1_epoch.toml", "h20x32")
    lengths = [n + 150 for n in job.lengths]
    parameters = 1_777_088_000 - 151_936 * 1536
    attention = 28 * 6 * 1536 * sum(n * n for n in lengths)
    assert train_flops(job) == pytest.approx(6 * parameters * sum(lengths) + attention, rel=1e-12)


def test_a_job_that_does_not_fit_is_refused_with_layouts_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    path = str((ROOT / "examples/qwen2p5_32b/config.toml").relative_to(Path.cwd()))
    assert main(["doctor", path, "--cluster", "h20x64", "--parallel.tensor=2"]) == 2
    said = capsys.readouterr().out
    assert "DOES NOT FIT" in said and said.count("fits with") == 3
    job = job_of(Path(path), "h20x64")
    for better, seconds in better_layouts(job):
        assert better.fits and seconds <= predict(job).total * 1.05


def test_rollout_servers_take_nothing_of_the_learners_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "examples/qwen2p5_32b/config.toml"
    shared = job_of(path, "h20x64")
    flags = ["--rollout.engine=server", "--rollout.servers=http://a:1,http://b:1"]
    apart = Job.of(load_config(path, flags), shared.arch, shared.cluster, shared.assumed)
    engine = {"vLLM weights": 2 * shared.parameters / shared.engine_tensor, "vLLM cache": shared.cache_bytes}
    assert shared.memory() == apart.memory() | engine and not apart.memory().keys() & engine.keys()
    assert predict(apart).generate > 2 * predict(shared).generate, "two engines instead of sixteen"
    said = str(path.relative_to(Path.cwd()))
    assert main(["doctor", said, "--cluster", "h20x64", *flags]) == 0
    assert f"2 rollout servers of {shared.engine_tensor} GPUs each" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_stage_holds_as_many_micro_batches_as_stages_follow_it() -> None:
    one = ParallelSettings(pipeline=4)
    assert [in_flight(one, stage, 16) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(one, 0, 2) == 2
    assert in_flight(ParallelSettings(pipeline=4, virtual_pipeline=2), 0, 16) == 11 / 2  # 2*3 + 4 + 1 chunks


def test_clusters_are_read_strictly(tmp_path: Path) -> None:
    assert known_clusters() == ["h100", "h20", "h200"]
    h20 = load_cluster("h20x32")
    assert (h20.gpus, h20.tflops, h20.memory, h20.memory_tb_s) == (32, 148.0, 96e9, 4.0)
    assert (h20.link(8), h20.link(16)) == (450e9, 50e9)
    own = tmp_path / "own.toml"
    own.write_text("gpus = 4\ntflops = 10\n")
    for name, said in {"h2x8": "h20x32", str(own): "expected the keys", "nothing": "h100, h20"}.items():
        with pytest.raises(ConfigError, match=said):
            load_cluster(name)


def test_doctor_without_a_configuration_names_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert torch.__version__ in capsys.readouterr().out


def test_the_curve_to_4096_gpus_says_that_it_is_extrapolated(capsys: pytest.CaptureFixture[str]) -> None:
    path = str((ROOT / "examples/pnpo_1p5b/pnpo_4_epochs.toml").relative_to(Path.cwd()))
    assert main(["doctor", path, "--cluster", "h20x32", "--scale"]) == 0
    said = capsys.readouterr().out
    assert "EXTRAPOLATION" in said and "4096" in said


def test_what_settings_of_the_loss_cost_is_in_the_plan() -> None:
    path, cluster = ROOT / "examples" / "pnpo_1p5b" / "pnpo_4_epochs.toml", load_cluster("h20x32")
    plain, more = (
        Job.of(config, read_shape(ROOT / config.model.hf), cluster, Assumptions())
        for config in (
            load_config(path),
            load_config(path, ["--objective.kl_coef=0.01", "--run.gradient_cosine=true"]),
        )
    )
    assert (
        predict(more).logprobs == 2 * predict(plain).logprobs
        and predict(more).update == predict(plain).update
    )
    shard = plain.memory()["gradients"] / 32  # data 16 x context 2
    assert more.memory()["gradients"] - plain.memory()["gradients"] == pytest.approx(shard)
