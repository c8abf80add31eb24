"""Bring results into the repository and onto the page.

    python scripts/study/page.py            copies .study/PLAN/results.jsonl to docs/study/PLAN.jsonl, renews the tables

docs/study.md is written by hand, except between `<!-- PLAN -->` and `<!-- end -->`.
"""

import json
import re
from pathlib import Path

import click
from table import tables

PAGE, RESULTS = Path("docs/study.md"), Path("docs/study")
PLACE = re.compile(r"(?<=<!-- )(?!end )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


@click.command(help=__doc__)
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), default=Path(".study"), show_default=True)
def main(work: Path) -> None:
    RESULTS.mkdir(exist_ok=True)
    for name, _ in PLACE.findall(PAGE.read_text()):
        found = work / name / "results.jsonl"
        if found.exists():
            (RESULTS / f"{name}.jsonl").write_bytes(found.read_bytes())
    PAGE.write_text(renewed(PAGE.read_text(), RESULTS))


def renewed(page: str, results: Path) -> str:
    """Return the page with its tables as the recorded results give them."""

    def fill(match: re.Match[str]) -> str:
        lines = [json.loads(line) for line in (results / f"{match[1]}.jsonl").read_text().splitlines()]
        return f"{match[1]}{match[2]}" + "\n\n".join(tables(lines)) + "\n"

    return PLACE.sub(fill, page)


if __name__ == "__main__":
    main()
