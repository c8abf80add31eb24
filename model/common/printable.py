"""Show text that comes from files of others: on a terminal, in JSON, in Markdown.

A name may hold escape sequences, which a terminal obeys, or marks that reverse what follows them.
"""

import re

# C0 and C1 controls without tab and newline, DEL, line separators, overrides of the direction, halves of pairs.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_MARKDOWN = re.compile(r"[\\`*\[\]<>|~&]")


def printable(text: str) -> str:
    r"""Return the text with control characters and the like spelt out, such as `\x1b`. Tabs and newlines stay."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """Return the text on one line, printable."""
    return printable(" ".join(text.split()))


def printable_json(text: str) -> str:
    """Return the same JSON without characters that a terminal would obey: in strings they are written as escapes."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def markdown(text: str) -> str:
    """Return Markdown that shows the text as it stands, on one line, also in a table. It makes no HTML and no links."""
    return _MARKDOWN.sub(r"\\\g<0>", one_line(text))


def markdown_code(text: str) -> str:
    """Return the text as code in Markdown, also in a table. A code span knows no escapes but that of its bar."""
    return f"`{one_line(text).replace('`', chr(39)).replace('|', chr(92) + '|')}`"
