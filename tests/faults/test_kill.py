"""A conversion killed at any moment leaves no OUT, and the same command again gives the same bytes."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import tiny
from self_kill import kill_at_every_step, run_self_killing

from convert.planning import plan
from scripts.bench.llama_checkpoint import TINY_LLAMA, write_random


@pytest.fixture
def kill_at(tmp_path):
    return lambda n, *arguments: run_self_killing(n, "convert", *arguments, output=tmp_path / "killed")


@pytest.fixture
def expected(convert, source, tmp_path):
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "expected", "--groups", 2).succeeded()
    return tiny.snapshot(tmp_path / "expected")


def test_killed_at_every_step_to_the_disk(convert, source, tmp_path, expected):
    def arguments(out):
        return ("mha-to-gqa", "--method", "mean", source, out, "--groups", 2, "--workers", 1)

    def finish(out):
        return out.exists() or convert(*arguments(out)).succeeded()

    assert kill_at_every_step(tmp_path, "convert", arguments, finish, expected) >= 20


def test_rerun_keeps_finished_shards(convert, source, tmp_path, expected, kill_at):
    out = tmp_path / "out"
    arguments = ("mha-to-gqa", "--method", "mean", source, out, "--groups", 2, "--workers", 1)
    kill_at(10, *arguments)
    staging = tmp_path / ".out.groupwise"
    finished = {p.name: p.stat().st_ino for p in (staging / "folder").glob("*.safetensors")}
    assert finished
    convert(*arguments).succeeded()
    assert {name: (out / name).stat().st_ino for name in finished} == finished
    assert tiny.snapshot(out) == expected
    assert not staging.exists()


@pytest.mark.parametrize(("family", "changes"), [("phi3", {}), ("stablelm", {"qk_layernorm": True})])
def test_rerun_where_heads_share_a_tensor_or_have_one_each(convert, tmp_path, family, changes, kill_at):
    source = tiny.save(tiny.build(family, **changes), tmp_path / family, "bfloat16", max_shard_size="10KB")
    arguments = ("--groups", 2, "--method", "random", "--workers", 1)
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "expected", *arguments).succeeded()
    assert kill_at(14, "mha-to-gqa", "--method", "mean", source, tmp_path / "out", *arguments) == -signal.SIGKILL
    assert list((tmp_path / ".out.groupwise/folder").glob("*.safetensors"))
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", *arguments[:-1], 4).succeeded()
    assert tiny.snapshot(tmp_path / "out") == tiny.snapshot(tmp_path / "expected")


@pytest.mark.parametrize(
    ("change", "named"), [("parameters", "--method"), ("source", "SOURCE"), ("config", "SOURCE")]
)  # fmt: skip
def test_other_parameters_or_inputs_do_not_continue(convert, source, tmp_path, expected, change, named, kill_at):
    out = tmp_path / "out"
    kill_at(10, "mha-to-gqa", "--method", "mean", source, out, "--groups", 2, "--workers", 1)
    (finished,) = (tmp_path / ".out.groupwise/folder").glob("*.safetensors")
    data = bytearray(finished.read_bytes())
    data[-1] ^= 1  # if this shard were kept, the output would be wrong
    finished.write_bytes(data)
    method = "mean"
    if change == "parameters":
        method = "first"
    elif change == "source":
        shard = next(source.glob("model-00001*"))
        os.utime(shard, ns=(1, 1))
    else:
        tiny.edit_config(source, rms_norm_eps=0.5)
    arguments = ("mha-to-gqa", source, out, "--groups", 2, "--method", method)
    convert(*arguments).refused(f"{tmp_path}/.out.groupwise holds the finished work of a command with another {named};")
    assert finished.read_bytes() == data
    shutil.rmtree(tmp_path / ".out.groupwise")
    convert(*arguments).succeeded()
    convert("verify", source, out).succeeded()
    assert json.loads((out / "groupwise.json").read_text())["method"] == method


def test_another_model_with_the_same_sizes_and_times_does_not_continue(convert, tmp_path, kill_at):
    """As the files of a Nix store, or of an image that was built with one date for all."""
    one, other = (tiny.save(tiny.build(seed=seed), tmp_path / f"{seed}", max_shard_size="30KB") for seed in (1, 2))
    for path in (*one.iterdir(), *other.iterdir()):
        os.utime(path, (1, 1))
    arguments = ("--groups", 2, "--method", "mean", "--workers", 1)
    kill_at(10, "mha-to-gqa", one, tmp_path / "out", *arguments)
    assert list((tmp_path / ".out.groupwise/folder").glob("*.safetensors"))
    convert("mha-to-gqa", other, tmp_path / "out", *arguments).refused("a command with another SOURCE;")
    convert("mha-to-gqa", one, tmp_path / "out", *arguments).succeeded()
    convert("verify", one, tmp_path / "out").succeeded()


def test_other_versions_of_packages_do_not_continue(convert, source, tmp_path, kill_at, monkeypatch):
    arguments = ("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", "mean", "--workers", 1)
    kill_at(10, *arguments)
    with monkeypatch.context() as patch:
        patch.setattr(plan, "version", lambda name: "0.1")
        convert(*arguments).refused("a command with another set of package versions;")
    convert(*arguments).succeeded()


def test_torn_journal_line_is_as_if_not_written(convert, source, tmp_path, expected, kill_at):
    out = tmp_path / "out"
    arguments = ("mha-to-gqa", "--method", "mean", source, out, "--groups", 2, "--workers", 1)
    kill_at(10, *arguments)
    journal = tmp_path / ".out.groupwise/journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-5])
    convert(*arguments).succeeded()
    assert tiny.snapshot(out) == expected


def test_killed_while_replacing(convert, source, tmp_path, expected, kill_at):
    """Between taking the old model away and putting the new one in place, both are still on the disk."""
    out = tmp_path / "out"
    arguments = ("mha-to-gqa", "--method", "mean", source, out, "--groups", 2, "--workers", 1, "--overwrite")
    between = left = 0
    for n in range(1, 200):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(source, out)
        old = tiny.snapshot(out)
        code = kill_at(n + 20, *arguments)
        if code == 0:
            break
        between += not out.exists()
        folders = [p for p in (out, tmp_path / ".out.groupwise/replaced") if p.exists()]
        assert any(tiny.snapshot(p) in (old, expected) for p in folders)
        if tiny.snapshot(out) == expected and (tmp_path / ".out.groupwise").exists():
            says = convert(*arguments[:-1]).refused("exists; choose another name, or add --overwrite").err
            assert "/.out.groupwise is left of a command that was killed when OUT was complete; remove it" in says
            left += 1
        convert(*arguments).succeeded()
        assert tiny.snapshot(out) == expected
    assert code == 0
    assert between and left


def test_interrupt_says_how_to_continue(source, tmp_path):
    """The interrupt comes when every shard is written, so that how far the workers are by then makes no difference."""
    code = "import signal, convert.output.write_shards as e\n"
    code += "written = e.wait\n"
    code += "e.wait = lambda *a, **k: (written(*a, **k), signal.raise_signal(signal.SIGINT))\n"
    code += "from convert.cli import main\nmain()"
    command = [sys.executable, "-c", code, "mha-to-mqa", "--method", "mean", str(source), str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert (
        result.stderr.strip()
        == f"Error: interrupted; finished work is kept in {tmp_path}/.out.groupwise, and the same command continues "
        "from there."
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_twenty_random_moments_of_a_gigabyte(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    assert write_random(TINY_LLAMA.of_size(1.1e9), source) >= 1e9
    command = [
        sys.executable,
        "-m",
        "convert",
        "mha-to-gqa",
        "--method",
        "mean",
        str(source),
        str(out),
        "--groups",
        "8",
    ]
    started = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    duration = time.monotonic() - started
    expected = digests(out)
    rng, kills, resumed = random.Random(0), 0, 0
    while kills < 20:
        shutil.rmtree(out, ignore_errors=True)
        while not out.exists():
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                process.wait(rng.uniform(0.1, 1.0) * duration)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                kills += 1
                journal = tmp_path / ".out.groupwise/journal.jsonl"
                resumed += journal.exists() and len(journal.read_text().splitlines()) > 1
            assert not out.exists() or digests(out) == expected
    assert resumed
    assert digests(out) == expected
    print(f"{kills} kills, {resumed} of them with finished shards to continue from")


def digests(folder):
    import hashlib

    return {
        p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }
