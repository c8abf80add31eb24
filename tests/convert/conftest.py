"""Inputs of calibrated conversions."""

from pathlib import Path

import pytest
from calibrated import make_source, make_text


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """Return a plain MHA Llama folder in several shards of bfloat16, with a tokenizer."""
    return make_source(tmp_path / "source")


@pytest.fixture
def prose(tmp_path: Path) -> Path:
    """Return a calibration text of one document, a `.txt` file."""
    return make_text(tmp_path / "text.txt")
