"""What a command did."""

from dataclasses import dataclass
from typing import Self


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

    def refused(self, *words: str) -> None:
        """Check for one clear line on stderr that holds all `words`, exit code 2, and nothing on stdout."""
        assert self.code == 2, (self.code, self.err)
        assert self.err.startswith("Error: ")
        assert self.err.count("\n") == 1, self.err
        assert not self.out
        for word in words:
            assert word in self.err, self.err
