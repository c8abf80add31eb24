"""Locks and staging areas that lead elsewhere, or that two machines hold: no other file is changed or removed."""

import errno
import fcntl
import json
import os
import resource
import shutil

import pytest
import real_runs
import tiny
from commands import MEAN

from model.common.errors import CheckpointError, InputError, RunError
from model.files import lock
from model.files.lock import FileLock, LockLostError
from model.files.staging import Staging
from uptrain.checkpoints import store
from uptrain.runs import start_and_resume
from uptrain.runs.run_folder import locked


def test_a_lock_that_is_a_link_leaves_its_target(tmp_path):
    """Of a RUN by somebody else, which `uptrain resume` locks."""
    (tmp_path / "run").mkdir()
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "run/.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(InputError, match=r"run/\.lock is a link"), locked(tmp_path / "run"):
        pass
    assert (tmp_path / "victim").read_text() == "precious"
    assert (tmp_path / "run/.lock").is_symlink()
    (tmp_path / "run/.lock").unlink()
    os.mkfifo(tmp_path / "run/.lock")
    with pytest.raises(InputError, match="not a regular file"), locked(tmp_path / "run"):
        pass


@pytest.mark.parametrize("link", ["", "lock", "journal.jsonl", "folder", "scratch", "replaced"])
def test_a_staging_area_that_is_or_holds_a_link_is_refused(tmp_path, link):
    (tmp_path / "elsewhere").mkdir()
    root, victim = tmp_path / ".out.groupwise", tmp_path / "elsewhere"
    if link:
        root.mkdir()
    if link in ("lock", "journal.jsonl"):
        victim = victim / "file"
        victim.write_text("precious")
    (root / link if link else root).symlink_to(victim)
    with pytest.raises(CheckpointError if link != "lock" else InputError, match="is a link"), Staging(tmp_path / "out"):
        pass
    assert victim.is_dir() or victim.read_text() == "precious"
    assert (root / link if link else root).is_symlink()
    assert len(list((tmp_path / "elsewhere").iterdir())) == (victim.name == "file")


@pytest.fixture
def local_flock(monkeypatch):
    """Make every flock succeed, as that of another machine does where locks hold on one machine only."""
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, operation: None)


def test_a_second_machine_is_noticed_before_anything_is_published(tmp_path, local_flock):
    with Staging(tmp_path / "out") as first:
        first.open({"input": 1})
        with Staging(tmp_path / "out") as second:
            second.open({"input": 1})
            for work in (first.publish, lambda: first.record_file("shard", {})):
                with pytest.raises(RunError, match=r"lock names process \d+ on .*: another process writes here too"):
                    work()
            second.record_file("shard", {})
            first.__exit__()
            second.record_file("shard", {})  # the first has not removed the lock of the second
            second.publish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_training_ends_once_another_has_taken_its_run(uptrain, tmp_path, monkeypatch):
    """It records nothing more, and leaves the other's state as it is. One look alone may be wrong."""
    (tmp_path / "inputs").mkdir()
    inputs = real_runs.make_inputs(tmp_path / "inputs")
    looks = []

    def check(self):
        looks.append(None)
        if len(looks) == 2 or len(looks) > 4:
            raise LockLostError("the lock names another process")

    monkeypatch.setattr(store, "LOCK_SECONDS", 0)
    monkeypatch.setattr(start_and_resume._RunLock, "check", check)
    result = uptrain(*real_runs.arguments(inputs, tmp_path / "run", "--save-every", 100, steps=200))
    assert (result.code, result.err.splitlines()[-1]) == (1, "Error: the lock names another process")
    assert len(real_runs.steps(tmp_path / "run")) == 5
    assert json.loads((tmp_path / "run/run_state.json").read_text())["status"] == "running"


def test_a_removed_lock_is_noticed(tmp_path):
    with FileLock(tmp_path / "lock") as lock:
        lock.check()
        (tmp_path / "lock").unlink()
        with pytest.raises(RunError, match="is gone"):
            lock.check()


