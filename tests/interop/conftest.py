"""Print the measured differences of all interop tests after the run."""

import pytest


@pytest.fixture
def figure(record_property):
    """Return a function that records a measured difference for that table."""

    def note(what: str, value: float) -> None:
        record_property("figure", (what, value))

    return note


def pytest_terminal_summary(terminalreporter) -> None:
    largest: dict[str, float] = {}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "figure":
                largest[value[0]] = max(value[1], largest.get(value[0], 0.0))
    if largest:
        terminalreporter.section("largest differences")
        for what, value in sorted(largest.items()):
            terminalreporter.line(f"{value:8.1e}  {what}")
