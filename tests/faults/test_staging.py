"""What a killed or interrupted command leaves in its staging area: nothing is lost, and the next command resumes."""

import errno
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from commands import MEAN, left_behind

from model.common.errors import CheckpointError
from model.files.staging import Staging

# What is on the disk when OUT appears


@pytest.mark.parametrize("name", ["convert", "export"])
def test_all_is_on_the_disk_before_out_appears(writers, tmp_path, monkeypatch, name):
    """A kill keeps what the kernel has not written yet, so tests of kills cannot show this.

    (`prepare` writes shards in other processes, whose calls are not seen here.)
    """
    out, synced, unsynced, fsync, rename = tmp_path / "out", set(), [], os.fsync, Path.rename

    def record(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def check(path, target):
        if Path(target) == out:
            unsynced.extend(file.name for file in (path, *path.rglob("*")) if file.stat().st_ino not in synced)
            synced.discard(tmp_path.stat().st_ino)  # it holds the new name only after the rename
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(Path, "rename", check)
    writers[name][0]().succeeded()
    assert out.exists()
    assert unsynced == []
    assert tmp_path.stat().st_ino in synced


# --overwrite, killed


def test_the_old_out_is_back_where_the_new_one_cannot_take_its_place(convert, source, tmp_path, monkeypatch):
    out, rename = tmp_path / "out", Path.rename
    convert("mha-to-gqa", source, out, *MEAN).succeeded()
    before = tiny.snapshot(out)

    def fail(path, target):
        if path.name == "folder":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    assert convert("mha-to-gqa", source, out, "--method", "first", "--groups", 4, "--overwrite").code == 1
    assert tiny.snapshot(out) == before


@pytest.mark.parametrize("name", ["folder", "out"])
def test_a_rename_that_was_done_and_is_called_failed(convert, source, tmp_path, monkeypatch, name):
    """NFS repeats a request whose answer was lost, and reports that the second one failed."""
    out, rename = tmp_path / "out", Path.rename
    convert("mha-to-gqa", source, out, *MEAN).succeeded()

    def fail_after(path, target):
        renamed = rename(path, target)
        if path.name == name:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return renamed

    monkeypatch.setattr(Path, "rename", fail_after)
    convert("mha-to-gqa", source, out, "--method", "first", "--groups", 4, "--overwrite").succeeded()
    monkeypatch.undo()
    convert("verify", source, out).succeeded()
    assert not left_behind(tmp_path)


def test_a_folder_that_cannot_be_moved_away(convert, source, tmp_path, monkeypatch):
    """As one of a container's image, which overlayfs does not rename: the same command could never succeed."""
    out, rename = tmp_path / "out", Path.rename
    convert("mha-to-gqa", source, out, *MEAN).succeeded()
    again = ("mha-to-gqa", source, out, "--method", "first", "--groups", 4, "--overwrite")

    def fail(path, target):
        if path.name == "out":
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    result = convert(*again)
    assert result.code == 1
    assert f"{out} cannot be moved away (Invalid cross-device link); close what uses it, or remove it" in result.err
    shutil.rmtree(out)
    convert(*again).succeeded()
    assert not left_behind(tmp_path)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EISDIR])
