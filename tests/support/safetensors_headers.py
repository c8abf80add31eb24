"""Write a safetensors file of any size without weights: its header, and a hole in place of the data."""

import json
import struct
from collections.abc import Iterable
from pathlib import Path

from model.checkpoint import TensorInfo


def write_headers(folder: Path, tensors: Iterable[TensorInfo]) -> Path:
    folder.mkdir(parents=True)
    header, end = {}, 0
    for tensor in tensors:
        offsets = [end, end + tensor.nbytes]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder
