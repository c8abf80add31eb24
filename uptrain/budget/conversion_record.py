"""Read what a conversion recorded of a model: its sources and its method."""

from pathlib import Path
from typing import Any, NamedTuple

from model.common.errors import CheckpointError, InputError
from model.files.names import CONVERSION_RECORD, UPTRAINING_RECORD
from model.files.read import MAX_CONFIG_BYTES, parse_json, read_bytes_up_to


class _Conversion(NamedTuple):
    """One conversion that `groupwise.json` records."""

    source: str
    """Name of the source."""
    method: str | None
    """None if the conversion left the attention unchanged."""
    source_kv_heads: int | None
    """K/V heads of the source; None if the record lacks them."""


def source_names(folder: Path) -> tuple[str, ...]:
    """Return the names of the folder's sources, latest conversion first, from `groupwise.json`; else its own name."""
    from model.checkpoint.hub import origin_of  # imports numpy, which the command line does not need to start

    return tuple(each.source for each in _conversions(folder)) or (origin_of(folder)[0],)


def conversion_method(folder: Path) -> str | None:
    """Return how Groupwise changed the folder's attention: the method of a merge, or `latent`; None if it did not.

    The method of the last conversion that changed the attention: reading another format or repeating heads does not.
    """
    conversion = _last_conversion_of_attention(folder)
    return conversion and conversion.method


def was_uptrained(folder: Path) -> bool:
    """Return whether a model is the export of a run, so that it was trained since its conversion."""
    return (folder / UPTRAINING_RECORD).is_file()


def no_teacher_warning(model: Path) -> str | None:
    """Return a warning that a model whose attention Groupwise changed trains without its parent; None for any other."""
    conversion = _last_conversion_of_attention(model)
    if conversion is None:
        return None
    return (
        f"{model} was converted from {conversion.source}, and trains without it; distilling from that parent "
        "(--teacher FOLDER) usually ends with a lower loss."
    )


def teacher_warning(model: Path, teacher: Path) -> str | None:
    """Return a warning if the teacher has fewer K/V heads than the model's parent, or than an unconverted model.

    A teacher of another size than the model, such as a larger one, is not compared.
    """
    from model.geometry import read_sizes  # imports numpy, which the command line does not need to start
    from model.language_model import open_language_model

    conversion = _last_conversion_of_attention(model)
    of_teacher = None if conversion else _last_conversion_of_attention(teacher)
    if of_teacher is None and (conversion is None or conversion.source_kv_heads is None):
        return None
    try:
        with open_language_model(model) as student, open_language_model(teacher) as other:
            own, theirs = read_sizes(student), read_sizes(other)
    except CheckpointError:  # the heads of a teacher of another family may be unknown
        return None
    if (own.n_layers, own.hidden_size) != (theirs.n_layers, theirs.hidden_size):
        return None
    if of_teacher is not None:
        if own.latent or (theirs.latent is None and theirs.n_kv_heads >= own.n_kv_heads):
            return None
        return (
            f"the teacher {teacher} was converted from {of_teacher.source}, and {model} has no record of a conversion; "
            "usually the converted model is trained, and its parent is the teacher. Are the two swapped?"
        )
    assert conversion is not None
    assert conversion.source_kv_heads is not None
    if theirs.latent is None and theirs.n_kv_heads >= conversion.source_kv_heads:
        return None
    found = "latent attention" if theirs.latent else f"{theirs.n_kv_heads} K/V heads"
    return (
        f"the teacher {teacher} has {found}, but the parent of {model} had {conversion.source_kv_heads} K/V heads: the "
        "teacher was converted too. The parent is usually the better teacher."
    )


def _last_conversion_of_attention(folder: Path) -> _Conversion | None:
    """Return the last conversion that changed the attention; None if there was none."""
    return next((conversion for conversion in _conversions(folder) if conversion.method), None)


def _conversions(folder: Path) -> list[_Conversion]:
    """Return a folder's conversions, the last one first. Raises InputError if its record is damaged."""
    path = folder / CONVERSION_RECORD
    if not path.is_file():
        return []
    content = read_bytes_up_to(path, MAX_CONFIG_BYTES)
    try:
        record: Any = parse_json(content)
        conversions = []
        while record is not None:
            source, method = record["source"], str(record.get("method"))
            # A record without the numbers of heads counts as that of a merge.
            changed = method == "latent" or record.get("groups", 0) < source.get("n_kv_heads", 1)
            heads = source.get("n_kv_heads")
            conversions.append(_Conversion(str(source["name"]), method if changed else None, heads and int(heads)))
            record = source.get("groupwise")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise InputError(f"{path} is damaged: {error!r}; convert the model again, or remove the file.") from error
    return conversions
