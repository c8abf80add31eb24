"""Fit a merged layer's output projection to what the layer gave before, by ridge regression on a text.

Every fourth window is held out. How strongly the solution is held to the projection as it was is chosen there, and
where nothing helps there, the projection stays: so a refit does not make a layer worse.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from convert.attention import LayerAttention, Real

PULLS = (1e-1, 1e-2, 1e-3)
"""Ridge penalties tried, as shares of the features' mean power."""
HELD_OUT_EVERY = 4


class _Sums:
    """What least squares needs of windows: features' and errors' products. C features, M outputs."""

    def __init__(self, n_features: int, n_outputs: int) -> None:
        self.power_CC = torch.zeros(n_features, n_features, dtype=torch.float64)
        self.slope_CM = torch.zeros(n_features, n_outputs, dtype=torch.float64)
        self.error = 0.0

    def add(self, heads_TC: Tensor, missing_TM: Tensor) -> None:
        self.power_CC += (heads_TC.T @ heads_TC).double()
        self.slope_CM += (heads_TC.T @ missing_TM).double()
        self.error += float(missing_TM.double().square().sum())

    def error_after(self, step_CM: Tensor) -> float:
        """Return the squared error that is left when the projection changes by this."""
        change = (step_CM * (self.power_CC @ step_CM - 2 * self.slope_CM)).sum()
        return self.error + float(change)


def refit_output(merged: LayerAttention, answers: Iterator[tuple[Tensor, Tensor]]) -> LayerAttention:
    """Return the layer with the output projection that serves best.

    `answers` are, window by window, what the merged layer's heads give [T, H·D] and what the layer must make of it
    [T, M], without the projection's bias.
    """
    o_MC = _projection(merged)
    fit, held = (_Sums(o_MC.shape[1], o_MC.shape[0]) for _ in range(2))
    old_CM = torch.from_numpy(o_MC.T.copy()).float()
    for window, (heads_TC, target_TM) in enumerate(answers):
        sums = held if is_held_out(window) else fit
        sums.add(heads_TC, target_TM - heads_TC @ old_CM)
    step_CM = _best_step(fit, held)
    if step_CM is None:
        return merged
    return replace(merged, o_HMD=_heads(o_MC + step_CM.T.numpy(), merged))


def is_held_out(window: int) -> bool:
    return window % HELD_OUT_EVERY == HELD_OUT_EVERY - 1


def squared_error(merged: LayerAttention, answers: Iterator[tuple[Tensor, Tensor]]) -> float:
    """Return how far a merged layer is from what it must give; `answers` as for `refit_output`."""
    o_CM = torch.from_numpy(_projection(merged).T.copy()).float()
    return sum(float((target_TM - heads_TC @ o_CM).double().square().sum()) for heads_TC, target_TM in answers)


def _best_step(fit: _Sums, held: _Sums) -> Tensor | None:
    """Return the change of the projection that helps most on what is held out; None where none helps."""
    best, least = None, held.error
    mean_power = float(fit.power_CC.diagonal().mean()) or 1.0
    for pull in PULLS:
        ridge_CC = fit.power_CC + pull * mean_power * torch.eye(len(fit.power_CC), dtype=torch.float64)
        step_CM = torch.linalg.solve(ridge_CC, fit.slope_CM)
        error = held.error_after(step_CM)
        if error < least:
            best, least = step_CM, error
    return best


def _projection(attention: LayerAttention) -> Real:
    o_MC: Real = attention.o_HMD.transpose(1, 0, 2).reshape(attention.o_HMD.shape[1], -1)
    return o_MC


def _heads(o_MC: Real, attention: LayerAttention) -> Real:
    n_heads, n_outputs, size = attention.o_HMD.shape
    o_HMD: Real = np.ascontiguousarray(o_MC.reshape(n_outputs, n_heads, size).transpose(1, 0, 2))
    return o_HMD
