"""Compare several numbers of K/V heads, parents or trained parts in one table of a page."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, product

from model.common.counts import counted
from scripts.study.cells import (
    PAPER_RECIPE,
    START,
    by_loss,
    markdown,
    merged_heads,
    model_name,
    models,
    name_of,
    parents_heads,
    show,
    uptrained,
)
from scripts.study.results import (
    FORWARDS,
    Result,
    StageKey,
    arm_shares_by_text_kind,
    at,
    at_best_setting,
    calibration_tokens,
    forward_passes,
    gaps,
    is_parent,
    losses,
    of_seeds,
    shares_of_mean_gap,
    stage_of,
    unique,
)

KNOWN = 6.0
"""Loss, in nats, below which the parents of `families` know a kind of text. A uniform guess costs them 7.6."""

FAR = 20
"""A power law is not followed to more than so many times the longest training."""


def by_heads(lines: list[Result]) -> str:
    """Return one table for all numbers of K/V heads: of each model its loss and its share of mean's gap."""
    heads, before = merged_heads(lines), parents_heads(lines)
    rows = []
    for arm, stage in models([line for line in lines if not is_parent(line)]):
        cells = []
        for groups in heads:
            own = at(lines, arm, stage, groups)
            left = shares_of_mean_gap(own, [line for line in lines if line["groups"] == groups])
            cells.append(f"{show(losses(own), '{:.3f}')}, {show(left, '{:z.1%}')}" if own else "–")
        rows.append([model_name(arm, stage), *cells])
    return markdown(["arm", *(f"{before} → {groups} heads" for groups in heads)], rows)


def distances(lines: list[Result], names: Sequence[tuple[str, StageKey]]) -> str:
    """Return the table of some models' compute and distance from the parent, for all numbers of K/V heads.

    Compute is a share of the recipe's. A cell has the KL divergence from the parent, and the agreement with it.
    """
    heads, before = merged_heads(lines), parents_heads(lines)
    of_recipe = forward_passes(at(lines, *PAPER_RECIPE)[0])
    rows = []
    for arm, stage in names:
        by_groups = [at(lines, arm, stage, groups) for groups in heads]
        cells = (f"{show(of_seeds(x, 'kl'), '{:.3f}')}; {show(of_seeds(x, 'agreement'), '{:.1%}')}" for x in by_groups)
        compute = f"{forward_passes(by_groups[0][0]) / of_recipe:.1%}"
        rows.append([model_name(arm, stage), compute, *cells])
    return markdown(["arm", "compute", *(f"{before} → {groups} heads" for groups in heads)], rows)


def rates_table(lines: list[Result]) -> str:
    """Return the table of losses above the parent's by peak learning rate, for all numbers of K/V heads.

    The first number is the parents' own: it has the unmerged parents, trained on.
    """
    heads = sorted({line["groups"] for line in lines}, reverse=True)
    rows = []
    for arm, stage, lr in sorted(unique((line["arm"], stage_of(line), line["lr"]) for line in lines), key=_by_arm):
        own = [line for line in lines if (line["arm"], stage_of(line), line["lr"]) == (arm, stage, lr)]
        by_groups = [[line for line in own if line["groups"] == groups] for groups in heads]
        rows.append(
            [f"{arm}; {name_of(stage)}", f"{lr:g}", *(show(gaps(x), "{:.3f}") if x else "–" for x in by_groups)]
        )
    return markdown(["arm", "peak rate", *(counted(n, "K/V head") for n in heads)], rows)


def _by_arm(key: tuple[str, StageKey, float]) -> tuple[object, ...]:
    arm, stage, lr = key
    return arm != "parent", arm, by_loss(stage), lr


