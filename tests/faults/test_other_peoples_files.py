"""Files and names of other people: nothing of theirs is lost."""

import json
import os
import shutil
import stat

import pytest
import real_runs
import tiny
from commands import MEAN, left_behind

# Files that appear during the work


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
    assert f"{out} was created during the run; move it elsewhere" in result.err
    assert result.err.count("\n") == 1
    mine = {"folder": out / "precious.txt", "file": out}.get(kind)
    assert out.is_symlink() if mine is None else mine.read_text() == "mine"
    shutil.rmtree(out) if kind == "folder" else out.unlink()
    command().succeeded()
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
    assert (result.code, "was created during the run" in result.err) == (1, True)
    assert (out / "precious.txt").read_text() == "mine"


# Other people's files


def test_copies_have_the_permissions_of_new_files(uptrain, finished_run, tmp_path):
    """Another's checkpoint may be read-only, and what is made of it must be rotated one day."""
    other, out = shutil.copytree(finished_run, tmp_path / "other"), tmp_path / "longer"
    paths = [path for path in other.rglob("*") if path.is_file()]
    for path in paths:
        path.chmod(0o444)
    settings = json.loads((other / "run.json").read_text())
    settings["settings"]["schedule"] = "constant"
    (other / "run.json").unlink()
    (other / "run.json").write_text(json.dumps(settings))
    uptrain("extend", other, "--out", out, "--steps", 6, "--max-minutes", 0).succeeded()
    uptrain("export", other, tmp_path / "out").succeeded()
    made = [path for folder in (out, tmp_path / "out") for path in folder.rglob("*") if path.is_file()]
    assert len(made) > 10
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o200 for path in made)


@pytest.mark.parametrize("name", ["step-00000001-best", "step-old", "step-1", "step-000000004", ".unfinished-mine"])
def test_a_users_own_copy_of_a_checkpoint_stays(uptrain, finished_run, tmp_path, name):
    """It is none of the run's: neither rotated away, nor in the way of other commands."""
    inputs, out = real_runs.make_inputs(tmp_path), tmp_path / "run"
    options = ("--keep-last", 1, "--save-every-steps", 1, "--schedule", "constant")
    uptrain(*real_runs.arguments(inputs, out, *options, steps=4), "--max-minutes", 0).succeeded()
    mine = shutil.copytree(out / "checkpoints/step-00000001", out / "checkpoints" / name)
    before = tiny.snapshot(mine)
    uptrain("resume", out).succeeded()
    assert tiny.snapshot(mine) == before
    assert real_runs.checkpoints(out) == sorted([name, "step-00000004"])
    assert [entry["step"] for entry in json.loads(uptrain("status", out, "--json").out)["checkpoints"]] == [4]
    uptrain("extend", out, "--out", tmp_path / "longer", "--steps", 5, "--max-minutes", 0).succeeded()
    uptrain("export", out, tmp_path / "out").succeeded()


# Names


NOT_UTF_8 = os.fsdecode(b"na\xefve")


def test_names_that_are_not_utf_8(convert, uptrain, source, finished_run, ids, tmp_path):
    odd = source.rename(tmp_path / NOT_UTF_8)
    convert("mha-to-gqa", odd, tmp_path / "out", *MEAN).refused("SOURCE", r"na\xefve", "not UTF-8", "rename it")
    source = odd.rename(tmp_path / "source")
    for options in ((), ("--json",), ("--dry-run",)):
        convert("mha-to-gqa", source, odd, *MEAN, *options).refused("OUT", r"na\xefve", "not UTF-8")
    uptrain("export", finished_run, odd).refused(r"na\xefve", "not UTF-8")
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


def test_out_that_is_a_link_in_a_circle(convert, uptrain, source, finished_run, ids, tmp_path):
    out, inputs = tmp_path / "out", real_runs.make_inputs(tmp_path)
    out.symlink_to(out)
    words = f"OUT ({out}) is not a usable path: Symlink loop"
    convert("mha-to-gqa", source, out, *MEAN).refused(words)
    uptrain("export", finished_run, out).refused(words)
    uptrain("prepare", "--data", ids, "--vocab-size", 300, "--seq-len", 8, "--out", out).refused(words)
    uptrain(*real_runs.arguments(inputs, out)).refused(words)
    uptrain("teach", inputs["parent"], "--data", inputs["data"], "--out", out).refused(words)


@pytest.mark.parametrize("length", [231, 244, 255, 256, 5000])
def test_names_that_are_too_long(convert, uptrain, source, finished_run, ids, tmp_path, length):
    out = tmp_path / ("x" * length)
    convert("mha-to-gqa", source, out, *MEAN).refused("has a name of more than", "choose a shorter one")
    convert("mha-to-gqa", source, out, *MEAN, "--dry-run").refused("has a name of more than")
    uptrain("export", finished_run, out).refused("has a name of more than")
    prepare = ("prepare", "--data", ids, "--vocab-size", 300, "--seq-len", 8, "--out", out)
    uptrain(*prepare).refused("has a name of more than")
    assert left_behind(tmp_path) == []


def test_overwriting_keeps_what_is_no_conversions(convert, source, tmp_path):
    out = tmp_path / "out"
    convert("mha-to-gqa", source, out, *MEAN).succeeded()
    (out / "text.txt").write_text("A text to calibrate on. " * 2000)
    text = ("--calibration", out / "text.txt", "--overwrite")
    for groups in (2, 8, 5):  # 8 heads stay 8; 5 are not possible
        options = ("--groups", groups, "--calibration-tokens", 1024)
        convert("mha-to-gqa", source, out, *options, *text).refused("holds the calibration text", "would delete")
    (out / ".git").mkdir()
    convert("mha-to-gqa", source, out, *MEAN, "--overwrite").refused("such as .git or a training run (here: .git)")
    (out / ".git").rmdir()
    (out / ".git").write_text("gitdir: a worktree's")
    convert("mha-to-gqa", source, out, *MEAN, "--overwrite").refused("such as .git or a training run (here: .git)")
    assert (out / "text.txt").exists() and (out / ".git").exists()


@pytest.mark.parametrize("name", ["checkpoint-500", "global_step7", "runs", "wandb", "onnx", "original"])
def test_overwriting_keeps_folders_of_other_programs(convert, source, tmp_path, name):
    out = tmp_path / "out"
    convert("mha-to-gqa", source, out, *MEAN).succeeded()
    (out / name).mkdir()
    (out / name / "trainer_state.json").write_text("{}")
    before = tiny.snapshot(out)
    convert("mha-to-gqa", source, out, *MEAN, "--overwrite").refused(str(out), name)
    assert tiny.snapshot(out) == before


def test_overwriting_takes_hidden_files_that_are_no_work(convert, source, tmp_path):
    out = tmp_path / "out"
    convert("mha-to-gqa", source, out, *MEAN).succeeded()
    for name in (".gitattributes", ".DS_Store"):
        (out / name).write_text("x")
    convert("mha-to-gqa", source, out, *MEAN, "--overwrite").succeeded()
    assert not (out / ".DS_Store").exists()
    (out / ".env").write_text("TOKEN=precious")
    convert("mha-to-gqa", source, out, *MEAN, "--overwrite").refused("such as .git or a training run (here: .env)")
