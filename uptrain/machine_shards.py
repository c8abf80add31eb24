"""Divide work among machines, each with a staging area beside OUT, and open those folders. Needs no torch."""

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from model.common.errors import InputError
from model.files.staging import Staging
from model.files.write import tree_bytes


@dataclass(frozen=True)
class MachineShard:
    """Work units of one machine: every `of`-th unit, beginning with number − 1."""

    number: int = 1
    of: int = 1

    def has(self, unit: int) -> bool:
        return unit % self.of == self.number - 1


@contextmanager
def open_staging(out: Path, inputs: Mapping[str, object], continues: str, temporary: bool = False) -> Iterator[Staging]:
    """Open the staging area of `out`. After an error or an interrupt, remove it if no unit with tokens is finished.

    `continues`: how to go on from the finished work; appended to an InputError. `temporary`: OUT is in a folder that
    the caller deletes, so no work is kept in it.
    """
    with Staging(out.resolve()) as staging:
        staging.open(inputs)
        try:
            yield staging
        except InputError as error:
            if temporary or not _is_worth_keeping(staging):
                staging.discard()
                raise
            hint = f"Finished work is kept in {staging.root}, and {continues}."
            raise InputError(f"{error} ({hint})") from error
        except KeyboardInterrupt as error:
            if temporary or _is_worth_keeping(staging):
                raise
            staging.discard()
            raise KeyboardInterrupt("nothing is finished yet, and the same command starts again") from error
        except OSError as error:
            if temporary:
                raise
            if not _is_worth_keeping(staging):
                with suppress(OSError):
                    staging.discard()
                raise OSError(f"{error}; nothing is finished yet, and the same command starts again.") from error
            hint = f"finished work is kept in {staging.root}, and the same command continues from there."
            raise OSError(f"{error}; {hint}") from error


def _is_worth_keeping(staging: Staging) -> bool:
    """Return whether a unit with tokens is finished."""
    return any(finished.get("n_tokens", 1) for finished in staging.finished.values())


def staging_out(out: Path, machine_shard: MachineShard | None) -> Path:
    """Return the path beside which to stage the build: OUT, or a name of its own for a machine shard."""
    if machine_shard is None:
        return out
    out = out.resolve()  # as `open_machine_shards` finds it, also by a link
    return out.with_name(f"{out.name}.shard-{machine_shard.number}-of-{machine_shard.of}")


def staged_bytes(out: Path, machine_shard: MachineShard | None) -> int:
    """Return the bytes in the staging areas that a build of OUT, or of a machine shard of it, continues from."""
    roots = [Staging(staging_out(out, machine_shard).resolve()).root]
    if machine_shard is None:
        roots += _machine_shard_roots(out.resolve())
    return sum(map(tree_bytes, roots))


def _machine_shard_roots(out: Path) -> list[Path]:
    """Return the staging areas of all machine shards of OUT, which is an absolute path without links."""
    pattern = re.compile(re.escape(f".{out.name}.shard-") + r"\d+-of-\d+\.groupwise")
    return [path for path in sorted(out.parent.glob(".*")) if pattern.fullmatch(path.name)]


@contextmanager
def open_machine_shards(staging: Staging, inputs: Mapping[str, object]) -> Iterator[list[Staging]]:
    """Open the staging areas of all machine shards; remove them if the context succeeds.

    Raises InputError if a machine is still working on its shard, or has finished work of other inputs.
    """
    with ExitStack() as stack:
        roots = _machine_shard_roots(staging.out)
        others = [stack.enter_context(_open_machine_shard(root, inputs)) for root in roots]
        yield others
        for other in others:
            other.discard()


@contextmanager
def _open_machine_shard(root: Path, inputs: Mapping[str, object]) -> Iterator[Staging]:
    """Open the staging area of a machine shard."""
    with Staging(root.with_name(root.name.removeprefix(".").removesuffix(".groupwise"))) as staging:
        staging.open(inputs)
        yield staging