def by_position(lines: list[Result], names: Sequence[tuple[str, StageKey]], trained: int) -> str:
    """Return the table of losses above the parent's at the last positions that it was trained on, and beyond these.

    A cell has both: up to position `trained` from half of it on, and up to twice as many.
    """
    heads = merged_heads(lines)
    rows = []
    for arm, stage in names:
        cells = []
        for groups in heads:
            own = at(lines, arm, stage, groups)
            ends = own[0]["behaviour"]["positions"]
            spans = [
                {line["seed"]: _gaps_by_position(line)[ends.index(end)] for line in own}
                for end in (trained, 2 * trained)
            ]
            cells.append("; ".join(show(span, "{:+.3f}") for span in spans))
        rows.append([model_name(arm, stage), *cells])
    return markdown(["arm", *(counted(n, "K/V head") for n in heads)], rows)


def _gaps_by_position(line: Result) -> list[float]:
    behaviour = line["behaviour"]
    pairs = zip(behaviour["loss_by_position"], behaviour["parents_loss_by_position"], strict=True)
    return [own - parents for own, parents in pairs]


def by_part(lines: list[Result], length: str = "α {alpha:g}") -> str:
    """Return the table of losses above the parent's by the part that was trained, each at the best of its rates.

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


def kinds_by_part(lines: list[Result]) -> str:
    """Return the table of losses above the parent's by kind of token, after conversion and by the part trained.

    The first row has the parent's own losses. Lines without these measures are left out.
    """
    watched = [line for line in lines if "behaviour" in line]
    names = list(watched[0]["behaviour"]["parents_loss_by_kind"])
    rows = []
    for line in watched:
        own, parents = (line["behaviour"][key] for key in ("loss_by_kind", "parents_loss_by_kind"))
        form, parents = ("{:.3f}", dict.fromkeys(names, 0.0)) if is_parent(line) else ("{:+.3f}", parents)
        length = f"{line['tokens']:,} tokens, {line['trainable']}" if line["alpha"] else "–"
        rows.append([line["arm"], length, *(form.format(own[name] - parents[name]) for name in names)])
    return markdown(["", "distilled", *names], rows)


def along_training(lines: list[Result]) -> str:
    """Return the table of a model's measures during uptraining (`curve`).

    They are the loss above the parent's, the share of the merge's cost that is recovered, the KL divergence from the
    parent, and how often the most likely tokens of both are the same.
    """
    (line,) = (line for line in lines if "curve" in line)
    cost = line["curve"][0]["loss"] - line["parent_loss"]
    rows = []
    for point in line["curve"]:
        gap = point["loss"] - line["parent_loss"]
        tokens = point["step"] * line["global_batch_tokens"]
        rows.append(
            [f"{tokens:,}", f"{gap:.4f}", f"{1 - gap / cost:.0%}", f"{point['kl']:.3f}", f"{point['agreement']:.1%}"]
        )
    return markdown(["tokens", "loss above the parent's", "recovered", "KL divergence", "agreement"], rows)


def by_tokens(lines: list[Result]) -> str:
    """Return the table of one merge by tokens of uptraining, over the orders of the data.

    Columns are the loss above the parent's, the share of the merge's cost that is recovered, the KL divergence from
    the parent, and how often the most likely tokens of both are the same.
    """
    merged = [line for line in lines if not is_parent(line)]
    lengths = sorted({line["tokens"] for line in merged})
    cost = statistics.mean(gaps([line for line in merged if line["tokens"] == lengths[0]]).values())
    rows = []
    for tokens in lengths:
        own = [line for line in merged if line["tokens"] == tokens]
        recovered = {seed: 1 - gap / cost for seed, gap in gaps(own).items()}
        rows.append([f"{tokens:,}", str(len(gaps(own))), show(gaps(own)), show(recovered, "{:z.0%}"),
                     show(of_seeds(own, "kl"), "{:.3f}"), show(of_seeds(own, "agreement"), "{:.1%}")])  # fmt: skip
    return markdown(["tokens", "orders", "loss above the parent's", "recovered", "KL divergence", "agreement"], rows)


def one_merge_by_rate(lines: list[Result], parents: list[Result]) -> str:
    """Return the table of one merge right after conversion, and uptrained for one length at several peak rates.

    Columns are the loss above the parent's, the KL divergence from the parent, how often the most likely tokens of
    both are the same, the loss on random tokens that come a second time, where it was measured, and the loss beyond
    the parent's on average over the kinds of text. The parent's losses on these are in a line of `parents`.
    """
    merged = [line for line in lines if not is_parent(line)]
    (parent,) = (line["text_kinds"] for line in parents if is_parent(line))
    watched = all("behaviour" in line for line in merged)
    rows = []
    for line in sorted(merged, key=lambda line: (*by_loss(stage_of(line)), line["lr"] or 0)):
        name = f"{line['loss']}, {line['lr']:g}" if line["alpha"] else "none: after conversion"
        copied = [f"{line['behaviour']['loss_by_kind']['copied']:.1f}"] if watched else []
        kinds = statistics.mean(line["text_kinds"][kind] - loss for kind, loss in parent.items())
        rows.append([name, f"{line['held_out_loss'] - line['parent_loss']:.3f}", f"{line['kl']:.3f}",
                     f"{line['agreement']:.1%}", *copied, f"{kinds:.3f}"])  # fmt: skip
    headings = ["loss above the parent's", "KL divergence", "agreement", *["copying"] * watched]
    return markdown(["training, peak rate", *headings, f"{len(parent)} kinds of text"], rows)


def extrapolated(lines: list[Result], arm: str) -> str:
    """Return the table of power laws through an arm's losses above the parent's against tokens, by the part trained.

    Between two lengths, the loss is taken to fall with a power of the tokens. From the two lengths before the last, the
    law predicts the last, which was measured too. From the last two, it says after how many tokens a tenth of the
    merge's cost is left, if that is near enough to believe (FAR). Parts with fewer than three lengths are left out.
    """
    own = [line for line in lines if line["arm"] == arm]
    longest = max(line["tokens"] for line in own)
    (cost,) = gaps([line for line in own if not line["alpha"]]).values()
    rows = []
    for part in unique(line["trainable"] for line in own if line["alpha"]):
        trained = [line for line in own if line["trainable"] == part]
        lengths = sorted({line["tokens"] for line in trained})
        best = (gaps(at_best_setting([x for x in trained if x["tokens"] == n])) for n in lengths)
        points = [(n, statistics.mean(left.values())) for n, left in zip(lengths, best, strict=True)]
        if len(points) < 3:
            continue
        exponents = [math.log(y0 / y1) / math.log(n1 / n0) for (n0, y0), (n1, y1) in pairwise(points)]
        *_, (n1, y1), (n2, y2) = points
        ahead = (y2 / (0.1 * cost)) ** (1 / exponents[-1])
        reach = f"{ahead * n2 / 1e6:,.0f} M" if ahead < FAR else f"more than {FAR * n2 / 1e6:,.0f} M"
        rows.append([part, ", ".join(f"{exponent:.2f}" for exponent in exponents),
                     f"{y1 * (n1 / n2) ** exponents[-2]:.3f}", f"{y2:.3f}", reach])  # fmt: skip
    headings = ["exponents", f"predicted at {longest:,}", "measured", "tokens to a tenth of the cost"]
    return markdown(["trained", *headings], rows)


def tasks(lines: list[Result]) -> str:
    """Return the table of the measures of lm-evaluation-harness's tasks. Lines without them are left out."""
    rows = []
    for line in lines:
        if "tasks" in line:
            word, prose = line["tasks"]["last_word"], line["tasks"]["prose"]
            length = f"{line['tokens']:,} tokens, {line['trainable']}" if line["alpha"] else "–"
            accuracy = f"{word['acc']:.1%} ± {word['acc_stderr']:.1%}"
            rows.append([line["arm"], length, accuracy, f"{word['perplexity']:,.1f}", f"{prose['bits_per_byte']:.3f}"])
    return markdown(["", "distilled", "last word: accuracy", "its perplexity", "prose: bits per byte"], rows)


