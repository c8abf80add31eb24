"""Three works in the public domain from the test data of brotli, less what is not their authors'."""

import re
from pathlib import Path

DEEP = 6
"""Spaces before a line of verse or of a heading, at least."""
FILES = ("alice29.txt", "asyoulik.txt", "plrabn12.txt")


def alice(folder: Path) -> str:
    """Return Carroll's tale (1865), a paragraph a line."""
    content = (folder / "alice29.txt").read_text(encoding="ascii").split("\x1a")[0]
    body = content[content.index("CHAPTER I\n") :].replace("`", "‘").replace("'", "’")
    blocks = [_unwrapped(block) for block in re.split(r"\n\s*\n", body)]
    return "\n\n".join(block for block in blocks if block.strip("* \n") not in ("", "THE END"))


def as_you_like_it(folder: Path) -> str:
    """Return Shakespeare's play from its first act on, its lines as they are, a speech a paragraph."""
    content = (folder / "asyoulik.txt").read_text(encoding="ascii")
    body = content[content.index("ACT I\n") :].replace("AS YOU LIKE IT\n", "")
    lines = [re.sub(r"^([A-Z][A-Za-z ]+)\t", r"\1: ", line).replace("\t", " ").strip() for line in body.split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def paradise_lost(folder: Path) -> str:
    """Return Milton's poem without what was put before it."""
    content = (folder / "plrabn12.txt").read_text(encoding="ascii").split("\x1a")[0]
    body = content[content.index("Book I \n") :].replace("[The End]", "")
    return "\n".join(line.rstrip() for line in body.split("\n"))


def _unwrapped(block: str) -> str:
    lines = block.strip("\n").split("\n")
    if all(len(line) - len(line.lstrip()) >= DEEP for line in lines):
        return "\n".join(line.strip() for line in lines)
    joined = " ".join(line.strip() for line in lines)
    return re.sub(r" {2,}", " ", re.sub(r"(?<=\w)- ", "-", joined))
