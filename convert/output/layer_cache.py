"""Share converted layers among workers: compute each once, or read it from the file that the calibration wrote."""

import threading
from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path

from convert.layer_tensors.converted_layer import ConvertedLayer, LayerConversion
from convert.layer_tensors.layer_file import load_layer
from model.checkpoint import Checkpoint


class ConvertedLayerCache:
    """Converted layers shared by several workers. Each layer is computed once for all its tensors.

    With a `calibrated` folder, layers are read from the files that the calibration wrote there.
    """

    def __init__(self, checkpoint: Checkpoint, n_workers: int, calibrated: Path | None = None) -> None:
        self._checkpoint, self._size, self._calibrated = checkpoint, n_workers, calibrated
        self._lock = threading.Lock()
        self._layers: OrderedDict[LayerConversion, Future[ConvertedLayer]] = OrderedDict()

    def get(self, conversion: LayerConversion) -> ConvertedLayer:
        """Return a layer. The first worker to request it computes it. The cache holds one layer per worker."""
        with self._lock:
            future, mine = self._layers.get(conversion), conversion not in self._layers
            if future is None:
                future = self._layers[conversion] = Future()
            while len(self._layers) > self._size:
                self._layers.popitem(last=False)
        if mine:
            try:
                if self._calibrated is None:
                    layer = conversion.compute(self._checkpoint)
                else:
                    layer = load_layer(conversion, self._calibrated)
                future.set_result(layer)
            except BaseException as error:
                future.set_exception(error)
        return future.result()
