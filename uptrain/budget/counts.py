"""Parse and format counts of tokens and steps: `2T`, `50B`, `1.5M`, `4096`."""

import re
from fractions import Fraction

from model.common.checks import LARGEST_COUNT, short_repr
from model.common.errors import InputError

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
LONGEST = 40
"""Maximum number of digits and separators in a count."""
EXAMPLES = "2T, 50B, 1.5M, 512K or 4194304"


def parse_count(text: str) -> int:
    """Return a positive integer. K, M, B and T are powers of 1000; `_` and `,` may separate thousands.

    Raises InputError for anything else, and if the product with the unit is not an integer.
    """
    match = re.fullmatch(r"(\d[\d_,]*(?:\.\d+)?)([KMBT]?)", text.strip(), re.IGNORECASE | re.ASCII)
    if match is None:
        raise InputError(f"{short_repr(text)} is not a count; write for example {EXAMPLES}.")
    if len(match[1]) > LONGEST:
        raise InputError(f"{short_repr(text)} is too long for a count; write for example {EXAMPLES}.")
    count = Fraction(re.sub("[_,]", "", match[1])) * UNITS[match[2].upper()]
    if count.denominator != 1 or count < 1:
        raise InputError(f"{short_repr(text)} is not a whole number of at least 1; write for example {EXAMPLES}.")
    if count > LARGEST_COUNT:
        raise InputError(f"{short_repr(text)} is more than {LARGEST_COUNT}; write for example {EXAMPLES}.")
    return count.numerator


def format_count(count: float) -> str:
    """Return a count in at most four digits with its unit: `50 B`."""
    for unit in ("", " K", " M", " B"):
        if count < 999.95:
            return f"{count:.4g}{unit}"
        count /= 1000
    return f"{count:,.4g} T"
