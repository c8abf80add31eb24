"""Read the calibration text of a conversion, as windows of the model's own tokens.

The text is the one that ships with Groupwise, a file, a dataset, or text that the model generates itself
(`convert/calibration/generated_text.py`). Several texts are mixed window by window.
"""

import lzma
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convert.calibration_text.choices import MAX_TOKENS, NONE, SELF, SHIPPED, VALIDATION_EVERY
from convert.calibration_text.text import CalibrationText, sha256_of_ids, split_name
from convert.calibration_text.tokenizer import encode, find_bos_ids, open_fast_tokenizer
from convert.errors import UnsupportedMethodError
from model.checkpoint import Checkpoint
from model.checkpoint.context import read_context
from model.common.checks import is_whole_number
from model.common.console import warn
from model.common.errors import CheckpointError, InputError
from model.files.names import CALIBRATION_TOKENS
from model.files.read import read_bytes_up_to
from model.texts import Problem, find_reader
from model.texts.compressed import MAX_WINDOW_BYTES
from model.texts.record import OR_NAME_IT
from model.texts.sources import TextFiles, find_files, why_ignored

MAX_WINDOW_TOKENS = 1024
"""Maximum tokens per window. Most attention stays within this distance, and the cost grows with it."""
MIN_WINDOWS = VALIDATION_EVERY
"""Minimum number of windows, of which the last is for validation."""
_PIECE_CHARACTERS = 1 << 16
"""Characters of a document that are tokenised at a time."""
_READ_BYTES = 1 << 26
"""Bytes of a file that are read as one piece."""
_TEXT = Path(__file__).parent / "sample_texts" / "mixture.jsonl.xz"


def stored_tokens(text: CalibrationText) -> bytes:
    """Return the token ids as OUT stores them: xz of 16 or 32 bits each, little-endian, window after window."""
    assert text.ids_NT is not None
    # Higher presets compress no better below 8 MB, and take up to 674 MB of memory.
    return lzma.compress(text.ids_NT.astype("<u2" if text.ids_NT.max() < 1 << 16 else "<u4").tobytes(), preset=6)


def read_stored(folder: Path, recorded: dict[str, Any]) -> CalibrationText:
    """Return the text that OUT was calibrated on, with the tokens stored in OUT.

    Raises CheckpointError if the tokens are missing, damaged, or not those that `groupwise.json` records.
    """
    path, shape = folder / CALIBRATION_TOKENS, (recorded["windows"], recorded["window"])
    text = CalibrationText(recorded["text"], *shape, None)
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {CALIBRATION_TOKENS}, which keeps the tokens it was calibrated on")
    if text.n_windows < MIN_WINDOWS or not 1 <= text.window_tokens <= MAX_WINDOW_TOKENS or text.n_tokens > MAX_TOKENS:
        raise CheckpointError(f"{folder} records a calibration of {shape[0]} windows of {shape[1]} tokens")
    content = read_bytes_up_to(path, 4 * MAX_TOKENS)
    decompressor = lzma.LZMADecompressor(memlimit=MAX_WINDOW_BYTES)
    try:
        ids = decompressor.decompress(content, max_length=4 * text.n_tokens + 1)
    except lzma.LZMAError as error:
        raise CheckpointError(f"{path} is damaged ({error})") from error
    is_whole = decompressor.eof and not decompressor.unused_data
    dtype = {2 * text.n_tokens: "<u2", 4 * text.n_tokens: "<u4"}.get(len(ids)) if is_whole else None
    ids_NT = None if dtype is None else np.frombuffer(ids, dtype).astype(np.int64).reshape(shape)
    if ids_NT is None or sha256_of_ids(ids_NT) != recorded["sha256_of_ids"]:
        raise CheckpointError(f"{path} does not hold the tokens that were recorded at conversion")
    return replace(text, ids_NT=ids_NT)


