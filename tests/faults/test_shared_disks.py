"""Other processes, other people and odd file systems: nothing of theirs is lost, and results are whole."""

import errno
import fcntl
import itertools
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import forks
import pytest
import real_runs
import tiny
from self_kill import die_at

from model.common.errors import CheckpointError, InputError
from model.common.files import FileLock, LockedError
from model.common.staging import Staging
from uptrain.runs.folder import locked

MEAN = ("--method", "mean", "--groups", 2)
LOCKS = {
    "flock": "",
    "no flock": "import errno, fcntl\n"
    "def refuse(*given): raise OSError(errno.ENOSYS, 'Function not implemented')\n"
    "fcntl.flock = refuse\n",
}
"""Code that makes locks as a file system has them."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a finished run."""
    folder = tmp_path_factory.mktemp("finished")
    inputs = real_runs.make_inputs(folder)
    real_runs.drive([{"arguments": real_runs.arguments(inputs, folder / "run", steps=4)}], on_cpu=True)
    return folder / "run"


@pytest.fixture
def ids(tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text("".join(json.dumps({"input_ids": [1, 2, 3, i]}) + "\n" for i in range(50)))
    return path


@pytest.fixture
def writers(convert, uptrain, source, run, ids, tmp_path):
    """Return the commands that make a folder OUT, by name: a function to run each, and where its last work is done."""
    out = tmp_path / "out"
    return {
        "convert": (lambda: convert("mha-to-gqa", source, out, *MEAN), "convert.conversion._write_side_files"),
        "export": (lambda: uptrain("export", run, out), "uptrain.export.export._write_files"),
        "prepare": (
            lambda: uptrain("prepare", "--data", ids, "--vocab-size", 300, "--seq-len", 8, "--out", out),
            "uptrain.data.prepare.publish._write",
        ),
    }


def left_behind(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


# What appears while the work goes on


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
@pytest.mark.parametrize("name", ["convert", "export", "prepare"])
def test_out_that_appears_meanwhile_is_left(writers, tmp_path, monkeypatch, name, kind):
    import importlib

    out, (command, last_work) = tmp_path / "out", writers[name]
    module, _, function = last_work.rpartition(".")
    real = getattr(importlib.import_module(module), function)

    def appear(*given):
        if kind == "folder":
            out.mkdir()
            (out / "precious.txt").write_text("mine")
        elif kind == "file":
            out.write_text("mine")
        else:
            out.symlink_to(tmp_path / "nowhere")
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(last_work, appear)
        result = command()
    assert result.code == 1
    assert f"{out} has appeared meanwhile; move it to another place" in result.err
    assert result.err.count("\n") == 1
    mine = {"folder": out / "precious.txt", "file": out}.get(kind)
    assert out.is_symlink() if mine is None else mine.read_text() == "mine"
    shutil.rmtree(out) if kind == "folder" else out.unlink()
    assert command().code == 0
    assert left_behind(tmp_path) == []


def test_overwrite_leaves_what_is_no_checkpoint_and_appears_meanwhile(convert, source, tmp_path, monkeypatch):
    import convert.conversion as conversion

    out, real = tiny.save(tiny.build(seed=1), tmp_path / "out"), conversion._write_side_files

    def appear(*given):
        out.rename(tmp_path / "away")
        out.mkdir()
        (out / "precious.txt").write_text("mine")
        return real(*given)

    monkeypatch.setattr(conversion, "_write_side_files", appear)
    result = convert("mha-to-gqa", source, out, *MEAN, "--overwrite")
    assert (result.code, "has appeared meanwhile" in result.err) == (1, True)
    assert (out / "precious.txt").read_text() == "mine"


# --overwrite, killed


@pytest.fixture
def killed_between(convert, source, tmp_path):
    """Return OUT's old content, after a kill between taking it away and putting the new one in its place."""
    out = tiny.save(tiny.build(seed=1), tmp_path / "out")
    before = tiny.snapshot(out)
    code = "import os, pathlib\nreal = pathlib.Path.rename\n"
    code += "def rename(me, to): return os._exit(9) if me.name == 'folder' else real(me, to)\n"
    code += "pathlib.Path.rename = rename\nfrom convert.cli import main\nmain()"
    command = [sys.executable, "-c", code, "mha-to-gqa", source, out, *MEAN, "--overwrite"]
    assert subprocess.run([str(x) for x in command], check=False).returncode == 9
    assert not out.exists()
    return before


@pytest.mark.parametrize("groups", [2, 4])
def test_any_later_command_puts_back_what_was_taken_away(convert, source, tmp_path, killed_between, groups):
    """Also another conversion: OUT is there again, and is not its to replace."""
    out = tmp_path / "out"
    convert("mha-to-gqa", source, out, "--method", "mean", "--groups", groups).refused("exists")
    assert tiny.snapshot(out) == killed_between
    assert convert("mha-to-gqa", source, out, "--method", "mean", "--groups", groups, "--overwrite").code == 0
    assert left_behind(tmp_path) == []


def test_what_was_taken_away_and_what_came_in_its_place_both_stay(convert, source, tmp_path, killed_between):
    out = tmp_path / "out"
    other = tiny.snapshot(tiny.save(tiny.build(seed=2), out))
    convert("mha-to-gqa", source, out, *MEAN, "--overwrite").refused("replaced", "move one of them")
    assert tiny.snapshot(out) == other
    assert tiny.snapshot(tmp_path / ".out.groupwise/replaced") == killed_between


def test_killed_after_the_new_one_is_in_place(convert, source, tmp_path):
    """The old one goes with the next command, whatever that says."""
    out = tiny.save(tiny.build(seed=1), tmp_path / "out")
    code = "import os, shutil\nreal = shutil.rmtree\n"
    code += "shutil.rmtree = lambda path, *a, **k: os._exit(9) if path.name == 'replaced' else real(path, *a, **k)\n"
    code += "from convert.cli import main\nmain()"
    command = [sys.executable, "-c", code, "mha-to-gqa", source, out, *MEAN, "--overwrite"]
    assert subprocess.run([str(x) for x in command], check=False).returncode == 9
    assert (tmp_path / ".out.groupwise/replaced/config.json").exists()
    with pytest.raises(CheckpointError, match="exists"), Staging(out):
        pass
    assert left_behind(tmp_path) == []
    assert convert("verify", source, out).code == 0


# The journal, and what a run before left


def test_the_journal_survives_a_full_disk_at_the_next_start(tmp_path, monkeypatch):
    with Staging(tmp_path / "out") as staging:
        staging.open("fingerprint")
        for i in range(5):
            staging.record(f"unit {i}", i)
    journal = tmp_path / ".out.groupwise/journal.jsonl"
    with journal.open("a") as file:
        file.write('{"name": "unit 5", "rec')

    def full(*given, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("write_bytes", "write_text"):
        monkeypatch.setattr(Path, name, full)
    for _ in range(2):
        with Staging(tmp_path / "out") as staging:
            staging.open("fingerprint")
            assert staging.finished == {f"unit {i}": i for i in range(5)}
    assert journal.read_bytes().endswith(b'{"name": "unit 4", "record": 4}\n')


@pytest.mark.parametrize("line", ["5", "[]", '{"name": 1}', '{"record": 1}', "null", '"x"', "{"])
def test_a_journal_is_read_up_to_its_first_broken_line(tmp_path, line):
    with Staging(tmp_path / "out") as staging:
        staging.open("fingerprint")
        staging.record("a", 1)
    journal = tmp_path / ".out.groupwise/journal.jsonl"
    journal.write_text(journal.read_text() + line + '\n{"name": "b", "record": 2}\n')
    with Staging(tmp_path / "out") as staging:
        staging.open("fingerprint")
        assert staging.finished == {"a": 1}
        staging.discard()


def test_side_files_that_source_no_longer_has_do_not_travel(convert, source, tmp_path, monkeypatch):
    import convert.conversion as conversion

    (source / "notes").mkdir()
    for name in ("notes.txt", "notes/more.txt"):
        (source / name).write_text("private")

    def fail(*given):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "sync_file", fail)
        assert convert("mha-to-gqa", source, tmp_path / "out", *MEAN).code == 1
    assert (tmp_path / ".out.groupwise/folder/notes/more.txt").exists()
    shutil.rmtree(source / "notes")
    (source / "notes.txt").unlink()
    assert convert("mha-to-gqa", source, tmp_path / "out", *MEAN).code == 0
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith("notes")]
    assert convert("verify", source, tmp_path / "out").code == 0


def test_a_source_with_other_inode_numbers_is_the_same(convert, source, tmp_path):
    """As sshfs, s3fs and the like may answer for one file."""
    from convert.planning.plan import fingerprint, make_plan
    from convert.planning.recipe import Recipe
    from model.checkpoint import open_checkpoint

    found = set()
    for _ in range(2):
        with open_checkpoint(source) as checkpoint:
            found.add(fingerprint(checkpoint, make_plan(checkpoint, 2, Recipe("mean"), None)))
        for path in source.glob("*.safetensors"):
            before = path.stat().st_ino
            copy = shutil.copy2(path, tmp_path / "copy")
            Path(copy).replace(path)
            assert path.stat().st_ino != before
    assert len(found) == 1


# Network file systems


@pytest.fixture
def nfs(monkeypatch):
    """Remove files as an NFS client does: one that is open stays in its folder as .nfs… until it is closed."""
    unlink, close, hidden = os.unlink, os.close, {}

    def open_files():
        found = {}
        for entry in Path("/proc/self/fd").iterdir():
            try:
                found[str(entry.readlink())] = int(entry.name)
            except OSError:
                continue
        return found

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
    assert convert("verify", source, out).code == 0
    assert convert("mha-to-gqa", source, out, *MEAN, "--overwrite").code == 0
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("name", ["convert", "export", "prepare"])
def test_a_journal_that_cannot_be_removed_is_no_failure(writers, tmp_path, monkeypatch, name):
    unlink = Path.unlink

    def denied(path, **options):
        if path.name == "journal.jsonl" and path.exists():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", denied)
    result = writers[name][0]()
    assert result.code == 0, result.err
    assert "could not be removed" in result.err
    assert (tmp_path / "out").is_dir()


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
def test_a_run_has_one_training_on_any_file_system(run, request, kind):
    request.getfixturevalue(kind)
    for _ in range(2):
        with locked(run), pytest.raises(InputError, match=r"is being trained by process \d+ on "), locked(run):
            pass
    assert left_behind(run) == []


@pytest.mark.parametrize("name", ["convert", "export", "prepare"])
def test_without_flock(writers, tmp_path, no_flock, name):
    with Staging(tmp_path / "out"):
        writers[name][0]().refused("is being written by process", "lock.owner")
    assert writers[name][0]().code == 0
    assert left_behind(tmp_path) == []


def test_without_flock_a_killed_owner_is_noticed(tmp_path, no_flock):
    """On this machine; of others nobody can tell whether they still live."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    owner = tmp_path / "lock.owner"
    with FileLock(tmp_path / "lock"):
        identity = json.loads(owner.read_text())
    for change, is_free in (({"pid": ended.pid}, True), ({"host": "other"}, False), ({"pid": os.getpid()}, False)):
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
    """Start a program with these locks, one of LOCKS; return a function that waits for it and returns its Result."""
    numbers = itertools.count()

    def run(program, *arguments, locks="flock"):
        output = tmp_path / f"process-{next(numbers)}"
        environment = {"ACCELERATE_USE_CPU": "true"}
        process = forks.start_program(program, *arguments, output=output, before=LOCKS[locks], environment=environment)
        return lambda: forks.finish([process], [output])[0]

    return run


@pytest.mark.parametrize("locks", LOCKS)
def test_two_conversions_to_one_out(convert, source, tmp_path, begin, locks):
    assert convert("mha-to-gqa", source, tmp_path / "expected", *MEAN).code == 0
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


# Other people's files


def test_copies_have_the_permissions_of_new_files(uptrain, run, tmp_path):
    """Another's checkpoint may be read-only, and what is made of it must be rotated one day."""
    other, out = shutil.copytree(run, tmp_path / "other"), tmp_path / "longer"
    paths = [path for path in other.rglob("*") if path.is_file()]
    for path in paths:
        path.chmod(0o444)
    settings = json.loads((other / "run.json").read_text())
    settings["settings"]["schedule"] = "constant"
    (other / "run.json").unlink()
    (other / "run.json").write_text(json.dumps(settings))
    assert uptrain("extend", other, "--out", out, "--steps", 6, "--max-minutes", 0).code == 0
    assert uptrain("export", other, tmp_path / "out").code == 0
    made = [path for folder in (out, tmp_path / "out") for path in folder.rglob("*") if path.is_file()]
    assert len(made) > 10
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o200 for path in made)


