"""Print the figures of a study as Markdown: held-out losses, means over seeds ± their sample standard deviation.

    python -m scripts.study.table .study/merges/results.jsonl

Each number of K/V heads has its own tables. Arms are ordered by their loss after conversion, best first. "of mean's
gap" is (the arm's loss − the parent's) / (mean's − the parent's), right after conversion. If several learning rates,
schedules or batches were tried for an uptraining, the one with the best mean is shown and named.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path

import click

from scripts.study.results import (
    FORWARDS,
    Result,
    Seeds,
    Stage,
    at,
    at_best_setting,
    beyond,
    by_setting,
    calibration_tokens,
    forward_passes,
    gaps,
    is_parent,
    left_of,
    losses,
    of_seeds,
    read,
    setting_of,
    shares,
    shares_by_register,
    stage_of,
    unique,
)

PAPERS = ("mean", (0.05, "next-token"))
"""The recipe of Ainslie et al. (2023), section 2."""
KNOWN = 6.0
"""Loss, in nats, below which the parents of `families` know a kind of text. A uniform guess costs them 7.6."""
START: Stage = (0, None)
"""Right after conversion."""


@click.command(help=__doc__)
@click.argument("results", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(results: Path) -> None:
    print("\n\n".join(tables(read(results))))


def tables(lines: list[Result]) -> Iterator[str]:
    parents, plans = unique(line["parent"] for line in lines), ", ".join(unique(line["plan"] for line in lines))
    for parent in parents:
        of_parent = [line for line in lines if line["parent"] == parent]
        merged = unique(line["groups"] for line in of_parent if line["convert"] is not None)
        for groups in sorted(merged, reverse=True):
            # The parent, which is not merged, is the control of every table.
            chosen = [line for line in of_parent if is_parent(line) or line["groups"] == groups]
            whose = f"{parent}, " if len(parents) > 1 else ""
            yield f"### {plans}: {whose}merged to {kv_heads(groups)}\n\n{table(chosen)}"
            yield from rates(chosen)
            if any(line["alpha"] for line in chosen):
                yield measures(chosen)
            if watched := [line for line in chosen if "behaviour" in line]:
                yield behaviours(watched)
            if watched := [line for line in watched if "loss_by_kind" in line["behaviour"]]:
                yield kinds(watched)
            if watched := [line for line in chosen if "registers" in line and not line["alpha"]]:
                yield registers(watched)


def markdown(headings: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [headings, ["---"] * len(headings), *rows])


def models(lines: list[Result]) -> list[tuple[str, Stage]]:
    """Return the arms, ordered by loss after conversion, each with its uptrainings, shortest first."""
    pairs = unique((line["arm"], stage_of(line)) for line in lines)
    starts = {arm: statistics.mean(losses(at(lines, arm, START)).values()) for arm, stage in pairs if stage == START}
    return sorted(pairs, key=lambda model: (starts.get(model[0], math.inf), *by_loss(model[1])))


def by_loss(stage: Stage) -> tuple[str, float]:
    """Return the sort key of an uptraining: first none, then by loss and length."""
    return stage[1] or "", stage[0]


def kv_heads(n: int) -> str:
    return f"{n} K/V head{'s' * (n > 1)}"


def name_of(stage: Stage) -> str:
    return f"{stage[1]}, α {stage[0]:g}" if stage[1] else "none"


def table(lines: list[Result]) -> str:
    """Return the table of losses of each arm, after conversion and after each uptraining."""
    stages = sorted({stage_of(line) for line in lines if line["alpha"]}, key=by_loss)
    rows = []
    for arm in unique(arm for arm, _ in models(lines)):
        own = [line for line in lines if line["arm"] == arm]
        start = [line for line in own if not line["alpha"]]
        cells = [uptrained([line for line in own if stage_of(line) == stage]) for stage in stages]
        rows.append([arm, show(losses(start)), show(shares(start, lines), "{:z.1%}"), *cells])
    return markdown(["arm", "after conversion", "of mean's gap", *map(name_of, stages)], rows)


def by_heads(lines: list[Result]) -> str:
    """Return one table for all numbers of K/V heads: of each model its loss and its share of mean's gap."""
    heads = sorted({line["groups"] for line in lines if not is_parent(line)}, reverse=True)
    before = next(line["groups"] for line in lines if is_parent(line))
    rows = []
    for arm, stage in models([line for line in lines if not is_parent(line)]):
        cells = []
        for groups in heads:
            own = at(lines, arm, stage, groups)
            left = shares(own, [line for line in lines if line["groups"] == groups])
            cells.append(f"{show(losses(own), '{:.3f}')}, {show(left, '{:z.1%}')}" if own else "–")
        rows.append([arm if stage == START else f"{arm}; {name_of(stage)}", *cells])
    return markdown(["arm", *(f"{before} → {groups} heads" for groups in heads)], rows)


