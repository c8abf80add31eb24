"""A RUN that comes from somebody else: no code of it runs, and no file outside it is read or written."""

import json
import os
import pickle
import shutil

import pytest
import real_runs
import tiny
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from model.checkpoint.formats.dcp.metadata import read_metadata
from model.files.write import replace_file
from uptrain.checkpoints.files import checksum


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Return a run of 6 steps that was stopped after the first, and could resume, or be extended."""
    folder = tmp_path_factory.mktemp("stopped")
    arguments = real_runs.arguments(real_runs.make_inputs(folder), folder / "run", "--schedule", "constant", steps=6)
    real_runs.drive([{"arguments": [*arguments, "--max-minutes", "0"]}], on_cpu=True)
    return folder / "run"


@pytest.fixture
def hostile(stopped, tmp_path):
    """Return a copy of the run, to be changed, and its checkpoint."""
    run = shutil.copytree(stopped, tmp_path / "run")
    return run, run / "checkpoints/step-00000001"


def rewrite_manifest(checkpoint):
    """Make the manifest right: whoever changed the files can do that, too."""
    names = [path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()]
    files = {name: checksum(checkpoint / name) for name in names if name != "manifest.json"}
    (checkpoint / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))


COMMANDS = {
    "resume": lambda run: ("resume", run),
    "extend": lambda run: ("extend", run, "--out", run.with_name("longer"), "--steps", 9),
    "export": lambda run: ("export", run, run.with_name("out")),
    "status": lambda run: ("status", run, "--verify"),
    "report": lambda run: ("report", run),
}


@pytest.mark.parametrize("command", ["resume", "extend", "export"])
def test_metadata_that_are_code_do_not_run(uptrain, hostile, payload, command):
    run, checkpoint = hostile
    (checkpoint / "tensors/.metadata").write_bytes(pickle.dumps(payload))
    rewrite_manifest(checkpoint)
    uptrain(*COMMANDS[command](run)).refused(".metadata", "no code was run")
    assert not payload.path.exists()
    assert not run.with_name("longer").exists()


def test_steps_of_more_windows_than_can_be_counted(uptrain, hostile):
    run, _ = hostile
    content = json.loads((run / "run.json").read_text())
    content["settings"]["global_batch"] = 1 << 60
    (run / "run.json").write_text(json.dumps(content))
    uptrain("resume", run).refused("run.json is damaged", "steps x global_batch")


@pytest.mark.parametrize("command", COMMANDS)
def test_numbers_that_are_code_do_not_run(uptrain, hostile, payload, command):
    """What is no tensor, as the optimizer's settings, is a pickle of its own."""
    run, checkpoint = hostile
    tensors = checkpoint / "tensors"
    metadata = FileSystemReader(tensors).read_metadata()
    names = [name for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, BytesStorageMetadata)]
    assert len(names) > 3
    torch.save(payload, tensors / "__9_0.distcp")
    for name in names:
        size = (tensors / "__9_0.distcp").stat().st_size
        metadata.storage_data[MetadataIndex(name)] = _StorageInfo("__9_0.distcp", 0, size)
    (tensors / ".metadata").write_bytes(pickle.dumps(metadata))
    rewrite_manifest(checkpoint)
    result = uptrain(*COMMANDS[command](run))
    assert not payload.path.exists()
    if command in ("resume", "extend"):
        assert (result.code, "does not fit the run's model and optimizer" in result.err) == (2, True), result.err
        assert result.err.count("\n") == 1
    else:
        result.succeeded()  # they read no such number


@pytest.mark.parametrize("command", ["resume", "extend"])
def test_a_tensor_that_is_code_does_not_run(uptrain, hostile, payload, command):
    run, checkpoint = hostile
    tensors = checkpoint / "tensors"
    metadata = FileSystemReader(tensors).read_metadata()
    torch.save(payload, tensors / "__9_0.distcp")
    for index, place in metadata.storage_data.items():
        if index.offset is not None:
            place.relative_path, place.offset = "__9_0.distcp", 0
            place.length = (tensors / "__9_0.distcp").stat().st_size
    (tensors / ".metadata").write_bytes(pickle.dumps(metadata))
    rewrite_manifest(checkpoint)
    uptrain(*COMMANDS[command](run)).refused("does not fit the run's model and optimizer")
    assert not payload.path.exists()


@pytest.mark.parametrize("name", ["../../../precious", "/etc/passwd", "tensors/../../../../precious", "a/b/c", "", "."])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_manifest_leads_nowhere_else(uptrain, hostile, tmp_path, command, name):
    run, checkpoint = hostile
    precious = tmp_path / "precious"
    precious.write_text("mine")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][name] = checksum(precious)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    before = tiny.snapshot(tmp_path)
    result = uptrain(*COMMANDS[command](run))
    if command == "report":  # which reads no manifest
        result.succeeded()
        written = run / "report.html"
        assert {path: text for path, text in tiny.snapshot(tmp_path).items() if path in before} == before
        assert "mine" not in written.read_text()
        return
    assert result.code == (1 if command == "status" else 2)
    assert "which no checkpoint has" in result.err
    assert tiny.snapshot(tmp_path) == before


