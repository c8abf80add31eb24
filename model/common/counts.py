"""Parse and format counts: `2T`, `50B`, `1.5M`, `4096` tokens or steps; `1 file`, `2 files`."""

import re
from fractions import Fraction

from model.common.checks import MAX_COUNT, short_repr
from model.common.errors import InputError

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
MAX_COUNT_LENGTH = 40
"""Maximum number of digits and separators in a count."""
ADVICE = "give a whole number such as 4096, or 4K, 1.5M, 50B, 2T"


def parse_count(text: str, least: int = 1, most: int = MAX_COUNT) -> int:
    """Return an integer of the range. K, M, B and T are powers of 1000; `_` and `,` may separate thousands.

    Raises InputError for anything else, and if the product with the unit is not an integer.
    """
    match = re.fullmatch(r"(\d[\d_,]*(?:\.\d+)?)([KMBT]?)", text.strip(), re.IGNORECASE | re.ASCII)
    if match is None:
        raise InputError(f"{short_repr(text)} is not a count; {ADVICE}.")
    if len(match[1]) > MAX_COUNT_LENGTH:
        raise InputError(f"{short_repr(text)} is too long for a count; {ADVICE}.")
    count = Fraction(re.sub("[_,]", "", match[1])) * UNITS[match[2].upper()]
    if count.denominator != 1 or count < least:
        raise InputError(f"{short_repr(text)} is not a whole number of at least {least}; {ADVICE}.")
    if count > most:
        raise InputError(f"{short_repr(text)} is more than {most:,}; {ADVICE}.")
    return count.numerator


def counted(n: int, noun: str) -> str:
    """Return a number with its noun: `1 file`, `1,200 files`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def format_count(count: float) -> str:
    """Return a count in at most four digits with its unit: `50 B`."""
    for unit in ("", " K", " M", " B"):
        if count < 999.95:
            return f"{count:.4g}{unit}"
        count /= 1000
    return f"{count:,.4g} T"
