"""Build the inputs of the training benchmarks: shapes of Llamas, a model, random documents, settings of a run."""

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.bench.machine import Row
from uptrain.budget.budget import Budget
from uptrain.data.token_cache import MANIFEST, CacheManifest, CacheShard
from uptrain.runs.settings import Settings

SEQ_LEN, MICRO_BATCH, ACCUMULATION, VOCAB = 512, 4, 2, 16384
SIZES: dict[str, Row] = {
    "7M": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 8},
    "25M": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6},
    "100M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
    # four layers of an 8B, with 1 B parameters: for GPUs
    "8B-layers": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "num_attention_heads": 32},
}
SHAPE = SIZES["25M"]


def make_model(
    folder: Path, n_kv_heads: int = 2, dtype: torch.dtype = torch.float32, shape: Row = SHAPE
) -> Path:  # fmt: skip
    """Write a Llama, by default of 27 M parameters and with 2 K/V heads."""
    torch.manual_seed(0)
    heads: Row = {"num_key_value_heads": n_kv_heads, "tie_word_embeddings": False}
    config = LlamaConfig(**shape, **heads, vocab_size=VOCAB, max_position_embeddings=SEQ_LEN)
    model = LlamaForCausalLM(config)
    torch.nn.Module.to(model, dtype)
    model.save_pretrained(folder)
    return folder


def merge_heads(parent: Path, out: Path) -> Path:
    """Convert a model to 2 K/V heads by the mean."""
    command = ["mha-to-gqa", "--method", "mean", "--groups", "2", str(parent), str(out)]
    subprocess.run([sys.executable, "-m", "convert", *command], check=True, stdout=subprocess.DEVNULL)
    return out


def make_documents(kind: str, n_tokens: int) -> list[list[int]]:
    """Return random documents: `full` windows, or documents of 2 to 512 tokens."""
    rng = np.random.default_rng(0)
    mean = SEQ_LEN if kind == "full" else SEQ_LEN // 2
    lengths = [SEQ_LEN if kind == "full" else rng.integers(2, SEQ_LEN + 1) for _ in range(n_tokens // mean)]
    return [rng.integers(0, VOCAB, length).tolist() for length in lengths]


def make_cache(folder: Path, documents: list[list[int]]) -> Path:
    """Write documents as a token cache like that of `uptrain prepare`."""
    folder.mkdir()
    lengths = [len(d) for d in documents]
    tokens = np.concatenate([np.array(d, "<u2") for d in documents])
    starts = np.cumsum([0, *lengths[:-1]]).astype("<i8")
    names, sums = ("tokens-00000.bin", "documents-00000.bin"), []
    for name, values in zip(names, (tokens, starts), strict=True):
        (folder / name).write_bytes(values.tobytes())
        sums.append(hashlib.sha256(values.tobytes()).hexdigest())
    shard = CacheShard(*names, len(tokens), len(starts), *sums)
    (folder / MANIFEST).write_bytes(CacheManifest(SEQ_LEN, "uint16", VOCAB, "", (shard,)).to_json())
    return folder


def settings(model: Path, data: Path, steps: int, precision: str, **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "model": str(model), "data": str(data), "loss": "next-token", "steps": steps,
        "global_batch": MICRO_BATCH * ACCUMULATION, "micro_batch": MICRO_BATCH, "schedule": "constant", "lr": 1e-4,
        "warmup_steps": 0, "decay_fraction": 0.0, "optimizer": "adamw", "weight_decay": 0.0, "trainable": "all",
        "precision": precision, "seed": 0, "save_every": 10 * steps, "keep_last": 1, "eval_every": 10 * steps,
    }  # fmt: skip
    return Settings(**values | changes)


_BATCH_TOKENS = MICRO_BATCH * ACCUMULATION * SEQ_LEN
BUDGET = Budget(
    steps=1, global_batch_tokens=_BATCH_TOKENS, peak_lr=1e-4, alpha=None, original_tokens=None, original=None,
    tokens=_BATCH_TOKENS,
)  # fmt: skip
"""A budget of one step; the measurements do not depend on it."""


def reset() -> None:
    """Reset accelerate's state, so that the next loop can choose its own precision."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
