"""The text that a conversion is calibrated on, as windows of the model's own tokens.

The text that ships with the project are speeches of presidents of the United States to Congress, in the public domain
(`scripts/make_sample_text.py` says which).
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO, TextIOWrapper
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from convert.recipe import NONE, NotFeasible
from model import checks, compression
from model.checkpoint import Checkpoint
from model.errors import CheckpointError
from model.hub_dataset import HUB, hub_texts
from model.reading import TOKENIZER_BYTES, read_bytes_up_to

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHIPPED = "shipped"
DEFAULT_TOKENS = 65_536
LONGEST_WINDOW = 1024
"""Tokens that attention is watched over together: most of what it does happens within them, and cost grows with it."""
_PIECE = 1 << 16
_TEXT = Path(__file__).parent / "sample_texts" / "speeches.txt.xz"


@dataclass(frozen=True, eq=False)
class Sample:
    """Windows of tokens, and where they come from."""

    name: str
    """`shipped`, or the path or dataset as it was given."""
    sha256: str
    """Of the ids: the same text through the same tokenizer."""
    n_windows: int
    window: int
    """Tokens in each."""
    ids_NT: NDArray[np.int64] | None
    """None where `verify` does not find the text again."""

    @property
    def n_tokens(self) -> int:
        return self.n_windows * self.window

    @property
    def is_shipped(self) -> bool:
        return self.name == SHIPPED

    @property
    def label(self) -> str:
        """What to call the text, without the folders it lies in."""
        if self.is_shipped:
            return "the text that ships with Groupwise"
        on_the_hub = self.name.startswith(HUB) and not Path(self.name.removeprefix(HUB)).is_absolute()
        return self.name if on_the_hub else Path(self.name).name

    @property
    def record(self) -> dict[str, object]:
        """What `groupwise.json` says of it."""
        return {
            "text": self.name, "sha256_of_ids": self.sha256, "windows": self.n_windows, "window": self.window,
        }  # fmt: skip


def read_sample(checkpoint: Checkpoint, name: str, n_tokens: int) -> Sample:
    """Read as many tokens as wanted of a text.

    It is `shipped`, a file or a folder of files (.txt, .jsonl, also .xz, .gz), or a dataset of the hub.

    Raises NotFeasible where the checkpoint has no tokenizer.json, CheckpointError where the text is too short.
    """
    window = min(_context(checkpoint), LONGEST_WINDOW)
    n_windows = n_tokens // window
    if n_windows < 4:
        raise CheckpointError(f"--calibration-tokens {n_tokens} is too few; give at least {4 * window}.")
    first, ids = _tokens(checkpoint, name, n_windows * window)
    length = window - len(first)
    if length < 1 or len(ids) < n_windows * length:
        raise CheckpointError(
            f"the calibration text {name} has only {len(ids):,} tokens, not {n_windows} windows of {window}; "
            "give a longer one with --calibration, or fewer --calibration-tokens."
        )
    body_NT = np.asarray(ids[: n_windows * length], dtype=np.int64).reshape(n_windows, length)
    ids_NT = np.concatenate([np.tile(np.asarray(first, dtype=np.int64), (n_windows, 1)), body_NT], axis=1)
    return Sample(name, hashlib.sha256(ids_NT.tobytes()).hexdigest(), n_windows, window, ids_NT)


def _context(checkpoint: Checkpoint) -> int:
    """Return the longest text that the model takes; a model that does not say takes any."""
    context = checkpoint.config.get("max_position_embeddings")
    if context is None:
        return LONGEST_WINDOW
    return checks.whole_number(context, "config.json has max_position_embeddings", least=2)


def _tokens(checkpoint: Checkpoint, name: str, wanted: int) -> tuple[list[int], list[int]]:
    """Return what the tokenizer puts before a text (a beginning-of-text token, or nothing), and the text's tokens."""
    content = checkpoint.side_files.get("tokenizer.json")
    if content is None:
        raise NotFeasible(
            f"{checkpoint.path} has no tokenizer.json, which calibrating needs; save the tokenizer there "
            "(transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…))."
        )
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise NotFeasible(NO_TORCH) from error
    text = read_bytes_up_to(content, TOKENIZER_BYTES) if isinstance(content, Path) else content
    try:
        tokenizer = Tokenizer.from_str(text.decode())
    except Exception as error:  # the library raises nothing more special
        raise CheckpointError(f"{checkpoint.path}/tokenizer.json is damaged ({error}).") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids: list[int] = []
    for piece in _pieces(name):
        ids += _encode(tokenizer, piece, checkpoint)
        if len(ids) >= wanted:
            break
    added, bare = (_encode(tokenizer, "a", checkpoint, special) for special in (True, False))
    starts = added.index(bare[0]) if bare and bare[0] in added else 0
    return added[:starts], ids


def _encode(tokenizer: "Tokenizer", text: str, checkpoint: Checkpoint, special: bool = False) -> list[int]:
    try:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=special).ids
    except Exception as error:  # the library raises nothing more special
        raise NotFeasible(f"{checkpoint.path}/tokenizer.json cannot read the calibration text ({error}).") from error
    return ids


NO_TORCH = "calibrating runs the model, which needs torch and tokenizers: pip install 'groupwise[torch]'."


def _pieces(name: str) -> Iterator[str]:
    """Yield the text some thousand characters at a time."""
    if name.startswith(HUB):
        for text in hub_texts(name):
            yield from _cut(StringIO(text))
        return
    for path in [_TEXT] if name == SHIPPED else _files(name):
        try:
            with _open(path) as file:
                yield from _cut(file) if _kind(path) == ".txt" else _records(file, path)
        except (UnicodeDecodeError, EOFError) as error:
            raise CheckpointError(f"{path} cannot be read as text ({error}).") from error


def _cut(file: IO[str]) -> Iterator[str]:
    while piece := file.read(_PIECE):
        yield piece


def _records(file: IO[str], path: Path) -> Iterator[str]:
    number = 0
    while line := file.readline(compression.MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > compression.MAX_LINE_BYTES:
            compression.refuse_long_line(str(path), number)
        if line.strip():
            yield from _cut(StringIO(_text_of(line, f"{path}, line {number}")))


def _files(name: str) -> list[Path]:
    path = Path(name)
    names = sorted(path.iterdir()) if path.is_dir() else [path]
    files = [file for file in names if _kind(file) is not None and file.is_file()]
    if not files:
        why = "it holds no text that is read here" if path.exists() else "there is no such text"
        raise CheckpointError(
            f"--calibration {name}: {why}; give a .txt or .jsonl file (also .gz, .xz), a folder of "
            f"them, {HUB}NAME for a dataset of the hub, {SHIPPED}, or {NONE}."
        )
    return files


def _kind(path: Path) -> str | None:
    stem = path.with_suffix("") if path.suffix in (".gz", ".xz") else path
    return stem.suffix if stem.suffix in (".txt", ".jsonl") else None


@contextmanager
def _open(path: Path) -> Iterator[IO[str]]:
    with path.open("rb") as raw:
        content = compression.open_compressed(raw, str(path)) if compression.is_compressed(str(path)) else raw
        with TextIOWrapper(content, encoding="utf-8-sig") as file:
            yield file


def _text_of(line: str, where: str) -> str:
    try:
        found = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{where}: not a JSON object with a key text.") from error
    if not isinstance(found, str):
        raise CheckpointError(f"{where}: what stands under text is no text.")
    return found.encode(errors="replace").decode()