def by_part(lines: list[Result], length: str = "α {alpha:g}") -> str:
    """Return the table of losses beyond the parent by the part that was trained, each at the best of its rates.

    A column is an arm and a length of training, which `length` names from a line. A cell names its rate, and the number
    of parents where not all are in it.
    """
    n_parents = len(losses(lines))
    columns = unique((line["arm"], line["alpha"]) for line in lines if line["alpha"])
    columns.sort(key=lambda column: (column[0] == "mean", column[1]))
    rows = []
    for part in unique(line["trainable"] for line in lines if line["trainable"]):
        cells = []
        for arm, alpha in columns:
            own = [x for x in lines if (x["arm"], x["alpha"], x["trainable"]) == (arm, alpha, part)]
            best = at_best_setting(own) if own else []
            n = len(losses(best)) if best else n_parents
            few = f"; {n} of {n_parents} parents" if n < n_parents else ""
            cells.append(f"{show(gaps(best))} (lr {best[0]['lr']:g}{few})" if best else "–")
        rows.append([part, *cells])
    starts = {arm: show(gaps([x for x in lines if x["arm"] == arm and not x["alpha"]])) for arm, _ in columns}
    rows.insert(0, ["none: after conversion", *(starts[arm] for arm, _ in columns)])
    first = {(line["arm"], line["alpha"]): line for line in reversed(lines)}
    return markdown(["trained", *(f"{column[0]}, {length.format(**first[column])}" for column in columns)], rows)


def by_cache(lines: list[Result], length: str = "α {alpha:g}") -> str:
    """Return the table of losses beyond the parent by cached numbers, of merged heads and of latent attention.

    Each uptraining is at its best rate, which the cell names, with the number of parents where not all are in it.
    `length` names how long it was, from a line.
    """
    cached = {line["groups"]: sum(line["latent"]) for line in lines if line["latent"]}
    n_parents = len(losses(lines))
    converted = [line for line in lines if not is_parent(line)]
    arms, rows = unique(line["arm"] for line in converted), []
    models = unique((line["arm"], stage_of(line), line["trainable"]) for line in converted)
    for arm, stage, part in sorted(models, key=lambda model: (arms.index(model[0]), *by_loss(model[1]))):
        own = [x for x in converted if (x["arm"], stage_of(x), x["trainable"]) == (arm, stage, part)]
        cells = []
        for groups in sorted(cached):
            best = at(own, arm, stage, groups)
            remarks = [f"lr {best[0]['lr']:g}"] if best and stage != START else []
            if best and len(losses(best)) < n_parents:
                remarks.append(f"{len(losses(best))} of {n_parents} parents")
            cells.append(show(gaps(best)) + (f" ({'; '.join(remarks)})" if remarks else ""))
        rows.append([arm, "–" if stage == START else f"{length.format(**own[0])}, {part}", *cells])
    return markdown(["", "distilled", *(f"{cached[groups]} numbers" for groups in sorted(cached))], rows)


def by_parent(lines: list[Result]) -> str:
    """Return the table of the arms `mean` and `default` on each parent, right after conversion and uptrained.

    Shares are of mean's gap right after conversion.
    """
    (uptraining,) = {stage_of(line) for line in lines if line["alpha"]}
    headings = [f"{arm}{after}" for after in ("", f", α {uptraining[0]:g}") for arm in ("mean", "default")]
    rows = []
    for groups in sorted({line["groups"] for line in lines if not is_parent(line)}, reverse=True):
        for parent in unique(line["parent"] for line in lines):
            own = [line for line in lines if line["parent"] == parent and line["groups"] == groups]
            if not own:
                continue
            cells = []
            for stage, arm in product((START, uptraining), ("mean", "default")):
                merged = at(own, arm, stage)
                left = f" ({show(shares(merged, own), '{:.1%}')})" if (arm, stage) != ("mean", START) and merged else ""
                cells.append(show(losses(merged)) + left if merged else "–")
            before = next(line["groups"] for line in lines if is_parent(line))
            rows.append([parent, f"{before} → {groups}", show(of_seeds(own, "parent_loss")), *cells])
    return markdown(["family", "K/V heads", "parent", *headings], rows)


