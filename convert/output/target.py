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
        other = _other_files(out) if out.is_dir() else []
        named = f"; here: {other[0]}" if other else ""
        raise CheckpointError(
            f"OUT ({out}) is not a checkpoint folder, or holds more (such as .git or a training run{named}), "
            "so --overwrite will not replace it."
        )
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
    if not out.is_dir():
        return False
    if not any(out.iterdir()):
        return True
    is_checkpoint = (out / "config.json").is_file() and any(out.glob("*.safetensors"))
    return is_checkpoint and not _holds_other_work(out)


def _holds_other_work(folder: Path) -> bool:
    """Return whether a folder holds what no conversion writes: version control, training runs, staging areas."""
    return (
        any(fnmatch(path.name, pattern) for path in folder.iterdir() for pattern in SKIPPED_FOLDERS)
        or any(folder.rglob(RUN_JSON))  # of `uptrain run`, with its checkpoints
        or any(folder.rglob(AREAS))
        or any(path.is_dir() and is_uptrain_output(path) for path in folder.rglob("*"))
        or bool(_other_files(folder))
    )


def _other_files(folder: Path) -> list[str]:
    """Return weights in subfolders and, without a groupwise.json, files that belong to no model.

    A conversion copies whatever lies beside the source's weights, so its own output may hold any file.
    """
    is_output = (folder / CONVERSION_RECORD).is_file()
    patterns = (*WEIGHTS, "*.index.json", *MODEL_FILES, "*.json", ".gitattributes", "*.jinja")
    return [
        str(path.relative_to(folder))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and (
            (path.parent != folder and any(fnmatch(path.name, pattern) for pattern in WEIGHTS))
            or (not is_output and not any(fnmatch(path.name, pattern) for pattern in patterns))
        )
    ]
