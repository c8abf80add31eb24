"""A run that is killed at any moment resumes from its last complete checkpoint as if it had not stopped."""

import random
import re
import shutil
import signal
import time

import pytest
import real_runs
from commands import left_behind
from fault_injection import Fault, Faults, launch, run, start
from faulty_runs import PUBLISHED, ROTATION, SAVE, UNFINISHED, only_error, succeed
from real_runs import assert_each_is_whole, assert_same_run, checkpoints, events, records, status


class TestAtAMomentOfASave:
    """SIGKILL leaves complete checkpoints alone, from which the run ends as it would have."""

    def strike(self, runs, folder, moment, action, layout):
        """Kill a run at a moment, and resume it; return from which step. `layout`: processes, and whether sharded."""
        out = folder / "run"
        shutil.rmtree(out, ignore_errors=True)
        faults = Faults([Fault(action, re.escape(moment))])
        started = time.monotonic()
        results = run(*runs.arguments(out), folder=folder, processes=layout[0], sharded=layout[1], faults=faults)
        assert time.monotonic() - started < 60
        codes = [r.code for r in results]
        assert sorted(codes) == [-signal.SIGKILL, 1][: len(codes)], (moment, results)
        if codes[0] == 1:
            assert re.match(r"after step [89], another process cannot be reached; ", only_error(results)), results
            assert status(out)[0] == "failed"
        assert_each_is_whole(out)
        assert max(name for name in checkpoints(out) if name.startswith("step-")) <= "step-00000008"
        succeed(("resume", out), folder, layout[0], sharded=layout[1])
        assert_same_run(out, runs.expected(*layout))
        assert checkpoints(out) == checkpoints(runs.expected(*layout))
        return events(out, "resumed")[0]["step"]

    def strike_at_all(self, runs, folder, moments, action, layout):
        steps = [self.strike(runs, folder, moment, action, layout) for moment in moments]
        print(f"{len(moments)} moments, {layout[0]} processes, sharded: {layout[1]}, {action}: resumed at {steps}")
        assert set(steps) == {4, 8}
        assert steps == sorted(steps)
        if action == "kill":
            assert steps.index(8) == moments.index(SAVE + PUBLISHED)

    def test_one_process(self, runs, tmp_path):
        moments = [SAVE + "half of manifest.json written", SAVE + PUBLISHED]
        moments.append(ROTATION + "before rmtree .removed-step-00000004")
        self.strike_at_all(runs, tmp_path, moments, "kill", (1, False))

    @pytest.mark.parametrize("action", [pytest.param("kill", marks=pytest.mark.slow), "kill 1"])
    def test_one_of_two_processes(self, runs, tmp_path, action):
        moment = SAVE + "before fsync __0_0.distcp"
        assert self.strike(runs, tmp_path, moment, action, (2, False)) == 4

    @pytest.mark.slow
    @pytest.mark.timeout(1800)
    @pytest.mark.parametrize(
        ("layout", "action"),
        [((1, False), "kill")] + [((2, sharded), action) for sharded in (False, True) for action in ("kill", "kill 1")],
        ids=["one-process", "DDP-kill", "DDP-kill-1", "FSDP2-kill", "FSDP2-kill-1"],
    )
    def test_every_moment(self, runs, tmp_path, layout, action):
        """`kill 1` is the other process, killed when the main one comes to the moment."""
        moments = runs.moments(*layout)
        assert len(moments) >= 16
        self.strike_at_all(runs, tmp_path, moments, action, layout)

    @pytest.mark.slow
    def test_while_a_damaged_one_is_removed(self, runs, tmp_path):
        """The checkpoint before, which the run resumes at, stands whatever is left of the damaged one."""
        removed = "rmtree .removed-step-00000008"
        moments = ["before rename step-00000008", f"before {removed}", "before unlink state.json", f"after {removed}"]
        for moment in moments:
            out = tmp_path / moment.replace(" ", "-")
            arguments = runs.arguments(out, "--keep-last", 2)
            run(*arguments, folder=tmp_path, faults=Faults([Fault("kill", "before write 9")]))
            (out / "checkpoints/step-00000008/state.json").write_bytes(b"")
            (result,) = run("resume", out, folder=tmp_path, faults=Faults([Fault("kill", "rotate 4: " + moment)]))
            assert result.code == -signal.SIGKILL, moment
            succeed(("resume", out), tmp_path)
            assert_same_run(out, runs.expected())


