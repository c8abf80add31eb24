"""The disk fills up, or reading fails, in the middle: exit code 1, no OUT, and the finished part kept and named."""

import errno
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from commands import left_behind


def run_limited(limit, *arguments):
    """Run the command line with files limited to `limit` bytes: a write beyond fails as on a full disk."""
    return subprocess.run(
        [sys.executable, "-m", "convert", *map(str, arguments)],
        capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip


def test_write_fails_midway(convert, source, tmp_path):
    sizes = sorted(f.stat().st_size for f in source.glob("*.safetensors"))
    result = run_limited(sizes[-1] // 2, "mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 4)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert "nothing is finished yet, and the same command starts again" in result.stderr
    assert left_behind(tmp_path) == []
    assert not (tmp_path / "out").exists()
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 4).succeeded()
    convert("verify", source, tmp_path / "out").succeeded()
    assert not (tmp_path / ".out.groupwise").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("place", ["area", "lock", "folder", "journal"])
@pytest.mark.parametrize("name", ["convert", "export", "prepare"])
def test_the_first_write_fails(writers, tmp_path, monkeypatch, name, place, number):
    """Nothing stays behind, since nothing is finished."""
    fail = OSError(number, os.strerror(number))
    paths = {"area": "", "lock": "/lock", "folder": "/folder", "journal": "/journal.jsonl"}
    path = f"{tmp_path}/.out.groupwise{paths[place]}"
    mkdir, pwrite = Path.mkdir, os.pwrite

    def make(folder, *given, **options):
        if str(folder) == path:
            raise OSError(number, os.strerror(number), path)
        mkdir(folder, *given, **options)

    def write(descriptor, content, offset):
        if str(Path(f"/proc/self/fd/{descriptor}").readlink()) == path:
            raise fail
        return pwrite(descriptor, content, offset)

    def sync(file):
        if file.name.startswith(".journal.jsonl."):
            raise fail

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", make)
        patch.setattr(os, "pwrite", write)
        patch.setattr("model.files.write.sync_file", sync)
        result = writers[name][0]()
    advice = "make room" if number == errno.ENOSPC else "check the disk, or choose another folder"
    assert (result.code, result.err) == (
        1, f"Error: {path} cannot be written: {os.strerror(number)}; {advice}.\n",
    )  # fmt: skip
    assert left_behind(tmp_path) == []
    assert not (tmp_path / "out").exists()
    writers[name][0]().succeeded()


@pytest.mark.parametrize("name", ["convert", "export", "prepare"])
def test_a_file_in_place_of_the_staging_area(writers, tmp_path, name):
    (tmp_path / ".out.groupwise").write_text("precious")
    words = f"{tmp_path}/.out.groupwise is a file, but a staging area is a folder; move it away."
    writers[name][0]().refused(words)
    assert (tmp_path / ".out.groupwise").read_text() == "precious"


MOUNT = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]


