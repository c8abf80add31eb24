"""File systems of several machines, without locks, or that ignore case: nothing is lost, and results are whole."""

import errno
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import forks
import pytest
import real_runs
import tiny
from commands import MEAN, left_behind
from self_kill import kill_at_every_step

from model.common.errors import InputError
from model.files.lock import FileLock, LockedError
from model.files.paths import lies_in
from model.files.staging import Staging
from model.files.write import StoppedError, file_sha256
from uptrain.runs.run_folder import locked

LOCKS = {
    "flock": "",
    "no flock": "import errno, fcntl\n"
    "def refuse(*given): raise OSError(errno.ENOSYS, 'Function not implemented')\n"
    "fcntl.flock = refuse\n",
}
"""Code that makes locks as a file system has them."""


# Network file systems


@pytest.fixture
def nfs(monkeypatch):
    """Remove files as an NFS client does: one that is open stays in its folder as .nfs… until it is closed."""
    unlink, close, hidden = os.unlink, os.close, {}

    def open_files():
        descriptors = {}
        for entry in Path("/proc/self/fd").iterdir():
            try:
                descriptors[str(entry.readlink())] = int(entry.name)
            except OSError:
                continue
        return descriptors

    def nfs_unlink(path, *, dir_fd=None):
        folder = Path.cwd() if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink()
        whole = folder / path
        descriptor = open_files().get(str(whole))
        if descriptor is None:
            unlink(path, dir_fd=dir_fd)
        else:
            hidden[descriptor] = whole.with_name(f".nfs{descriptor:08}")
            whole.rename(hidden[descriptor])

    def nfs_close(descriptor):
        close(descriptor)
        if descriptor in hidden:
            unlink(hidden.pop(descriptor))

    monkeypatch.setattr(os, "unlink", nfs_unlink)
    monkeypatch.setattr(os, "close", nfs_close)


@pytest.mark.parametrize("name", ["convert", "export", "prepare"])
def test_nfs_keeps_open_files_that_are_removed(writers, tmp_path, nfs, name):
    result = writers[name][0]()
    assert (result.code, "Error" in result.err) == (0, False), result.err
    assert (tmp_path / "out").is_dir()
    assert left_behind(tmp_path) == []


