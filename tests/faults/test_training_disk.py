"""Training continues without what could not be written: checkpoints but for the last, its display, its state."""

import errno
import re
import shlex
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import real_runs
from fault_injection import Fault, Faults, run
from faulty_runs import ROTATION, SAVE, UNFINISHED, error_of, only_error, succeed
from real_runs import assert_each_is_whole, assert_same_run, checkpoints, events, records, state, status

from uptrain.checkpoints import store
from uptrain.runs import progress, start_and_resume


def refused(out):
    """Return after which steps a save failed, and why."""
    failures = events(out, "not saved")
    assert all("\n" not in event["why"] for event in failures)
    return [event["step"] for event in failures], {event["why"] for event in failures}


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("processes", "rank", "moment"),
    [
        (1, 0, "before fsync __0_0.distcp"),
        pytest.param(1, 0, "before mkdir .unfinished-step-00000008", marks=slow),
        pytest.param(1, 0, "before fsync .metadata", marks=slow),
        pytest.param(1, 0, "before write_bytes state.json", marks=slow),
        pytest.param(1, 0, "before fsync manifest.json", marks=slow),
        pytest.param(1, 0, UNFINISHED, marks=slow),
        (2, 1, "before fsync __1_0.distcp"),
        pytest.param(2, 1, "before checksum __1_0.distcp", marks=slow),
        pytest.param(2, 0, "before write_bytes manifest.json", marks=slow),
    ],
)
def test_training_goes_on(runs, tmp_path, processes, rank, moment):
    """The old checkpoint stands, and a run killed then ends as it would have."""
    out, expected = tmp_path / "run", runs.expected(processes)
    faults = Faults([Fault("no space", re.escape(SAVE + moment), rank), Fault("kill", "before write 9")])
    results = run(*runs.arguments(out), folder=tmp_path, processes=processes, faults=faults)
    assert -signal.SIGKILL in [r.code for r in results], results
    assert refused(out) == ([8], {"[Errno 28] No space left on device"})
    assert "step 8: not saved: [Errno 28] No space left on device\n" in results[0].err
    assert checkpoints(out) == ["step-00000004"]
    assert_each_is_whole(out)
    succeed(("resume", out), tmp_path, processes)
    assert_same_run(out, expected)
    assert checkpoints(out) == checkpoints(expected)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=slow)])
def test_nothing_is_left_of_what_could_not_be_written(runs, tmp_path, processes):
    """It would fill the disk further with every save."""
    out = tmp_path / "run"
    faults = Faults([Fault("no space", "save .*before fsync __0_0.distcp", often=True)])
    results = run(*runs.arguments(out), folder=tmp_path, processes=processes, faults=faults)
    error = error_of(results, 1)
    assert error == (
        "step 12, where the run ends, could not be saved: [Errno 28] No space left on device. Fix that, then "
        f"`uptrain resume {out}` starts at step 0 (no checkpoint was saved)."
    )
    assert refused(out)[0] == [4, 8, 10, 12, 12]
    assert checkpoints(out) == []
    assert status(out) == ("failed", 12)
    assert state(out)["reason"] == error


def test_too_little_space_is_seen_before(runs, tmp_path):
    out = tmp_path / "run"
    results = run(*runs.arguments(out), folder=tmp_path, faults=Faults(free_bytes=1000))
    assert "1,000 bytes are free, but a checkpoint needs " in error_of(results, 1)
    steps, why = refused(out)
    assert steps == [8, 10, 12, 12]  # before the last evaluation, and after it
    assert len(why) == 1
    assert checkpoints(out) == ["step-00000004"]
    succeed(("resume", out), tmp_path)
    assert_same_run(out, runs.expected())


@slow
def test_real_writes_that_fail(runs, tmp_path):
    """The kernel refuses to let a file grow beyond 100 kB; a checkpoint's tensors are larger."""
    out = tmp_path / "run"
    results = run(*runs.arguments(out), folder=tmp_path, faults=Faults(max_file_bytes=100_000))
    assert "File too large" in error_of(results, 1)
    assert refused(out)[0] == [4, 8, 10, 12, 12]
    assert checkpoints(out) == []
    succeed(("resume", out), tmp_path)
    assert_same_run(out, runs.expected())


def test_metrics_wait_for_room(runs, tmp_path):
    """Lines that a full disk does not take are written once it does."""
    out, faults = tmp_path / "run", Faults([Fault("no space", "before flush [567]", often=True)])
    (result,) = succeed(runs.arguments(out), tmp_path, faults=faults)
    assert result.err.count("step 6: metrics wait for room on the disk: [Errno 28] No space left on device\n") == 1
    assert_same_run(out, runs.expected())


def test_metrics_end_with_a_whole_line(runs, tmp_path):
    """The kernel takes a part of a line: that part goes again."""
    out = tmp_path / "run"
    results = run(*runs.arguments(out), folder=tmp_path, faults=Faults(max_file_bytes=1500))
    assert "File too large" in results[0].err.splitlines()[-1]
    assert results[0].code == 1
    assert 1500 - 300 < (out / "metrics.jsonl").stat().st_size <= 1500
    assert [r["step"] for r in records(out) if "loss" in r] == list(range(1, len(real_runs.steps(out)) + 1))
    assert checkpoints(out) == []
    succeed(("resume", out), tmp_path)
    assert_same_run(out, runs.expected())


