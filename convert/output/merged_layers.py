"""Keep merged layers in files until their tensors are written, and share them among workers."""

import json
import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from convert.merging.heads import GroupReport
from convert.merging.layer import LayerConversion, MergedLayer
from model.checkpoint import FLOAT_DTYPES, Checkpoint
from model.common.files import sync_file


class MergedLayerCache:
    """Merged layers shared by several workers. Each layer is computed once for all its tensors.

    With a `calibrated` folder, layers are read from the files that `convert.calibration.calibrate_layers` wrote there.
    """

    def __init__(self, checkpoint: Checkpoint, n_workers: int, calibrated: Path | None = None) -> None:
        self._checkpoint, self._size, self._calibrated = checkpoint, n_workers, calibrated
        self._lock = threading.Lock()
        self._layers: OrderedDict[LayerConversion, Future[MergedLayer]] = OrderedDict()

    def get(self, merge: LayerConversion) -> MergedLayer:
        """Return a layer. The first worker to request it computes it. The cache holds one layer per worker."""
        with self._lock:
            future, mine = self._layers.get(merge), merge not in self._layers
            if future is None:
                future = self._layers[merge] = Future()
            while len(self._layers) > self._size:
                self._layers.popitem(last=False)
        if mine:
            try:
                if self._calibrated is None:
                    layer = merge.compute(self._checkpoint)
                else:
                    layer = load_layer(merge, self._calibrated)
                future.set_result(layer)
            except BaseException as error:
                future.set_exception(error)
        return future.result()


def save_layer(layer: MergedLayer, merge: LayerConversion, folder: Path) -> None:
    """Write a layer into a folder, atomically."""
    partial = folder / f"{merge.file}.partial"
    with partial.open("wb") as file:
        text = json.dumps({name: [asdict(report) for report in reports] for name, reports in layer.reports.items()})
        arrays: dict[str, Any] = {name: values.reshape(-1).view(np.uint8) for name, values in layer.tensors.items()}
        forms = json.dumps({name: [values.dtype.name, values.shape] for name, values in layer.tensors.items()})
        np.savez(file, reports=np.array(text), forms=np.array(forms), **arrays)
    sync_file(partial)
    partial.rename(folder / merge.file)


_READING = threading.Lock()
"""numpy parses each array's header with `ast`, which fails at times in several threads at once before Python 3.12."""


def load_layer(merge: LayerConversion, folder: Path) -> MergedLayer:
    """Read a layer that `save_layer` wrote."""
    with _READING, np.load(folder / merge.file, allow_pickle=False) as file:
        reports, forms = (json.loads(str(file[key])) for key in ("reports", "forms"))
        dtypes = {dtype.name: dtype for dtype in FLOAT_DTYPES.values()}
        tensors = {name: file[name].view(dtypes[forms[name][0]]).reshape(forms[name][1]) for name in merge.tensors}
    return MergedLayer(
        tensors, {name: [GroupReport(**report) for report in entries] for name, entries in reports.items()}
    )