def test_a_staging_area_that_cannot_be_removed_is_no_failure(convert, source, tmp_path, monkeypatch):
    out = tiny.save(tiny.build(seed=1), tmp_path / "out")

    real = shutil.rmtree

    def busy(path, *given, **options):
        if path.name == "replaced":
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        real(path, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        result = convert("mha-to-gqa", source, out, *MEAN, "--overwrite")
    assert (result.code, result.err.count("\n")) == (0, 1)
    assert result.err.startswith(f"Warning: {tmp_path}/.out.groupwise/replaced could not be removed")
    convert("verify", source, out).succeeded()
    convert("mha-to-gqa", source, out, *MEAN, "--overwrite").succeeded()
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("name", ["convert", "export", "prepare"])
def test_a_journal_that_cannot_be_removed_is_no_failure(writers, tmp_path, monkeypatch, name):
    unlink = Path.unlink

    def denied(path, **options):
        if path.name == "journal.jsonl" and path.exists():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", denied)
    result = writers[name][0]().succeeded()
    assert "could not be removed" in result.err
    assert (tmp_path / "out").is_dir()


def test_a_working_directory_that_was_deleted(uptrain, ids, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    words = "the working directory does not exist any more; change to another folder."
    uptrain("prepare", "--data", ids, "--vocab-size", 300, "--seq-len", 8, "--out", "out").refused(words)


@pytest.fixture
def flock_of_nfs(monkeypatch):
    """A lock of the server: for files that are open for writing."""
    flock = fcntl.flock

    def strict(descriptor, operation):
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(number, operation)

    monkeypatch.setattr(fcntl, "flock", strict)


@pytest.fixture
def no_flock(monkeypatch):
    def refuse(*given):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.parametrize("kind", ["flock_of_nfs", "no_flock"])
def test_a_run_has_one_training_on_any_file_system(finished_run, request, kind):
    request.getfixturevalue(kind)
    for _ in range(2):
        with (
            locked(finished_run),
            pytest.raises(InputError, match=r"is being trained by process \d+ on "),
            locked(finished_run),
        ):
            pass
    assert left_behind(finished_run) == []


@pytest.mark.parametrize("name", ["convert", "export", "prepare"])
def test_without_flock(writers, tmp_path, no_flock, name):
    with Staging(tmp_path / "out"):
        writers[name][0]().refused("is being written by process", "lock.owner")
    writers[name][0]().succeeded()
    assert left_behind(tmp_path) == []


def test_without_flock_a_killed_owner_is_noticed(tmp_path, no_flock):
    """On this machine; of others nobody can tell whether they still live.

    The process id of the owner may be that of another process by now: a container that starts again often has the same.
    """
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    owner = tmp_path / "lock.owner"
    with FileLock(tmp_path / "lock"):
        identity = json.loads(owner.read_text())
    changes = (
        ({"pid": ended.pid}, True), ({"started": identity["started"] - 60}, True), ({}, False),
        ({"host": "other"}, False), ({"pid": ended.pid, "pid_namespace": "pid:[1]"}, False),
    )  # fmt: skip
    for change, is_free in changes:
        owner.write_text(json.dumps(identity | change))
        if is_free:
            with FileLock(tmp_path / "lock"):
                assert json.loads(owner.read_text())["pid"] == os.getpid()
            assert not owner.exists()
        else:
            with pytest.raises(LockedError, match=f"if that has ended, remove {owner}"), FileLock(tmp_path / "lock"):
                pass
    owner.write_text("rubbish")
    with pytest.raises(LockedError, match="another process"), FileLock(tmp_path / "lock"):
        pass


def test_without_flock_an_owner_that_is_about_to_write_its_name_is_waited_for(tmp_path, no_flock):
    owner = tmp_path / "lock.owner"
    with FileLock(tmp_path / "lock"):
        identity = owner.read_text()
    owner.touch()
    writing = threading.Timer(0.05, owner.write_text, [identity])
    writing.start()
    with pytest.raises(LockedError, match=f"process {os.getpid()} on "), FileLock(tmp_path / "lock"):
        pass
    writing.join()


def test_a_lock_that_is_removed_while_another_waits_for_it(tmp_path, monkeypatch):
    """The file that was opened before is nobody's then."""
    first, flock = FileLock(tmp_path / "lock"), fcntl.flock
    first.__enter__()

    def release_first(descriptor, operation):
        first.release()
        monkeypatch.setattr(fcntl, "flock", flock)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", release_first)
    with FileLock(tmp_path / "lock"), pytest.raises(LockedError), FileLock(tmp_path / "lock"):
        pass
    assert list(tmp_path.iterdir()) == []


# Two processes at once


@pytest.fixture
def begin(tmp_path):
    """Start a program with these locks, one of LOCKS; return a function that waits and returns its Result."""
    numbers = itertools.count()

    def run(program, *arguments, locks="flock"):
        output = tmp_path / f"process-{next(numbers)}"
        environment = {"ACCELERATE_USE_CPU": "true"}
        process = forks.start_program(program, *arguments, output=output, before=LOCKS[locks], environment=environment)
        return lambda: forks.finish([process], [output])[0]

    return run


@pytest.mark.parametrize("locks", LOCKS)
def test_two_conversions_to_one_out(convert, source, tmp_path, begin, locks):
    convert("mha-to-gqa", source, tmp_path / "expected", *MEAN).succeeded()
    out = tmp_path / "out"
    for _ in range(3):
        begun = [begin("convert", "mha-to-gqa", source, out, *MEAN, locks=locks) for _ in range(3)]
        results = [finish() for finish in begun]
        refused = [r for r in results if r.code == 2]
        assert len(refused) == 2, results
        assert all("is being written by process" in r.err or "exists" in r.err for r in refused), results
        assert tiny.snapshot(out) == tiny.snapshot(tmp_path / "expected")
        assert left_behind(tmp_path) == []
        shutil.rmtree(out)


@pytest.mark.parametrize("locks", LOCKS)
def test_two_trainings_of_one_run(tmp_path, begin, locks):
    """The second is refused while the first trains, and finds nothing left to do after it."""
    inputs, out, expected = real_runs.make_inputs(tmp_path), tmp_path / "run", tmp_path / "expected"
    alone = real_runs.arguments(inputs, expected, steps=6)
    stopped = [*real_runs.arguments(inputs, out, steps=6), "--max-minutes", "0"]
    real_runs.drive([{"arguments": alone}, {"arguments": stopped}], on_cpu=True)
    first = begin("uptrain", "resume", out, locks=locks)
    deadline = time.monotonic() + forks.HANGS
    while not (out / ".lock").exists() and real_runs.status(out) == ("preempted", 1):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    second = begin("uptrain", "resume", out, locks=locks)
    results = [first(), second()]
    assert results[0].code == 0, results
    assert results[1].code == 0 or "is being trained by process" in results[1].err, results
    real_runs.assert_same_run(out, expected)
    assert left_behind(out) == []


def test_two_starts_of_one_run(tmp_path, begin):
    inputs, out = real_runs.make_inputs(tmp_path), tmp_path / "run"
    begun = [begin("uptrain", *real_runs.arguments(inputs, out, steps=4)) for _ in range(2)]
    results = [finish() for finish in begun]
    assert sorted(r.code for r in results) == [0, 2], results
    (error,) = [r.err.splitlines()[-1] for r in results if r.code == 2]
    assert "exists" in error or "is being written" in error
    assert real_runs.status(out) == ("finished", 4)
    assert left_behind(tmp_path) == []


# Kills without flock


@pytest.mark.slow
def test_killed_at_every_step_to_the_disk_without_flock(convert, source, tmp_path, begin):
    def arguments(out):
        return ("mha-to-gqa", source, out, *MEAN, "--workers", 1)

    def finish(out):
        return out.exists() or begin("convert", *arguments(out), locks="no flock")().succeeded()

    convert("mha-to-gqa", source, tmp_path / "expected", *MEAN).succeeded()
    expected = tiny.snapshot(tmp_path / "expected")
    kills = kill_at_every_step(tmp_path, "convert", arguments, finish, expected, before=LOCKS["no flock"])
    assert kills >= 20


def test_one_folder_under_two_names(tmp_path, monkeypatch):
    """A disk that ignores case, or that is mounted twice, names a folder in ways that no resolving tells apart."""
    (tmp_path / "model/inside").mkdir(parents=True)
    (tmp_path / "MODEL").symlink_to(tmp_path / "model")
    monkeypatch.setattr(Path, "resolve", Path.absolute)
    assert lies_in(tmp_path / "MODEL", tmp_path / "model")
    assert lies_in(tmp_path / "MODEL/inside", tmp_path / "model")
    assert not lies_in(tmp_path / "model", tmp_path / "MODEL/inside")
    assert not lies_in(tmp_path / "other", tmp_path / "model")


@pytest.mark.parametrize(
    ("out", "words"), [("LINK", "is SOURCE or lies"), ("LINK/deeper", "is SOURCE or lies"), (".", "OUT")]
)
def test_source_under_another_name_is_not_replaced(convert, source, tmp_path, monkeypatch, out, words):
    (tmp_path / "LINK").symlink_to(source)
    monkeypatch.setattr(Path, "resolve", Path.absolute)
    before = tiny.snapshot(source)
    convert("mha-to-gqa", source, tmp_path / out, *MEAN, "--overwrite").refused(words)
    assert tiny.snapshot(source) == before


def test_hashing_ends_soon_after_it_is_stopped(tmp_path):
    """An interrupted command waits for its threads; a file may take minutes."""
    (tmp_path / "large").write_bytes(bytes(3 << 20))
    stop = threading.Event()
    assert file_sha256(tmp_path / "large", stop) == hashlib.sha256(bytes(3 << 20)).hexdigest()
    stop.set()
    with pytest.raises(StoppedError):
        file_sha256(tmp_path / "large", stop)
