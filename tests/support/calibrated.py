"""Conversions that are calibrated on a text."""

import json
from pathlib import Path
from typing import Any

import tiny
from tiny_tokenizers import make_tokenizer

TEXT = "The folder is the interface, and heads are merged into groups. Ein Dokument endet, ein anderes beginnt. " * 60
FIT = ("--method", "fit", "--calibration-tokens", 1024)
TOKENS = "groupwise_calibration.xz"


def make_source(folder: Path) -> Path:
    """Write a model with a tokenizer, in several shards."""
    return make_tokenizer(tiny.save(tiny.build(vocab_size=300), folder, "bfloat16", max_shard_size="20KB"), 300)


def make_text(path: Path) -> Path:
    path.write_text(TEXT)
    return path


def record(folder: Path) -> Any:
    return json.loads((folder / "groupwise.json").read_text())
