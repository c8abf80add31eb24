"""Make the generated tables of the pages from the recorded results. `PLACEHOLDERS` names them."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from model.common.counts import counted
from scripts.study import plans_and_records
from scripts.study.cells import PAPER_RECIPE, START, markdown, show
from scripts.study.page_tables import (
    along_training,
    by_cache,
    by_heads,
    by_parent,
    by_part,
    by_position,
    by_tokens,
    distances,
    extrapolated,
    kinds_by_part,
    one_merge_by_rate,
    rates_table,
    recovered_by_text_kind,
    savings,
    tasks,
    text_kinds_by_parent,
    with_coverage,
)
from scripts.study.results import (
    ARM_REFITTED_ONCE,
    BETTER,
    DEFAULT_ARM,
    WEAK,
    Result,
    StageKey,
    arm_shares_by_text_kind,
    at,
    distilled_mean,
    gaps,
    is_parent,
    losses,
    of_seeds,
    read_lines,
    read_results,
    shares_by_text_kind,
    shares_of_mean_gap,
    stage_of,
    unique,
    united,
)
from scripts.study.table import tables

PARENTS, DISTILLED = "parents.jsonl", "text_kinds_distilled.jsonl"
PARENTS_OF = {
    "merges": "weak parents", "longer": "better-trained parents", "twenty": "longest-trained parents",
    "larger": "larger parents",
}  # fmt: skip
"""Plan → how the page calls the parents that it trains."""
FORMER_DEFAULT = "fit-refit"


def training_of_parents(results: Path) -> str:
    """Return the table of the parents' losses after each tenth of their training."""
    lines: list[Result] = [{"groups": None} | line for line in read_lines(results / PARENTS)]
    models = unique((line["plan"], line["groups"]) for line in lines)
    rows = []
    for share in sorted({line["share"] for line in lines if line["share"] > 0}):
        at_share = [line for line in lines if line["share"] == share]
        own = [[line for line in at_share if (line["plan"], line["groups"]) == model] for model in models]
        rows.append([f"{share:.0%}", *(show(losses(of_model), "{:.3f}") for of_model in own)])
    names = [
        PARENTS_OF.get(plan, plan) + (f", {counted(groups, 'K/V head')}" if groups else "") for plan, groups in models
    ]
    return markdown(["of its training", *names], rows)


LONGEST_TRAINED: tuple[tuple[str, StageKey], ...] = (
    PAPER_RECIPE,
    ("mean", (0.01, "distill")),
    *((DEFAULT_ARM["twenty"], stage) for stage in (START, (0.0025, "distill"), (0.01, "distill"))),
)
"""Arms and stages whose distance from the longest-trained parents the page tells: the recipe, the mean distilled, and
the default."""
LARGER = tuple(model for model in LONGEST_TRAINED if model[1] != (0.0025, "distill"))
"""The same of the larger parents, which were not distilled for α = 0.0025."""
BY_TOKENS_PER_PARAMETER = (("1", "refine"), ("7", "refine_longer"), ("20", "twenty"))
"""Tokens per parameter that parents of one shape are trained on, and the plan that merges them."""


def tokens_per_parameter(results: Path) -> str:
    """Return the table of the default merge right after conversion, by the length of the parents' training."""
    rows = []
    for tokens, plan in BY_TOKENS_PER_PARAMETER:
        lines = [line for line in read_results(results / f"{plan}.jsonl") if not line["alpha"]]
        cells = []
        for groups in (4, 2, 1):
            heads = [line for line in lines if line["groups"] == groups]
            own = [line for line in heads if line["arm"] == ARM_REFITTED_ONCE[plan]]
            cells.append(f"{show(gaps(own), '{:.3f}')}, {show(shares_of_mean_gap(own, heads), '{:.1%}')}")
        loss = of_seeds(lines, "parent_loss")
        rows.append([tokens, str(len(loss)), show(loss, "{:.3f}"), *cells])
    return markdown(["tokens per parameter", "parents", "their loss", *(f"8 → {n} heads" for n in (4, 2, 1))], rows)


