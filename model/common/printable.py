"""Escape text from untrusted files for a terminal, JSON or Markdown.

A name may contain escape sequences, which a terminal executes, or marks that reverse the direction of text.
"""

import json
import re

# C0 and C1 controls without tab and newline, DEL; marks and overrides of direction, line separators, invisible
# operators and byte order marks; lone surrogates; tags. Joiners (U+200C, U+200D) stay: some scripts need them.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
_MARKDOWN = re.compile(r"[\\`*\[\]<>|~&]")


def printable(text: str) -> str:
    r"""Return the text with control characters and the like escaped, such as `\x1b`. Tabs and newlines stay."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def one_line(text: str) -> str:
    """Return the text on one line, printable."""
    return printable(" ".join(text.split()))


def first_sentence(text: str) -> str:
    """Return the text up to its first full stop, printable. One after a number, as in "256. GiB", ends no sentence."""
    return re.split(r"(?<!\d)\. ", one_line(text), maxsplit=1)[0]


def printable_json(text: str) -> str:
    """Return equivalent JSON with control characters in strings written as JSON escapes."""
    return _UNPRINTABLE.sub(lambda match: json.dumps(match[0])[1:-1], text)


def markdown(text: str) -> str:
    """Return Markdown that shows the text literally on one line, also in a table, without HTML and links."""
    return _MARKDOWN.sub(r"\\\g<0>", one_line(text))


def markdown_code(text: str) -> str:
    """Return the text as a Markdown code span, also in a table. The only escape in a code span is that of the bar."""
    return f"`{one_line(text).replace('`', chr(39)).replace('|', chr(92) + '|')}`"
