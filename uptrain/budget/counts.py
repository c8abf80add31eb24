"""Format counts of tokens and steps: `50 B`."""


def format_count(count: float) -> str:
    """Return a count in at most four digits with its unit: `50 B`."""
    for unit in ("", " K", " M", " B"):
        if count < 999.95:
            return f"{count:.4g}{unit}"
        count /= 1000
    return f"{count:,.4g} T"
