"""Compare the record of each plan with the plan: what a run today would not measure again, and what it would add."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from scripts.study.arms import all_cases, key, key_of_line, measures_of
from scripts.study.cells import markdown
from scripts.study.plan import PLANS, Plan, read_plan
from scripts.study.prepare import Workspace
from scripts.study.record import MEASURES
from scripts.study.results import Result, read_results

Key = tuple[object, ...]
DIFFERENCES = {
    0: "of other parents", 2: "of other arms", 3: "with other arguments", 1: "of other seeds",
    4: "with other numbers of K/V heads",
}  # fmt: skip
"""Place in a figure's key → what to call a figure that the other side has no such value of."""
HEADINGS = [
    "plan", "commits of the record (figures)", "figures in the record, not in the plan",
    "figures in the plan, not in the record",
]  # fmt: skip


def table(results: Path, plans: Path = PLANS) -> str:
    """Return a row for each plan that has a record. Raises PlanError if a plan is not valid."""
    rows = []
    for path in sorted(plans.glob("*.toml")):
        if lines := read_results(results / f"{path.stem}.jsonl"):
            rows.append([f"`{path.stem}`", commits(lines), *plan_differences(read_plan(path), lines)])
    return markdown(HEADINGS, rows)


def commits(lines: list[Result]) -> str:
    counts = Counter(line["commit"] for line in lines)
    return ", ".join(f"{commit} ({n})" for commit, n in counts.most_common())


def plan_differences(plan: Plan, lines: list[Result]) -> tuple[str, str]:
    """Return what the record has beyond the plan, and what it lacks of it."""
    cases = all_cases(Workspace(plan, work=Path(), texts=None))
    planned = {key(case, stage) for case in cases for stage in case.stages}
    recorded = {key_of_line(line): line for line in lines}
    beyond = count_differences(recorded.keys() - planned, planned)
    lacking = count_differences(planned - recorded.keys(), recorded)
    measures = measures_of(plan)
    for line in (recorded[figure] for figure in planned & recorded.keys()):
        unasked = (MEASURES - {"curve"} - measures) & line.keys()  # a curve is no measure that a plan names
        beyond.update(f"with {name} that the plan lacks" for name in unasked)
        lacking.update(f"without {name}" for name in measures - line.keys())
    return describe_counts(beyond, len(recorded)), describe_counts(lacking, len(planned))


def count_differences(figures: Iterable[Key], others: Iterable[Key]) -> Counter[str]:
    """Return how many figures differ from all others, by what differs."""
    return Counter(difference(figure, list(others)) for figure in figures)


def difference(figure: Key, others: list[Key]) -> str:
    """Return what the others have no such value of. Uptrainings and sizes of latent attention are compared last."""
    for place, name in DIFFERENCES.items():
        others = [other for other in others if other[place] == figure[place]]
        if not others:
            return name
    return "with other uptrainings"


def describe_counts(counts: Counter[str], total: int) -> str:
    named = ", ".join(f"{n} {name}" for name, n in sorted(counts.items(), key=lambda item: (-item[1], item[0])))
    return f"of {total:,}: {named}" if named else "–"
