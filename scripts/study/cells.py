"""Write rows, names and cells of a study's tables: means over seeds ± their sample standard deviation.

Of two seeds both values are shown, since a deviation of two says little.
"""

import math
import statistics

from scripts.study.results import (
    Result,
    Seeds,
    StageKey,
    at,
    at_best_setting,
    by_setting,
    is_parent,
    losses,
    setting_of,
    stage_of,
    unique,
)

PAPER_RECIPE = ("mean", (0.05, "next-token"))
"""The recipe of Ainslie et al. (2023), section 2."""
START: StageKey = (0, None)
"""Right after conversion."""


def markdown(headings: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [headings, ["---"] * len(headings), *rows])


def models(lines: list[Result]) -> list[tuple[str, StageKey]]:
    """Return the arms, ordered by loss after conversion, each with its uptrainings, shortest first."""
    pairs = unique((line["arm"], stage_of(line)) for line in lines)
    starts = {arm: statistics.mean(losses(at(lines, arm, START)).values()) for arm, stage in pairs if stage == START}
    return sorted(pairs, key=lambda model: (starts.get(model[0], math.inf), *by_loss(model[1])))


def by_loss(stage: StageKey) -> tuple[str, float]:
    """Return the sort key of an uptraining: first none, then by loss and length."""
    return stage[1] or "", stage[0]


def merged_heads(lines: list[Result]) -> list[int]:
    """Return the numbers of K/V heads of the models that are not the parent, from many to few."""
    return sorted({line["groups"] for line in lines if not is_parent(line)}, reverse=True)


def parents_heads(lines: list[Result]) -> int:
    """Return the number of K/V heads of the parent."""
    return int(next(line["groups"] for line in lines if is_parent(line)))


def model_name(arm: str, stage: StageKey) -> str:
    """Return the name of an arm after an uptraining, or right after conversion."""
    return arm if stage == START else f"{arm}; {name_of(stage)}"


def name_of(stage: StageKey) -> str:
    return f"{stage[1]}, α {stage[0]:g}" if stage[1] else "none"


def uptrained(lines: list[Result]) -> str:
    if not lines:
        return "–"
    best, several = at_best_setting(lines), by_setting(lines)
    lr, schedule, batch, part = setting_of(best[0])
    _, schedules, batches, parts = (set(values) for values in zip(*several, strict=True))
    names = [f"lr {lr:g}"] * (len(several) > 1) + [str(schedule)] * (len(schedules) > 1)
    names += [f"{batch:,} tokens per step"] * (len(batches) > 1) + [str(part)] * (len(parts) > 1)
    return show(losses(best)) + (f" ({', '.join(names)})" if names else "")


def show(figures: Seeds, form: str = "{:.4f}") -> str:
    if not figures:
        return "–"
    values = list(figures.values())
    mean = form.format(statistics.mean(values))
    if min(values) == max(values):
        return mean
    if len(values) == 2:
        return " and ".join(map(form.format, values))
    return f"{mean} ± {form.format(statistics.stdev(values)).lstrip('+')}"
