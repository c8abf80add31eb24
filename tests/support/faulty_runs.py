"""Runs in which something goes wrong, beside the same run undisturbed."""

from collections.abc import Sequence
from pathlib import Path

import real_runs
from commands import Result
from fault_injection import Faults, run

SAVE, ROTATION = "save 8: ", "rotate 8: "
"""What is called out during the save that faults strike, and when the checkpoint before, of step 4, goes."""
UNFINISHED, PUBLISHED = "before rename .unfinished-step-00000008", "after rename .unfinished-step-00000008"
MUST = (
    "before mkdir .unfinished-step-00000008", "before save_tensors", "before fsync __0_0.distcp", "after save_tensors",
    "before checksum .metadata", "half of state.json written", "before fsync state.json",
    "half of manifest.json written", "before fsync manifest.json", "before fsync .unfinished-step-00000008",
    UNFINISHED, PUBLISHED, "before fsync checkpoints", "after save",
)  # fmt: skip
ROTATED = (
    "before rename step-00000004", "before rmtree .removed-step-00000004", "before unlink manifest.json",
    "after rmtree .removed-step-00000004",
)  # fmt: skip
"""Moments that the trace must contain. They show that the faults still strike the code that is tested."""


class Runs:
    """What runs are made of, and what they come to if nothing goes wrong."""

    def __init__(self, folder: Path) -> None:
        self.inputs = real_runs.make_inputs(folder)
        self._folder = folder
        self._whole: dict[tuple[int, bool], Path] = {}

    def arguments(self, out: Path, *more: object) -> list[str]:
        """Return the arguments of a run of 12 steps that saves after 4, 8, 10 (before the decay) and 12."""
        options = ("--save-every-steps", 4, "--keep-last", 1, "--eval-data", self.inputs["held_out"], "--eval-every", 7)
        return real_runs.arguments(self.inputs, out, *options, *more)

    def expected(self, processes: int = 1, sharded: bool = False) -> Path:
        """Return the run undisturbed."""
        key = processes, sharded
        if key not in self._whole:
            folder = self._folder / f"{processes}{'-sharded' if sharded else ''}"
            folder.mkdir()
            succeed(self.arguments(folder / "run"), folder, processes, Faults(trace=folder / "trace"), sharded)
            self._whole[key] = folder / "run"
        return self._whole[key]

    def moments(self, processes: int = 1, sharded: bool = False) -> list[str]:
        """Return all that the main process calls out from the beginning of the save until after the next step."""
        trace = self.expected(processes, sharded).with_name("trace")
        traced = [line for line in trace.read_text().splitlines() if line.startswith((SAVE, ROTATION))]
        assert {SAVE + name for name in MUST} | {ROTATION + name for name in ROTATED} <= set(traced)
        return [*traced, "before write 9", "after write 9"]


def succeed(
    arguments: Sequence[object], folder: Path, processes: int = 1, faults: Faults | None = None, sharded: bool = False
) -> list[Result]:
    results = run(*arguments, folder=folder, processes=processes, faults=faults, sharded=sharded)
    assert [r.code for r in results] == [0] * processes, results
    return results


def error_of(results: Sequence[Result], code: int) -> str:
    """Check for this exit code of all processes, and one clear line from all of them together; return it."""
    assert [r.code for r in results] == [code] * len(results), results
    return only_error(results)


def only_error(results: Sequence[Result]) -> str:
    lines = [
        line
        for r in results
        for line in r.err.splitlines()
        if not line.startswith(("READY", "step", "Skipped", "Training", "Warning"))
    ]
    assert len(lines) == 1, results
    assert lines[0].startswith("Error: "), lines
    return lines[0].removeprefix("Error: ")