@pytest.mark.parametrize("name", ["step-00000001-best", "step-old", "step-1", "step-000000004", ".unfinished-mine"])
def test_a_users_own_copy_of_a_checkpoint_stays(uptrain, run, tmp_path, name):
    """It is none of the run's: neither rotated away, nor in the way of other commands."""
    inputs, out = real_runs.make_inputs(tmp_path), tmp_path / "run"
    options = ("--keep-last", 1, "--save-every-steps", 1, "--schedule", "constant")
    assert uptrain(*real_runs.arguments(inputs, out, *options, steps=4), "--max-minutes", 0).code == 0
    mine = shutil.copytree(out / "checkpoints/step-00000001", out / "checkpoints" / name)
    before = tiny.snapshot(mine)
    assert uptrain("resume", out).code == 0
    assert tiny.snapshot(mine) == before
    assert real_runs.checkpoints(out) == sorted([name, "step-00000004"])
    assert [entry["step"] for entry in json.loads(uptrain("status", out, "--json").out)["checkpoints"]] == [4]
    assert uptrain("extend", out, "--out", tmp_path / "longer", "--steps", 5, "--max-minutes", 0).code == 0
    assert uptrain("export", out, tmp_path / "out").code == 0


# Names


NOT_UTF_8 = os.fsdecode(b"na\xefve")


