"""Check whether a conversion may write OUT, or replace it."""

import os
from fnmatch import fnmatch
from pathlib import Path

from convert.output.groupwise_json import earlier_conversion
from model.checkpoint import Checkpoint
from model.checkpoint.hf_folder import MODEL_FILES, SKIPPED_FOLDERS, WEIGHTS, is_uptrain_output
from model.common.errors import CheckpointError
from model.files.names import CONVERSION_RECORD, RUN_JSON
from model.files.paths import check_name, lies_in
from model.files.staging import AREAS, Staging, check_out

CHECKPOINT_FILES = (
    *WEIGHTS, *MODEL_FILES, "*.json", "*.jinja", ".gitattributes", ".DS_Store",
)  # fmt: skip
"""Files that a checkpoint folder of another program may hold."""


def staging_for(checkpoint: Checkpoint, out: Path, overwrite: bool) -> Staging:
    """Return the staging area for OUT. Raises CheckpointError if a conversion must not or cannot write there."""
    source = checkpoint.path.resolve()
    check_name(Path(source.name), "SOURCE")
    check_out(out)
    out = out.resolve()
    if out.is_mount():
        raise CheckpointError(f"OUT ({out}) is a mount point, which cannot be replaced; name a folder inside it.")
    if lies_in(out, source):
        raise CheckpointError(f"OUT ({out}) is SOURCE or lies inside it; choose a folder elsewhere.")
    inputs = [source, checkpoint.config_folder.resolve(), *(path.resolve() for path in checkpoint.weight_files)]
    if any(lies_in(path, folder) for path in inputs for folder in (out, Staging(out).root)):
        raise CheckpointError(f"OUT ({out}) holds files of SOURCE, which replacing it would destroy; choose another.")
    if out.exists() and not overwrite:
        advice = ", or add --overwrite to replace it" if _is_replaceable(out) else ""
        raise CheckpointError(f"OUT ({out}) exists; choose another name{advice}.{_left(out)}")
    if out.exists() and not _is_replaceable(out):
        problem = (
            f"holds more than a checkpoint, such as .git or a training run (here: {_other_work(out)})"
            if _is_checkpoint(out)
            else "is not a checkpoint folder"
        )
        raise CheckpointError(f"OUT ({out}) {problem}, so --overwrite will not replace it; choose another OUT.")
    folder = _nearest_folder(out)
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise CheckpointError(f"{folder} cannot be written to; choose another OUT.")
    if out.exists() and not os.access(out, os.W_OK | os.X_OK):
        raise CheckpointError(f"OUT ({out}) cannot be written to, so it cannot be replaced; choose another OUT.")
    earlier_conversion(checkpoint)  # its record goes into that of this conversion
    return Staging(out, _is_replaceable if overwrite else None)


def _left(out: Path) -> str:
    """Return what is left beside OUT of a command that was killed after it had written OUT; "" if nothing is."""
    staging = Staging(out)
    if not staging.root.is_dir() or staging.folder.exists():
        return ""
    return f" ({staging.root} is left of a command that was killed when OUT was complete; remove it.)"


def _nearest_folder(out: Path) -> Path:
    """Return the nearest parent of OUT that exists."""
    return next(parent for parent in out.parents if parent.exists())


def _is_replaceable(out: Path) -> bool:
    """Return whether OUT is an empty folder, or a checkpoint that holds no other work."""
    return out.is_dir() and (not any(out.iterdir()) or (_is_checkpoint(out) and not _other_work(out)))


def _is_checkpoint(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _other_work(folder: Path) -> str:
    """Return the name of something in a folder that no conversion writes, or "": version control, runs, weights.

    A conversion copies whatever lies beside the source's weights, but no hidden files. So a folder with a
    groupwise.json may hold any other file, and another one those of a model.
    """
    any_file = (folder / CONVERSION_RECORD).is_file()
    for path in sorted(folder.rglob("*")):
        in_subfolder = path.parent != folder
        if path.is_dir():
            is_other = _matches(path, (AREAS, ".git")) or is_uptrain_output(path)
            is_other = is_other or (not in_subfolder and _matches(path, SKIPPED_FOLDERS))
        else:  # `.git` is a file in a worktree of git
            is_other = path.name in (RUN_JSON, ".git") or (in_subfolder and _matches(path, WEIGHTS))
            is_other = is_other or not (_matches(path, CHECKPOINT_FILES) or (any_file and path.name[0] != "."))
        if is_other:
            return str(path.relative_to(folder))
    return ""


def _matches(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(path.name, pattern) for pattern in patterns)
