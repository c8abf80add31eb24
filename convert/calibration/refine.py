"""Train a converted layer's attention to reproduce the original layer's output, one layer at a time.

The closed form (`convert.merging.methods.fit`) minimises the errors of logits and of values separately, to second
order. Gradient descent starts from it and minimises the output error over queries, keys, values and output projection
together. The layer reads the parent's states. It needs neither the rest of the model nor labels.

Every fourth window is for validation. The result is the weights with the least validation error, possibly the initial
ones.
"""

import math
from collections.abc import Iterator
from itertools import islice
from typing import Generic

import torch
from torch import Tensor

from convert.calibration.float32_weights import AnyWeights
from convert.calibration.layer_output import heads_out, original_output, squared_error
from convert.layers.layer_stream import CalibrationLayer
from model.common.console import Advance

BATCH_TOKENS = 1024
"""Tokens per step."""
PEAK_LEARNING_RATE = 0.32
"""The learning rate of a matrix is this number times the root mean square of its weights, divided by the square root of
the hidden size.

Adam moves every element of a matrix by about the learning rate. The effect on the matrix's products grows with the root
of its width.
"""
WARMUP = 0.05
"""Share of steps with a rising learning rate; a cosine decay follows."""
EVALUATIONS = 4
"""Number of times the validation error is measured during training."""
BETAS = (0.9, 0.95)


def refine(layer: CalibrationLayer, converted: AnyWeights, n_tokens: int, seed: int, advance: Advance) -> AnyWeights:
    """Return the weights after training on `n_tokens` tokens; `converted` itself if training brings nothing.

    The text's windows are repeated as often as needed, in an order that `seed` draws.

    `advance` counts `n_tokens` in all, step by step.

    Reads the file that `CalibrationLayer.run` writes, so call that first.
    """
    validation = layer.windows.validation_windows
    batch = max(1, BATCH_TOKENS // layer.windows.window_tokens)
    n_steps = max(1, n_tokens // (batch * layer.windows.window_tokens))
    start = converted.to(layer.runnable.device)
    best, least = converted, squared_error(layer, start, validation)
    with torch.enable_grad():
        training = _Training(layer, start, n_steps)
        for step, windows in enumerate(islice(_shuffled(layer, batch, seed), n_steps), start=1):
            training.step(windows)
            advance(step * n_tokens // n_steps - (step - 1) * n_tokens // n_steps)
            if step * EVALUATIONS // n_steps > (step - 1) * EVALUATIONS // n_steps:
                weights = training.weights()
                with torch.no_grad():
                    error = squared_error(layer, weights, validation)
                if error < least:
                    best, least = weights, error
    return best


def _shuffled(layer: CalibrationLayer, batch: int, seed: int) -> Iterator[list[int]]:
    """Yield batches of the training windows without end. Each pass has another random order."""
    windows = layer.windows.training_windows
    generator = torch.Generator().manual_seed((seed * 1_000_003 + layer.index) % 2**63)
    waiting: list[int] = []
    while True:
        while len(waiting) < batch:
            waiting += [windows[i] for i in torch.randperm(len(windows), generator=generator).tolist()]
        yield waiting[:batch]
        waiting = waiting[batch:]


def root_mean_square(matrix: Tensor, hidden_size: int) -> float:
    """Return the root mean square of a matrix, without a column of biases: these may be a hundred times larger."""
    weights = matrix[:, :hidden_size] if matrix.shape[1] == hidden_size + 1 else matrix
    return float(weights.square().mean().sqrt())


class _Training(Generic[AnyWeights]):
    """Adam on a layer's attention, in float32."""

    def __init__(self, layer: CalibrationLayer, start: AnyWeights, n_steps: int) -> None:
        self._layer, self._n_steps = layer, n_steps
        self._weights: AnyWeights = start.with_matrices(*(matrix.clone().requires_grad_() for matrix in start))
        share = PEAK_LEARNING_RATE / math.sqrt(len(start.o_MC))
        peaks = [share * root_mean_square(matrix.detach(), len(start.o_MC)) for matrix in self._weights]
        groups = [{"params": [matrix], "lr": peak} for matrix, peak in zip(self._weights, peaks, strict=True)]
        self._optimizer = torch.optim.Adam(groups, betas=BETAS, fused=True)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, self._share_of_peak)

    def step(self, windows: list[int]) -> None:
        with torch.no_grad():
            x_BTM, target_BTM = self._layer.inputs(windows), original_output(self._layer, windows)
        out_BTM = heads_out(self._layer, self._weights, x_BTM) @ self._weights.o_MC.T
        loss = (out_BTM - target_BTM).square().mean() / target_BTM.square().mean()
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        self._optimizer.step()
        self._schedule.step()

    def weights(self) -> AnyWeights:
        """Return a copy of the current weights."""
        return self._weights.with_matrices(*(matrix.detach().clone() for matrix in self._weights))

    def _share_of_peak(self, step: int) -> float:
        """Return the learning rate of a step, as a share of its peak."""
        warmup = max(1.0, WARMUP * self._n_steps)
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1.0, self._n_steps - warmup)))
