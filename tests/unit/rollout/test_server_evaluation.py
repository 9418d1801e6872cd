"""`pnpo-megatron eval --servers`: the folder's weights go to the servers, whatever they held."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_server import SETTINGS, FakeServer, tokens_of
from tiny_models import VOCAB, hf_tensors, save_qwen2
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pnpo_megatron.cli import main

# anyio says so when a connection is cancelled while it is being made
pytestmark = pytest.mark.filterwarnings("ignore:coroutine 'connect_tcp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_qwen2(tmp_path_factory.mktemp("model"), 1)
    core = Tokenizer(models.WordLevel({chr(48 + i): i for i in range(VOCAB)}, unk_token="0"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="0", eos_token="2").save_pretrained(folder)
    rows = [{"id": f"q{i}", "problem": f"{i + 3}9", "answer": "1"} for i in range(4)]
    (folder / "quiz.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def evaluate(folder: Path, out: Path, *servers: str, dtype: str = "float32") -> int:
    return main([
        "eval", "--model", str(folder), "--benchmark", str(folder / "quiz.jsonl"), "--samples", "3",
        "--template", "raw", "--max-prompt-tokens", "8", "--max-response-tokens", "8", "--dtype", dtype,
        "--out", str(out), "--servers", ",".join(servers),
    ])  # fmt: skip


def test_every_sample_comes_from_a_server_that_holds_the_folder_s_weights(
    folder: Path, tmp_path: Path
) -> None:
    with FakeServer() as one, FakeServer("127.0.0.2") as other:
        assert evaluate(folder, tmp_path, one.url, other.url) == 0
    for server in (one, other):
        assert server.asked
        received = server.received[-1]
        assert received == {name: tensor.tolist() for name, tensor in hf_tensors(folder).items()}
    samples = [json.loads(line) for line in (tmp_path / "step_000000.jsonl").read_text().splitlines()]
    assert len({(sample["problem"], sample["sample"]) for sample in samples}) == 4 * 3
    for sample in samples:
        prompt = [int(sample["problem"][1:]) + 3, 9]
        assert sample["ids"] == tokens_of(prompt, sample["seed"], one.weights)


@pytest.mark.parametrize(
    ("address", "dtype", "said"),
    [
        ("10.0.0.1:8000", "float32", "--servers 10.0.0.1:8000: expected http://HOST:PORT"),
        (None, "bfloat16", "dtype = 'torch.float32' instead of 'torch.bfloat16'"),
    ],
)
def test_a_server_that_cannot_be_meant_is_refused_in_one_line(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    address: str | None,
    dtype: str,
    said: str,
) -> None:
    with FakeServer() as server:
        server.settings = SETTINGS
        assert evaluate(folder, tmp_path, address or server.url, dtype=dtype) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and said in error