@slow
def test_old_checkpoints_that_cannot_be_removed(runs, tmp_path):
    """The new one stands all the same."""
    out, faults = tmp_path / "run", Faults([Fault("no space", ROTATION + "before rename step-00000004")])
    succeed(runs.arguments(out), tmp_path, faults=faults)
    (event,) = events(out, "old checkpoint not removed")
    assert (event["step"], event["why"]) == (8, "[Errno 28] No space left on device")
    assert not refused(out)[0]
    assert_same_run(out, runs.expected())
    assert checkpoints(out) == checkpoints(runs.expected())


def on_a_small_disk(runs, out, copy, checkpoints_of_room, first=""):
    """Train on a file system of its own, where the run fails; copy the run from there."""
    if not shutil.which("unshare"):
        pytest.skip("needs unshare, to mount a small disk")
    out.parent.mkdir()
    size = sum(f.stat().st_size for f in (runs.expected() / "checkpoints/step-00000012").rglob("*"))
    size = int(size * checkpoints_of_room)
    line = shlex.join([sys.executable, "-m", "uptrain", *runs.arguments(out)])
    script = f"mount -t tmpfs -o size={size} none {out.parent} || exit 77; {first}{line}; code=$?; "
    script += f"wait; cp -r {out} {copy}; exit $code"
    result = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
        env=real_runs.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if result.returncode == 77 or "unshare" in result.stderr:
        pytest.skip("no file system may be mounted here")
    assert result.returncode == 1, result
    assert result.stderr.splitlines()[-1].startswith("Error: "), result.stderr
    assert "Traceback" not in result.stderr
    return result


@slow
def test_a_disk_without_room_for_the_first_checkpoint(runs, tmp_path):
    """The message of torch is then of its place in the file, not of the disk."""
    copy = tmp_path / "copy"
    result = on_a_small_disk(runs, tmp_path / "disk/run", copy, 0.7)
    assert "could not be saved: [Errno 28] No space left on device. Fix that" in result.stderr
    assert refused(copy) == ([4, 8, 10, 12, 12], {"[Errno 28] No space left on device"})
    assert checkpoints(copy) == []


@slow
@pytest.mark.parametrize("spare", [0.5, 0.0], ids=["for half a checkpoint", "for nothing"])
def test_a_disk_that_is_really_full(runs, tmp_path, spare):
    """A file system of its own, with room for one checkpoint and a little, or filled by another while training."""
    out, copy = tmp_path / "disk/run", tmp_path / "copy"
    fill = f"while [ ! -d {out}/checkpoints/step-00000004 ]; do :; done; cat /dev/zero > {out.parent}/fill 2> /dev/null"
    result = on_a_small_disk(runs, out, copy, 1.5, "" if spare else f"({fill}) & ")
    assert checkpoints(copy) == ["step-00000004"]
    assert_each_is_whole(copy)
    if spare:
        assert refused(copy)[0] == [8, 10, 12, 12]
        assert real_runs.steps(copy) == [(step,) for step in range(1, 13)]
    else:
        assert "step 12: held-out loss" in result.stderr
    succeed(("resume", copy), tmp_path)
    assert_same_run(copy, runs.expected())


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=slow)])
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=slow)])
def test_one_process_that_cannot_read_says_so(runs, tmp_path, rank, sharded):
    """The others do not know why they lost it, and do not wait for it."""
    out, faults = tmp_path / "run", Faults([Fault("unreadable", "before _backward 5", rank)])
    results = run(*runs.arguments(out), folder=tmp_path, processes=2, sharded=sharded, faults=faults)
    assert [r.code for r in results] == [1, 1], results
    assert only_error(results[rank : rank + 1]) == (
        f"process {rank}, after step 5: [Errno 5] Input/output error. "
        f"Fix that, then `uptrain resume {out}` continues from the newest checkpoint."
    )
    if rank == 1:
        assert only_error(results[:1]).startswith("after step 5, another process cannot be reached;")
    else:
        assert not results[1].err
    assert status(out) == ("failed", 5)
    succeed(("resume", out), tmp_path, 2, sharded=sharded)
    assert status(out) == ("finished", 12)


FULL = """
import resource, signal, sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from uptrain.checkpoints.tensors import SaveError, write_tensors

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
module = nn.Linear(300, 300)
try:
    write_tensors(Path(sys.argv[1]), module, torch.optim.AdamW(module.parameters()))
except SaveError as error:
    print(error)
dist.destroy_process_group()
"""