def test_names_that_are_not_utf_8(convert, uptrain, source, run, ids, tmp_path):
    odd = source.rename(tmp_path / NOT_UTF_8)
    convert("mha-to-gqa", odd, tmp_path / "out", *MEAN).refused("SOURCE", r"na\xefve", "not UTF-8", "rename it")
    source = odd.rename(tmp_path / "source")
    for options in ((), ("--json",), ("--dry-run",)):
        convert("mha-to-gqa", source, odd, *MEAN, *options).refused("OUT", r"na\xefve", "not UTF-8")
    uptrain("export", run, odd).refused(r"na\xefve", "not UTF-8")
    odd_data = ids.rename(tmp_path / f"{NOT_UTF_8}.jsonl")
    prepare = ("prepare", "--vocab-size", 300, "--seq-len", 8, "--data")
    uptrain(*prepare, odd_data, "--out", tmp_path / "out").refused("--data", r"na\xefve", "not UTF-8")
    ids = odd_data.rename(ids)
    uptrain(*prepare, ids, "--out", odd).refused("OUT", r"na\xefve", "not UTF-8")
    inputs = real_runs.make_inputs(tmp_path)
    inputs["model"] = inputs["model"].rename(odd)
    uptrain(*real_runs.arguments(inputs, tmp_path / "out")).refused(r"na\xefve", "not UTF-8")
    inputs["model"] = odd.rename(tmp_path / "model")
    uptrain(*real_runs.arguments(inputs, odd)).refused("OUT", r"na\xefve", "not UTF-8")
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {"source", "ids.jsonl", "model", "parent", "data", "held-out"}