def recovered_by_text_kind(lines: list[Result]) -> str:
    """Return the table of losses above the parent's on each kind of text, right after conversion and uptrained.

    Beside a loss after uptraining is the share of the merge's cost that is recovered. Several seeds are averaged.
    """
    (parent,) = (line["text_kinds"] for line in lines if is_parent(line))
    merged = [line for line in lines if not is_parent(line)]
    lengths = sorted({line["tokens"] for line in merged})
    gaps_of = {
        tokens: {
            kind: statistics.mean(line["text_kinds"][kind] for line in merged if line["tokens"] == tokens) - loss
            for kind, loss in parent.items()
        }
        for tokens in lengths
    }
    rows = []
    for kind, loss in parent.items():
        start, *after = (gaps_of[tokens][kind] for tokens in lengths)
        rows.append([kind, f"{loss:.3f}", f"{start:+.3f}", *(f"{gap:+.3f} ({1 - gap / start:.0%})" for gap in after)])
    start, *after = (statistics.mean(gaps_of[tokens].values()) for tokens in lengths)
    average = statistics.mean(parent.values())
    rows.append(
        ["average", f"{average:.3f}", f"{start:+.3f}", *(f"{gap:+.3f} ({1 - gap / start:.0%})" for gap in after)]
    )
    return markdown(["", "parent", "after conversion", *(f"{tokens:,} tokens" for tokens in lengths[1:])], rows)


