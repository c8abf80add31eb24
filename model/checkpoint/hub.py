"""Find a model of the Hugging Face Hub in the local cache by its name, `org/name[@revision]`. Nothing is downloaded."""

import re
from pathlib import Path

from model.common.errors import CheckpointError
from model.files.paths import similar_path

# The hub's rule for names (huggingface_hub, `validate_repo_id`); a revision is a branch, a tag or a commit.
NAME = re.compile(r"(?P<model>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w./-]*))?", re.ASCII)

ADDRESS = re.compile(
    r"(?:https?:/+(?:www\.)?(?:huggingface|hf)\.co/|hf:/+)(?!datasets/|spaces/)(?P<model>\w[\w.-]*/\w[\w.-]*)", re.ASCII
)
"""The beginning of a model's address."""
SNAPSHOT = re.compile(r"/models--([\w.-]+)--([\w.-]+)/snapshots/([0-9a-f]{40})$")
"""The path of a model in the cache."""
BLOB = re.compile(r"/models--[\w.-]+--[\w.-]+/blobs/([0-9a-f]{64})$")
"""The path of a large file's content in the cache, which names it by its SHA-256 (huggingface_hub's guide "Manage
huggingface_hub cache-system")."""
Origin = tuple[str, str | None]
"""A model's name and its revision."""


def origin_of(path: Path) -> Origin:
    """Return a checkpoint's origin: for a cached snapshot the hub's name and commit, else its own name and None."""
    is_file = path.is_file()
    folder = (path.parent if is_file else path).resolve()  # not a file's, which the cache links to its content
    if cached := SNAPSHOT.search(folder.as_posix()):
        return f"{cached[1]}/{cached[2]}", cached[3]
    return path.name if is_file else folder.name, None


def name_of(path: Path) -> str:
    """Return a folder's name, or the name of a model in the hub's cache; "" for no folder."""
    name, revision = origin_of(path) if path.name else ("", None)
    return name if revision else path.name


def sha256_in_cache(path: Path) -> str | None:
    """Return the SHA-256 by which the hub's cache names a file's content; None for a file that is not in a cache.

    Small files have shorter names there. huggingface_hub compares the size of a download with the hub's, not its hash.
    """
    blob = BLOB.search(path.resolve().as_posix())
    return blob[1] if blob else None


def find_in_cache(path: Path) -> Path | None:
    """Return the cached folder of the model that `path` names, or None if `path` cannot be a model's name.

    Raises CheckpointError for a model's address, and, with the command that fetches the model, if it is not in the
    cache. If there is a path of a similar name, the message names that first.
    """
    if address := ADDRESS.match(str(path)):
        given = re.sub("^(https?|hf):/+", r"\1://", str(path))  # a path has one slash of each pair
        raise CheckpointError(
            f"{given} is an address; give the model's name, as {address['model']}, once it is in the cache: "
            f"hf download {address['model']}."
        )
    match = NAME.fullmatch(str(path))
    if not match:
        return None
    try:
        return _find_in_cache(path, *match.group("model", "revision"))
    except CheckpointError as error:
        if similar := similar_path(path):
            raise CheckpointError(
                f"{path}: no such file or folder; did you mean {similar}? If it is a model on the Hugging Face Hub, "
                f"fetch it: hf download {match['model']}."
            ) from error
        raise


def _find_in_cache(path: Path, model: str, revision: str | None) -> Path:
    fetch = f"hf download {model}" + (f" --revision {revision}" if revision else "")
    missing = f"{path}: no such file or folder here, and if it is a model on the Hugging Face Hub, then"
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{missing} huggingface_hub is needed to find it: pip install huggingface_hub; {fetch}."
        ) from error
    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (OSError, ValueError) as error:  # raised by huggingface_hub if the cache lacks the model
        raise CheckpointError(f"{missing} it is not in the cache; fetch it: {fetch}.") from error
