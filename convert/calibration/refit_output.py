"""Fit a merged layer's output projection to the original layer's output, by ridge regression on a text.

Every fourth window is for validation. The ridge penalty with the least validation error is chosen. If none lowers
that error, the projection stays as it is, so a refit never increases it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from convert.calibration.layer_output import AnyAttention, with_output
from convert.layers.layer_stream import is_validation_window
from convert.merging.weights import join_heads
from model.decoder.devices import float64_device, to_float64

RIDGE_PENALTIES = (1e-1, 1e-2, 1e-3)
"""Ridge penalties tried, as shares of the features' mean power."""


class _Sums:
    """The products of features and targets that least squares needs, summed over windows. C features, M outputs."""

    def __init__(self, like_CM: Tensor) -> None:
        self.power_CC = like_CM.new_zeros(len(like_CM), len(like_CM))
        self.cross_CM = torch.zeros_like(like_CM)

    def add(self, heads_TC: Tensor, target_TM: Tensor) -> None:
        self.power_CC += to_float64(heads_TC.T @ heads_TC)
        self.cross_CM += to_float64(heads_TC.T @ target_TM)

    def slope(self, o_CM: Tensor) -> Tensor:
        """Return half the negative gradient of the squared error, [C, M]."""
        return self.cross_CM - self.power_CC @ o_CM

    def error(self, o_CM: Tensor) -> float:
        """Return the squared error of a projection, less the targets' power."""
        return float((o_CM * (self.power_CC @ o_CM - 2 * self.cross_CM)).sum())


def refit_output(
    merged: AnyAttention, answers: Iterator[tuple[Tensor, Tensor]], device: str | torch.device = "cpu"
) -> AnyAttention:  # fmt: skip
    """Return the layer with the output projection that has the least validation error.

    `answers` yields for each window the merged heads' outputs [T, H·D] and the target output [T, M], without the
    projection's bias, on `device`.
    """
    old_CM = torch.from_numpy(join_heads(merged.o_HMD).T.copy()).to(float64_device(torch.device(device)))
    fit, validation = (_Sums(old_CM) for _ in range(2))
    for window, (heads_TC, target_TM) in enumerate(answers):
        (validation if is_validation_window(window) else fit).add(heads_TC, target_TM)
    best_CM, least = old_CM, validation.error(old_CM)
    for o_CM in _solutions(old_CM, fit):
        if (error := validation.error(o_CM)) < least:
            best_CM, least = o_CM, error
    return merged if best_CM is old_CM else with_output(merged, best_CM.T.cpu().numpy())


def _solutions(old_CM: Tensor, fit: _Sums) -> Iterator[Tensor]:
    """Yield the least-squares projection for each of RIDGE_PENALTIES. The penalty is on the change from the old one."""
    mean_power = float(fit.power_CC.diagonal().mean()) or 1.0
    slope_CM = fit.slope(old_CM)
    for penalty in RIDGE_PENALTIES:
        ridged_CC = fit.power_CC.clone()
        ridged_CC.diagonal().add_(penalty * mean_power)
        yield torch.linalg.solve(ridged_CC, slope_CM).add_(old_CM)
