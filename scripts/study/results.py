"""Read and select results of a study. A line is a figure of one model, with everything it depends on."""

import json
import statistics
from pathlib import Path
from typing import Any

from convert.calibration_text.choices import DEFAULT_TOKENS

Result = dict[str, Any]
Seeds = dict[int, float]
"""Seed → figure."""
StageKey = tuple[float, str | None]
"""An uptraining as its α and loss; (0, None) is right after conversion."""
Setting = tuple[float | None, str | None, int | None, str | None]
"""The settings of an uptraining: peak learning rate, schedule, tokens per step, and the trained part."""


def read_lines(path: Path) -> list[Result]:
    with path.open() as file:
        return [json.loads(line) for line in file]


def read_results(path: Path) -> list[Result]:
    """Return the results of a file, in order; none if it does not exist yet."""
    lines = read_lines(path) if path.exists() else []
    # Early lines lack these keys.
    return [
        {"schedule": "wsd" if line["loss"] else None, "trainable": "all" if line["loss"] else None,
         "from_scratch": False, "latent": None} | line
        for line in lines
    ]  # fmt: skip


WEAK = ("paper", "recipe", "short")
"""The plans that uptrain the three weak parents. The first has the arms that are uptrained at every length."""
DEFAULT_ARM = {
    "refine": "refined 65536", "refine_longer": "refined 65536", "text_kinds": "default", "qwen2": "default",
    "twenty": "default", "larger": "default",
}  # fmt: skip
"""Plan → the arm with the default merge. In the first two, its output projection was refitted only once."""
ARM_REFITTED_ONCE = DEFAULT_ARM | {"twenty": "refined 65536", "text_kinds": "shipped 65536, refined 65536"}
"""Plan → the arm with the default merge as most plans have it, for comparisons between plans."""
BETTER = ("longer", "recipe_longer", "from_scratch")
"""The plans that uptrain the better-trained parents."""


def united(results: Path, plans: tuple[str, ...]) -> list[Result]:
    """Return the lines of several plans for the arms of the first plan, with all settings of uptraining."""
    arms = {line["arm"] for line in read_results(results / f"{plans[0]}.jsonl")}
    lines = [line for plan in plans for line in read_results(results / f"{plan}.jsonl")]
    return [line for line in lines if line["arm"] in arms or line["from_scratch"]]


def distilled_mean(results: Path) -> list[Result]:
    """Return the lines of the mean distilled from the better-trained parents, attention alone."""
    lines = [line for line in read_results(results / "behaviour.jsonl") if line["parent"] == "parent"]
    return [line for line in lines if line["arm"] == "mean" and line["alpha"]]


FORWARDS = {None: 0, "next-token": 3, "distill": 4, "calibration": 2, "refining": 3}
"""Cost of a token in forward passes: 1 for the student, 2 for its gradients, 1 for the teacher; in calibration 1 for
the parent and 1 for the merged model; in refining those of training, though only attention is trained. (Solving is not
counted.)"""


def calibration_tokens(line: Result) -> int:
    """Return the number of tokens that a merge was calibrated on."""
    words = line["convert"]
    text = words[words.index("--calibration") + 1] if "--calibration" in words else "none"
    by_weights = "--method" in words and text == "none"
    return _option(line, "--calibration-tokens", 0 if by_weights else DEFAULT_TOKENS)


def forward_passes(line: Result) -> int:
    """Return the compute of a merge and its uptraining, in forward passes of a token."""
    calibration = calibration_tokens(line)
    refining = _option(line, "--refine", 0 if "--method" in line["convert"] else calibration)
    tokens = {line["loss"]: line["tokens"], "calibration": calibration, "refining": refining}
    return sum(FORWARDS[use] * n for use, n in tokens.items())


def _option(line: Result, name: str, default: int) -> int:
    words = line["convert"]
    return int(words[words.index(name) + 1]) if name in words else default


def unique(values: Any) -> list[Any]:
    return list(dict.fromkeys(values))


def is_parent(line: Result) -> bool:
    return line["convert"] is None and not line["from_scratch"]


def stage_of(line: Result) -> StageKey:
    return line["alpha"], line["loss"]


def at(lines: list[Result], arm: str, stage: StageKey, groups: int | None = None) -> list[Result]:
    """Return the lines of an arm after an uptraining, with its best setting."""
    own = [line for line in lines if (line["arm"], stage_of(line)) == (arm, stage) and groups in (None, line["groups"])]
    return at_best_setting(own) if own else []


def setting_of(line: Result) -> Setting:
    return line["lr"], line["schedule"], line["global_batch_tokens"], line["trainable"]


def by_setting(lines: list[Result]) -> dict[Setting, list[Result]]:
    keys = unique(map(setting_of, lines))
    return {key: [line for line in lines if setting_of(line) == key] for key in keys}


def at_best_setting(lines: list[Result]) -> list[Result]:
    """Return the lines of the learning rate, schedule, batch and trained part that did best for an arm."""

    def rank(own: list[Result]) -> tuple[int, float]:
        # A setting that some seeds have not tried yet must not win by chance.
        return -len(losses(own)), statistics.mean(losses(own).values())

    return min(by_setting(lines).values(), key=rank)


def of_seeds(lines: list[Result], what: str) -> Seeds:
    """Return a figure for each seed. If a seed has several lines, the last is used: it was measured again."""
    return {line["seed"]: line[what] for line in lines}


def losses(lines: list[Result]) -> Seeds:
    return of_seeds(lines, "held_out_loss")


def shares_of_mean_gap(start: list[Result], lines: list[Result]) -> Seeds:
    """Return the gap to the parent as a share of the gap that merging by the mean leaves."""
    return shares_of_gap(start, losses([line for line in lines if line["arm"] == "mean" and not line["alpha"]]))


def arm_shares_by_text_kind(arm: str, lines: list[Result]) -> dict[str, float]:
    """Return an arm's share of mean's gap on each kind of text, right after conversion."""
    own = next(line["text_kinds"] for line in reversed(lines) if line["arm"] == arm and not line["alpha"])
    return shares_by_text_kind(own, lines)


def shares_by_text_kind(own: dict[str, float], lines: list[Result]) -> dict[str, float]:
    """Return losses by kind of text as shares of mean's gap."""
    losses_of = {line["arm"]: line["text_kinds"] for line in lines if not line["alpha"]}
    parent, mean = losses_of["parent"], losses_of["mean"]
    return {kind: (own[kind] - parent[kind]) / (mean[kind] - parent[kind]) for kind in own}


def shares_of_gap(own: list[Result], reference_losses: Seeds) -> Seeds:
    """Return the gap to the parent as a share of the gap of other losses.

    It is computed for each parent separately, so that differences between parents do not count.
    """
    parent = of_seeds(own, "parent_loss")
    return {
        seed: (loss - parent[seed]) / (reference_losses[seed] - parent[seed])
        for seed, loss in losses(own).items()
        if seed in reference_losses
    }


def gaps(lines: list[Result]) -> Seeds:
    """Return for each seed the loss minus the parent's loss."""
    return subtract(losses(lines), of_seeds(lines, "parent_loss"))


def subtract(own: Seeds, others: Seeds) -> Seeds:
    """Return a figure minus another one, for each seed that has both."""
    return {seed: figure - others[seed] for seed, figure in own.items() if seed in others}
