"""Fit a converted layer's output projection to the original layer's output, by ridge regression on a text.

Every fourth window is for validation. The ridge penalty with the least validation error is chosen. If none lowers
that error, the projection stays as it is, so a refit never increases it.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from convert.calibration.float32_weights import AnyMatrices, with_output
from convert.layer_tensors.head_matrices import join_heads
from convert.layers.layer_stream import is_validation_window
from model.decoder.devices import float64_device

RIDGE_PENALTIES = (1e-1, 1e-2, 1e-3)
"""Ridge penalties tried, as shares of the features' mean power."""
BLOCK = 1024
"""Rows of the features' products that are computed at a time."""


class _Sums:
    """The products of features and targets that least squares needs, summed over windows. C features, M outputs.

    The symmetric matrix of the features is the sum of a block triangle and its transpose. Only the triangle is
    computed, in blocks of B rows, each from its own first column N on.
    """

    def __init__(self, like_CM: Tensor) -> None:
        n = len(like_CM)
        self._rows = [slice(start, min(start + BLOCK, n)) for start in range(0, n, BLOCK)]
        self._triangle = [like_CM.new_zeros(rows.stop - rows.start, n - rows.start) for rows in self._rows]
        self.cross_CM = torch.zeros_like(like_CM)

    def add(self, heads_TC: Tensor, target_TM: Tensor) -> None:
        for rows, triangle_BN in zip(self._rows, self._triangle, strict=True):
            block_BT = heads_TC[:, rows].T
            power_BN = block_BT @ heads_TC[:, rows.start :]
            power_BN[:, : len(power_BN)] /= 2  # the transpose adds the other half
            triangle_BN += power_BN.to(triangle_BN.device)
            self.cross_CM[rows] += (block_BT @ target_TM).to(self.cross_CM.device)

    def power(self) -> Tensor:
        """Return the matrix of the features, [C, C]."""
        power_CC = self.cross_CM.new_zeros(len(self.cross_CM), len(self.cross_CM))
        for rows, triangle_BN in zip(self._rows, self._triangle, strict=True):
            power_CC[rows, rows.start :] += triangle_BN
            power_CC[rows.start :, rows] += triangle_BN.T
        return power_CC

    def error(self, o_CM: Tensor) -> float:
        """Return the squared error of a projection, less the targets' power."""
        total = 0.0
        for rows, triangle_BN in zip(self._rows, self._triangle, strict=True):
            slope_BM = _product(triangle_BN, o_CM[rows.start :]).sub_(self.cross_CM[rows])
            total += 2 * float((o_CM[rows] * slope_BM).sum())
        return total


def refit_output(converted: AnyMatrices, samples: Iterator[tuple[Tensor, Tensor]], device: torch.device) -> AnyMatrices:
    """Return the layer with the output projection that has the least validation error.

    `samples` yields for each window the converted heads' outputs [T, H·D] and the target output [T, M], without the
    projection's bias, on `device`.
    """
    old_CM = torch.from_numpy(join_heads(converted.o_HMD).T.copy()).to(float64_device(device))
    fit, validation = (_Sums(old_CM) for _ in range(2))
    for window, (heads_TC, target_TM) in enumerate(samples):
        (validation if is_validation_window(window) else fit).add(heads_TC, target_TM)
    best_CM, least = old_CM, validation.error(old_CM)
    for o_CM in _solutions(old_CM, fit):
        if (error := validation.error(o_CM)) < least:
            best_CM, least = o_CM, error
    return converted if best_CM is old_CM else with_output(converted, best_CM.T.cpu().numpy())


def _solutions(old_CM: Tensor, fit: _Sums) -> Iterator[Tensor]:
    """Yield the least-squares projection for each of RIDGE_PENALTIES. The penalty is on the change from the old one."""
    power_CC = fit.power()
    diagonal_C = power_CC.diagonal().clone()
    mean_power = float(diagonal_C.mean()) or 1.0
    slope_CM = fit.cross_CM - _product(power_CC, old_CM)
    for penalty in RIDGE_PENALTIES:
        power_CC.diagonal().copy_(diagonal_C + penalty * mean_power)
        yield _solve(power_CC, slope_CM).add_(old_CM)


def _product(a_BN: Tensor, b_NM: Tensor) -> Tensor:
    """Return a product in float64. On AMD processors, numpy's OpenBLAS is 1.8 times as fast as torch's MKL."""
    return torch.from_numpy(a_BN.numpy() @ b_NM.numpy()) if a_BN.device.type == "cpu" else a_BN @ b_NM


def _solve(a_CC: Tensor, b_CM: Tensor) -> Tensor:
    """Solve a linear system in float64, with the same choice of library."""
    if a_CC.device.type == "cpu":
        return torch.from_numpy(np.linalg.solve(a_CC.numpy(), b_CM.numpy()))
    solution_CM: Tensor = torch.linalg.solve(a_CC, b_CM)
    return solution_CM
