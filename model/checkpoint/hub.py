"""Names of models on the Hugging Face Hub, `org/name[@revision]`, where a path is asked for. Only the cache is read."""

import re
from pathlib import Path

from model.common.errors import CheckpointError

# The hub's own rule for names (huggingface_hub, `validate_repo_id`); a revision is a branch, a tag or a commit.
NAME = re.compile(r"(?P<model>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w./-]*))?", re.ASCII)


SNAPSHOT = re.compile(r"/models--([\w.-]+)--([\w.-]+)/snapshots/([0-9a-f]{40})$")
"""Where the cache keeps a model."""
Origin = tuple[str, str | None]
"""The name of a model and its revision."""


def origin_of(path: Path) -> Origin:
    """Return where a checkpoint comes from: the hub's for a snapshot in the cache, else its own name and None."""
    resolved = path.resolve()
    cached = SNAPSHOT.search(resolved.as_posix())
    return (f"{cached[1]}/{cached[2]}", cached[3]) if cached else (resolved.name, None)


def find_in_cache(path: Path) -> Path | None:
    """Return the folder of the model that `path` names, or None if that can be no model's name.

    Raises CheckpointError, which says how to fetch it, if it is not in the cache.
    """
    match = NAME.fullmatch(str(path))
    if not match:
        return None
    model, revision = match.group("model", "revision")
    fetch = f"hf download {model}" + (f" --revision {revision}" if revision else "")
    missing = f"{path}: no such file or folder here, and if it is a model on the Hugging Face Hub, then"
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{missing} it can be found with huggingface_hub only: pip install huggingface_hub; {fetch}."
        ) from error
    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (OSError, ValueError) as error:  # what huggingface_hub raises where the cache lacks it
        raise CheckpointError(f"{missing} it is not in the cache; fetch it: {fetch}.") from error
