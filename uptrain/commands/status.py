"""Run `uptrain status`: show the status of a run."""

import math
import shlex
from pathlib import Path
from typing import Any

import click

from model.common import console
from model.common.command_options import PathType, json_option
from model.common.errors import RunError
from uptrain.report.history import format_recovered
from uptrain.training.loss_values import format_above_teacher, format_loss

_RESUMABLE = ("not started", "died", "preempted", "finished")
_UNIT = " nats per token"


@click.command("status")
@click.argument("run", type=PathType())
@click.option("--verify", is_flag=True, help="Also check every file of every checkpoint against its checksum.")
@json_option("Print the status as JSON.")
def command(run: Path, verify: bool, as_json: bool) -> None:
    """Show the status of RUN.

    Show steps, losses, speed, time left and checkpoints. This also works while the run trains.

    The exit code is 1 if --verify finds a damaged checkpoint.
    """
    from uptrain.report.status import read_status

    status = read_status(run, verify)
    if as_json:
        console.print_json(status)
    else:
        console.print_key_values(str(run), _rows(status))
    damaged = [entry["damage"] for entry in status["checkpoints"] if entry.get("damage")]
    if damaged:
        raise RunError(f"damaged: {'; '.join(damaged)}.")


def _rows(status: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("status", _status(status)),
        ("step", f"{status['step']:,} of {status['total_steps']:,} ({status['share']:.1%})"),
        ("tokens", _tokens(status)),
    ]
    if status["alpha"]:
        rows.append(("α", f"{status['alpha'] * status['share']:.4g} of {status['alpha']:.4g}"))
    rows += [*_last_step(status), *_evaluation(status["evaluation"], status["first_evaluation"])]
    if status["warning"]:
        rows.append(("warning", status["warning"]))
    for title, name in (("updates skipped", "skipped_steps"), ("not saved", "not_saved_steps")):
        if steps := status[name]:
            last = ", ".join(f"{step:,}" for step in steps[-8:])
            rows.append((title, f"{len(steps):,}: step {'… ' if len(steps) > 8 else ''}{last}"))
    rows.append(("checkpoints", "\n".join(map(_checkpoint, status["checkpoints"])) or "none"))
    if status["parent"]:
        rows.append(("extends", f"{status['parent']['run']} from step {status['parent']['step']:,}"))
    return rows + _next(status)


def _tokens(status: dict[str, Any]) -> str:
    tokens, planned = status["tokens"], status["total_tokens"]
    if status["step"] == status["total_steps"] and tokens < planned:
        return f"{tokens:,}; {planned - tokens:,} fewer than planned, because the last window of the data is short"
    return f"{tokens:,} of {planned:,}"


def _next(status: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what to do with a run that does not train. The reason of one that failed or halted gives advice itself.

    Resuming a finished run whose newest checkpoint is damaged or missing makes it again.
    """
    run = shlex.quote(status["run"])
    newest = status["checkpoints"][-1] if status["checkpoints"] else None
    if status["status"] == "finished" and newest and newest["kept_for_extend"] is not None and not newest.get("damage"):
        return [("next", f"uptrain export {run} FOLDER")]
    return [("next", f"uptrain resume {run}")] if status["status"] in _RESUMABLE else []


def _status(status: dict[str, Any]) -> str:
    age = status["seconds_since_last_line"]
    last_line = "not yet" if age is None else f"{console.format_duration(age)} ago"
    place = f" of {status['host']}, whose processes cannot be seen from here" if status["elsewhere"] else ""
    return {
        "not started": "not started",
        "running": f"running as process {status['pid']}{place}, last line written {last_line}",
        "died": f"died: no process {status['pid']} on this machine, last line written {last_line}",
        "preempted": f"stopped ({status['reason']}), and saved",
        "finished": "finished",
    }.get(status["status"], f"{status['status']}: {status['reason']}")


def _last_step(status: dict[str, Any]) -> list[tuple[str, str]]:
    if status["tokens_per_s"] is None:
        return []
    rows = [
        ("training loss", f"{format_loss(status['loss'], _UNIT)}, {status['objective']}"),
        ("learning rate", f"{status['learning_rate']:.3e}"),
        ("gradient norm", "not finite" if status["grad_norm"] is None else f"{status['grad_norm']:.4g}"),
        ("speed", f"{status['tokens_per_s']:,.0f} tokens/s"),
    ]
    if status["step"] < status["total_steps"] and math.isfinite(status["seconds_left"]):
        rows.append(
            ("time left", f"{console.format_duration(status['seconds_left'])}, evaluations and saving not counted")
        )
    return rows


def _evaluation(evaluation: dict[str, Any] | None, first: dict[str, Any] | None) -> list[tuple[str, str]]:
    if evaluation is None or first is None:
        return []
    loss = f"{format_loss(evaluation['loss'], _UNIT)} at step {evaluation['step']:,}"
    if evaluation["step"] > first["step"]:
        loss += f" ({format_loss(first['loss'])} at step {first['step']:,})"
    rows = [("held-out loss", loss)]
    if "kl" in evaluation:
        rows.append(("teacher's loss", format_loss(evaluation["teacher_loss"], _UNIT)))
        # Runs of earlier versions have no errors.
        error = evaluation.get("above_teacher_error")
        above = format_above_teacher(evaluation["loss"], evaluation["teacher_loss"], error)
        rows.append(("above the teacher's", above))
        rows.append(("KL from the teacher", format_loss(evaluation["kl"], _UNIT, evaluation.get("kl_error"))))
        rows.append(("agreement", f"{evaluation['agreement']:.1%}"))
    if recovered := format_recovered(evaluation):
        rows.append(("recovered fraction", recovered))
    return rows


def _checkpoint(entry: dict[str, Any]) -> str:
    text = f"step {entry['step']:,}, {console.format_bytes(entry['bytes'])}"
    if entry["kept_for_extend"] is None:
        text += ", its state cannot be read"
    elif entry["kept_for_extend"]:
        text += ", kept for `extend`"
    if "damage" in entry:
        text += ", DAMAGED" if entry["damage"] else ", whole"
    return text
