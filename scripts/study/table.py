"""Print the figures of a study as Markdown: held-out losses, means over seeds ± their sample standard deviation.

    python -m scripts.study.table .study/merges/results.jsonl

Each number of K/V heads has its own tables. Arms are ordered by their loss after conversion, best first. "of mean's
gap" is (the arm's loss − the parent's) / (mean's − the parent's), right after conversion. If several learning rates,
schedules, batches or trained parts were tried for an uptraining, the one with the best mean is shown and named.
"""

import statistics
from collections.abc import Iterator
from pathlib import Path

import click

from model.common.counts import counted
from scripts.study.cells import (
    PAPER_RECIPE,
    START,
    by_loss,
    markdown,
    models,
    name_of,
    show,
    uptrained,
)
from scripts.study.results import (
    Result,
    Seeds,
    StageKey,
    at,
    by_setting,
    is_parent,
    losses,
    of_seeds,
    read_results,
    shares_by_text_kind,
    shares_of_gap,
    shares_of_mean_gap,
    stage_of,
    subtract,
    unique,
)


@click.command(help=__doc__)
@click.argument("results", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(results: Path) -> None:
    print("\n\n".join(tables(read_results(results))))


def tables(lines: list[Result]) -> Iterator[str]:
    parents, plans = unique(line["parent"] for line in lines), ", ".join(unique(line["plan"] for line in lines))
    for parent in parents:
        of_parent = [line for line in lines if line["parent"] == parent]
        merged = unique(line["groups"] for line in of_parent if line["convert"] is not None)
        for groups in sorted(merged, reverse=True):
            # The parent, which is not merged, is the control of every table.
            chosen = [line for line in of_parent if is_parent(line) or line["groups"] == groups]
            whose = f"{parent}, " if len(parents) > 1 else ""
            yield f"### {plans}: {whose}merged to {counted(groups, 'K/V head')}\n\n{table(chosen)}"
            yield from tables_of_rates(chosen)
            if any(line["alpha"] for line in chosen):
                yield distances_table(chosen)
            if watched := [line for line in chosen if "behaviour" in line]:
                yield behaviours(watched)
            if watched := [line for line in watched if "loss_by_kind" in line["behaviour"]]:
                yield token_kinds(watched)
            if watched := [line for line in chosen if "text_kinds" in line and not line["alpha"]]:
                yield text_kinds(watched)


def table(lines: list[Result]) -> str:
    """Return the table of losses of each arm, after conversion and after each uptraining."""
    stages = sorted({stage_of(line) for line in lines if line["alpha"]}, key=by_loss)
    rows = []
    for arm in unique(arm for arm, _ in models(lines)):
        own = [line for line in lines if line["arm"] == arm]
        start = [line for line in own if not line["alpha"]]
        cells = [uptrained([line for line in own if stage_of(line) == stage]) for stage in stages]
        rows.append([arm, show(losses(start)), show(shares_of_mean_gap(start, lines), "{:z.1%}"), *cells])
    return markdown(["arm", "after conversion", "share of mean's gap", *map(name_of, stages)], rows)


def tables_of_rates(lines: list[Result]) -> Iterator[str]:
    """Yield a table of losses by setting for each uptraining with several learning rates."""
    for arm, stage in unique((line["arm"], stage_of(line)) for line in lines if line["alpha"]):
        own = [line for line in lines if (line["arm"], stage_of(line)) == (arm, stage)]
        by_rate = {setting: losses(tried) for setting, tried in by_setting(own).items()}
        peaks = sorted({lr for lr, *_ in by_rate if lr is not None})
        if len(peaks) == 1:
            continue
        several_parts = len({part for *_, part in by_rate}) > 1
        rows = []
        for schedule, batch, part in unique(setting[1:] for setting in by_rate):
            name = f"{schedule}, {batch:,} tokens per step" + (f", {part}" if several_parts else "")
            rows.append([name, *(show(by_rate.get((lr, schedule, batch, part), {}), "{:.3f}") for lr in peaks)])
        yield markdown([f"{arm}, {name_of(stage)}; peak:", *(f"{lr:g}" for lr in peaks)], rows)


def distances_table(lines: list[Result]) -> str:
    """Return the table of each model's distance from its parent and from the control."""
    rows, of_recipe = [], losses(at(lines, *PAPER_RECIPE))
    for arm, stage in models(lines):
        start, own = losses(at(lines, arm, START)), at(lines, arm, stage)
        if stage == START and is_parent(own[0]):
            continue
        is_trained_merge = stage != START and not is_parent(own[0])
        recovered = {seed: 1 - left for seed, left in shares_of_gap(own, start).items()} if is_trained_merge else {}
        rows.append([
            arm, name_of(stage),
            show(of_seeds(own, "kl"), "{:.3f}"), show(of_seeds(own, "agreement"), "{:.1%}"),
            show(recovered, "{:.0%}"), show(shares_of_gap(own, of_recipe), "{:.0%}"),
            show(subtract(losses(own), control(lines, stage)) if is_trained_merge else {}, "{:+.3f}"),
        ])  # fmt: skip
    headings = ["arm", "uptraining", "KL from parent", "agreement", "recovered", "of the recipe's gap",
                "over the control"]  # fmt: skip
    filled = [i for i in range(len(headings)) if any(row[i] != "–" for row in rows)]
    return markdown([headings[i] for i in filled], [[row[i] for i in filled] for row in rows])


def control(lines: list[Result], stage: StageKey) -> Seeds:
    """Return the losses of the parent trained further for as long, or of the parent itself if they are better."""
    candidates = [losses(at(lines, "parent", each)) for each in (START, (stage[0], "next-token"))]
    return min(filter(None, candidates), key=lambda seeds: statistics.mean(seeds.values()), default={})


def behaviours(lines: list[Result]) -> str:
    """Return the table of losses above the parent's by position, and of the generated texts."""
    starts = [1, *(end + 1 for end in lines[0]["behaviour"]["positions"])]
    places = [f"{start}–{end}" for start, end in zip(starts, lines[0]["behaviour"]["positions"], strict=False)]
    rows = []
    for arm, stage in models(lines):
        by_seed = {line["seed"]: line["behaviour"] for line in at(lines, arm, stage)}.values()
        more = [statistics.mean(b["loss_by_position"][i] - b["parents_loss_by_position"][i] for b in by_seed)
                for i in range(len(places))]  # fmt: skip
        part, repeated = (statistics.mean(b[key] for b in by_seed) for key in ("tokens_until_they_part", "repeated"))
        rows.append([arm, name_of(stage), *(f"{x:+.3f}" for x in more), f"{part:.1f}", f"{repeated:.0%}"])
    return markdown(["arm", "uptraining", *places, "tokens until they part", "repeated"], rows)


def token_kinds(lines: list[Result]) -> str:
    """Return the table of losses above the parent's by kind of token; the parent's own row has its losses."""
    rows: list[list[str]] = []
    names = list(lines[0]["behaviour"]["parents_loss_by_kind"])
    for arm, stage in models(lines):
        measured = [line["behaviour"] for line in at(lines, arm, stage)]
        parents = [statistics.mean(b["parents_loss_by_kind"][name] for b in measured) for name in names]
        own = [statistics.mean(b["loss_by_kind"][name] for b in measured) for name in names]
        if is_parent(at(lines, arm, stage)[0]) and stage == START:
            rows.insert(0, [arm, name_of(stage), *(f"{x:.3f}" for x in own)])
        else:
            rows.append([arm, name_of(stage), *(f"{x - y:+.3f}" for x, y in zip(own, parents, strict=True))])
    return markdown(["arm", "uptraining", *names], rows)


def text_kinds(lines: list[Result]) -> str:
    """Return the table of each arm's remaining share of mean's gap by kind of text, and on the worst kind.

    Arms named after a kind of text and a number of tokens share one column: each was calibrated on texts of that kind,
    and is shown only for it.
    """
    by_arm = {line["arm"]: line["text_kinds"] for line in lines}
    parent, mean = by_arm["parent"], by_arm["mean"]
    own = {arm: arm.rsplit(" ", 1) for arm in by_arm if arm.rsplit(" ", 1)[0] in parent}
    columns: dict[str, Result] = {
        arm: by_kind for arm, by_kind in by_arm.items() if arm not in ("parent", "mean", *own)
    }
    for arm, (text_kind, tokens) in own.items():
        columns.setdefault(f"own {tokens}", {})[text_kind] = by_arm[arm][text_kind]
    left = {name: shares_by_text_kind(by_kind, lines) for name, by_kind in columns.items()}
    rows = [
        [
            r,
            f"{parent[r]:.3f}",
            f"{mean[r]:.3f}",
            *(f"{left_by_kind[r]:.1%}" if r in left_by_kind else "–" for left_by_kind in left.values()),
        ]
        for r in parent
    ]
    rows.append(["worst", "", "", *(f"{max(left_by_kind.values()):.1%}" for left_by_kind in left.values())])
    return markdown(["held-out texts", "parent", "mean", *columns], rows)


if __name__ == "__main__":
    main()