def test_links_in_a_checkpoint_are_not_followed(uptrain, hostile, tmp_path):
    run, checkpoint = hostile
    (tmp_path / "secret").write_text("mine")
    (checkpoint / "tensors/__7_0.distcp").symlink_to(tmp_path / "secret")
    uptrain("extend", run, "--out", tmp_path / "longer", "--steps", 9, "--max-minutes", 0).succeeded()
    assert not (tmp_path / "longer/checkpoints/step-00000001/tensors/__7_0.distcp").exists()
    rewrite_manifest(checkpoint)
    uptrain("extend", run, "--out", tmp_path / "another", "--steps", 9).refused("is a link")


LINKED = ("report.html", "report.png", "run.json", "run_state.json", "metrics.jsonl")


def test_links_at_the_names_of_temporary_files_are_not_followed(hostile, tmp_path, monkeypatch):
    """Whoever made RUN may have guessed the names."""
    run, _ = hostile
    (tmp_path / "precious").write_text("mine")
    monkeypatch.setattr("model.files.write.secrets.token_hex", lambda n: "0" * 2 * n)
    for name in LINKED:
        for target in (tmp_path / "precious", tmp_path / "new"):
            link = run / f".{name}.00000000"
            link.symlink_to(target)
            with pytest.raises(FileExistsError):
                replace_file(run / name, b"theirs")
            assert link.is_symlink()
            link.unlink()
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", ["resume", "report"])
def test_links_in_a_run_leave_their_targets(uptrain, hostile, tmp_path, command):
    """The names of temporary files have held the process id, of which there are few."""
    run, _ = hostile
    (tmp_path / "home").mkdir()
    (tmp_path / "home/precious").write_text("mine")
    for name in LINKED:
        (run / f".{name}.{os.getpid()}").symlink_to(tmp_path / "home/precious")
    for name in ("run_state.json", "metrics.jsonl"):
        (run / name).rename(tmp_path / "home" / name)
        (run / name).symlink_to(tmp_path / "home" / name)
    before = tiny.snapshot(tmp_path / "home")
    uptrain(*COMMANDS[command](run), *(("--max-minutes", 0) if command == "resume" else ())).succeeded()
    assert tiny.snapshot(tmp_path / "home") == before
    if command == "resume":
        assert len((run / "metrics.jsonl").read_text().splitlines()) > len(before["metrics.jsonl"].splitlines())


@pytest.mark.parametrize("command", ["export", "extend"])
def test_a_model_out_of_the_run_is_not_copied(uptrain, hostile, tmp_path, command):
    """Other files may lie beside it."""
    run, _ = hostile
    (run / "model").rename(tmp_path / "home")
    (tmp_path / "home/notes.txt").write_text("mine")
    (run / "model").symlink_to("../home")
    before = tiny.snapshot(tmp_path)
    uptrain(*COMMANDS[command](run)).refused(f"{run}/model is a link out of the run", "move them here")
    assert tiny.snapshot(tmp_path) == before
    (tmp_path / "home").rename(run / "inside")
    (run / "model").unlink()
    (run / "model").symlink_to("inside")
    (run / "inside/config.json").rename(tmp_path / "config.json")
    uptrain(*COMMANDS[command](run)).refused(f"{run}/model has no config.json")
    (tmp_path / "config.json").rename(run / "inside/config.json")
    uptrain(*COMMANDS[command](run), *(("--max-minutes", 0) if command == "extend" else ())).succeeded()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_listed", [True, False])
def test_a_fifo_in_a_checkpoint_does_not_block(uptrain, hostile, is_listed):
    run, checkpoint = hostile
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (path,) = (checkpoint / "tensors").glob("*.distcp")
    path.unlink()
    os.mkfifo(path)
    listed = manifest["files"].pop(f"tensors/{path.name}")
    if is_listed:
        manifest["files"][f"tensors/{path.name}"] = {**listed, "size": 0}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    uptrain("resume", run).refused(f"{path} is not a regular file")


STATES = [
    b"", b"[]", b"5", b"null", b'"x"', b"{}", b"{", b'{"step": 1}', b"\xff", b"[" * 100_000,
    *(json.dumps({"step": 1, "tokens": 256, "skipped": [], "not_finite": [], "grad_norms": [], "keep": False, **change}
                 ).encode()
      for change in ({"step": "1"}, {"step": 2}, {"step": -1}, {"step": True}, {"tokens": 1.5}, {"skipped": 3},
                     {"skipped": ["1"]}, {"not_finite": None}, {"grad_norms": {"a": 1}}, {"grad_norms": ["x"]},
                     {"keep": 1})),
]  # fmt: skip


@pytest.mark.parametrize("state", STATES, ids=range(len(STATES)))
@pytest.mark.parametrize("command", ["resume", "export", "status"])
def test_damaged_states(uptrain, hostile, state, command):
    run, checkpoint = hostile
    (checkpoint / "state.json").write_bytes(state)
    rewrite_manifest(checkpoint)
    result = uptrain(*COMMANDS[command](run))
    assert result.code == (0 if command == "status" else 2), result.err
    assert command == "status" or ("state.json is damaged" in result.err and result.err.count("\n") == 1)


def test_metadata_are_read_as_torch_reads_them(stopped):
    """Names, dtypes, shapes and places, of tensors and of all else."""
    from uptrain.checkpoints.tensors import _Reader

    tensors = stopped / "checkpoints/step-00000001/tensors"
    ours, theirs = _Reader(tensors).read_metadata(), FileSystemReader(tensors).read_metadata()
    assert ours.storage_data == theirs.storage_data
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    contents = read_metadata(tensors / ".metadata")
    assert contents.non_tensors
    assert contents.tensors
    assert all(os.sep not in place.file for place in contents.non_tensors.values())