def registers_by_parent(lines: list[Result]) -> str:
    """Return the shares of mean's gap that the arm `default` leaves on each kind of text, by parent.

    A cell has one share for each number of K/V heads, from many to few. Kinds of which a parent knows too little are
    left out (`KNOWN`): there the mean can be better than the parent, and a share of its gap says nothing.
    """
    heads = sorted({line["groups"] for line in lines if not is_parent(line)}, reverse=True)
    shares_of = {}
    for parent in unique(line["parent"] for line in lines):
        own = [line for line in lines if line["parent"] == parent]
        by_groups = ([line for line in own if is_parent(line) or line["groups"] == groups] for groups in heads)
        shares_of[parent] = [shares_by_register("default", merged) for merged in by_groups]
    of_parents = [line["registers"] for line in lines if is_parent(line)]
    kinds = [kind for kind in of_parents[0] if max(losses[kind] for losses in of_parents) < KNOWN]
    rows = [[kind, *(_shares(left[kind] for left in each) for each in shares_of.values())] for kind in kinds]
    for name, of_all in (("average", statistics.mean), ("worst", max)):
        summary = ([of_all(left[kind] for kind in kinds) for left in each] for each in shares_of.values())
        rows.append([name, *map(_shares, summary)])
    before = next(line["groups"] for line in lines if is_parent(line))
    return markdown([f"{before} → {' / '.join(map(str, heads))} heads", *shares_of], rows)


def _shares(left: Iterable[float]) -> str:
    return " / ".join(f"{share:.1%}" for share in left)


def rates(lines: list[Result]) -> Iterator[str]:
    """Yield a table of losses by learning rate, schedule and batch for each uptraining with several learning rates."""
    for arm, stage in unique((line["arm"], stage_of(line)) for line in lines if line["alpha"]):
        own = [line for line in lines if (line["arm"], stage_of(line)) == (arm, stage)]
        by_rate = {setting: losses(tried) for setting, tried in by_setting(own).items()}
        peaks = sorted({lr for lr, *_ in by_rate if lr is not None})
        if len(peaks) == 1:
            continue
        rows = [
            [f"{schedule}, {batch:,} tokens a step",
             *(show(by_rate.get((lr, schedule, batch), {}), "{:.3f}") for lr in peaks)]
            for schedule, batch in unique((schedule, batch) for _, schedule, batch in by_rate)
        ]  # fmt: skip
        yield markdown([f"{arm}, {name_of(stage)}; peak:", *(f"{lr:g}" for lr in peaks)], rows)


def measures(lines: list[Result]) -> str:
    """Return the table of each model's distance from its parent and from the control."""
    rows, papers = [], losses(at(lines, *PAPERS))
    for arm, stage in models(lines):
        start, own = losses(at(lines, arm, START)), at(lines, arm, stage)
        if stage == START and is_parent(own[0]):
            continue
        is_trained_merge = stage != START and not is_parent(own[0])
        recovered = {seed: 1 - left for seed, left in left_of(own, start).items()} if is_trained_merge else {}
        rows.append([
            arm, name_of(stage),
            show(of_seeds(own, "kl"), "{:.3f}"), show(of_seeds(own, "agreement"), "{:.1%}"),
            show(recovered, "{:.0%}"), show(left_of(own, papers), "{:.0%}"),
            show(beyond(losses(own), control(lines, stage)) if is_trained_merge else {}, "{:+.3f}"),
        ])  # fmt: skip
    headings = ["arm", "uptraining", "KL from parent", "agreement", "recovered", "of the recipe's gap",
                "over the control"]  # fmt: skip
    filled = [i for i in range(len(headings)) if any(row[i] != "–" for row in rows)]
    return markdown([headings[i] for i in filled], [[row[i] for i in filled] for row in rows])


def control(lines: list[Result], stage: Stage) -> Seeds:
    """Return the losses of the parent trained further for as long, or of the parent itself if they are better."""
    candidates = [losses(at(lines, "parent", each)) for each in (START, (stage[0], "next-token"))]
    return min(filter(None, candidates), key=lambda seeds: statistics.mean(seeds.values()), default={})


def savings(lines: list[Result], best: str) -> str:
    """Return the table of tokens and compute that our best merge needs to match the paper's recipe.

    The recipe has one row per batch size, at the best learning rate for it. The distilled mean and the best merge
    follow.
    """
    arm, stage = PAPERS
    recipe = [line for line in lines if (line["arm"], stage_of(line)) == PAPERS]
    heads = sorted({line["groups"] for line in recipe}, reverse=True)
    # Other batch sizes give a few tokens more or less, because steps are whole.
    papers_tokens = max(recipe, key=lambda line: int(line["global_batch_tokens"]))["tokens"]
    n_parents = len(losses(recipe))
    rows = []
    for batch in sorted({line["global_batch_tokens"] for line in recipe}, reverse=True):
        with_batch = [line for line in recipe if line["global_batch_tokens"] == batch]
        rows.append([f"{arm}, {name_of(stage)}, {batch:,} a step (the paper's)", "100%", "100%", "100%",
                     *(counted(uptrained, [line for line in with_batch if line["groups"] == n], n_parents)
                       for n in heads)])  # fmt: skip
    distilled = [
        line for line in lines if (line["arm"], line["loss"]) in ((arm, "distill"), (best, "distill"), (best, None))
    ]
    for name, own_stage in sorted(models(distilled), key=lambda model: model[0] == best):
        by_heads = [at(lines, name, own_stage, n) for n in heads]
        (tokens,) = {line["tokens"] for own in by_heads for line in own}
        first = next(line for own in by_heads for line in own)
        calibration = calibration_tokens(first)
        compute = forward_passes(first)
        shares_of_papers = [tokens / papers_tokens, (tokens + calibration) / papers_tokens]
        shares_of_papers += [compute / (papers_tokens * FORWARDS["next-token"])]
        batch = first["global_batch_tokens"]
        label = f"{name}, {f'{name_of(own_stage)}, {batch:,} a step' if batch else 'no training'}"
        rows.append([label, *(f"{share:.1%}" for share in shares_of_papers),
                     *(counted(lambda own: show(losses(own)), own, n_parents) for own in by_heads)])  # fmt: skip
    headings = ["", "tokens trained on", "with calibration", "compute", *map(kv_heads, heads)]
    return markdown(headings, rows)