RATES = "twenty_rates.jsonl"


def twenty(results: Path) -> list[Result]:
    """Return the lines of the longest-trained parents: of the main settings, and of more rates."""
    # There, the recipe is an arm of its own, since it was tried with fewer numbers of heads than the distilled mean.
    rates = [
        line | {"arm": "mean" if line["arm"] == "recipe" else line["arm"]} for line in read_results(results / RATES)
    ]
    return [*read_results(results / "twenty.jsonl"), *rates]


def tried_rates(results: Path) -> str:
    """Return the table of the uptrainings of the longest-trained parents that were tried at several rates."""
    lines = [line for line in twenty(results) if line["alpha"]]
    several = {(line["arm"], stage_of(line)) for line in lines if line["plan"] == "twenty_rates"}
    return rates_table([line for line in lines if (line["arm"], stage_of(line)) in several])


SAME_TRAINING = (
    ("1", "4.2 M", ("parts", "mean"), ("parts", "default")),
    ("1", "15 M", ("larger", "mean"), ("larger", "default")),
    ("7", "4.2 M", ("behaviour", "mean"), ("refine_longer", "refined 65536")),
    ("20", "4.2 M", ("twenty", "mean"), ("twenty", "default")),
)
"""Tokens per parameter and size of parents, and the plan and arm of the mean and of the default, distilled alike."""


def same_training(results: Path) -> str:
    """Return the table of the mean and the default after the same distillation of attention, by the parents."""
    rows = []
    for tokens, size, *ways in SAME_TRAINING:
        found = []
        for plan, arm in ways:
            lines = twenty(results) if plan == "twenty" else read_results(results / f"{plan}.jsonl")
            found.append(
                [x for x in lines if x["arm"] == arm and x["parent"] == "parent" and x["trainable"] == "attention"]
            )
        columns = []
        for groups in (4, 2, 1):
            mean, own = (gaps(at(lines, lines[0]["arm"], (0.01, "distill"), groups)) for lines in found)
            less = {seed: 1 - own[seed] / mean[seed] for seed in mean.keys() & own.keys()}
            columns.append([show(mean, "{:.3f}"), show(own, "{:.3f}"), show(less, "{:.0%}")])
        for what, *cells in zip(("mean, distilled", "default, distilled", "smaller by"), *columns, strict=True):
            rows.append([tokens, size, what, *cells])
    return markdown(["tokens per parameter", "parameters", "", *(f"8 → {n} heads" for n in (4, 2, 1))], rows)


WEAK_PARENTS = "4.2 M parameters, 4 M tokens, 3 parents"
BETTER_PARENTS = "4.2 M parameters, 30 M tokens, 3 parents"
SMOLLM2 = "SmolLM2-135M-Instruct, 4 bit"
HEADLINE = tuple(("2 Llamas of 4.2 M", "twenty", DEFAULT_ARM["twenty"], 8, groups) for groups in (4, 2, 1))
"""Rows of the README's table: parent, plan, arm, K/V heads before and after. Rows over all kinds of text follow."""
KNOWN_MODELS = (("SmolLM2-135M", "text_kinds", "3 → 1"), ("Qwen2.5-Coder-0.5B", "qwen2", "2 → 1"))
"""Rows over all kinds of text: parent, plan, K/V heads."""
FORMER = (
    *((WEAK_PARENTS, "merges", FORMER_DEFAULT, 8, groups) for groups in (4, 2, 1)),
    *((BETTER_PARENTS, "longer", FORMER_DEFAULT, 8, groups) for groups in (4, 2, 1)),
    (SMOLLM2, "smollm2", FORMER_DEFAULT, 3, 1),
)


