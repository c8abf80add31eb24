"""Train a merged layer's attention to give what the layer gave before, one layer at a time.

The closed form (`convert.merging.methods.fit`) minimises the errors of logits and of values separately, to second
order. Gradient descent starts there and minimises the error of the attention's output over queries, keys, values and
output projection together. The layer reads the parent's states. It needs neither the rest of the model nor labels.

Every fourth window is held out. The weights are those that served best there, which may be the ones it began with.
"""

import math
from collections.abc import Iterator
from itertools import islice

import torch

from convert.calibration.layer_output import Weights, heads_out, parents_output, squared_error, weights_of, with_weights
from convert.calibration.layer_stream import Layer
from convert.calibration.refit import is_held_out
from convert.merging.weights import LayerAttention

BATCH_TOKENS = 1024
"""Of a step."""
RATE = 0.32
"""The peak of the learning rate, as a share of each matrix's root mean square, times the root of the hidden size.

Adam moves all numbers of a matrix by the rate, and what that does to its products grows with the root of its width.
"""
WARMUP = 0.05
"""The share of steps in which the rate rises; it falls as a cosine after them."""
EVALUATIONS = 4
"""How many times the error on the held-out windows is measured."""
BETAS = (0.9, 0.95)


def refine(layer: Layer, merged: LayerAttention, n_tokens: int) -> LayerAttention:
    """Return the layer, trained on so many tokens: the text's windows, again and again.

    `Layer.attend` must have left on the disk what the layer gave before.
    """
    held = [n for n in range(layer.text.n_windows) if is_held_out(n)]
    batch = max(1, BATCH_TOKENS // layer.text.length)
    n_steps = max(1, n_tokens // (batch * layer.text.length))
    best = start = weights_of(merged)
    least = squared_error(layer, best, held)
    with torch.enable_grad():
        training = _Training(layer, merged, n_steps)
        for step, windows in enumerate(islice(_shuffled(layer, batch), n_steps), start=1):
            training.step(windows)
            if step * EVALUATIONS // n_steps > (step - 1) * EVALUATIONS // n_steps:
                found = training.weights()
                with torch.no_grad():
                    error = squared_error(layer, found, held)
                if error < least:
                    best, least = found, error
    return merged if best is start else with_weights(merged, best)


def _shuffled(layer: Layer, batch: int) -> Iterator[list[int]]:
    """Yield batches of the windows that are not held out, in another order each time round."""
    windows = [n for n in range(layer.text.n_windows) if not is_held_out(n)]
    generator = torch.Generator().manual_seed(layer.index)
    waiting: list[int] = []
    while True:
        while len(waiting) < batch:
            waiting += [windows[i] for i in torch.randperm(len(windows), generator=generator).tolist()]
        yield waiting[:batch]
        waiting = waiting[batch:]


class _Training:
    """Adam on a layer's attention, in float32."""

    def __init__(self, layer: Layer, merged: LayerAttention, n_steps: int) -> None:
        self._layer, self._n_steps = layer, n_steps
        self._weights = Weights(*(matrix.clone().requires_grad_() for matrix in weights_of(merged)))
        share = RATE / math.sqrt(merged.o_HMD.shape[1])
        peaks = [share * float(matrix.detach().square().mean().sqrt()) for matrix in self._weights]
        groups = [{"params": [matrix], "lr": peak} for matrix, peak in zip(self._weights, peaks, strict=True)]
        self._optimizer = torch.optim.Adam(groups, betas=BETAS, foreach=True)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, self._share_of_peak)

    def step(self, windows: list[int]) -> None:
        with torch.no_grad():
            x_BTM, target_BTM = self._layer.inputs(windows), parents_output(self._layer, windows)
        out_BTM = heads_out(self._layer, self._weights, x_BTM) @ self._weights.o_MC.T
        loss = (out_BTM - target_BTM).square().mean() / target_BTM.square().mean()
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        self._optimizer.step()
        self._schedule.step()

    def weights(self) -> Weights:
        return Weights(*(matrix.detach().clone() for matrix in self._weights))

    def _share_of_peak(self, step: int) -> float:
        warmup = max(1.0, WARMUP * self._n_steps)
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1.0, self._n_steps - warmup)))
