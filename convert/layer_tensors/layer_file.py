"""Write a layer that the calibration has computed into a file, and read it again."""

import json
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from convert.layer_tensors.converted_layer import ConvertedLayer, GroupReport, LayerConversion
from model.checkpoint import FLOAT_DTYPES
from model.common.errors import RunError
from model.files.write import sync_file

FINISHED = "finished"
"""An empty file in the folder of the layers, which says that all of them are written."""
STATES = "states-*.npy"
"""Pattern of the files of states between layers in that folder."""


def save_layer(layer: ConvertedLayer, conversion: LayerConversion, folder: Path) -> None:
    """Write a layer into a folder, atomically."""
    partial = folder / f"{conversion.file}.partial"
    with partial.open("wb") as file:
        text = json.dumps({name: [asdict(report) for report in reports] for name, reports in layer.reports.items()})
        arrays: dict[str, Any] = {name: values.reshape(-1).view(np.uint8) for name, values in layer.tensors.items()}
        forms = json.dumps({name: [values.dtype.name, values.shape] for name, values in layer.tensors.items()})
        error = np.array(math.nan if layer.output_error is None else layer.output_error)
        clipped = np.array(layer.clipped)
        np.savez(file, reports=np.array(text), forms=np.array(forms), clipped=clipped, output_error=error, **arrays)
    sync_file(partial)
    partial.rename(folder / conversion.file)


_READING = threading.Lock()
"""numpy parses each array's header with `ast`, which fails at times in several threads at once before Python 3.12."""


def load_layer(conversion: LayerConversion, folder: Path) -> ConvertedLayer:
    """Read a layer that `save_layer` wrote. Raises RunError as `load_output_error` does."""
    with _open_layer(folder / conversion.file) as file:
        reports, forms = (json.loads(str(file[key])) for key in ("reports", "forms"))
        n_clipped, n_values = map(int, file["clipped"])
        dtypes = {dtype.name: dtype for dtype in FLOAT_DTYPES.values()}
        tensors = {
            name: file[name].view(dtypes[forms[name][0]]).reshape(forms[name][1]) for name in conversion.tensor_names
        }
        output_error = _output_error(file)
    groups = {name: [GroupReport(**report) for report in entries] for name, entries in reports.items()}
    return ConvertedLayer(tensors, groups, (n_clipped, n_values), output_error)


def load_output_error(conversion: LayerConversion, folder: Path) -> float | None:
    """Read the output error of a layer that `save_layer` wrote.

    Raises RunError if the file is missing or damaged, and removes it and FINISHED, so that the next run computes it.
    """
    with _open_layer(folder / conversion.file) as file:
        return _output_error(file)


def _output_error(file: Mapping[str, Any]) -> float | None:
    error = float(file["output_error"])
    return None if math.isnan(error) else error


@contextmanager
def _open_layer(path: Path) -> Iterator[Mapping[str, Any]]:
    """Open the file of a layer. Raises RunError if it is missing or damaged, after removing it, FINISHED and states."""
    try:
        # numpy would leave a damaged file open.
        with _READING, path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            yield file
    except (BadZipFile, EOFError, FileNotFoundError, KeyError, ValueError) as error:
        # With the states after the last layer, which a kill may have left, the next run would compute no layer.
        for left in (path.parent / FINISHED, path, *path.parent.glob(STATES)):
            left.unlink(missing_ok=True)
        raise RunError(f"{path} is damaged ({error!r}); the same command computes it again") from error