def headline(results: Path) -> str:
    """Return the table of the default merge right after conversion: loss, and share of mean's gap."""
    rows = [after_conversion(results, HEADLINE)]
    for name, plan, heads in KNOWN_MODELS:
        lines = read_results(results / f"{plan}.jsonl")
        if not lines:  # not run yet
            continue
        by_arm = {line["arm"]: statistics.mean(line["text_kinds"].values()) for line in lines}
        left = arm_shares_by_text_kind(DEFAULT_ARM[plan], lines)
        cells = " | ".join(f"{by_arm[arm]:.4f}" for arm in ("parent", "mean", DEFAULT_ARM[plan]))
        span = f"{statistics.mean(left.values()):.1%} ({min(left.values()):.1%} to {max(left.values()):.1%})"
        rows.append(f"| {name}, {len(left)} kinds of text | {heads} | {cells} | {span} |")
    return "\n".join(rows)


def smollm2_lines(results: Path) -> list[Result]:
    """Return the lines of SmolLM2 right after conversion, distilled on novels, and on mixed text."""
    converted = [line for line in read_results(results / "behaviour.jsonl") if line["parent"] == "smollm2"]
    novels = [line for line in read_results(results / "smollm2_tokens.jsonl") if line["alpha"]]
    plans = ("smollm2_mixed_attention", "smollm2_mixed")
    mixed = [line for plan in plans for line in read_results(results / f"{plan}.jsonl") if line["alpha"]]
    return [*converted, *novels, *(line | {"arm": f"{line['arm']}, mixed text"} for line in mixed)]


def on_mixed_text(results: Path) -> list[Result]:
    """Return the lines of SmolLM2 distilled on mixed text: a long distillation, and its beginning in several orders."""
    return [line for plan in ("smollm2_mixed", "smollm2_orders") for line in read_results(results / f"{plan}.jsonl")]


def rates_of(results: Path, plan: str, plan_of_parent: str) -> str:
    """Return the table of a plan's peak rates, against the parent that another plan measured."""
    return one_merge_by_rate(read_results(results / f"{plan}.jsonl"), read_results(results / f"{plan_of_parent}.jsonl"))


def latent_smollm2(results: Path) -> str:
    """Return the table of latent attention on SmolLM2, beside the default merge distilled as long."""
    own = read_results(results / "latent_smollm2.jsonl")
    starts = {line["arm"]: line["held_out_loss"] for line in own if not line["alpha"]}
    own.sort(key=lambda line: starts[line["arm"]])
    stages = {(line["alpha"], line["trainable"]) for line in own}
    heads = [
        line | {"arm": "merged"} if line["arm"] == "default" else line
        for line in read_results(results / "smollm2_tokens.jsonl")
        if is_parent(line) or (line["alpha"], line["trainable"]) in stages
    ]
    return by_cache([*heads, *own], "{tokens:,} tokens")


FIELD = (
    ("short", "random", "a random head of each group"),
    ("short", "first", "the first head of each group"),
    ("short", "mean", "mean (Ainslie et al.; AverageKV)"),
    ("parts", "mean", "mean, attention distilled at 2e-3"),
    ("merges", "pca-weights", "truncated SVD of the weights"),
    ("short", "mean-norm", "mean, norms of the heads restored"),
    ("short", "pca-spread", "PCA of what the heads compute, calibrated"),
    ("short", "aligned-spread", "heads aligned, then their mean (Jin et al.)"),
    ("merges", "aligned-weights", "heads aligned by the weights, then their mean"),
    ("latent", "svd", "latent attention, SVD of the weights"),
    ("latent", "transmla", "latent attention, TransMLA"),
    ("latent", "care", "latent attention, CARE"),
    ("latent", "merged", "**default merge**"),
    ("latent", "latent", "**`mha-to-mla`**"),
)
"""Plan, arm and name of each way that the page compares, from the weak parents."""
FIELD_PLANS = {"short": ("A", "all"), "merges": ("A", "all"), "parts": ("B", "attention"), "latent": ("C", "attention")}
"""Plan → its set of texts, and the trained part: all parameters at one rate, attention at the best of some."""


