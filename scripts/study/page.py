"""Bring results into the repository and onto its pages.

    python scripts/study/page.py    copies .study/PLAN/results.jsonl to docs/study/PLAN.jsonl, renews tables and figure

docs/study.md and README.md are written by hand, except between `<!-- NAME -->` and `<!-- end -->`: a plan's name,
`savings` or `results`.
"""

import re
from pathlib import Path

import click
from figures import draw
from plan import PLANS
from results import losses, of_seeds, read, shares
from table import savings, show, tables

PAGE, README, RESULTS = Path("docs/study.md"), Path("README.md"), Path("docs/study")
BEST = "fit-refit"
PLACE = re.compile(r"(?<=<!-- )(?!end )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


@click.command(help=__doc__)
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), default=Path(".study"), show_default=True)
def main(work: Path) -> None:
    RESULTS.mkdir(exist_ok=True)
    for plan in (plan.stem for plan in PLANS.glob("*.toml") if plan.stem != "smoke"):
        found = work / plan / "results.jsonl"
        if found.exists():
            (RESULTS / f"{plan}.jsonl").write_bytes(found.read_bytes())
    draw(RESULTS)
    for page in (PAGE, README):
        page.write_text(renewed(page.read_text(), RESULTS))


def renewed(page: str, results: Path) -> str:
    """Return the page with its tables as the recorded results give them."""

    def fill(match: re.Match[str]) -> str:
        own = {"results": headline, "savings": lambda results: savings(read(results / "paper.jsonl"), BEST)}
        found = [own[match[1]](results)] if match[1] in own else tables(read(results / f"{match[1]}.jsonl"))
        return f"{match[1]}{match[2]}" + "\n\n".join(found) + "\n"

    return PLACE.sub(fill, page)


def headline(results: Path) -> str:
    """Return the table of what the default merge keeps, without any training."""
    rows = ["| | K/V heads | parent | mean | default | of mean's gap |", "|---|---|---|---|---|---|"]
    for name, plan, before, after in (
        ("4.2 M parameters, 3 parents", "merges", 8, 4), ("", "merges", 8, 2), ("", "merges", 8, 1),
        ("SmolLM2-135M", "smollm2", 3, 1),
    ):  # fmt: skip
        lines = [line for line in read(results / f"{plan}.jsonl") if line["groups"] == after and not line["alpha"]]
        mean, best = ([line for line in lines if line["arm"] == arm] for arm in ("mean", BEST))
        figures = (
            show(of_seeds(best, "parent_loss")),
            show(losses(mean)),
            show(losses(best)),
            show(shares(best, lines), "{:.1%}"),
        )
        rows.append(f"| {name} | {before} → {after} | {' | '.join(figures)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