def test_file_systems_that_do_not_flush_folders(convert, source, tmp_path, monkeypatch, number):
    fsync = os.fsync

    def refuse_folders(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    convert("mha-to-gqa", source, tmp_path / "out", *MEAN).succeeded()


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
    arguments = ("mha-to-gqa", source, out, "--method", "mean", "--groups", groups, "--overwrite")
    if groups == 4:
        convert(*arguments).refused("holds the finished work of a command with another number of K/V heads")
        assert tiny.snapshot(out) == killed_between
        shutil.rmtree(tmp_path / ".out.groupwise")
    convert(*arguments).succeeded()
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
    convert("verify", source, out).succeeded()


# The journal, and what a run before left


def test_the_journal_survives_a_full_disk_at_the_next_start(tmp_path, monkeypatch):
    with Staging(tmp_path / "out") as staging:
        staging.open({"input": 1})
        for i in range(5):
            staging.record(f"unit {i}", i)
    journal = tmp_path / ".out.groupwise/journal.jsonl"
    with journal.open("a") as file:
        file.write('{"name": "unit 5", "rec')

    def full(*given, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("write_bytes", "write_text"):
        monkeypatch.setattr(Path, name, full)
    monkeypatch.setattr("model.files.staging.replace_file", full)
    for _ in range(2):
        with Staging(tmp_path / "out") as staging:
            staging.open({"input": 1})
            assert staging.finished == {f"unit {i}": i for i in range(5)}
    assert journal.read_bytes().endswith(b'{"name": "unit 4", "record": 4}\n')


def test_an_interrupt_while_the_area_is_made_leaves_none(tmp_path, monkeypatch):
    def interrupt(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr("model.files.staging.replace_file", interrupt)
    with pytest.raises(KeyboardInterrupt), Staging(tmp_path / "out") as staging:
        staging.open({"input": 1})
    assert list(tmp_path.iterdir()) == []


def test_finished_work_of_other_inputs_is_kept(tmp_path):
    """It may be hours of calibration. What a run has not finished goes without a word."""
    root = tmp_path / ".out.groupwise"
    with Staging(tmp_path / "out") as staging:
        staging.open({"--seed": 1, "SOURCE": "a"})
        staging.scratch.mkdir()
        (staging.scratch / "states-0000.npy").touch()
    with Staging(tmp_path / "out") as staging:
        staging.open({"--seed": 2, "SOURCE": "a"}, ["*.npz"])
        assert not staging.scratch.exists()
        staging.scratch.mkdir()
        (staging.scratch / "layer-0000.npz").touch()
    words = f"{root} holds the finished work of a command with another --seed; give"
    with Staging(tmp_path / "out") as staging, pytest.raises(CheckpointError, match=words):
        staging.open({"--seed": 3, "SOURCE": "a"}, ["*.npz"])
    with Staging(tmp_path / "out") as staging:
        staging.open({"--seed": 2, "SOURCE": "a"}, ["*.npz"])
        assert (staging.scratch / "layer-0000.npz").exists()
        staging.record("piece", 1)
    for inputs, names in (
        ({"--seed": 1, "SOURCE": "a"}, "another --seed;"),
        ({"--seed": 1, "SOURCE": "b"}, "another --seed, another SOURCE;"),
        ({"--seed": 2}, "a SOURCE;"),
        ({"--seed": 1, "SOURCE": "a", "--to": 5}, "another --seed, no --to;"),
    ):
        words = f"{root} holds the finished work of a command with {names} give the same"
        with Staging(tmp_path / "out") as staging, pytest.raises(CheckpointError, match=words):
            staging.open(inputs)
    with Staging(tmp_path / "out") as staging:
        staging.open({"--seed": 2, "SOURCE": "a"})
        assert staging.finished == {"piece": 1}


@pytest.mark.parametrize("line", ["5", "[]", '{"name": 1}', '{"record": 1}', "null", '"x"', "{"])
def test_a_journal_is_read_up_to_its_first_broken_line(tmp_path, line):
    with Staging(tmp_path / "out") as staging:
        staging.open({"input": 1})
        staging.record("a", 1)
    journal = tmp_path / ".out.groupwise/journal.jsonl"
    journal.write_text(journal.read_text() + line + '\n{"name": "b", "record": 2}\n')
    with Staging(tmp_path / "out") as staging:
        staging.open({"input": 1})
        assert staging.finished == {"a": 1}
        staging.discard()


def test_side_files_removed_from_source_are_not_copied(convert, source, tmp_path, monkeypatch):
    import convert.conversion as conversion

    (source / "notes").mkdir()
    for name in ("notes.txt", "notes/more.txt"):
        (source / name).write_text("private")

    def fail(*given, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "sync_tree", fail)
        assert convert("mha-to-gqa", source, tmp_path / "out", *MEAN).code == 1
    assert (tmp_path / ".out.groupwise/folder/notes/more.txt").exists()
    shutil.rmtree(source / "notes")
    (source / "notes.txt").unlink()
    convert("mha-to-gqa", source, tmp_path / "out", *MEAN).succeeded()
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith("notes")]
    convert("verify", source, tmp_path / "out").succeeded()


def test_a_source_with_other_inode_numbers_is_the_same(convert, source, tmp_path):
    """As sshfs, s3fs and the like may answer for one file."""
    from convert.merging.merge_recipe import MergeRecipe
    from convert.planning.merge_plan import make_merge_plan
    from convert.planning.plan import inputs_of
    from model.checkpoint import open_checkpoint

    inputs = []
    for _ in range(2):
        with open_checkpoint(source) as checkpoint:
            inputs.append(inputs_of(checkpoint, make_merge_plan(checkpoint, 2, MergeRecipe("mean"), None)))
        for path in source.glob("*.safetensors"):
            before = path.stat().st_ino
            copy = shutil.copy2(path, tmp_path / "copy")
            Path(copy).replace(path)
            assert path.stat().st_ino != before
    assert inputs[0] == inputs[1]


def test_an_interrupt_once_out_is_in_place_changes_nothing(convert, source, tmp_path, monkeypatch):
    def interrupt(staging):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "discard", interrupt)
        result = convert("mha-to-gqa", source, tmp_path / "out", *MEAN).succeeded()
    assert "could not be removed (interrupted); it is no longer needed." in result.err
    convert("verify", source, tmp_path / "out").succeeded()


def test_leftovers_that_cannot_be_removed_are_not_taken_for_new_work(convert, source, tmp_path, monkeypatch):
    """The layers of one method would be published under the name of another."""
    scratch = tmp_path / ".out.groupwise/scratch"
    with Staging(tmp_path / "out") as staging:
        staging.open({"input": 2})
        staging.scratch.mkdir()
    assert scratch.exists()

    def refuse(path, **options):
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("model.files.staging.shutil.rmtree", refuse)
        result = convert("mha-to-gqa", source, tmp_path / "out", *MEAN)
    assert result.code == 1
    assert "Device or resource busy" in result.err
    convert("mha-to-gqa", source, tmp_path / "out", *MEAN).succeeded()
