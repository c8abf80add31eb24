"""Changes to the files of a checkpoint."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import load_file, save_file


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Apply `change` to the tensors of a folder, by name, and save them as one file."""
    tensors = tiny.tensors(folder)
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_tensors(folder: Path, edit: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Replace each tensor of a folder by what `edit` returns of its name and itself; the files stay as many."""
    for file in folder.glob("*.safetensors"):
        save_file({name: edit(name, t) for name, t in load_file(file).items()}, file, metadata={"format": "pt"})


def record_sha256(folder: Path) -> None:
    """Record the SHA-256 of the tensors as they are now, as if the conversion had written them so."""
    path, tensors = folder / "groupwise.json", tiny.tensors(folder)
    record = json.loads(path.read_text())
    for name in record["sha256"]:
        record["sha256"][name] = hashlib.sha256(tensors[name].view(torch.uint8).numpy().tobytes()).hexdigest()
    path.write_text(json.dumps(record))


def edit_index(folder: Path, change: Callable[[Any], object], name: str = "model.safetensors.index.json") -> None:
    path = folder / name
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
