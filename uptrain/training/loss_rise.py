"""Judge by a run's metrics whether training made the model worse."""

import math
from itertools import pairwise
from statistics import fmean, median

from uptrain.training.loss_values import format_loss
from uptrain.training.metrics_log import Record

MEASURABLE = 0.01
"""Smallest difference of two losses, in nats per token, that is reported.

It is 1 % of the perplexity, and about the spread of losses between seeds (docs/study.md).
"""
RISE_STEPS = 4
"""Least number of steps whose training losses are compared with others."""
RISE_SIGMA = 4.0
"""Standard deviations of their noise by which training losses have to differ."""


def rise_warning(records: list[Record], peak_lr: float, has_stored_teacher: bool) -> str | None:
    """Return a warning if the loss rose by more than MEASURABLE from the beginning of a run to its end.

    The held-out losses of the first and the last evaluation are compared. If the divergence from the teacher fell, no
    rise is reported. A rise is expected if the student's loss began below the teacher's: it approaches the teacher.

    Without evaluations, training losses are compared: the first, which is the loss before any update, with the mean of
    the last n, a tenth of all (RISE_STEPS at least). Runs with stored logits are judged the same way, since their
    divergence is not evaluated. The windows of steps differ. The mean therefore also has to exceed every one of the
    first n losses, or the first by RISE_SIGMA standard deviations of such a difference: σ √(1 + 1/n), with σ that of
    single losses.
    """
    evaluations = [record["evaluation"] for record in records if "evaluation" in record]
    losses = [evaluation["loss"] for evaluation in evaluations]
    divergences = [evaluation.get("kl") for evaluation in evaluations]
    if divergences and None not in divergences and divergences[-1] < divergences[0]:
        return None
    if losses and not has_stored_teacher:
        what, first, last = "held-out", losses[0], losses[-1]
        limit = first
    else:
        losses = [record["loss"] for record in records if record.get("loss") is not None]
        n = max(RISE_STEPS, len(losses) // 10)
        if len(losses) < 2 * n:
            return None
        what, first, last = "training", losses[0], fmean(losses[-n:])
        limit = min(max(losses[:n]), first + RISE_SIGMA * _noise(losses) * math.sqrt(1 + 1 / n))
    if first is None or (last is not None and last <= limit + MEASURABLE):
        return None
    now = "a number that is not finite" if last is None else format_loss(last)
    return (
        f"the {what} loss rose from {format_loss(first)} to {now}, so training made the model worse; start a new run "
        f"with a lower --lr (it was {peak_lr:.3g})."
    )


def _noise(losses: list[float]) -> float:
    """Return the standard deviation of losses around their trend, from the median difference of two in succession.

    Neither the trend nor single spikes change it much. Of normal numbers, the median of |difference| is 0.954 σ.
    """
    return median(abs(b - a) for a, b in pairwise(losses)) / 0.954