def by_cache(lines: list[Result], length: str) -> str:
    """Return the table of losses above the parent's by cached elements, of merged heads and of latent attention.

    Each uptraining is at its best rate, which the cell names. `length` names how long it was, from a line. A † marks
    cells without some of the parents; a line under the table says of how many they are.
    """
    cached = {line["groups"]: sum(line["latent"]) for line in lines if line["latent"]}
    n_parents = len(losses(lines))
    converted = [line for line in lines if not is_parent(line)]
    arms, rows = unique(line["arm"] for line in converted), []
    variants = unique((line["arm"], stage_of(line), line["trainable"]) for line in converted)
    fewer = set()
    for arm, stage, part in sorted(variants, key=lambda variant: (arms.index(variant[0]), *by_loss(variant[1]))):
        own = [x for x in converted if (x["arm"], stage_of(x), x["trainable"]) == (arm, stage, part)]
        cells = []
        for groups in sorted(cached):
            best = at(own, arm, stage, groups)
            mark = "†" if best and len(losses(best)) < n_parents else ""
            fewer |= {len(losses(best))} if mark else set()
            rate = f" (lr {best[0]['lr']:g})" if best and stage != START else ""
            cells.append(f"{show(gaps(best))}{mark}{rate}")
        rows.append([arm, "–" if stage == START else f"{length.format(**own[0])}, {part}", *cells])
    table = markdown(["", "distilled", *(f"{cached[groups]} elements" for groups in sorted(cached))], rows)
    note = f"\n\n† {' or '.join(map(str, sorted(fewer)))} of {n_parents} parents."
    return table + note if fewer else table


def by_parent(lines: list[Result]) -> str:
    """Return the table of the arms `mean` and `default` on each parent, right after conversion and uptrained.

    Shares are of mean's gap right after conversion.
    """
    (uptraining,) = {stage_of(line) for line in lines if line["alpha"]}
    headings = [f"{arm}{after}" for after in ("", f", α {uptraining[0]:g}") for arm in ("mean", "default")]
    rows, before = [], parents_heads(lines)
    for groups in merged_heads(lines):
        for parent in unique(line["parent"] for line in lines):
            own = [line for line in lines if line["parent"] == parent and line["groups"] == groups]
            if not own:
                continue
            cells = []
            for stage, arm in product((START, uptraining), ("mean", "default")):
                merged = at(own, arm, stage)
                if not merged:
                    cells.append("–")
                elif (arm, stage) == ("mean", START):
                    cells.append(show(losses(merged)))
                else:
                    cells.append(f"{show(losses(merged))} ({show(shares_of_mean_gap(merged, own), '{:.1%}')})")
            rows.append([parent, f"{before} → {groups}", show(of_seeds(own, "parent_loss")), *cells])
    return markdown(["family", "K/V heads", "parent", *headings], rows)


