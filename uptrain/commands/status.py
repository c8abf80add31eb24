"""`uptrain status`: where a run stands."""

import math
from pathlib import Path
from typing import Any

import click

from model.common import console
from model.common.errors import RunError


@click.command("status")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Also check every file of every checkpoint against its checksum.")
@click.option("--json", "as_json", is_flag=True, help="Print the status as JSON.")
def command(run: Path, verify: bool, as_json: bool) -> None:
    """Show where RUN stands.

    Its steps, losses, speed, time left and checkpoints; also while it goes on.

    Exit code 1 if --verify finds a damaged checkpoint.
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


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("status", _status(found)),
        ("step", f"{found['step']:,} of {found['steps']:,} ({found['share']:.1%})"),
        ("tokens", f"{found['tokens']:,} of {found['total_tokens']:,}"),
    ]
    if found["alpha"]:
        rows.append(("α", f"{found['alpha'] * found['share']:.4g} of {found['alpha']:.4g}"))
    rows += [*_last_step(found), *_evaluation(found["evaluation"]), *_troubles(found)]
    rows.append(("checkpoints", "\n".join(map(_checkpoint, found["checkpoints"])) or "none yet"))
    if found["parent"]:
        rows.append(("extends", f"{found['parent']['run']} from step {found['parent']['step']:,}"))
    return rows


def _status(found: dict[str, Any]) -> str:
    resume = f"`uptrain resume {found['run']}` goes on"
    heard = _seconds_ago(found["seconds_since_last_line"])
    return {
        "not started": f"not started; {resume}",
        "running": f"running as process {found['pid']}, last heard of {heard}",
        "died": f"died: no process {found['pid']} on this machine, last heard of {heard}; {resume}",
        "preempted": f"stopped ({found['reason']}); {resume}",
        "finished": "finished",
    }.get(found["status"], f"{found['status']}: {found['reason']}")


def _seconds_ago(seconds: float | None) -> str:
    return "not yet" if seconds is None else f"{duration(seconds)} ago"


def _last_step(found: dict[str, Any]) -> list[tuple[str, str]]:
    if found["tokens_per_s"] is None:
        return []
    rows = [
        ("training loss", f"{_number(found['loss'], '.4f', ' nats per token')}, {found['minimised']}"),
        ("learning rate", f"{found['learning_rate']:.3e}"),
        ("gradient norm", _number(found["grad_norm"], ".4g", "")),
        ("speed", f"{found['tokens_per_s']:,.0f} tokens/s"),
    ]
    if found["step"] < found["steps"] and math.isfinite(found["seconds_left"]):
        rows.append(("time left", f"{duration(found['seconds_left'])}, evaluations and saving not counted"))
    return rows


def _number(value: float | None, form: str, unit: str) -> str:
    return "not finite" if value is None else f"{value:{form}}{unit}"


def duration(seconds: float) -> str:
    """Write a time for people: `2 days 3 h`, `1 h 5 min`, `3 min`, `12 s`."""
    minutes = round(seconds / 60)
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"


def _evaluation(found: dict[str, Any] | None) -> list[tuple[str, str]]:
    if found is None:
        return []
    rows = [("held-out loss", f"{_number(found['loss'], '.4f', ' nats per token')} at step {found['step']:,}")]
    if "kl" in found:
        rows.append(("teacher's loss", _number(found["teacher_loss"], ".4f", " nats per token")))
        rows.append(("KL to the teacher", _number(found["kl"], ".4f", " nats per token")))
        rows.append(("same choice", f"{found['agreement']:.1%} of tokens"))
    if found["recovered_fraction"] is not None:
        rows.append(("recovered fraction", f"{found['recovered_fraction']:.1%}"))
    return rows


def _troubles(found: dict[str, Any]) -> list[tuple[str, str]]:
    titles = (("updates left out", "skipped_steps"), ("not saved", "not_saved_steps"))
    return [(title, _steps(found[name])) for title, name in titles if found[name]]


def _steps(steps: list[int]) -> str:
    """Name the last few."""
    shown = ", ".join(f"{step:,}" for step in steps[-8:])
    return f"{len(steps):,}: step {'… ' if len(steps) > 8 else ''}{shown}"


def _checkpoint(entry: dict[str, Any]) -> str:
    text = f"step {entry['step']:,}, {console.size(entry['bytes'])}"
    if entry["kept"] is None:
        text += ", its state cannot be read"
    elif entry["kept"]:
        text += ", kept for `extend`"
    if "damage" in entry:
        text += ", DAMAGED" if entry["damage"] else ", whole"
    return text
