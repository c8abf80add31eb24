"""The text of a calibration, as windows of the model's own tokens, and its name in records and messages."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from convert.calibration_text.choices import NONE, SELF, SHIPPED
from model.texts.hub import HUB


@dataclass(frozen=True, eq=False)
class CalibrationText:
    """Windows of tokens, and their sources. N windows, T tokens in each."""

    name: str
    """`shipped`, `self`, the path or dataset as the user wrote it, or several joined by +."""
    n_windows: int
    window_tokens: int
    """Tokens per window."""
    ids_NT: NDArray[np.int64] | None
    """None until the model has generated its windows, and if `verify` has no tokens."""
    generated: tuple[int, ...] = ()
    """Indices of the windows that the model generates."""
    bos_ids: tuple[int, ...] = ()
    """Tokens that the tokenizer puts before a text."""
    read_NT: NDArray[np.int64] | None = None
    """The other windows, in order."""
    generation_bytes: int = 0
    """Peak memory of generating, in bytes. Most of it is weights, which each step reads."""
    generation_steps: int = 0
    """Number of times that generating runs the whole model."""
    generation_inputs: str = ""
    """SHA-256 of what determines the text that the model generates, besides its weights and config."""

    @property
    def n_tokens(self) -> int:
        return self.n_windows * self.window_tokens

    @property
    def parts(self) -> list[str]:
        return split_name(self.name)

    @property
    def label(self) -> str:
        """The text's description for people, without folders."""
        return " and ".join(map(_label, self.parts))

    @property
    def record(self) -> dict[str, object]:
        """The text's entry in `groupwise.json`."""
        return {
            "text": self.name, "sha256_of_ids": sha256_of_ids(self.ids_NT),
            "windows": self.n_windows, "window": self.window_tokens,
        }  # fmt: skip

    @property
    def identity(self) -> dict[str, object]:
        """Everything that determines the output before the model has generated its windows.

        An interrupted conversion resumes only if it is equal.
        """
        return {
            "windows": self.n_windows,
            "window": self.window_tokens,
            "sha256_of_ids": sha256_of_ids(self.ids_NT),
            "sha256_of_read": sha256_of_ids(self.read_NT),
            "generation_inputs": self.generation_inputs,
        }

    def with_generated(self, generated_NT: NDArray[np.int64]) -> "CalibrationText":
        """Return the text with the windows that the model has generated."""
        assert self.read_NT is not None
        ids_NT = np.empty((self.n_windows, self.window_tokens), dtype=np.int64)
        ids_NT[list(self.generated)] = generated_NT
        ids_NT[np.setdiff1d(np.arange(self.n_windows), self.generated)] = self.read_NT
        return replace(self, ids_NT=ids_NT)


def _label(part: str) -> str:
    on_the_hub = part.startswith(HUB) and not Path(part.removeprefix(HUB)).is_absolute()
    labels = {SHIPPED: "the text that ships with Groupwise", SELF: "text that the model wrote itself"}
    return labels.get(part) or (part if on_the_hub else Path(part).name)


def sha256_of_ids(ids_NT: NDArray[np.int64] | None) -> str | None:
    return None if ids_NT is None else hashlib.sha256(ids_NT.tobytes()).hexdigest()


def split_name(name: str) -> list[str]:
    """Split a --calibration into parts: `self`, `shipped`, then a path or dataset, whose name may contain a +."""
    parts: list[str] = []
    for _ in (SELF, SHIPPED):  # at most two, so that a crafted groupwise.json cannot make the list long
        word, plus, rest = name.partition("+")
        if not plus or word not in (SELF, SHIPPED):
            break
        parts.append(word)
        name = rest
    return [*parts, name]


def user_texts(name: str) -> list[str]:
    """Return the parts of a --calibration that are the user's own texts."""
    return [part for part in split_name(name) if part not in (SHIPPED, SELF, NONE)]
