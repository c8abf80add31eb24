"""Write and read `metrics.jsonl`: one line per step, evaluation and event, written by the main process.

    {"step": 7, "loss": …, "learning_rate": …, "grad_norm": …, "tokens": …, "windows_crc32": …, "tokens_per_s": …, …}
    {"step": 8, "evaluation": {…}, "time": …}
    {"step": 8, "event": "resumed", …, "time": …}

`step` counts finished steps. Numbers that are not finite are null, since JSON cannot express them. When a run resumes
at an earlier step, later lines are removed.
"""

import json
import os
from pathlib import Path
from typing import Any

from model.common import checks
from model.common.console import null_non_finite
from model.common.errors import InputError
from model.common.typed_json import check_types, parse_object
from model.files.read import check_regular
from model.files.write import replace_file

Record = dict[str, Any]
Number = float | None
"""None if the number was not finite."""
KIND_TYPES: dict[str, dict[str, Any]] = {
    "loss": {
        "step": int, "loss": Number, "learning_rate": float, "grad_norm": Number, "tokens": int,
        "windows_crc32": int, "tokens_per_s": float,
    },
    "evaluation": {"step": int, "evaluation": dict[str, Number]},
    "event": {"step": int, "event": str},
}  # fmt: skip
"""Required keys and their types of each kind of record, by the key that identifies the kind."""
EVALUATION_TYPES = {"targets": int, "loss": Number}
TEACHER_TYPES = {"teacher_loss": Number, "kl": Number, "agreement": float}
START_TYPES = {"time": float, "processes": int, "device": str}
MAX_ABSOLUTE = 1e300
"""Limit of the absolute value of a number, so that sums and the limits of an axis stay finite."""
MAX_TIME = 253_402_300_799
"""Last second of the year 9999, the latest that `datetime` can represent."""
MAX_LINE_BYTES = 1 << 20
"""Longest line that is read. Ours have a few hundred bytes; a file without line ends would be read whole."""


class Metrics:
    """Metrics file of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting = ""
        self.repeated_evaluation: int | None = None
        """The step whose evaluation `rewind` has removed, if the run makes it again at once."""

    def write(self, record: Record) -> str:
        """Append a line. If the disk is full, keep it for the next write, and return the error the first time."""
        is_first = not self._waiting
        self._waiting += _line(record)
        try:
            self.flush()
        except OSError as error:
            return str(error) if is_first else ""
        return ""

    def flush(self) -> None:
        """Write the pending lines. Raises OSError if that fails, with the file unchanged."""
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a") as file:
                file.write(self._waiting)
        except OSError:
            os.truncate(self.path, size)
            raise
        self._waiting = ""

    def rewind(self, step: int) -> None:
        """Remove the lines that a run resumed at `step` writes again: later steps, and evaluations at or after `step`.

        Lines are parsed from the end down to the first step that stays, so that a long run resumes about as fast as a
        short one.

        Raises InputError if one of them is damaged.
        """
        lines, kept_lines = _complete_lines(self.path), []
        while lines:
            record = _parse(self.path, len(lines), lines[-1])
            if "loss" in record and record["step"] <= step:
                break
            if "event" in record or record["step"] < step:
                kept_lines.append(lines[-1])
            elif "evaluation" in record and record["step"] == step:
                self.repeated_evaluation = step
            lines.pop()
        replace_file(self.path, "".join([*lines, *reversed(kept_lines)]).encode())


def read_metrics(path: Path) -> list[Record]:
    """Return all records. Raises InputError if a line is damaged."""
    return [_parse(path, number, line) for number, line in enumerate(_complete_lines(path), start=1)]


def write_metrics(path: Path, records: list[Record]) -> None:
    path.write_text("".join(map(_line, records)))


def _complete_lines(path: Path) -> list[str]:
    """Return all lines, without a last one that was cut off by a kill."""
    if not path.exists():
        return []
    check_regular(path)
    lines: list[str] = []
    with path.open("rb") as file:
        while (line := file.readline(MAX_LINE_BYTES + 1)).endswith(b"\n"):
            lines.append(line.decode(errors="replace"))
    if len(line) > MAX_LINE_BYTES:
        raise InputError(f"{path}:{len(lines) + 1} is longer than {MAX_LINE_BYTES:,} bytes; remove the line.")
    return lines


def _parse(path: Path, number: int, line: str) -> Record:
    try:
        record = parse_object(line.encode())
        if "windows" in record:  # the name in runs of earlier versions
            record["windows_crc32"] = record.pop("windows")
        _check(record)
    except InputError as error:
        reason = str(error).rstrip(".")
        raise InputError(f"{path}:{number} is damaged ({reason}); remove the line.") from error
    return record


def _check(record: Record) -> None:
    """Raise InputError unless a record is of one of the kinds, with values of valid types and ranges."""
    kind = next((key for key in KIND_TYPES if key in record), None)
    if kind is None:
        raise InputError(f"it has none of {', '.join(KIND_TYPES)}")
    check_types(record, KIND_TYPES[kind])
    for key, value in {**record, **record.get("evaluation", {})}.items():
        if isinstance(value, int | float) and abs(value) > MAX_ABSOLUTE:
            raise InputError(f"{key} = {checks.short_repr(value)}; it must be at most {MAX_ABSOLUTE:g}")
    checks.whole_number(record["step"], "step", least=0)
    if "time" in record:  # in runs of earlier versions, only starts have it
        check_types(record, {"time": float})
        checks.whole_number(int(record["time"]), "time", least=0, most=MAX_TIME)
    if kind == "loss":
        checks.whole_number(record["tokens"], "tokens", least=0)
        checks.number(record["tokens_per_s"], "tokens_per_s", above=0.0)
    elif kind == "evaluation":
        with_teacher = any(key in record["evaluation"] for key in TEACHER_TYPES)
        check_types(record["evaluation"], {**EVALUATION_TYPES, **(TEACHER_TYPES if with_teacher else {})}, kind)
    elif record["event"] in ("started", "resumed"):
        check_types(record, START_TYPES)
        if "rejected" in record:
            check_types(record, {"rejected": tuple[str, ...]})
    elif "why" in record:
        check_types(record, {"why": str})


def _line(record: Record) -> str:
    return json.dumps(null_non_finite(record), allow_nan=False) + "\n"