def test_a_run_locked_by_another_machine_keeps_its_checkpoints(uptrain, finished_run, tmp_path, monkeypatch):
    """The training that was there first stops where it would save, with one line."""
    from uptrain.checkpoints.store import CheckpointStore

    run, begin = tmp_path / "run", CheckpointStore._begin
    shutil.copytree(finished_run, run)
    saved = sorted((run / "checkpoints").iterdir())
    for path in saved[-1:]:
        shutil.rmtree(path)

    def taken_over(self, unfinished):
        (run / ".lock").write_text('{"host": "other", "pid": 7, "token": "x"}')
        begin(self, unfinished)

    monkeypatch.setattr(CheckpointStore, "_begin", taken_over)
    result = uptrain("resume", run)
    assert result.code == 1
    assert "names process 7 on other" in result.err
    assert sorted(path for path in (run / "checkpoints").glob("step-*")) == saved[:-1]


def test_locking_ends_where_no_write_can_be_read_back(tmp_path, monkeypatch):
    """Some FUSE mounts show what is written only after the file is closed."""
    monkeypatch.setattr(lock, "_read", lambda path: "")
    with pytest.raises(OSError, match="cannot be read back"), FileLock(tmp_path / "lock"):
        pass
    with pytest.raises(CheckpointError, match=r"cannot write beside .*cannot be read back"), Staging(tmp_path / "out"):
        pass


def test_a_full_disk_leaves_no_owner_that_would_block_others(tmp_path, monkeypatch):
    """Where flock is missing, a file names the owner; empty, it would name nobody."""

    def refuse(descriptor, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match=f"{os.strerror(errno.EFBIG)}.*{tmp_path}/lock"), FileLock(tmp_path / "lock"):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "lock.owner").exists()
    with FileLock(tmp_path / "lock") as lock:
        assert lock.is_held


def test_conversion_refuses_a_linked_staging_area(convert, source, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".out.groupwise").symlink_to("elsewhere")
    convert("mha-to-gqa", source, tmp_path / "out", *MEAN).refused(".out.groupwise is a link")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_checkpoints_outside_of_a_run_are_refused(tmp_path):
    """Rotation would remove those of the run that they belong to."""
    from accelerate import Accelerator

    from uptrain.checkpoints.store import CheckpointStore

    (tmp_path / "other/step-00000001").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").symlink_to("../other")
    store = CheckpointStore(
        tmp_path / "run/checkpoints", Accelerator(cpu=True), keep_last=1, save_every=1, check_lock=lambda: None
    )
    with pytest.raises(InputError, match="is a link out of the run"):
        store.clean_up()
    (tmp_path / "run/checkpoints").unlink()
    store.clean_up()
    assert (tmp_path / "other/step-00000001").is_dir()


@pytest.mark.parametrize("name", ["other/model.safetensors", "notes.txt"])
def test_overwrite_keeps_other_models_and_notes(convert, source, tmp_path, name):
    out = tmp_path / "out"
    tiny.save(tiny.build(seed=1), out)
    convert("mha-to-gqa", source, out, *MEAN, "--overwrite").succeeded()
    assert (out / "groupwise.json").is_file()
    if name == "notes.txt":
        (out / "groupwise.json").unlink()
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("precious")
    convert("mha-to-gqa", source, out, *MEAN, "--overwrite").refused(f"here: {name}", "will not replace")
    assert (out / name).read_text() == "precious"


def test_hidden_files_are_left_out(convert, source, tmp_path):
    (source / ".env").write_text("TOKEN=precious")
    (source / ".ssh").mkdir()
    (source / ".ssh/id_rsa").write_text("precious")
    result = convert("mha-to-gqa", source, tmp_path / "out", *MEAN).succeeded()
    assert ".env" in result.out
    assert ".ssh/" in result.out
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


def test_leftovers_of_a_killed_start_are_removed(tmp_path):
    (tmp_path / ".out.groupwise").mkdir()
    (tmp_path / ".out.groupwise/.journal.jsonl.123").write_text("{")
    with Staging(tmp_path / "out"):
        pass
    assert list(tmp_path.iterdir()) == []