@pytest.mark.parametrize("length", [231, 244, 255, 256, 5000])
def test_names_that_are_too_long(convert, uptrain, source, run, ids, tmp_path, length):
    out = tmp_path / ("x" * length)
    convert("mha-to-gqa", source, out, *MEAN).refused("has a name of more than", "choose a shorter one")
    convert("mha-to-gqa", source, out, *MEAN, "--dry-run").refused("has a name of more than")
    uptrain("export", run, out).refused("has a name of more than")
    prepare = ("prepare", "--data", ids, "--vocab-size", 300, "--seq-len", 8, "--out", out)
    uptrain(*prepare).refused("has a name of more than")
    assert left_behind(tmp_path) == []


# Kills without flock


@pytest.mark.slow
def test_killed_at_every_step_to_the_disk_without_flock(convert, source, tmp_path, begin):
    assert convert("mha-to-gqa", source, tmp_path / "expected", *MEAN).code == 0
    expected, out = tiny.snapshot(tmp_path / "expected"), tmp_path / "out"
    arguments, n = ("mha-to-gqa", source, out, *MEAN, "--workers", 1), 0
    while True:
        n += 1
        code = die_at(n, "convert", *arguments, before=LOCKS["no flock"], output=tmp_path / "killed")
        if code != -signal.SIGKILL:
            break
        assert not out.exists() or tiny.snapshot(out) == expected, n
        if not out.exists():
            result = begin("convert", *arguments, locks="no flock")()
            assert result.code == 0, result.err
        assert tiny.snapshot(out) == expected, n
        shutil.rmtree(out)
        shutil.rmtree(tmp_path / ".out.groupwise", ignore_errors=True)
    assert code == 0
    assert n > 20
