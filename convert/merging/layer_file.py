"""Write a layer that the calibration has computed into a file, and read it again."""

import json
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from convert.merging.heads import GroupReport
from convert.merging.layer import ConvertedLayer, LayerConversion
from model.checkpoint import FLOAT_DTYPES
from model.common.files import sync_file


def save_layer(layer: ConvertedLayer, conversion: LayerConversion, folder: Path) -> None:
    """Write a layer into a folder, atomically."""
    partial = folder / f"{conversion.file}.partial"
    with partial.open("wb") as file:
        text = json.dumps({name: [asdict(report) for report in reports] for name, reports in layer.reports.items()})
        arrays: dict[str, Any] = {name: values.reshape(-1).view(np.uint8) for name, values in layer.tensors.items()}
        forms = json.dumps({name: [values.dtype.name, values.shape] for name, values in layer.tensors.items()})
        np.savez(file, reports=np.array(text), forms=np.array(forms), **arrays)
    sync_file(partial)
    partial.rename(folder / conversion.file)


_READING = threading.Lock()
"""numpy parses each array's header with `ast`, which fails at times in several threads at once before Python 3.12."""


def load_layer(conversion: LayerConversion, folder: Path) -> ConvertedLayer:
    """Read a layer that `save_layer` wrote."""
    with _READING, np.load(folder / conversion.file, allow_pickle=False) as file:
        reports, forms = (json.loads(str(file[key])) for key in ("reports", "forms"))
        dtypes = {dtype.name: dtype for dtype in FLOAT_DTYPES.values()}
        tensors = {name: file[name].view(dtypes[forms[name][0]]).reshape(forms[name][1]) for name in conversion.tensors}
    return ConvertedLayer(
        tensors, {name: [GroupReport(**report) for report in entries] for name, entries in reports.items()}
    )
