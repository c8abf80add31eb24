"""List training checkpoints, read their state, and verify their files. Needs no torch.

    RUN/checkpoints/step-00000120/
        tensors/              trained weights and optimizer states, float32, sharded by torch.distributed.checkpoint
        state.json            see `uptrain.training.loop.TrainingProgress`
        manifest.json         size and CRC-32 per block of 64 MB of every other file; written last

Runs may be untrusted: file names are checked before the files are opened.
"""

import re
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from model.common.errors import InputError
from model.files.paths import is_plain_name
from model.files.read import MAX_CONFIG_BYTES, parse_json, read_bytes_up_to

TENSORS, STATE, MANIFEST = "tensors", "state.json", "manifest.json"
_NAME = re.compile(r"step-(\d{8,18})")
_BLOCK, _PIECE, _SUMMING_THREADS = 64 << 20, 4 << 20, 4
DEFAULT_KEEP_LAST = 2
DEFAULT_INTERVALS = 10
"""How often a run saves, and evaluates, by default."""
FREE_SPACE_FACTOR = 1.2
"""Free space that a save requires, relative to the size of the last checkpoint."""
CheckpointState = dict[str, Any]
"""Content of state.json."""
Checksums = dict[str, dict[str, Any]]
"""File → `size`, and list `crc32` of its blocks."""


def checkpoints_on_disk(keep_last: int, save_every: int, steps: int, schedule: str) -> float:
    """Return the room that a run of some steps needs, in checkpoints: those that it keeps, and the one that it saves.

    See `CheckpointStore.rotate`. The one that it saves counts FREE_SPACE_FACTOR. A run of less than an hour, without
    stops, keeps fewer: it saves at each `save_every` steps only.
    """
    regular = min(keep_last, (steps - 1) // save_every)
    others = min(keep_last, steps - 1 - (steps - 1) // save_every)
    return regular + others + (schedule == "wsd") + FREE_SPACE_FACTOR


def default_interval(steps: int) -> int:
    """Return the steps between checkpoints, and between evaluations, by default."""
    return max(1, steps // DEFAULT_INTERVALS)


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint's folder name; None for any other name, such as that of a copy."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match and folder_name(int(match[1])) == name else None


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the complete checkpoints of a run by step, oldest first."""
    folders = {step_of(path.name): path for path in (folder.iterdir() if folder.is_dir() else ()) if path.is_dir()}
    return {step: folders[step] for step in sorted(step for step in folders if step is not None)}


def read_state(checkpoint: Path) -> CheckpointState:
    """Return a checkpoint's state. Raises InputError if it is damaged, or its step is not that of the folder."""
    path = checkpoint / STATE
    try:
        state = parse_json(read_bytes_up_to(path, MAX_CONFIG_BYTES))
        numbers = [state["step"], state["tokens"], *state["skipped"], *state["not_finite"]]
        if not all(type(n) is int and n >= 0 for n in numbers) or type(state["keep"]) is not bool:
            raise TypeError("a count is not a whole number of 0 or more, or `keep` is not true or false")
        if not all(type(norm) is float for norm in state["grad_norms"]):
            raise TypeError("a gradient norm is not a number")
        if state["step"] != step_of(checkpoint.name):
            raise ValueError(f"it says step {state['step']}")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(
            f"{path} is damaged ({error!r}); remove {checkpoint}, so that an older one is used."
        ) from error
    assert isinstance(state, dict)
    return state


def is_kept_for_extend(checkpoint: Path) -> bool | None:
    """Return whether a checkpoint is marked to extend the run from; None if its state is unreadable."""
    try:
        return bool(read_state(checkpoint)["keep"])
    except InputError:
        return None


def find_damage(checkpoint: Path, rank: int = 0, world_size: int = 1) -> str:
    """Compare every `world_size`-th file of a checkpoint, from `rank` on, with its manifest; return an error or "".

    Raises OSError if a file exists but cannot be read. The disk may be temporarily unavailable, and the file intact.
    """
    path = checkpoint / MANIFEST
    try:
        for name, expected in sorted(read_manifest(checkpoint).items())[rank::world_size]:
            path = checkpoint / name
            size = path.stat().st_size
            if not path.is_file():  # opening a FIFO would block
                return f"{path} is not a regular file"
            if size != expected["size"]:
                return f"{path} has {size} bytes instead of {expected['size']}"
            if checksum(path) != expected:
                return f"{path} has changed since it was written"
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        return f"{path}: {error.strerror}"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return f"{path} is damaged ({error!r})"
    return ""


@contextmanager
def input_error_if_removed(checkpoint: Path) -> Iterator[None]:
    """Raise InputError in place of an error in the block if the run has removed the checkpoint meanwhile."""
    try:
        yield
    except (OSError, InputError) as error:
        if checkpoint.exists():
            raise
        raise InputError(f"{checkpoint}: the run removed this checkpoint meanwhile; run the command again.") from error


def read_manifest(checkpoint: Path) -> Checksums:
    """Return the checksums of a checkpoint's files from its manifest.

    Raises OSError, ValueError, LookupError, TypeError or AttributeError if the manifest is damaged.
    """
    files: Checksums = parse_json(read_bytes_up_to(checkpoint / MANIFEST, MAX_CONFIG_BYTES))["files"]
    for name in files:
        parts = name.split("/")
        if not all(map(is_plain_name, parts)) or parts[:-1] not in ([], [TENSORS]):
            raise ValueError(f"it names {name!r}, which no checkpoint has")
        if (checkpoint / name).is_symlink():
            raise ValueError(f"{name} is a link")
    return files


def checksum(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    with ThreadPoolExecutor(_SUMMING_THREADS) as pool:
        return {"size": size, "crc32": list(pool.map(partial(_sum_block, path), range(0, size, _BLOCK)))}


def _sum_block(path: Path, start: int) -> int:
    crc, end = 0, start + _BLOCK
    with path.open("rb") as file:
        file.seek(start)
        while piece := file.read(min(_PIECE, end - file.tell())):
            crc = zlib.crc32(piece, crc)
    return crc
