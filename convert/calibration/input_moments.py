"""Accumulate the second moments of a layer's attention inputs on a text.

Letters: B windows in a batch, T tokens, S sampled queries of a head, N those of all heads, C keys drawn for each query,
H query heads, K key/value heads, D head_dim, X inputs (the hidden size).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from convert.calibration.query_draws import QueryDraws
from convert.latent.closed_form import InputMoments
from convert.layers.layer_stream import CalibrationLayer, is_validation_window
from convert.layers.runnable_layer import HeadStates
from model.decoder.devices import float64_device, to_float64

QUERIES = 2048
"""Queries sampled per head, over the whole text."""
KEYS_PER_HEAD_QUERY = 16
"""Keys drawn for each of them, of its own head."""


@dataclass(frozen=True)
class DrawnKeys:
    """Queries of one window, and the keys that were drawn for them."""

    query_positions_S: Tensor
    key_positions_HSC: Tensor
    """For each head, those of the keys that were drawn for each query."""


_FLOOR = 1e-6
"""Ridge on the moments' diagonal, as a share of its mean. It keeps directions defined that the text rarely uses."""


class InputSums:
    """The moments of a layer's inputs, summed over windows in float64."""

    def __init__(self, layer: CalibrationLayer, hidden_size: int) -> None:
        self._layer = layer
        self._batches = layer.windows.batches()
        sums_device = float64_device(layer.runnable.device)
        self._tokens_XX, self._attended_XX, self._mixed_XX = (
            torch.zeros(hidden_size, hidden_size, dtype=torch.float64, device=sums_device) for _ in range(3)
        )
        self.drawn_keys: list[DrawnKeys] = []
        """For each window."""
        self._draws = QueryDraws(layer, QUERIES)

    def add(self, heads: HeadStates) -> None:
        """Add a batch of windows. Call it in the order of `CalibrationWindows.batches`, as `layer.run` does."""
        x_BTX = self._layer.inputs(next(self._batches))
        for x_TX, q_THD, k_TKD in zip(x_BTX, heads.rotated_q_BTHD, heads.rotated_k_BTKD, strict=True):
            at_S, weights_HST = self._draws.queries(q_THD, k_TKD)
            weights_NT = weights_HST.flatten(0, 1)
            drawn_NC = self._draws.keys(weights_NT, KEYS_PER_HEAD_QUERY)
            drawn_HSC = drawn_NC.view(*weights_HST.shape[:2], KEYS_PER_HEAD_QUERY)
            self.drawn_keys.append(DrawnKeys(query_positions_S=at_S.cpu(), key_positions_HSC=drawn_HSC))
            mixed_NX = weights_NT @ x_TX
            self._tokens_XX += _products(x_TX, x_TX)
            self._attended_XX += _products(x_TX * weights_NT.mean(dim=0)[:, None], x_TX)
            self._mixed_XX += _products(mixed_NX, mixed_NX) / len(mixed_NX)

    def training_keys(self) -> list[tuple[int, DrawnKeys]]:
        """Return the keys drawn in training windows, each with its window's index."""
        return [(n, drawn) for n, drawn in enumerate(self.drawn_keys) if not is_validation_window(n)]

    def moments(self) -> InputMoments:
        """Return the moments. Call it once, after all `add`s."""
        n_windows, length = self._layer.windows.n_windows, self._layer.windows.window_tokens
        sums = (
            self._tokens_XX / (n_windows * length),
            (self._attended_XX - self._mixed_XX) / n_windows,
            self._mixed_XX / n_windows,
        )
        for sum_XX in sums:
            sum_XX.diagonal().add_(_FLOOR * sum_XX.diagonal().mean())
        tokens, keys, values = (sum_XX.cpu().numpy() for sum_XX in sums)
        return InputMoments(tokens, keys, values)


def _products(a_NX: Tensor, b_NX: Tensor) -> Tensor:
    return to_float64(a_NX.T @ b_NX)
