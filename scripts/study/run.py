"""Run a study of merges: train parents, convert them by each arm, evaluate, uptrain and evaluate again.

Every figure is a line of WORK/PLAN/results.jsonl; `scripts/study/table.py` prints tables of them. Existing figures are
not measured again, so the same command resumes a study.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import click

from model.files.lock import FileLock, LockedError
from scripts.study.arms import missing_cases, work_on
from scripts.study.plan import find_plan, read_plan
from scripts.study.prepare import Step, Workspace, check_home, parent_steps, shared_steps
from scripts.study.programs import ProgramFailed

FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command(help=__doc__)
@click.option("--plan", "name", metavar="NAME|FILE", required=True, help="One of scripts/study/plans/, or a TOML file.")
@click.option("--texts", type=FOLDER, help="Folder of the novels, as .jsonl.xz.")
@click.option("--text-kinds", type=FOLDER, help="Texts of many kinds, of scripts/study/text_kinds.py.")
@click.option("--work", type=FOLDER, default=Path(".study"), show_default=True, help="Where all outputs go.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Side by side, a thread each.")
@click.option("--dry-run", is_flag=True, help="Print the remaining work, and do nothing.")
def main(name: str, texts: Path | None, text_kinds: Path | None, work: Path, jobs: int, dry_run: bool) -> None:
    workspace = Workspace(read_plan(find_plan(name)), work, texts, text_kinds)
    if dry_run:
        print_rest(workspace)
    else:
        run_study(workspace, jobs)


def print_rest(workspace: Workspace) -> None:
    for step in [*shared_steps(workspace), *parent_steps(workspace)]:
        if not step.done.exists():
            print(f"make {step.done}")
    for case in missing_cases(workspace):
        print(f"{case.name}: {len(case.stages)} to measure")


def run_study(workspace: Workspace, jobs: int) -> None:
    for folder in (workspace.home, workspace.results.parent):
        folder.mkdir(parents=True, exist_ok=True)
    # Without the lock, two runners would delete each other's models.
    with locked(workspace.results.parent / "lock", f"the study {workspace.plan.name} is running"):
        check_home(workspace)
        make_parents(workspace, jobs)
        side_by_side([partial(work_on, workspace, case, tell) for case in missing_cases(workspace)], jobs)


def make_parents(workspace: Workspace, jobs: int) -> None:
    """Build missing texts, token caches and parents. Plans for which nothing is missing do not wait for the lock."""
    if all(step.done.exists() for step in [*shared_steps(workspace), *parent_steps(workspace)]):
        return
    with locked(workspace.home / "making.lock", f"the parents of {workspace.plan.home} are being made"):
        for step in shared_steps(workspace):
            make(step)
        side_by_side([partial(make, step) for step in parent_steps(workspace)], jobs)


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    with ExitStack() as lock:
        try:
            lock.enter_context(FileLock(path))
        except LockedError as error:
            raise click.ClickException(f"{what} in {path.parent} already.") from error
        yield


def make(step: Step) -> None:
    if not step.done.exists():
        tell(f"making {step.done}")
        step.make()


def side_by_side(tasks: Sequence[Callable[[], None]], jobs: int) -> None:
    """Run all tasks in `jobs` threads. A failure is printed at once, and the other tasks continue."""
    n_failed = 0
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for future in as_completed([pool.submit(task) for task in tasks]):
                if isinstance(error := future.exception(), ProgramFailed):
                    tell(f"failed: {error}")
                    n_failed += 1
                else:
                    future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if n_failed:
        sys.exit(f"{n_failed} of {len(tasks)} failed; the same command tries them again.")


def tell(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
