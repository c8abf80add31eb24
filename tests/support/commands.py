"""Commands that tests run: options, results, refusals, and what they leave behind."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

MEAN = ("--method", "mean", "--groups", 2)
"""Options of a conversion that needs neither torch nor a tokenizer."""


@dataclass
class Result:
    """What a command did."""

    code: int
    out: str
    err: str

    def succeeded(self) -> Self:
        """Check for exit code 0; return this result."""
        assert self.code == 0, self.err
        return self

    def refused(self, *words: str) -> Self:
        """Check for one clear line on stderr that holds all `words`, exit code 2, and nothing on stdout."""
        assert self.code == 2, (self.code, self.err)
        assert self.err.startswith("Error: ")
        assert self.err.count("\n") == 1, self.err
        assert not self.out
        for word in words:
            assert word in self.err, self.err
        return self


def left_behind(folder: Path) -> list[str]:
    """Return the names of hidden files and folders, such as staging areas."""
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]