def text_kinds_by_parent(lines: list[Result]) -> str:
    """Return the shares of mean's gap that the arm `default` leaves on each kind of text, by parent.

    A cell has one share for each number of K/V heads, from many to few. Kinds of which a parent knows too little are
    left out (`KNOWN`): there the mean can be better than the parent, and a share of its gap says nothing.
    """
    heads = merged_heads(lines)
    shares_of = {}
    for parent in unique(line["parent"] for line in lines):
        own = [line for line in lines if line["parent"] == parent]
        by_groups = ([line for line in own if is_parent(line) or line["groups"] == groups] for groups in heads)
        shares_of[parent] = [arm_shares_by_text_kind("default", merged) for merged in by_groups]
    of_parents = [line["text_kinds"] for line in lines if is_parent(line)]
    kinds = [kind for kind in of_parents[0] if max(by_kind[kind] for by_kind in of_parents) < KNOWN]
    rows = [[kind, *(_shares(left[kind] for left in each) for each in shares_of.values())] for kind in kinds]
    for name, of_all in (("average", statistics.mean), ("worst", max)):
        summary = ([of_all(left[kind] for kind in kinds) for left in each] for each in shares_of.values())
        rows.append([name, *map(_shares, summary)])
    merges = f"{parents_heads(lines)} → {' / '.join(map(str, heads))} heads"
    return markdown([merges, *shares_of], rows)


def _shares(left: Iterable[float]) -> str:
    return " / ".join(f"{share:.1%}" for share in left)


def savings(lines: list[Result], best: str) -> str:
    """Return the table of tokens and compute that our best merge needs to match the paper's recipe.

    The recipe has one row per batch size, at the best learning rate for it. The distilled mean and the best merge
    follow.
    """
    arm, stage = PAPER_RECIPE
    recipe = [line for line in lines if (line["arm"], stage_of(line)) == PAPER_RECIPE]
    heads = sorted({line["groups"] for line in recipe}, reverse=True)
    # Other batch sizes give a few tokens more or less, because steps are whole.
    recipe_tokens = max(recipe, key=lambda line: int(line["global_batch_tokens"]))["tokens"]
    n_parents = len(losses(recipe))
    rows = []
    for batch in sorted({line["global_batch_tokens"] for line in recipe}, reverse=True):
        with_batch = [line for line in recipe if line["global_batch_tokens"] == batch]
        rows.append([f"{arm}, {name_of(stage)}, {batch:,} a step (the paper's)", "100%", "100%", "100%",
                     *(with_coverage(uptrained, [line for line in with_batch if line["groups"] == n], n_parents)
                       for n in heads)])  # fmt: skip
    distilled = [
        line for line in lines if (line["arm"], line["loss"]) in ((arm, "distill"), (best, "distill"), (best, None))
    ]
    for name, own_stage in sorted(models(distilled), key=lambda model: model[0] == best):
        own_by_heads = [at(lines, name, own_stage, n) for n in heads]
        (tokens,) = {line["tokens"] for own in own_by_heads for line in own}
        first = next(line for own in own_by_heads for line in own)
        calibration = calibration_tokens(first)
        compute = forward_passes(first)
        shares_of_recipe = [tokens / recipe_tokens, (tokens + calibration) / recipe_tokens]
        shares_of_recipe += [compute / (recipe_tokens * FORWARDS["next-token"])]
        batch = first["global_batch_tokens"]
        part = "" if first["trainable"] in (None, "all") else f"{first['trainable']}, "
        label = f"{name}, {f'{name_of(own_stage)}, {part}{batch:,} a step' if batch else 'no training'}"
        shown = [with_coverage(lambda own: show(losses(own)), own, n_parents) for own in own_by_heads]
        rows.append([label, *(f"{share:.1%}" for share in shares_of_recipe), *shown])
    columns = [counted(groups, "K/V head") for groups in heads]
    headings = ["", "tokens trained on", "with calibration", "compute", *columns]
    return markdown(headings, rows)


def with_coverage(cell: Callable[[list[Result]], str], lines: list[Result], n_parents: int) -> str:
    """Return a cell of the table, with a remark if it does not cover all parents."""
    n = len(losses(at_best_setting(lines))) if lines else n_parents
    return cell(lines) + (f" ({n} of {n_parents} parents)" if n < n_parents else "")