@pytest.mark.skipif(
    not shutil.which("unshare")
    or subprocess.run([*MOUNT, "mount -t tmpfs none /mnt"], capture_output=True, check=False).returncode != 0,
    reason="needs a user namespace in which to mount a small disk",
)
def test_disk_really_full(source, tmp_path):
    """A tmpfs of 64 kB, and a free-space check that is told otherwise (as when another program takes the space)."""
    code = "import shutil; real = shutil.disk_usage; "
    code += "shutil.disk_usage = lambda p: real(p)._replace(free=10**12); from convert.cli import main; main()"
    (tmp_path / "disk").mkdir()
    script = f"mount -t tmpfs -o size=64k none {tmp_path}/disk && {sys.executable} -c '{code}' "
    script += (
        f"mha-to-gqa {source} {tmp_path}/disk/out --groups 4 --method mean --workers 1; "
        f"code=$?; ls -A {tmp_path}/disk; exit $code"
    )
    result = subprocess.run([*MOUNT, script], capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stderr
    assert os.strerror(errno.ENOSPC) in result.stderr
    assert result.stdout.split() == [".out.groupwise"]


def test_out_that_is_a_mount_point(convert, source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == out)
    convert("mha-to-gqa", source, out, "--groups", 4, "--overwrite").refused("out) is a mount point", "inside it")
    assert not (tmp_path / ".out.groupwise").exists()


def test_read_fails_midway(convert, source, tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        patch.setattr("convert.output.write_shards.file_sha256", fail)  # else a checksum may be finished first
        result = convert("mha-to-mqa", "--method", "mean", source, tmp_path / "out")
    assert result.code == 1
    assert os.strerror(errno.EIO) in result.err
    assert "nothing is finished yet, and the same command starts again" in result.err
    assert left_behind(tmp_path) == []
    convert("mha-to-mqa", "--method", "mean", source, tmp_path / "out").succeeded()


@pytest.mark.parametrize("name", ["source", "notes"])
def test_a_folder_of_the_source_that_cannot_be_listed(convert, source, tmp_path, monkeypatch, name):
    """Its files would be missing in OUT."""
    (source / "notes").mkdir(exist_ok=True)
    (source / "notes/more.txt").write_text("more")
    scandir = os.scandir

    def fail(path):
        if Path(path).name == name and "walk" in sys._getframe(1).f_code.co_name:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fail)
        result = convert("mha-to-mqa", "--method", "mean", source, tmp_path / "out")
    assert (result.code, os.strerror(errno.ESTALE) in result.err) == (1, True)
    assert left_behind(tmp_path) == []
    assert not (tmp_path / "out").exists()


def test_a_checksum_alone_is_no_finished_work(convert, tmp_path):
    """One weight file: when the disk is full, its checksum may be known, but no piece of the output is finished."""
    source = tiny.save(tiny.build(), tmp_path / "source")
    (weights,) = source.glob("*.safetensors")
    arguments = ("mha-to-gqa", source, tmp_path / "out", "--groups", 4, "--method", "mean")
    result = run_limited(weights.stat().st_size // 2, *arguments)
    assert (result.returncode, "nothing is finished yet" in result.stderr) == (1, True), result.stderr
    assert left_behind(tmp_path) == []
    convert(*arguments, "--max-shard-size", "30KB").succeeded()


def test_source_shrinks_while_it_is_read(convert, source, tmp_path, monkeypatch):
    import convert.conversion as conversion

    real = conversion.write_shards

    def shrink_first(*arguments):
        shard = next(source.glob("model-00001*"))
        shard.write_bytes(shard.read_bytes()[:-1000])
        real(*arguments)

    monkeypatch.setattr(conversion, "write_shards", shrink_first)
    result = convert("mha-to-mqa", "--method", "mean", source, tmp_path / "out")
    assert result.code == 1
    assert "became shorter" in result.err
    assert not (tmp_path / "out").exists()


def test_source_changes_while_it_is_read(convert, source, tmp_path, monkeypatch):
    import convert.conversion as conversion

    real = conversion.write_shards

    def change_after(*arguments):
        real(*arguments)
        os.utime(next(source.glob("model-00001*")), ns=(5, 5))

    monkeypatch.setattr(conversion, "write_shards", change_after)
    convert("mha-to-mqa", "--method", "mean", source, tmp_path / "out").refused("changed while it was read")
    assert {p.name for p in tmp_path.iterdir()} == {"source"}


@pytest.mark.parametrize("number", ["EXDEV", "ENOSYS", "EINVAL", "EOPNOTSUPP", "EPERM", "EBADF", "EIO"])
def test_copy_falls_back_where_the_kernel_cannot(convert, source, tmp_path, monkeypatch, number):
    """EPERM and EBADF are what some sandboxes answer, EIO some kernels on CIFS."""
    number = getattr(errno, number)

    def refuse(*arguments):
        raise OSError(number, os.strerror(number))

    convert("mha-to-mqa", "--method", "mean", source, tmp_path / "kernel")
    monkeypatch.setattr(os, "copy_file_range", refuse)
    convert("mha-to-mqa", "--method", "mean", source, tmp_path / "by-hand").succeeded()
    assert tiny.snapshot(tmp_path / "kernel") == tiny.snapshot(tmp_path / "by-hand")
