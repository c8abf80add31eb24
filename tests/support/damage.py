"""Changes to the files of a checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import save_file


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Apply `change` to the tensors of a folder, by name, and save them as one file."""
    tensors = tiny.tensors(folder)
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_index(folder: Path, change: Callable[[Any], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
