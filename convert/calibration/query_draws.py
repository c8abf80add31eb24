"""Draw queries of a layer's heads on a text, and keys for each of them.

Letters: T tokens of a window, S drawn queries of a head, N those of several heads, C keys drawn for each query, H query
heads, K key/value heads, D head_dim.
"""

import numpy as np
import torch
from torch import Tensor

from convert.layers.layer_stream import CalibrationLayer


class QueryDraws:
    """Draw at random, on the CPU, so that the result does not depend on the layer's device.

    Each call continues the random numbers of the call before, so call in the order of the windows.
    """

    def __init__(self, layer: CalibrationLayer, n_queries: int) -> None:
        """`n_queries`: number of queries of a head, over the whole text."""
        self._runnable = layer.runnable
        self._positions = np.random.default_rng(layer.index)
        self._keys = torch.Generator().manual_seed(layer.index)
        self.per_window = min(-(-n_queries // layer.windows.n_windows), layer.windows.window_tokens)

    def queries(self, q_THD: Tensor, k_TKD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions of queries of one window, [S], and their attention weights in all heads, [H, S, T].

        Queries and keys are rotated. Call it after the layer has run the window.
        """
        drawn = self._positions.permutation(len(q_THD))[: self.per_window]
        at_S = torch.from_numpy(drawn).to(self._runnable.device)
        return at_S, self._runnable.attention_weights(q_THD[at_S].transpose(0, 1), k_TKD.transpose(0, 1), at_S)

    def keys(self, weights_NT: Tensor, n_keys: int) -> Tensor:
        """Return positions of keys for each query, [N, C], with attention weights as probabilities. On the CPU."""
        return torch.multinomial(weights_NT.cpu(), n_keys, replacement=True, generator=self._keys)
