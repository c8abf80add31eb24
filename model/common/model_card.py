"""Write and change a model card's front matter: YAML between two lines `---` at the beginning of `README.md`."""

import re
from collections.abc import Sequence

from model.files.names import UPTRAINING_RECORD

UPTRAINING_DETAILS = f"Details are in `{UPTRAINING_RECORD}`."
"""A sentence of an export's card, which the card of a later conversion changes: the file is not copied then."""

_FRONT_MATTER = re.compile(rb"(?:\xef\xbb\xbf)?\s*---[ \t]*\r?\n(.*?^)---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
"""huggingface_hub, too, finds it after empty lines and a byte order mark."""
_EMPTY = re.compile(rb"(?:[ \t]*+(?:#.*|\{\}[ \t]*+)?\r?\n)*+")
"""Comments and `{}`, as in the template of huggingface_hub. (Possessive, so that the time is linear.)"""
_KEY = rb"[^\s#\[\]{}-][^\n]*:(?:[ \t]|\r?$)"
"""The beginning of an entry at the top level: no comment, no item of a list, no end of brackets, not indented."""


def is_utf8(card: bytes) -> bool:
    """Return whether a card can be followed by a section in UTF-8."""
    try:
        card.decode()
    except UnicodeDecodeError:
        return False
    return True


def front_matter(base_model: str | None, tags: Sequence[str]) -> bytes:
    """Return the front matter of a new card. `base_model`: its name on the hub, if it has one."""
    lines = [f"base_model: {base_model}"] if base_model else []
    return "\n".join(["---", *lines, "library_name: transformers", f"tags: [{', '.join(tags)}]", "---"]).encode()


def of_derived_model(card: bytes, base_model: str | None) -> tuple[bytes, bytes]:
    """Return front matter for a model derived from the card's, and the card's text.

    It names `base_model`, a name on the hub, as the base model; None leaves the entry as it is. The measurements of the
    base model (`model-index`) are left out. The front matter is empty if it would hold nothing.
    """
    front, text = (match[1], card[match.end() :]) if (match := _FRONT_MATTER.match(card)) else (b"", card)
    if _EMPTY.fullmatch(front):
        front = b""
    elif not re.search(b"^" + _KEY, front, re.MULTILINE):  # entries in brackets, or text between two rules
        front, text = b"", card
    front = _without(front, b"model-index")
    if base_model:
        front = f"base_model: {base_model}\n".encode() + _without(front, b"base_model")
    return b"---\n" + front + b"---\n\n" if front else b"", text.lstrip()


def _without(front: bytes, key: bytes) -> bytes:
    """Return front matter without a key at its top level, and without the lines of its value, up to the next key."""
    entry = rb"^[\"']?%b[\"']?[ \t]*:.*\n(?:(?!%b).*\n)*" % (re.escape(key), _KEY)
    return re.sub(entry, b"", front, flags=re.MULTILINE)