def field(results: Path) -> str:
    """Return the table of other ways and ours: loss above the parent's right after conversion, and after distilling."""
    stages: tuple[StageKey, StageKey] = (0, None), (0.01, "distill")
    columns = [(groups, stage) for groups in (2, 1) for stage in stages]
    rows = []
    for plan, arm, name in FIELD:
        texts, part = FIELD_PLANS[plan]
        lines = [line for line in read_results(results / f"{plan}.jsonl") if line["trainable"] in (None, part)]
        if arm not in {line["arm"] for line in lines}:  # not run yet
            continue
        n = len({line["seed"] for line in lines if line["arm"] == arm})
        merged = [at(lines, arm, stage, groups) for groups, stage in columns]
        cells = [with_coverage(lambda own: show(gaps(own)), own, n) if own else "–" for own in merged]
        is_distilled = any(own for own, (_, stage) in zip(merged, columns, strict=True) if stage[0])
        rows.append([name, str(n), texts, part if is_distilled else "–", *cells])
    headings = [f"{64 * groups} elements{', distilled' if stage[0] else ''}" for groups, stage in columns]
    return markdown(["", "parents", "set", "distilled part", *headings], rows)


def refined_text_kinds(results: Path) -> str:
    """Return the shares of mean's gap by kind of text, of the default merge with and without refining."""
    lines = read_results(results / "text_kinds.jsonl")
    arms = (
        "shipped 65536",
        ARM_REFITTED_ONCE["text_kinds"],
        DEFAULT_ARM["text_kinds"],
        "shipped 262144, refined 262144",
    )
    left = [arm_shares_by_text_kind(arm, lines) for arm in arms]
    names = ["unrefined", "refined on 65,536 tokens", "refitted again (default)", "refined on 262,144 tokens"]
    return by_text_kind(names, left)


def distilled_text_kinds(results: Path) -> str:
    """Return the shares of mean's gap by kind of text, of the default merge and after distilling it on some kinds."""
    lines = read_results(results / "text_kinds.jsonl")
    own = [line for line in read_lines(results / DISTILLED) if line["start"] == "default"]
    names = [
        "right after conversion" if line["tokens"] == 0 else f"distilled on {line['distilled_on']}" for line in own
    ]
    return by_text_kind(names, [shares_by_text_kind(line["text_kinds"], lines) for line in own])


def losses_by_text_kind(lines: list[Result], arm: str) -> str:
    """Return losses by kind of text right after conversion: the parent's, the mean's and an arm's, with its share."""
    by_arm = {line["arm"]: line["text_kinds"] for line in lines if not line["alpha"]}
    left = arm_shares_by_text_kind(arm, lines)
    rows = [
        [kind, *(f"{by_arm[each][kind]:.3f}" for each in ("parent", "mean", arm)), f"{share:.1%}"]
        for kind, share in left.items()
    ]
    averages = (statistics.mean(by_arm[each].values()) for each in ("parent", "mean", arm))
    rows.append(["average", *(f"{loss:.3f}" for loss in averages), f"{statistics.mean(left.values()):.1%}"])
    return markdown(["held-out texts", "parent", "mean", arm, "share of mean's gap"], rows)


def by_text_kind(names: list[str], left: list[dict[str, float]]) -> str:
    """Return a table of shares of mean's gap by kind of text, with their average and the worst."""
    rows = [[kind, *(f"{each[kind]:.1%}" for each in left)] for kind in left[0]]
    rows.append(["average", *(f"{statistics.mean(each.values()):.1%}" for each in left)])
    rows.append(["worst", *(f"{max(each.values()):.1%}" for each in left)])
    return markdown(["held-out texts", *names], rows)


def after_conversion(results: Path, cases: Sequence[tuple[str, str, str, int, int]], merge: str = "default") -> str:
    """Return a table of a merge and the mean right after conversion: loss, and share of mean's gap."""
    rows = [f"| | K/V heads | parent | mean | {merge} | added loss ÷ mean's |", "|---|---|---|---|---|---|"]
    for name, plan, arm, before, after in cases:
        lines = [
            line for line in read_results(results / f"{plan}.jsonl") if line["groups"] == after and not line["alpha"]
        ]
        mean, own = ([line for line in lines if line["arm"] == each] for each in ("mean", arm))
        figures = (
            show(of_seeds(own, "parent_loss")),
            show(losses(mean)),
            show(losses(own)),
            show(shares_of_mean_gap(own, lines), "{:.1%}"),
        )
        rows.append(f"| {name} | {before} → {after} | {' | '.join(figures)} |")
    return "\n".join(rows)


