"""Find the sources that `--data` names: texts (`model.texts.sources`), each with its weight in a mixture.

PATH or hub:NAME…     a text
…=WEIGHT              a text with its weight
"""

import os
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from model.common.errors import InputError
from model.texts.sources import TextFiles, file_identity, find_files
from uptrain.data.token_cache import is_prepared

_WEIGHT = re.compile(r"-?[\d.]{1,40}(?:e[+-]?\d{1,2})?|\d{1,40}/\d{1,40}", re.ASCII | re.IGNORECASE)
"""Weights, which are read exactly. Exponents are limited, since large ones would exhaust memory."""


@dataclass(frozen=True)
class Source:
    """Text that one `--data` names."""

    text: TextFiles
    weight: Fraction | None = None


def find_sources(data: tuple[str, ...], option: str = "--data") -> list[Source]:
    """Return the sources in the order given. Raises InputError for missing files and ambiguous names or weights."""
    split = [_split_weight(text, option) for text in data]
    for name, weight in split:
        if name and is_prepared(Path(name)):
            if any(Path(name).glob("values-*.bin")):
                raise InputError(f"{option} {name} holds a teacher's logits; give texts.")
            if len(data) == 1 and weight is not None:
                raise InputError(
                    f"{option} {name} is a token cache, which has no weight; give {option} {name} (`uptrain prepare`: "
                    "the texts that it was made of)."
                )
            raise InputError(
                f"{option} {name} is a token cache, which stands alone; give the texts that it was made of."
            )
    sources = [Source(find_files(name, option), weight) for name, weight in split]
    weighted = [source for source in sources if source.weight is not None]
    if weighted and len(weighted) < len(sources):
        bare = next(source.text.name for source in sources if source.weight is None)
        raise InputError(
            f"{option} {bare} has no weight, but others have; give all of them one (PATH=WEIGHT), or none."
        )
    _check_named_once(sources, option)
    return sources


def _check_named_once(sources: list[Source], option: str) -> None:
    """Raise InputError if two sources hold the same file, which would then be trained on twice as often."""
    named: dict[object, str] = {}
    for source in sources:
        for identity, file in {file_identity(file): file for file in source.text.files}.items():
            if identity in named:
                real = os.path.realpath(file)
                raise InputError(
                    f"{option} {named[identity]} and {option} {source.text.name} both hold {real}; name each file "
                    "once. Weights (PATH=WEIGHT) set each source's share of the tokens."
                )
            named[identity] = source.text.name


def _split_weight(text: str, option: str) -> tuple[str, Fraction | None]:
    """Split PATH=WEIGHT into path and weight; an existing path that contains `=` has no weight."""
    path, equals, digits = text.rpartition("=")
    if not equals or Path(text).exists():
        return text, None
    try:
        if not _WEIGHT.fullmatch(digits):
            raise ValueError("no number, or one of more digits than are read")
        weight = Fraction(digits)
    except (ValueError, ZeroDivisionError) as error:
        raise InputError(f"{option} {text}: no such file, and {digits!r} is no weight such as 0.7.") from error
    if weight <= 0:
        raise InputError(f"{option} {text}: a weight must be above 0; leave the source out instead.")
    return path, weight