def test_the_cause_reaches_all_ranks(tmp_path):
    """Between ranks, torch sends an error without its cause."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FULL, str(tmp_path)],
        env=real_runs.environment(), capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert result.stdout == "[Errno 27] File too large\n"


def test_machines_that_do_not_share_the_folder(tmp_path, uptrain, monkeypatch):
    """A second machine whose disk lacks the run's folder, or has another folder of that name."""
    inputs, out = real_runs.make_inputs(tmp_path), tmp_path / "run"
    monkeypatch.setattr(store, "all_gather", lambda _, value: [value, False] if value is True else [value])
    uptrain(*real_runs.arguments(inputs, out)).refused("not every process finds", "that all machines share")
    elsewhere = {"tensors/__1_0.distcp": {"bytes": 1, "sha256": "0"}}
    monkeypatch.setattr(
        store, "all_gather", lambda _, value: [value, elsewhere] if isinstance(value, dict) else [value]
    )
    result = uptrain(*real_runs.arguments(inputs, tmp_path / "second"))
    assert result.code == 1, result
    assert "another process wrote tensors/__1_0.distcp to a disk of its own" in result.err
    assert checkpoints(tmp_path / "second") == []


@pytest.mark.parametrize(("part", "optimizer"), [("all", "adamw"), ("kv", "adamw"), ("all", "adafactor")])
def test_too_little_room_for_a_checkpoint_is_said_at_the_start(tmp_path, uptrain, monkeypatch, part, optimizer):
    inputs = real_runs.make_inputs(tmp_path, hidden_size=256)  # so large that headers of files do not count
    options = ("--trainable", part, "--optimizer", optimizer)

    def start(name, free, *more):
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
        result = uptrain(*real_runs.arguments(inputs, tmp_path / name, *options, *more, steps=4)).succeeded()
        return result.err

    assert "Warning: a checkpoint takes about" not in start("first", 10**9)
    saved = [file.stat().st_size for file in (tmp_path / "first/checkpoints/step-00000004/tensors").iterdir()]
    # A save asks for room by the size of the last checkpoint, so the saves themselves pass without one.
    monkeypatch.setattr(store, "FREE_SPACE_FACTOR", 0)
    # It saves each step, keeps the last two and the one before the decay, and writes another.
    assert "Warning: a checkpoint takes about" not in start("enough", 4.25 * sum(saved))
    assert f"are free on the disk of {tmp_path / 'less'}; make room" in start("less", 3.8 * sum(saved))
    # Then it saves before the decay, and by time.
    once = ("--save-every", 4, "--keep-last", 1)
    assert "Warning: a checkpoint takes about" not in start("enough for two", 3.25 * sum(saved), *once)
    assert "Warning: a checkpoint takes about" in start("less than two", 2.9 * sum(saved), *once)


def test_a_run_whose_save_at_the_decay_failed_can_be_extended(runs, tmp_path):
    """The decay begins after step 10. Then the checkpoint before is kept, though later ones are whole."""
    out = tmp_path / "run"
    faults = Faults([Fault("no space", "save 10: before rename .unfinished-step-00000010")])
    run(*runs.arguments(out), folder=tmp_path, faults=faults)
    assert refused(out) == ([10], {"[Errno 28] No space left on device"})
    assert checkpoints(out) == ["step-00000008", "step-00000012"]
    succeed(("extend", out, "--out", tmp_path / "longer", "--steps", "16"), tmp_path)
    assert status(tmp_path / "longer") == ("finished", 16)
    longer = tmp_path / "extended"
    faults = Faults([Fault("no space", "save 14: before rename .unfinished-step-00000014")])
    succeed(("extend", runs.expected(), "--out", longer, "--steps", "18"), tmp_path, faults=faults)
    assert refused(longer) == ([14], {"[Errno 28] No space left on device"})
    assert checkpoints(longer) == [
        "step-00000012",
        "step-00000016",
        "step-00000018",
    ]  # the copied one, of step 10, is of no more use


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE])
def test_a_display_that_cannot_be_written(uptrain, runs, tmp_path, monkeypatch, number):
    def full(*arguments, **options):
        raise OSError(number, "no")

    uptrain(*real_runs.arguments(runs.inputs, tmp_path / "shown")).succeeded()
    monkeypatch.setattr(progress, "echo", full)
    uptrain(*real_runs.arguments(runs.inputs, tmp_path / "silent")).succeeded()
    assert_same_run(tmp_path / "shown", tmp_path / "silent")


def test_a_state_that_cannot_be_written_at_the_end(uptrain, runs, tmp_path, monkeypatch):
    """The run is saved. So is the reason for which it failed, which is printed."""
    real = start_and_resume._write_run_state

    def full(folder, status, *rest):
        if status != "running":
            raise OSError(errno.ENOSPC, "No space left on device", "run_state.json")
        real(folder, status, *rest)

    monkeypatch.setattr(start_and_resume, "_write_run_state", full)
    result = uptrain(*real_runs.arguments(runs.inputs, tmp_path / "run")).succeeded()
    assert "Warning: run_state.json could not be written" in result.err
    monkeypatch.setattr(start_and_resume, "train", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    result = uptrain(*real_runs.arguments(runs.inputs, tmp_path / "failing"))
    assert (result.code, "run_state.json could not" in result.err) == (1, True)
    assert "full" in result.err.splitlines()[-1]
