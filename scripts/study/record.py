"""Add results of the study's plans to its record, the files of docs/study."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from scripts.study.arms import key_of_line
from scripts.study.plan import PlanError
from scripts.study.results import Result, read_lines, read_results

MEASURES = {"behaviour", "text_kinds", "tasks", "curve"}
"""Keys of measures that not all lines have."""
SAME_PARENT = 1e-3
"""Tolerance for the loss of one model on different machines, in nats."""


def add_lines(results: Path, record: Path) -> None:
    """Add results to the record. A figure that was measured again replaces the earlier one.

    Raises PlanError if they are from other parents than those in the record, or a measure would be lost.
    """
    new, old = read_results(results), read_results(record)
    reference_losses = {(line["parent"], line["seed"]): line["parent_loss"] for line in old}
    for line in new:
        loss = reference_losses.get((line["parent"], line["seed"]), line["parent_loss"])
        if abs(loss - line["parent_loss"]) > SAME_PARENT:
            raise PlanError(
                f"{results} is of another {line['parent']} {line['seed']} than {record}: its loss is "
                f"{line['parent_loss']:.4f}, not {loss:.4f}. Move one of the two away."
            )
    newest = {key_of_line(line): line for line in new}
    for line in old:
        lost = MEASURES & line.keys() - newest.get(key_of_line(line), line).keys()
        if lost:
            raise PlanError(f"{results} has no {min(lost)} of {line['arm']}, but {record} has; measure it too.")
    kept = [line for line in old if key_of_line(line) not in newest]
    record.write_text("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in [*kept, *newest.values()]))


def add_distilled(results: Path, record: Path) -> None:
    """Add results of `distil_on_text_kinds` to the record."""
    if results.exists():
        new = {(line["start"], line["distilled_on"], line["lr"]): line for line in read_lines(results)}
        kept = [line for line in read_lines(record) if (line["start"], line["distilled_on"], line.get("lr")) not in new]
        record.write_text("".join(f"{json.dumps(line)}\n" for line in [*kept, *new.values()]))


def record_parents(work: Path, record: Path) -> None:
    """Replace the lines of the parents that are in the work folder; keep the lines of others.

    Raises PlanError if a parent's loss is not the recorded one.
    """
    new, old = list(parents(work)), read_lines(record) if record.exists() else []

    def at_share(line: Result) -> tuple[object, ...]:
        return line["plan"], line.get("groups"), line["seed"], line["share"]

    losses_now = {at_share(line): line["held_out_loss"] for line in new}
    for line in old:
        loss = losses_now.get(at_share(line), line["held_out_loss"])
        if line["share"] == 1 and abs(loss - line["held_out_loss"]) > SAME_PARENT:
            raise PlanError(
                f"{work}/{line['plan']} has another parent {line['seed']} than {record}: its loss is {loss:.4f}, not "
                f"{line['held_out_loss']:.4f}. Move one of the two away."
            )
    kept = [line for line in old if at_share(line) not in losses_now]
    record.write_text("".join(f"{json.dumps(line)}\n" for line in [*kept, *new]))


def parents(work: Path) -> Iterator[Result]:
    """Yield the held-out losses of parents and of models with fewer K/V heads, from finished trainings."""
    for metrics in sorted(work.glob("*/parent-*/metrics.jsonl")):
        trained = re.fullmatch(r"parent-\d+(?:-g(\d+))?", metrics.parent.name)
        if trained is None:  # of a family, whose loss is in the plan's own record
            continue
        run = json.loads((metrics.parent / "run.json").read_text())
        settings = run["settings"]
        losses_by_step = {
            line["step"]: line["evaluation"]["loss"] for line in read_lines(metrics) if "evaluation" in line
        }
        if settings["steps"] in losses_by_step:
            tenths = {round(step / settings["steps"], 1): loss for step, loss in losses_by_step.items()}
            for share, loss in tenths.items():
                yield {
                    "plan": metrics.parts[-3], "groups": int(trained[1]) if trained[1] else None,
                    "seed": settings["seed"], "steps": settings["steps"], "share": share, "held_out_loss": loss,
                    "cache": run["cache_sha256"],
                }  # fmt: skip
