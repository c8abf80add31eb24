"""Conversions that are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from results import Result


def refuser(convert: Callable[..., Result], source: Path, tmp_path: Path) -> Callable[..., None]:
    """Return a function that converts, and checks the refusal: one line with all `words`."""

    def run(*words: str, groups: object = 2, options: Any = (), path: Path | None = None, out: Any = None) -> None:
        result = convert(
            "mha-to-gqa", "--method", "mean", path or source, out or tmp_path / "out", "--groups", groups, *options
        )
        result.refused(*words)

    return run
