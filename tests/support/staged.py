"""Commands that write OUT by way of a staging folder."""

from pathlib import Path

MEAN = ("--method", "mean", "--groups", 2)


def left_behind(folder: Path) -> list[str]:
    """Return the names of hidden files and folders."""
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]
