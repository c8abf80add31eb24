"""Bring results into the repository and onto its pages.

    python scripts/study/page.py    copies .study/PLAN/results.jsonl to docs/study/PLAN.jsonl, renews tables and figure

docs/study.md is written by hand, except between `<!-- PLAN -->` and `<!-- end -->`; so is README.md, except between
`<!-- results -->` and `<!-- end -->`.
"""

import re
from pathlib import Path

import click
from figures import draw
from table import losses, read, shares, show, tables

PAGE, README, RESULTS = Path("docs/study.md"), Path("README.md"), Path("docs/study")
BEST = "fit-refit"
PLACE = re.compile(r"(?<=<!-- )(?!end )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


@click.command(help=__doc__)
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), default=Path(".study"), show_default=True)
def main(work: Path) -> None:
    RESULTS.mkdir(exist_ok=True)
    for name, _ in PLACE.findall(PAGE.read_text()):
        found = work / name / "results.jsonl"
        if found.exists():
            (RESULTS / f"{name}.jsonl").write_bytes(found.read_bytes())
    draw(RESULTS)
    for page in (PAGE, README):
        page.write_text(renewed(page.read_text(), RESULTS))


def renewed(page: str, results: Path) -> str:
    """Return the page with its tables as the recorded results give them."""

    def fill(match: re.Match[str]) -> str:
        found = [headline(results)] if match[1] == "results" else tables(read(results, match[1]))
        return f"{match[1]}{match[2]}" + "\n\n".join(found) + "\n"

    return PLACE.sub(fill, page)


def headline(results: Path) -> str:
    """Return the table of what the default merge keeps, without any training."""
    rows = ["| | K/V heads | parent | mean | default | of mean's gap |", "|---|---|---|---|---|---|"]
    for name, plan, before, after in (
        ("4.2 M parameters, 3 parents", "merges", 8, 4), ("", "merges", 8, 2), ("", "merges", 8, 1),
        ("SmolLM2-135M", "smollm2", 3, 1),
    ):  # fmt: skip
        lines = [line for line in read(results, plan) if line["groups"] == after and not line["alpha"]]
        mean, best = ([line for line in lines if line["arm"] == arm] for arm in ("mean", BEST))
        parent = {line["seed"]: line["parent_loss"] for line in best}
        figures = (show(parent), show(losses(mean)), show(losses(best)), show(shares(best, lines), "{:.1%}"))
        rows.append(f"| {name} | {before} → {after} | {' | '.join(figures)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