def read_calibration_text(checkpoint: Checkpoint, name: str, n_tokens: int) -> CalibrationText:
    """Read `n_tokens` tokens of a text, or of several texts with their windows alternating.

    A text is `shipped`, or what `model.texts.sources` finds. The windows of `self` stay open, for the model to write
    later (`with_generated`).

    Raises UnsupportedMethodError if no tokenizer of the checkpoint can be opened and the text is not of token ids,
    CheckpointError if the text is too short.
    """
    window = min(read_context(checkpoint.config) or MAX_WINDOW_TOKENS, MAX_WINDOW_TOKENS)
    _check_n_tokens(n_tokens, window)
    n_windows, parts = n_tokens // window, _parts(name)
    # Each part is in turn in the windows for validation, also where the number of parts divides VALIDATION_EVERY.
    part_N = [(n + n // VALIDATION_EVERY) % len(parts) for n in range(n_windows)]
    encode_text, bos_ids = _find_encoder(checkpoint, needs_tokenizer=SELF in parts)
    read_NT = np.zeros((n_windows, window), dtype=np.int64)
    for number, part in enumerate(parts):
        if part != SELF:
            rows = np.flatnonzero(np.equal(part_N, number))
            read_NT[rows] = _read_windows(part, encode_text, bos_ids, (len(rows), window))
    generated = tuple(n for n in range(n_windows) if parts[part_N[n]] == SELF)
    read_NT = np.delete(read_NT, generated, axis=0)
    return CalibrationText(
        name=name,
        n_windows=n_windows,
        window_tokens=window,
        ids_NT=None if generated else read_NT,
        generated=generated,
        bos_ids=tuple(bos_ids),
        read_NT=read_NT,
    )


def _check_n_tokens(n_tokens: int, window: int) -> None:
    """Raise CheckpointError if the tokens are too few for windows of `window` tokens, or too many."""
    if n_tokens // window < MIN_WINDOWS:
        raise CheckpointError(f"--calibration-tokens {n_tokens} is too few; give at least {MIN_WINDOWS * window}.")
    if n_tokens > MAX_TOKENS:
        raise CheckpointError(f"--calibration-tokens {n_tokens} is too many; give at most {MAX_TOKENS}.")


def _parts(name: str) -> list[str]:
    """Return the names of the texts that are joined by + in `name`. Raises CheckpointError for what is no such name."""
    if not name:
        raise CheckpointError(f"--calibration is empty; give {SHIPPED}, {SELF}, {NONE} or a text.")
    parts = split_name(name)
    if len(set(parts)) < len(parts) or "" in parts or (len(parts) > 1 and parts[-1] == NONE):
        raise CheckpointError(
            f"--calibration {name}: give each of {SELF} and {SHIPPED} once, then a text, as in {SELF}+{SHIPPED}."
        )
    return parts


def _find_encoder(checkpoint: Checkpoint, needs_tokenizer: bool) -> tuple[Callable[[str], list[int]], list[int]]:
    """Return a function that tokenises a string, and the tokens that begin each window.

    If no tokenizer can be opened, the function raises UnsupportedMethodError: a text of token ids never calls it. With
    `needs_tokenizer`, the error is raised at once.
    """
    try:
        tokenizer = open_fast_tokenizer(checkpoint)
        return (lambda text: encode(tokenizer, text, checkpoint)), find_bos_ids(tokenizer, checkpoint)
    except UnsupportedMethodError as error:
        if needs_tokenizer:
            raise
        no_tokenizer = error  # Python deletes `error` at the end of this block

    def refuse(text: str) -> list[int]:
        raise no_tokenizer

    bos = checkpoint.config.get("bos_token_id")
    return refuse, [bos] if is_whole_number(bos, least=0) else []


def _read_windows(
    name: str, encode_text: Callable[[str], list[int]], bos_ids: list[int], shape: tuple[int, int]
) -> NDArray[np.int64]:
    """Return windows of a text, `shape` = (windows, tokens), each with the tokens `bos_ids` before it.

    Raises CheckpointError if the text is too short.
    """
    n_windows, window = shape
    length = window - len(bos_ids)
    ids = _read_ids(name, encode_text, n_windows * window)
    windows: list[list[int]] = []
    start, longest = 0, length
    while len(windows) < n_windows and length > 0:
        begun = ids[start : start + len(bos_ids)] == bos_ids  # a chat template has written them
        n = window if begun else length
        longest = max(longest, n)
        if start + n > len(ids):
            break
        windows.append(([] if begun else bos_ids) + ids[start : start + n])
        start += n
    if len(windows) < n_windows:
        raise CheckpointError(
            f"the calibration text {name} has only {len(ids):,} tokens, and {n_windows} windows of {window} need "
            f"{n_windows * max(longest, 1):,}; give a longer text with --calibration, or fewer --calibration-tokens."
        )
    return np.asarray(windows, dtype=np.int64)


def _read_ids(name: str, encode_text: Callable[[str], list[int]], n: int) -> list[int]:
    """Return n tokens of a text, some more, or all that it has.

    Each file gives the same share if it can, since each may hold another kind of text, and then all take turns piece
    by piece. One file is read at a time: a document may be large.
    """
    text = TextFiles(SHIPPED, "jsonl", (str(_TEXT),)) if name == SHIPPED else _find(name)
    pieces: dict[str, list[list[int]]] = {file: [] for file in text.files}
    unread, missing = list(text.files), n
    while unread and missing > 0:
        share = missing / len(unread)  # of those that have more, once others are at their end
        for file in list(unread):
            if missing <= 0:
                break
            n_read = 0
            for piece in islice(_pieces_of_file(file, text.format), len(pieces[file]), None):
                pieces[file].append(encode_text(piece) if isinstance(piece, str) else piece.tolist())
                n_read += len(pieces[file][-1])
                if n_read >= min(share, missing):
                    break
            else:
                unread.remove(file)
            missing -= n_read
    return [token for turn in zip_longest(*pieces.values(), fillvalue=[]) for ids in turn for token in ids]


def _pieces_of_file(file: str, format_name: str) -> Iterator[str | NDArray[np.int64]]:
    """Yield the documents of a file, piece by piece, each a string or token ids.

    Raises CheckpointError or InputError for a bad record.
    """
    reader = find_reader(format_name)
    for part in reader.split(file, _READ_BYTES):
        for record in reader.read(part, "text"):
            document = record.content
            if not isinstance(document, Problem):
                for start in range(0, len(document), _PIECE_CHARACTERS):
                    yield document[start : start + _PIECE_CHARACTERS]
            elif document.bad:
                raise CheckpointError(f"{reader.place(part, record.row)}: {document.reason.removesuffix(OR_NAME_IT)}.")


def _find(name: str) -> TextFiles:
    try:
        text = find_files(name, "--calibration")
    except InputError as error:
        raise CheckpointError(f"{error} --calibration also takes {SELF}, {SHIPPED} and {NONE}.") from error
    if text.ignored:
        first = text.ignored[0]
        more = f", and so are {len(text.ignored) - 1:,} more" if len(text.ignored) > 1 else ""
        warn(f"--calibration {name}: {first} is left out ({why_ignored(first)}){more}.")
    return text