PLACEHOLDERS: dict[str, Callable[[Path], str]] = {
    "results": headline,
    "results_former": lambda folder: after_conversion(folder, FORMER, "former default"),
    "parents": training_of_parents,
    "weak": lambda folder: "\n\n".join(tables(united(folder, WEAK))),
    "better": lambda folder: "\n\n".join(tables(united(folder, BETTER))),
    "savings_weak": lambda folder: savings(united(folder, WEAK), FORMER_DEFAULT),
    "calibration": lambda folder: by_heads(read_results(folder / "calibration.jsonl")),
    "refine": lambda folder: by_heads(read_results(folder / "refine.jsonl")),
    "refine_longer": lambda folder: by_heads(read_results(folder / "refine_longer.jsonl")),
    "refine_orders": lambda folder: by_heads(read_results(folder / "refine_orders.jsonl")),
    "twenty": lambda folder: by_heads(twenty(folder)),
    "twenty_rates": tried_rates,
    "twenty_distance": lambda folder: distances(twenty(folder), LONGEST_TRAINED),
    "twenty_positions": lambda folder: by_position(twenty(folder), LONGEST_TRAINED, 256),
    "larger_positions": lambda folder: by_position(read_results(folder / "larger.jsonl"), LARGER, 256),
    "same_training": same_training,
    "tokens_per_parameter": tokens_per_parameter,
    "larger": lambda folder: by_heads(read_results(folder / "larger.jsonl")),
    "smollm2_repeated": lambda folder: by_heads(read_results(folder / "smollm2_repeated.jsonl")),
    "families": lambda folder: by_parent(read_results(folder / "families.jsonl")),
    "families_text_kinds": lambda folder: text_kinds_by_parent(read_results(folder / "families_text_kinds.jsonl")),
    "demo_model": lambda folder: by_heads(read_results(folder / "demo_model.jsonl")),
    "refined_text_kinds": refined_text_kinds,
    "distilled_text_kinds": distilled_text_kinds,
    "parts": lambda folder: by_part(read_results(folder / "parts.jsonl")),
    "smollm2_tokens": lambda folder: by_part(read_results(folder / "smollm2_tokens.jsonl"), "{tokens:,} tokens"),
    "smollm2_kinds": lambda folder: kinds_by_part(smollm2_lines(folder)),
    "smollm2_extrapolated": lambda folder: extrapolated(read_results(folder / "smollm2_tokens.jsonl"), "default"),
    "smollm2_tasks": lambda folder: tasks(smollm2_lines(folder)),
    "smollm2_mixed": lambda folder: by_tokens(on_mixed_text(folder)),
    "smollm2_mixed_curve": lambda folder: along_training(read_results(folder / "smollm2_mixed.jsonl")),
    "smollm2_mixed_kinds": lambda folder: recovered_by_text_kind(on_mixed_text(folder)),
    "smollm2_mixed_rates": lambda folder: rates_of(folder, "smollm2_mixed_mean", "smollm2_mixed"),
    "qwen2_rates": lambda folder: rates_of(folder, "qwen2_mixed", "qwen2"),
    "qwen2_text_kinds": lambda folder: losses_by_text_kind(read_results(folder / "qwen2.jsonl"), DEFAULT_ARM["qwen2"]),
    "latent": lambda folder: by_cache(read_results(folder / "latent.jsonl"), "{tokens:,} tokens"),
    "latent_smollm2": latent_smollm2,
    "field": field,
    "plans_and_records": plans_and_records.table,
    "savings_better": lambda folder: savings([*united(folder, BETTER), *distilled_mean(folder)], FORMER_DEFAULT),
}  # fmt: skip
"""Name of a placeholder in a page → what makes its table from the folder of the recorded results."""
