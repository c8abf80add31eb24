"""Write the report of runs from their metrics: an HTML page and a PNG."""

import os
from collections.abc import Sequence
from pathlib import Path

from model.common.errors import InputError
from model.common.printable import printable
from model.files.write import replace_file
from uptrain.report.figures import draw_png, draw_svgs
from uptrain.report.history import History
from uptrain.report.html import GENERATOR, make_page

REPORT = "report.html"


def write_report(folders: Sequence[Path], out: Path | None) -> tuple[Path, Path]:
    """Write the page, and the picture beside it; return both paths. Several runs share the panels.

    Raises InputError if a folder is no run or has no metrics, or if `out` is missing or invalid.
    """
    page = _page_path(folders, out)
    picture = page.with_suffix(".png")
    if picture.exists() and not page.exists():
        raise InputError(f"{picture} exists, and is not of an earlier report; choose another --out.")
    histories = [History.read(folder) for folder in folders]
    for history in histories:
        if not history.steps and not history.evaluations:
            raise InputError(f"{history.folder} has no metrics yet; a report needs one step or evaluation.")
    names = [printable(folder.resolve().name) for folder in folders]
    if len(set(names)) < len(names):
        names = [printable(str(folder)) for folder in folders]
    png, html = draw_png(histories, names), make_page(histories, names, draw_svgs(histories, names)).encode()
    replace_file(page, html)  # first: where it is, the same command replaces the picture too
    replace_file(picture, png)
    return page, picture


def _page_path(folders: Sequence[Path], out: Path | None) -> Path:
    if out is None:
        if len(folders) > 1:
            raise InputError("a report of several runs needs --out FILE.html.")
        return _check_writable(folders[0] / REPORT)
    if out.suffix != ".html":
        raise InputError(f"--out {out}: the name must end in .html; the picture is written beside it.")
    if not out.parent.is_dir():
        raise InputError(f"there is no folder {out.parent} for {out.name}; create it first.")
    if os.path.lexists(out) and not _is_report(out):
        raise InputError(f"--out {out} exists, and is no report of this version; remove it, or choose another name.")
    return _check_writable(out)


def _is_report(page: Path) -> bool:
    """Return whether a file begins as the pages of `make_page` do."""
    if not page.is_file():
        return False
    with page.open("rb") as file:
        return GENERATOR.encode() in file.read(1 << 10)


def _check_writable(page: Path) -> Path:
    """Return the page's path. Raises InputError if its folder exists and cannot be written to."""
    if page.parent.is_dir() and not os.access(page.parent, os.W_OK):
        raise InputError(f"the folder {page.parent} is not writable; write the report elsewhere with --out FILE.html.")
    return page