def counted(cell: Callable[[list[Result]], str], lines: list[Result], n_parents: int) -> str:
    """Return a cell of the table, with a remark if it does not cover all parents."""
    n = len(losses(at_best_setting(lines))) if lines else n_parents
    return cell(lines) + (f" ({n} of {n_parents} parents)" if n < n_parents else "")


def behaviours(lines: list[Result]) -> str:
    """Return the table of losses beyond the parent's by position, and of the generated texts."""
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


def kinds(lines: list[Result]) -> str:
    """Return the table of losses beyond the parent's by kind of token; the parent's own row has its losses."""
    rows: list[list[str]] = []
    names = list(lines[0]["behaviour"]["parents_loss_by_kind"])
    for arm, stage in models(lines):
        of_seeds = [line["behaviour"] for line in at(lines, arm, stage)]
        parents = [statistics.mean(b["parents_loss_by_kind"][name] for b in of_seeds) for name in names]
        own = [statistics.mean(b["loss_by_kind"][name] for b in of_seeds) for name in names]
        if is_parent(at(lines, arm, stage)[0]) and stage == START:
            rows.insert(0, [arm, name_of(stage), *(f"{x:.3f}" for x in own)])
        else:
            rows.append([arm, name_of(stage), *(f"{x - y:+.3f}" for x, y in zip(own, parents, strict=True))])
    return markdown(["arm", "uptraining", *names], rows)


def registers(lines: list[Result]) -> str:
    """Return the table of each arm's remaining share of mean's gap by register, and on the worst register.

    Arms named after a register and a number of tokens share one column: each was calibrated on texts of that register,
    and is shown only for it.
    """
    by_arm = {line["arm"]: line["registers"] for line in lines}
    parent, mean = by_arm["parent"], by_arm["mean"]
    own = {arm: arm.rsplit(" ", 1) for arm in by_arm if arm.rsplit(" ", 1)[0] in parent}
    columns: dict[str, Result] = {arm: losses for arm, losses in by_arm.items() if arm not in ("parent", "mean", *own)}
    for arm, (register, tokens) in own.items():
        columns.setdefault(f"own {tokens}", {})[register] = by_arm[arm][register]
    left = {
        name: {r: (losses[r] - parent[r]) / (mean[r] - parent[r]) for r in losses} for name, losses in columns.items()
    }
    rows = [
        [
            r,
            f"{parent[r]:.3f}",
            f"{mean[r]:.3f}",
            *(f"{shares[r]:.1%}" if r in shares else "–" for shares in left.values()),
        ]
        for r in parent
    ]
    rows.append(["worst", "", "", *(f"{max(shares.values()):.1%}" for shares in left.values())])
    return markdown(["held-out texts", "parent", "mean", *columns], rows)


def uptrained(lines: list[Result]) -> str:
    if not lines:
        return "–"
    best, several = at_best_setting(lines), by_setting(lines)
    lr, schedule, batch = setting_of(best[0])
    _, schedules, batches = (set(values) for values in zip(*several, strict=True))
    parts = [f"lr {lr:g}"] * (len(several) > 1) + [str(schedule)] * (len(schedules) > 1)
    parts += [f"{batch:,} tokens a step"] * (len(batches) > 1)
    return show(losses(best)) + (f" ({', '.join(parts)})" if parts else "")


def show(figures: Seeds, form: str = "{:.4f}") -> str:
    if not figures:
        return "–"
    values = list(figures.values())
    mean = form.format(statistics.mean(values))
    return mean if len(values) == 1 else f"{mean} ± {form.format(statistics.stdev(values)).lstrip('+')}"


if __name__ == "__main__":
    main()
