"""A request to stop is met by all processes within a step, with a checkpoint; a second one at once, without."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import real_runs
from fault_injection import Fault, Faults, launch, run, start
from faulty_runs import SAVE, succeed
from real_runs import assert_each_is_whole, assert_same_run, checkpoints, state, status
from waiting import wait_until

from uptrain.distributed.signals import STOPPING

ROOT = Path(__file__).parents[2]
PHASES = {
    "before the first step": ("after mkdir checkpoints", 0),
    "in the first evaluation": ("before micro_batches of evaluation", 0),
    "in the first step": ("before _backward 0", 1),
    "in the middle": ("before _backward 5", 6),
    "in an evaluation": ("after write 7", 7),
    "in a save": (SAVE + "before fsync __0_0.distcp", 9),
    "in the last step": ("before _backward 11", 12),
    "in the last save": ("save 12: before fsync __0_0.distcp", 12),
}
"""When a signal comes → the moment, and the step after which the run then stands."""
OF_MAIN = ("before the first step", "in an evaluation")
"""The moments that only the main process calls out."""


def assert_saved_at(out, step, reason):
    assert status(out) == ("preempted", step)
    assert state(out)["reason"] == reason
    assert checkpoints(out)[-1] == f"step-{step:08d}"
    assert len(real_runs.steps(out)) == step
    assert_each_is_whole(out)


def stop_and_go_on(runs, folder, processes, fault, step):
    """Let a signal come, see the run stop after a step, and resume it."""
    out = folder / "run"
    results = succeed(runs.arguments(out), folder, processes, Faults([fault]))
    assert "READY: started at step 0" in results[0].err
    assert f"Saved and stopped. Resume it with: uptrain resume {out}" in results[0].out
    # The first process says it if it is asked itself; the others never do.
    assert [result.err.splitlines().count(STOPPING) for result in results] == [int(fault.rank == 0), 0][:processes]
    assert_saved_at(out, step, fault.action.split()[0])
    succeed(("resume", out), folder, processes)
    assert status(out) == ("finished", 12)
    assert_same_run(out, runs.expected(processes))


@pytest.mark.parametrize(
    ("phase", "name"),
    [
        ("in the first evaluation", "SIGINT"),
        ("in the first step", "SIGTERM"),
        ("in a save", "SIGUSR1"),
        *(
            pytest.param(phase, name, marks=pytest.mark.slow)
            for phase in PHASES
            for name in ("SIGTERM", "SIGINT", "SIGUSR1")
        ),
    ],
)
def test_one_process(runs, tmp_path, phase, name):
    moment, step = PHASES[phase]
    stop_and_go_on(runs, tmp_path, 1, Fault(name, re.escape(moment)), step)


@pytest.mark.parametrize(
    ("phase", "rank"),
    [
        ("in the middle", 1),
        *(pytest.param(phase, 0, marks=pytest.mark.slow) for phase in PHASES),
        *(pytest.param(phase, 1, marks=pytest.mark.slow) for phase in PHASES if phase not in OF_MAIN),
    ],
)
def test_one_of_two_processes(runs, tmp_path, phase, rank):
    moment, step = PHASES[phase]
    moment = moment.replace("__0_0", f"__{rank}_0")
    stop_and_go_on(runs, tmp_path, 2, Fault("SIGTERM", re.escape(moment), rank), step)


def test_two_at_once_are_one_request(runs, tmp_path):
    """A launcher passes on the Ctrl-C that the terminal has sent to all already."""
    stop_and_go_on(runs, tmp_path, 1, Fault("SIGINT SIGTERM", "before _backward 5"), 6)


def test_from_outside_once_ready(runs, tmp_path, end_afterwards):
    """Sent as people send them, to a run that does not end by itself."""
    out, err = tmp_path / "run", tmp_path / "output-0.err"
    (process,) = start(*real_runs.arguments(runs.inputs, out, steps=10**6), folder=tmp_path)
    end_afterwards(process)
    wait_until(lambda: "READY: started" in shown_by(process, err))
    process.terminate()
    process.join()
    assert process.exitcode == 0
    assert_saved_at(out, status(out)[1], "SIGTERM")


def shown_by(process, file):
    """Return what a process has written to a file; it may not have ended."""
    assert is_running(process)
    return file.read_text() if file.exists() else ""


def is_running(process):
    return process.poll() is None if isinstance(process, subprocess.Popen) else process.is_alive()


def goes_on(process, out):
    """Wait until a run has logged ten more lines."""

    def n_lines():
        assert is_running(process)
        return (out / "metrics.jsonl").read_bytes().count(b"\n")

    before = n_lines()
    wait_until(lambda: n_lines() > before + 10)


@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal(runs, tmp_path, end_afterwards, ignored):
    """The run saves and stops, though it can no longer print; under `nohup`, which ignores the signal, it goes on."""
    out = tmp_path / "run"
    ours, theirs = os.openpty()

    def open_terminal():
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

    process = subprocess.Popen(
        [sys.executable, "-m", "uptrain", *real_runs.arguments(runs.inputs, out, steps=10**6)],
        env={**real_runs.environment(), "TERM": "xterm"}, stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True, preexec_fn=open_terminal,
    )  # fmt: skip
    end_afterwards(process)
    os.close(theirs)
    shown = b""
    while b"READY: started" not in shown:
        shown += os.read(ours, 4096)
    os.close(ours)
    if ignored:
        goes_on(process, out)
        process.terminate()
    # Only what the run prints at its end is lost.
    assert process.wait() in (0, 1)
    assert_saved_at(out, status(out)[1], "SIGTERM" if ignored else "SIGHUP")


@pytest.mark.parametrize("names", ["SIGTERM later SIGINT", pytest.param("SIGINT later SIGINT", marks=pytest.mark.slow)])
def test_a_second_one_ends_at_once(runs, tmp_path, names):
    out, faults = tmp_path / "run", Faults([Fault(names, "before _backward 5")])
    (result,) = run(*runs.arguments(out), folder=tmp_path, faults=faults)
    assert result.code == 130
    assert result.err.splitlines()[-2:] == [STOPPING, "stopped by a second signal, without saving."]
    assert checkpoints(out) == ["step-00000004"]
    succeed(("resume", out), tmp_path)
    assert_same_run(out, runs.expected())


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_second_one_while_saving(runs, tmp_path, processes):
    """What is half written then is no checkpoint, and the next start deletes it."""
    out = tmp_path / "run"
    strikes = [Fault("SIGTERM", "before _backward 5"), Fault("later SIGTERM", "save 6: before fsync __0_0.distcp")]
    results = run(*runs.arguments(out), folder=tmp_path, processes=processes, faults=Faults(strikes))
    assert [r.code for r in results] == [130, 1][:processes]
    assert checkpoints(out) == [".unfinished-step-00000006", "step-00000004"]
    succeed(("resume", out), tmp_path, processes)
    assert_same_run(out, runs.expected(processes))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("program", ["torchrun", "accelerate"])
def test_the_launcher(runs, tmp_path, program, name):
    """It passes SIGTERM on to all processes, whichever of the two it was sent, and waits until they have saved."""
    out, faults = tmp_path / "run", Faults([Fault(f"launcher {name}", "before _backward 5")])
    started = time.monotonic()
    result = launch(program, *runs.arguments(out), folder=tmp_path, faults=faults)
    print(f"{program}, {name}: code {result.returncode} after {time.monotonic() - started:.1f} s, starting included")
    assert_saved_at(out, 6, state(out)["reason"])
    assert state(out)["reason"] in (name, "SIGTERM"), result
    succeed(("resume", out), tmp_path, 2)
    assert_same_run(out, runs.expected(2))


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [False, True])
def test_the_scripts_when_the_terminal_is_closed(runs, tmp_path, end_afterwards, ignored):
    """A launcher passes SIGHUP on, but not if `nohup` has made the script ignore it."""
    out, err = tmp_path / "run", tmp_path / "err"
    with err.open("wb") as errors:
        process = subprocess.Popen(
            ["sh", "scripts/uptrain_multi_cpu.sh", *real_runs.arguments(runs.inputs, out, steps=10**6)],
            cwd=ROOT, env={**real_runs.environment(), "PROCESSES": "2"}, stderr=errors, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL),
        )  # fmt: skip
        end_afterwards(process)
        wait_until(lambda: "READY: started" in shown_by(process, err))
        os.killpg(process.pid, signal.SIGHUP)
        if ignored:
            goes_on(process, out)
            process.terminate()
        process.wait()
    assert_saved_at(out, status(out)[1], "SIGTERM" if ignored else "SIGHUP")


@pytest.mark.slow
@pytest.mark.parametrize("program", ["torchrun", "accelerate"])
def test_a_run_by_a_launcher(runs, tmp_path, program):
    out = tmp_path / "run"
    result = launch(program, *runs.arguments(out), folder=tmp_path, faults=Faults())
    assert result.returncode == 0, result
    assert_same_run(out, runs.expected(2))


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_between_two_micro_batches(runs, tmp_path, processes):
    """A launcher does not wait for the end of a long step. The step is made again."""
    whole, out = tmp_path / "whole", tmp_path / "run"
    options = ("--micro-batch", 1, "--global-batch-tokens", 16 * 32 * processes, "--save-every-steps", 4)
    succeed(real_runs.arguments(runs.inputs, whole, *options, steps=8), tmp_path, processes)
    faults = Faults([Fault("SIGTERM", "before _backward 5", processes - 1)])
    succeed(real_runs.arguments(runs.inputs, out, *options, steps=8), tmp_path, processes, faults)
    assert_saved_at(out, 5, "SIGTERM")
    succeed(("resume", out), tmp_path, processes)
    assert_same_run(out, whole)


@pytest.mark.parametrize("evaluated", [False, True])
def test_no_minutes_are_one_step(runs, tmp_path, evaluated):
    """Even if each step is followed by an evaluation, which takes longer."""
    out = tmp_path / "run"
    options = ("--save-every-steps", 4, "--max-minutes", 0)
    if evaluated:
        options = (*options, "--eval-data", runs.inputs["held_out"], "--eval-every", 1)
    succeed(real_runs.arguments(runs.inputs, out, *options), tmp_path)
    assert_saved_at(out, 1, "max-minutes")
    succeed(("resume", out, "--max-minutes", 0), tmp_path)
    assert_saved_at(out, 2, "max-minutes")
    succeed(("resume", out), tmp_path)
    assert real_runs.steps(out, "loss", "grad_norm") == real_runs.steps(runs.expected(), "loss", "grad_norm")
