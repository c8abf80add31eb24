"""Print the figures of a study as Markdown: held-out losses, means over seeds ± their sample standard deviation.

    python scripts/study/table.py .study/merges/results.jsonl

Each number of K/V heads has its table. "of mean's gap" is the share of the loss that merging by mean costs:
(the arm's loss − the parent's) / (mean's − the parent's), right after conversion. Where several learning rates were
tried for an uptraining, the one with the best mean counts, and is named.
"""

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

Line = dict[str, Any]
Seeds = dict[int, float]
"""A figure of each seed."""


@click.command(help=__doc__)
@click.argument("results", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(results: Path) -> None:
    print("\n\n".join(tables(read(results.parent, results.stem))))


def read(folder: Path, name: str) -> list[Line]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def tables(lines: list[Line]) -> Iterable[str]:
    for parent in unique(line["parent"] for line in lines):
        of_parent = [line for line in lines if line["parent"] == parent]
        merged = unique(line["groups"] for line in of_parent if line["convert"] is not None)
        for groups in sorted(merged, reverse=True):
            # The parent, which nothing has merged, is the control of every table.
            chosen = [line for line in of_parent if line["convert"] is None or line["groups"] == groups]
            yield f"### {lines[0]['plan']}, {parent}: {groups} K/V heads\n\n{table(chosen)}"
            if watched := [line for line in chosen if "behaviour" in line]:
                yield behaviours(watched)


def unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def table(lines: list[Line]) -> str:
    stages = sorted({(line["alpha"], line["loss"]) for line in lines if line["alpha"]})
    headings = ["arm", "after conversion", "of mean's gap", *(f"{loss}, α {alpha:g}" for alpha, loss in stages)]
    positions = {line["arm"]: line["position"] for line in lines}
    rows = [headings, ["---"] * len(headings)]
    for arm in sorted(positions, key=lambda name: positions[name]):
        own = [line for line in lines if line["arm"] == arm]
        start = [line for line in own if not line["alpha"]]
        cells = [uptrained([line for line in own if (line["alpha"], line["loss"]) == stage]) for stage in stages]
        rows.append([arm, show(losses(start)), show(shares(start, lines), percent=True), *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def behaviours(lines: list[Line]) -> str:
    """Return where in a text models lose more than their parent, and what they write by themselves."""
    starts = [1, *(end + 1 for end in lines[0]["behaviour"]["positions"])]
    places = [f"{start}–{end}" for start, end in zip(starts, lines[0]["behaviour"]["positions"], strict=False)]
    rows = [["arm", "uptraining", *places, "tokens until they part", "repeated"]]
    rows.append(["---"] * len(rows[0]))
    for arm, alpha, loss in unique((line["arm"], line["alpha"], line["loss"]) for line in lines):
        own = at_best_rate([line for line in lines if (line["arm"], line["alpha"], line["loss"]) == (arm, alpha, loss)])
        found = {line["seed"]: line["behaviour"] for line in own}.values()
        beyond = [statistics.mean(b["loss_by_position"][i] - b["parents_loss_by_position"][i] for b in found)
                  for i in range(len(places))]  # fmt: skip
        part, repeated = (statistics.mean(b[key] for b in found) for key in ("tokens_until_they_part", "repeated"))
        rows.append(
            [
                arm,
                f"{loss}, α {alpha:g}" if loss else "none",
                *(f"{x:+.3f}" for x in beyond),
                f"{part:.1f}",
                f"{repeated:.0%}",
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def losses(lines: list[Line]) -> Seeds:
    """Return the loss of each seed; of lines for the same, the last: it was measured again."""
    return {line["seed"]: line["held_out_loss"] for line in lines}


def shares(start: list[Line], lines: list[Line]) -> Seeds:
    """Compare with mean on the same parent, so that what parents differ in does not count."""
    mean = losses([line for line in lines if line["arm"] == "mean" and not line["alpha"]])
    parent = {line["seed"]: line["parent_loss"] for line in start}
    return {
        seed: (loss - parent[seed]) / (mean[seed] - parent[seed])
        for seed, loss in losses(start).items()
        if seed in mean
    }


def uptrained(lines: list[Line]) -> str:
    if not lines:
        return "–"
    several = len({line["lr"] for line in lines}) > 1
    best = at_best_rate(lines)
    return show(losses(best)) + (f" (lr {best[0]['lr']:g})" if several else "")


def at_best_rate(lines: list[Line]) -> list[Line]:
    """Return the lines of the learning rate that did best for an arm."""
    rates = [[line for line in lines if line["lr"] == lr] for lr in unique(line["lr"] for line in lines)]
    # One that not all seeds have tried yet must not win by its luck.
    return min(rates, key=lambda own: (-len(losses(own)), statistics.mean(losses(own).values())))


def show(figures: Seeds, percent: bool = False) -> str:
    if not figures:
        return "–"
    values = list(figures.values())
    form = "{:.1%}" if percent else "{:.4f}"
    mean = form.format(statistics.mean(values))
    return mean if len(values) == 1 else f"{mean} ± {form.format(statistics.stdev(values))}"


if __name__ == "__main__":
    main()