def test_while_a_line_of_metrics_is_written(runs, tmp_path):
    out = tmp_path / "run"
    (result,) = run(*runs.arguments(out), folder=tmp_path, faults=Faults([Fault("kill", "after write 9")]))
    assert result.code == -signal.SIGKILL
    path = out / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    succeed(("resume", out), tmp_path)
    assert_same_run(out, runs.expected())


@pytest.mark.parametrize("name", ["metrics.jsonl", "run_state.json"])
def test_temporary_files_of_a_kill_are_removed(runs, tmp_path, name):
    """Those of other programs and other files stay, and so does a folder."""
    out, faults = tmp_path / "run", Faults([Fault("kill", rf"before replace \.{name}\..*")])
    (result,) = run(*runs.arguments(out), folder=tmp_path, faults=faults)
    assert result.code == -signal.SIGKILL
    assert len(list(out.glob(f".{name}.*"))) == 1
    (out / f".{name}.1234").touch()  # as earlier versions named them
    others = {f".{name}.swp", ".notes.txt.1234", f".{name}.0"}
    (out / f".{name}.0").mkdir()
    for other in others - {f".{name}.0"}:
        (out / other).touch()
    succeed(("resume", out), tmp_path)
    assert set(left_behind(out)) == others
    assert_same_run(out, runs.expected())


def test_before_the_first_checkpoint(runs, tmp_path):
    out, faults = tmp_path / "run", Faults([Fault("kill", "save 4: before rename .unfinished-step-00000004")])
    (result,) = run(*runs.arguments(out), folder=tmp_path, faults=faults)
    assert result.code == -signal.SIGKILL
    succeed(("resume", out), tmp_path)
    assert [r["event"] for r in records(out) if "event" in r] == ["started", "started"]
    assert_same_run(out, runs.expected())


@pytest.mark.slow
def test_before_there_is_a_run(runs, tmp_path):
    """Then the same command, not `resume`, starts it."""
    out = tmp_path / "run"
    (result,) = run(*runs.arguments(out), folder=tmp_path, faults=Faults([Fault("kill", "before rename folder")]))
    assert result.code == -signal.SIGKILL
    assert not out.exists()
    succeed(runs.arguments(out), tmp_path)
    assert not list(tmp_path.glob(".run*"))
    assert_same_run(out, runs.expected())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_at_twenty_random_moments(runs, tmp_path):
    """A save after every step, so that many of them fall into one."""
    expected, out, options = tmp_path / "expected", tmp_path / "run", ("--save-every-steps", 1)
    succeed(real_runs.arguments(runs.inputs, expected, *options, steps=40), tmp_path)  # the server of forks starts
    shutil.rmtree(expected)
    started = time.monotonic()
    succeed(real_runs.arguments(runs.inputs, expected, *options, steps=40), tmp_path)
    duration = time.monotonic() - started
    first = arguments = real_runs.arguments(runs.inputs, out, *options, steps=40)
    rng, kills, in_a_save, rounds = random.Random(0), 0, 0, 0
    while kills < 20:
        (process,) = start(*arguments, folder=tmp_path)
        process.join(rng.uniform(0.1, 0.6) * duration)
        if process.exitcode is None:
            process.kill()
            process.join()
            kills += 1
            in_a_save += (out / "checkpoints").exists() and any(n[0] == "." for n in checkpoints(out))
            assert_each_is_whole(out)
        else:
            assert process.exitcode == 0
            assert_same_run(out, expected)
            shutil.rmtree(out)
            rounds += 1
        arguments = ("resume", out) if out.exists() else first
    succeed(arguments, tmp_path)
    assert_same_run(out, expected)
    print(f"{kills} random kills, {in_a_save} of them in a save, over {rounds + 1} runs of {duration:.1f} s")
    assert in_a_save


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("action", ["kill", "kill 1"])
@pytest.mark.parametrize("moment", ["before _backward 5", SAVE + "before fsync __0_0.distcp", SAVE + UNFINISHED])
def test_the_launcher_ends_within_a_minute(runs, tmp_path, moment, action):
    """By torchrun, one killed process takes the other with it, which saves nothing that is not complete."""
    out = tmp_path / "run"
    started = time.monotonic()
    result = launch("torchrun", *runs.arguments(out), folder=tmp_path, faults=Faults([Fault(action, moment)]))
    assert result.returncode not in (0, 2)
    assert "SIGKILL" in result.stderr
    print(f"launcher's code {result.returncode} after {time.monotonic() - started:.1f} s, starting included")
    assert time.monotonic() - started < 60
    assert_each_is_whole(out)
    succeed(("resume", out), tmp_path, 2)
    assert_same_run(out, runs.expected(2))
