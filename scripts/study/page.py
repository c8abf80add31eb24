"""Copy results into the repository, and update the tables and figures of its pages.

    python -m scripts.study.page    adds .study/PLAN/results.jsonl to docs/study/PLAN.jsonl, updates tables and figures

Pages are written by hand, except between `<!-- NAME -->` and `<!-- end -->`. NAME is a plan's name, or one in
`placeholders.PLACEHOLDERS`.
"""

import re
from pathlib import Path

import click

from scripts.study.figures import draw
from scripts.study.placeholders import DISTILLED, PARENTS, PLACEHOLDERS
from scripts.study.plan import PLANS, PlanError
from scripts.study.record import add_distilled, add_lines, record_parents
from scripts.study.results import read_results
from scripts.study.table import tables

RESULTS = Path("docs/study")
PAGES = (
    Path("README.md"),
    Path("docs/study.md"),
    *(RESULTS / f"{name}.md" for name in ("latent", "more", "reproduction", "small_models", "smollm2_qwen2", "tables")),
)
PLACEHOLDER = re.compile(r"(?<=<!-- )(?!end )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


@click.command(help=__doc__)
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), default=Path(".study"), show_default=True)
def main(work: Path) -> None:
    RESULTS.mkdir(exist_ok=True)
    for plan in (plan.stem for plan in PLANS.glob("*.toml") if plan.stem != "smoke"):
        results = work / plan / "results.jsonl"
        if results.exists():
            add_lines(results, RESULTS / f"{plan}.jsonl")
    record_parents(work, RESULTS / PARENTS)
    add_distilled(work / "distilled/results.jsonl", RESULTS / DISTILLED)
    draw(RESULTS)
    for page in PAGES:
        page.write_text(renewed(page.read_text(), RESULTS))


def renewed(page: str, results: Path) -> str:
    """Return the page with its tables rebuilt from the recorded results."""

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        text = (
            PLACEHOLDERS[name](results)
            if name in PLACEHOLDERS
            else "\n\n".join(tables(read_results(results / f"{name}.jsonl")))
        )
        if not text:
            raise PlanError(f"the placeholder {name} of a page names no table, or one without results.")
        return f"{name}{match[2]}{text}\n"

    return PLACEHOLDER.sub(fill, page)


if __name__ == "__main__":
    main()
