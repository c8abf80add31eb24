"""A teacher's logits are written once, and a run from them is a run with the teacher."""

import errno
import hashlib
import json
import os
import shutil
import zlib
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import tiny
import torch
from caches import write_cache
from commands import left_behind
from limits import few_files
from real_runs import (
    LAYOUT_CASES,
    LAYOUTS,
    VOCAB,
    arguments,
    assert_stops_change_nothing,
    drive,
    evaluations,
    records,
    steps,
)
from tiny_tokenizers import make_tokenizer

from model.files.staging import Staging
from model.files.write import tree_bytes
from uptrain.data import teacher_logits
from uptrain.data.teacher_logits import LogitsManifest
from uptrain.data.token_cache import TokenCache
from uptrain.runs import checks
from uptrain.training import logits as logits_module


def teach_arguments(inputs, out, *more):
    return ("teach", inputs["parent"], "--data", inputs["data"], "--out", out, *more)


@pytest.fixture
def teach(uptrain, inputs):
    def run(out, *more):
        uptrain(*teach_arguments(inputs, out, *more)).succeeded()
        return out

    return run


def train(inputs, out, logits, *more, **options):
    drive([{"arguments": arguments(inputs, out, "--teacher-logits", logits, *more, **options)}])
    return [loss for _, loss in steps(out, "loss")]


@pytest.mark.parametrize("part", ["all", "kv"])
@pytest.mark.parametrize("loss", ["distill", "mix"])
def test_with_all_tokens_the_run_is_that_of_the_live_teacher(inputs, teach, tmp_path, loss, part):
    logits = teach(tmp_path / "logits", "--top-k", VOCAB)
    drive([{"arguments": arguments(inputs, tmp_path / "live", "--trainable", part, loss=loss)}])
    live = [x for _, x in steps(tmp_path / "live", "loss")]
    stored = train(inputs, tmp_path / "run", logits, "--trainable", part, "--loss", loss)
    assert len(live) == len(stored) == 12
    assert max(abs(a - b) for a, b in zip(live, stored, strict=True)) <= 1e-6
    few = teach(tmp_path / "few", "--top-k", 4)
    assert abs(train(inputs, tmp_path / "fewer", few, "--loss", loss, steps=4)[0] - live[0]) > 1e-6


def test_a_class_of_transformers_computes_few_logits_at_once(uptrain, inputs, tmp_path, monkeypatch):
    """Whole batches of large vocabularies would take many gigabytes. The logits are the same but for rounding."""
    parent = tiny.save(tiny.build("phi", vocab_size=VOCAB), tmp_path / "phi")
    cache, values, losses, n_windows = TokenCache.open(inputs["data"]), [], [], []
    real = logits_module.whole_logits

    def counted(model, batch):
        n_windows.append(len(batch.ids_BT))
        return real(model, batch)

    monkeypatch.setattr(logits_module, "whole_logits", counted)
    for limit, most in ((1 << 28, cache.n_windows), (2 * 32 * VOCAB, 2), (1, 1)):
        monkeypatch.setattr(logits_module, "_WHOLE_LOGITS", limit)
        n_windows.clear()
        out = tmp_path / f"{limit}"
        uptrain(*teach_arguments({**inputs, "parent": parent}, out, "--top-k", VOCAB)).succeeded()
        assert (max(n_windows), sum(n_windows)) == (most, cache.n_windows)
        logits, ids = teacher_logits.TeacherLogits.open(out, cache).read(np.arange(cache.n_windows))
        order = ids.argsort(axis=-1)  # rounding may change the order of the top
        values.append(np.take_along_axis(logits[..., :-1], order, axis=-1))
        n_windows.clear()
        evaluated = uptrain("evaluate", parent, "--data", inputs["data"], "--json").succeeded()
        losses.append(json.loads(evaluated.out)["loss"])
        assert (max(n_windows), sum(n_windows)) == (most, cache.n_windows)
    for each in values[1:]:
        np.testing.assert_allclose(each, values[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)


def test_shards_in_bfloat16_do_not_round_the_logits(inputs, teach, tmp_path):
    """A student that equals its teacher begins with a divergence of 0. With rounded logits it is 1e-4."""
    more = ("--teacher-logits", teach(tmp_path / "logits", "--top-k", VOCAB), "--precision", "bf16")
    own = {**inputs, "model": inputs["parent"]}
    drive([{"arguments": arguments(own, tmp_path / "run", *more, steps=4)}], *LAYOUTS["FSDP2 x 2"])
    assert abs(steps(tmp_path / "run", "loss")[0][1]) <= 1e-6


def test_logits_do_not_depend_on_the_seed_of_a_run(inputs, teach, tmp_path):
    logits = teach(tmp_path / "logits", "--top-k", VOCAB)
    drive([{"arguments": arguments(inputs, tmp_path / "live", "--seed", 5, loss="distill")}])
    live = [x for _, x in steps(tmp_path / "live", "loss")]
    stored = train(inputs, tmp_path / "run", logits, "--seed", 5)
    assert max(abs(a - b) for a, b in zip(live, stored, strict=True)) <= 1e-6


def test_held_out_text_is_measured_without_the_teacher(inputs, teach, tmp_path):
    logits = teach(tmp_path / "logits")
    train(inputs, tmp_path / "run", logits, "--eval-data", inputs["held_out"], steps=4)
    assert all(set(evaluation) == {"targets", "loss", "loss_error"} for _, evaluation in evaluations(tmp_path / "run"))


@pytest.mark.parametrize("layout", LAYOUT_CASES)
def test_stopped_and_resumed_is_bit_equal(inputs, teach, tmp_path, layout):
    more = ("--teacher-logits", teach(tmp_path / "logits", "--top-k", 16))
    assert_stops_change_nothing(inputs, tmp_path, LAYOUTS[layout], *more, loss="next-token", evaluates=False)


def test_machines_share_the_work(uptrain, inputs, teach, tmp_path, monkeypatch):
    monkeypatch.setattr(teacher_logits, "SHARD_BYTES", 20_000)
    expected = tiny.snapshot(teach(tmp_path / "alone"))
    assert len(LogitsManifest.parse(tmp_path / "alone").shards) > 3
    out = tmp_path / "out"
    n_windows, done = LogitsManifest.parse(tmp_path / "alone").n_windows, []
    for share in ("1/3", "3/3"):
        done.append(json.loads(uptrain(*teach_arguments(inputs, out, "--shard", share, "--json")).out))
    assert [(part["shard"], part["windows_in_all"]) for part in done] == [("1/3", n_windows), ("3/3", n_windows)]
    again = " ".join(uptrain(*teach_arguments(inputs, out, "--shard", "1/3")).out.split())
    assert again == (
        f"Shard 1/3 is done: {done[0]['windows']} of the {n_windows} windows. When all 3 shards are done, run the "
        "command without --shard to join them."
    )
    assert not out.exists()
    uptrain(*teach_arguments(inputs, out, "--top-k", 3)).refused(
        "out.shard-1-of-3", "work of a command with another --top-k;"
    )
    monkeypatch.setattr("uptrain.teach.load_teacher", counted := Counted())
    teach(out, "--shard", "1/3")
    assert not counted.calls, "what is finished is not computed again"
    teach(out)
    assert tiny.snapshot(out) == expected
    assert not list(tmp_path.glob(".out*"))


def test_what_else_lies_in_the_staging_area_stays_out(uptrain, inputs, teach, tmp_path, monkeypatch):
    def fail(*given):
        raise OSError("the disk is away")

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("uptrain.teach._publish", fail)
        assert uptrain(*teach_arguments(inputs, out)).code == 1
    (tmp_path / ".out.groupwise/folder/stray.bin").write_bytes(b"left by a killed command")
    teach(out)
    files = {name for shard in LogitsManifest.parse(out).shards for name in shard.files}
    assert {path.name for path in out.iterdir()} == {"manifest.json", *files}


def test_all_shards_have_one_precision(uptrain, inputs, tmp_path, monkeypatch):
    """What a GPU began in bfloat16 goes on so on a CPU; parts that two devices began are not joined."""
    monkeypatch.setattr(teacher_logits, "SHARD_BYTES", 20_000)
    out, other = tmp_path / "out", tmp_path / "other"
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr("uptrain.teach._precision", lambda stagings: "bf16")
        uptrain(*teach_arguments(inputs, out, "--shard", "1/3")).succeeded()
        uptrain(*teach_arguments(inputs, other, "--shard", "1/2")).succeeded()
    uptrain(*teach_arguments(inputs, other, "--shard", "2/2")).succeeded()
    before = tiny.snapshot(tmp_path)
    uptrain(*teach_arguments(inputs, other)).refused("shards were computed in bf16 (", " and fp32 (")
    assert tiny.snapshot(tmp_path) == before, "nothing is lost"
    monkeypatch.setattr("uptrain.teach.load_teacher", counted := Counted())
    assert json.loads(uptrain(*teach_arguments(inputs, out, "--json")).out)["precision"] == "bf16"
    assert [precision for _, precision in counted.calls] == ["bf16"]
    assert {shard.precision for shard in LogitsManifest.parse(out).shards} == {"bf16"}


def test_more_shards_than_a_process_may_open(inputs, teach, tmp_path, monkeypatch):
    monkeypatch.setattr(teacher_logits, "SHARD_BYTES", 2_000)
    logits = teach(tmp_path / "logits")
    cache = TokenCache.open(inputs["data"])
    n_shards = len(LogitsManifest.parse(logits).shards)
    with few_files(n_shards):  # each shard has two
        assert len(teacher_logits.TeacherLogits.open(logits, cache).read(np.array([0]))[0]) == 1


class Counted:
    """`load_teacher`, with its calls."""

    def __init__(self):
        from uptrain.models.load import load_teacher

        self.calls, self._load = [], load_teacher

    def __call__(self, *given, **options):
        self.calls.append(given)
        return self._load(*given, **options)


def test_the_same_command_again(uptrain, inputs, teach, tmp_path):
    out = teach(tmp_path / "out")
    before = tiny.snapshot(out)
    again = uptrain(*teach_arguments(inputs, out))
    assert again.code == 0 and "was complete already" in again.out
    given = f"--data {inputs['data']} --teacher-logits {out} --alpha A --out RUN"
    assert again.out.splitlines()[-1] == f"Next: uptrain run STUDENT {given}"
    assert tiny.snapshot(out) == before
    uptrain(*teach_arguments(inputs, out, "--top-k", 3)).refused("exists, and is of another --top-k")
    other = {**inputs, "data": inputs["held_out"]}
    uptrain(*teach_arguments(other, out)).refused("exists, and is of another token cache")
    other = {**inputs, "parent": inputs["model"]}
    uptrain(*teach_arguments(other, out)).refused("exists, and is of another model")


def test_refusals_of_teach(uptrain, inputs, tmp_path, monkeypatch):
    out = tmp_path / "out"
    uptrain(*teach_arguments(inputs, out, "--top-k", 258)).refused("--top-k 258", "has 257 tokens")
    uptrain(*teach_arguments(inputs, out, "--top-k", 0)).refused("--top-k")
    uptrain(*teach_arguments(inputs, out, "--shard", "3/2")).refused("--shard", "3/2")
    foreign = write_cache(tmp_path / "foreign", [[[1, 2, 300]]], 8, 301)
    uptrain(*teach_arguments({**inputs, "data": foreign}, out)).refused("holds the id 300", "below 257")
    named = write_cache(tmp_path / "named", [[[1, 2, 3]]], 8, VOCAB, "f" * 64)
    parent = shutil.copytree(inputs["parent"], tmp_path / "parent")
    uptrain(*teach_arguments({"parent": parent, "data": named}, out)).refused(
        f"cannot load the tokenizer of {parent}", f"copy its files into {parent}"
    )
    make_tokenizer(parent, VOCAB, bos=False)
    uptrain(*teach_arguments({"parent": parent, "data": named}, out)).refused("made with another tokenizer")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": 1000}))
    words = f"{tmp_path} has 1 kB free, but ", " are needed; make room, or start again with a lower --top-k"
    uptrain(*teach_arguments(inputs, out)).refused(*words)
    assert left_behind(tmp_path) == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    uptrain(*teach_arguments(inputs, out)).refused("one process", "--shard 1/N")
    assert not out.exists()


@pytest.mark.parametrize("share", [(), ("--shard", "1/2")])
def test_room_for_the_rest_is_enough(uptrain, inputs, tmp_path, monkeypatch, share):
    """What an earlier command or another machine has finished takes no more of the disk."""
    monkeypatch.setattr(teacher_logits, "SHARD_BYTES", 20_000)
    out, record_file = tmp_path / "out", Staging.record_file

    def full_at_the_second(self, name, record):
        if self.finished:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        record_file(self, name, record)

    monkeypatch.setattr(Staging, "record_file", full_at_the_second)
    result = uptrain(*teach_arguments(inputs, out, *share))
    assert (result.code, "finished work is kept in" in result.err) == (1, True)
    monkeypatch.setattr(Staging, "record_file", record_file)
    (root,) = tmp_path.glob(".*.groupwise")
    cache = TokenCache.open(inputs["data"])
    n_bytes = cache.n_windows * teacher_logits.window_bytes(cache.seq_len, 64, "uint16")
    staged = tree_bytes(root)
    assert 20_000 < staged < n_bytes
    for free in (n_bytes - staged - 1, n_bytes - staged):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: type("usage", (), {"free": free}))
        result = uptrain(*teach_arguments(inputs, out))
        assert result.code == (0 if free == n_bytes - staged else 2), result.err
        assert root.exists() == (result.code == 2)
    assert left_behind(tmp_path) == []


@pytest.fixture
def refused(uptrain, inputs, tmp_path):
    """Return a function that checks the refusal of a run."""

    def check(logits, *words, more=(), **changes):
        fixed = arguments({**inputs, **changes}, tmp_path / "run", "--teacher-logits", logits, *more)
        uptrain(*fixed).refused(*words)
        assert not (tmp_path / "run").exists()

    return check


def test_foreign_logits_are_refused_by_name(uptrain, inputs, teach, refused, tmp_path):
    """Of another cache, which another tokenizer makes, or of a teacher with another vocabulary."""
    logits = teach(tmp_path / "logits")
    refused(logits, f"{logits} is of another token cache than", "another tokenizer", data=inputs["held_out"])
    bigger = tiny.save(tiny.build(vocab_size=VOCAB + 3), tmp_path / "bigger")
    other = tmp_path / "other"
    uptrain(*teach_arguments({**inputs, "parent": bigger}, other)).succeeded()
    refused(other, f"the teacher of {other}, bigger, has 260 tokens, the student 257")
    refused(tmp_path, "holds no teacher's logits", "uptrain teach")
    refused(inputs["data"], f"{inputs['data']} is a token cache; give what `uptrain teach` made of it.")
    refused(logits, "either --teacher or --teacher-logits", more=("--teacher", inputs["parent"]))
    refused(logits, "--loss next-token does not use --teacher-logits", more=("--loss", "next-token"))


@pytest.mark.parametrize("name", ["values-00001.bin", "ids-00001.bin", "crc-00001.bin"])
def test_damaged_logits_are_refused_by_name(inputs, teach, refused, tmp_path, uptrain, monkeypatch, name):
    monkeypatch.setattr(teacher_logits, "SHARD_BYTES", 20_000)
    logits = teach(tmp_path / "logits")
    path = logits / name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    refused(logits, f"{path} has {len(content) - 1} bytes where the manifest says {len(content)}")
    path.unlink()
    refused(logits, f"{path}, which the manifest names, is missing")
    place = min(77, len(content) - 1)
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    result = uptrain(*arguments(inputs, tmp_path / "run", "--teacher-logits", logits))
    assert result.code == 1
    assert f"{path} is damaged: its checksum" in result.err


def test_a_damaged_manifest_is_refused(teach, refused, tmp_path):
    logits = teach(tmp_path / "logits")
    manifest = json.loads((logits / "manifest.json").read_text())
    for key, value, word in (
        ("top_k", "8", "top_k"), ("n_windows", 3, "n_windows"), ("dtype", "int8", "dtype"), ("sha256", "0", "sha256"),
        ("shards", [{**manifest["shards"][0], "ids": "../ids"}], "no file of the folder"), ("format", 9, "format 9"),
    ):  # fmt: skip
        (logits / "manifest.json").write_text(json.dumps({**manifest, key: value}))
        refused(logits, f"{logits}/manifest.json is damaged", word, "uptrain teach")


def test_windows_that_the_cache_has_not_are_refused(inputs, teach, refused, tmp_path):
    """The checksums are right: the folder was made by something else."""
    logits = teach(tmp_path / "logits")
    manifest = LogitsManifest.parse(logits)
    (shard,) = manifest.shards
    n = manifest.n_windows - 1
    for name in shard.files:
        os.truncate(logits / name, (logits / name).stat().st_size // manifest.n_windows * n)
    digest = hashlib.sha256((logits / shard.crc).read_bytes()).hexdigest()
    fewer = replace(manifest, n_windows=n, shards=(replace(shard, n_windows=n, crc_sha256=digest),))
    (logits / "manifest.json").write_bytes(fewer.to_json())
    refused(logits, f"is damaged: it has {n} windows of 32 tokens", f"has {n + 1} of 32")
    none = replace(manifest, shards=(shard, replace(shard, n_windows=0)))
    (logits / "manifest.json").write_bytes(none.to_json())
    refused(logits, "is damaged", "shards[1].n_windows = 0")


def test_ids_beyond_the_vocabulary_are_refused(inputs, teach, tmp_path, uptrain):
    """The checksums are right: the folder was made by something else."""
    logits = teach(tmp_path / "logits")
    manifest = LogitsManifest.parse(logits)
    path = logits / manifest.shards[0].ids
    ids = np.fromfile(path, "<u2")
    ids[:] = 300
    path.write_bytes(ids.tobytes())
    crcs = np.fromfile(logits / manifest.shards[0].crc, "<u4").reshape(-1, 2)
    crcs[:, 1] = zlib.crc32(ids[: len(ids) // len(crcs)].tobytes())
    (logits / manifest.shards[0].crc).write_bytes(crcs.tobytes())
    sums = {
        f"{kind}_sha256": hashlib.sha256((logits / getattr(manifest.shards[0], kind)).read_bytes()).hexdigest()
        for kind in ("ids", "crc")
    }
    shard = replace(manifest.shards[0], **sums)
    (logits / "manifest.json").write_bytes(replace(manifest, shards=(shard,)).to_json())
    result = uptrain(*arguments(inputs, tmp_path / "run", "--teacher-logits", logits))
    assert result.code == 1
    assert "holds the id 300, where its manifest says that all are below 257" in result.err


def test_other_logits_on_resume_are_refused(inputs, teach, tmp_path, uptrain):
    logits, run = teach(tmp_path / "logits"), tmp_path / "run"
    drive([{"arguments": arguments(inputs, run, "--teacher-logits", logits), "stop_in": 2}])
    logits.rename(tmp_path / "aside")
    teach(logits, "--top-k", 5)
    uptrain("resume", run).refused(f"{logits} is other logits than when the run began")
    (tmp_path / "aside").rename(tmp_path / "back")
    uptrain("export", run, tmp_path / "out")
    record = json.loads((tmp_path / "out/uptraining.json").read_text())
    assert record["settings"]["teacher_logits"] == "logits"
    assert any("loss" in each for each in records(run))


def test_a_model_that_computes_nan_is_refused(uptrain, inputs, tmp_path):
    model = tiny.build(vocab_size=VOCAB)
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    folder, out = tiny.save(model, tmp_path / "nan"), tmp_path / "logits"
    uptrain("teach", folder, "--data", inputs["data"], "--out", out).refused(f"{folder} computes NaN for", "damaged")
    assert [path.name for path in tmp_path.iterdir()] == ["nan"]


def test_another_folder_at_out(uptrain, inputs):
    for out in (inputs["data"], inputs["model"]):
        refused = uptrain("teach", inputs["parent"], "--data", inputs["data"], "--out", out)
        refused.refused(f"{out} exists, and is no folder of teacher's logits", "choose another --out")


@pytest.mark.parametrize("teacher", ["parent", "model"])
def test_logits_of_the_model_itself(uptrain, inputs, tmp_path, teacher):
    """Distillation from them trains nothing; so typed by mistake, they are worth a warning."""
    logits = tmp_path / "logits"
    uptrain(*teach_arguments({**inputs, "parent": inputs[teacher]}, logits)).succeeded()
    fixed = ("--data", inputs["data"], "--steps", 1, "--lr", 1e-4, "--global-batch-tokens", 256)
    result = uptrain("run", inputs["model"], *fixed, "--teacher-logits", logits, "--out", tmp_path / "run")
    assert (result.code, "are those of MODEL itself" in result.err) == (0, teacher == "model")


def test_one_process_hashes_the_model(inputs, tmp_path, monkeypatch):
    """Hashing reads all weights. Other processes of the machine leave that to the one that prints the warning."""
    monkeypatch.setattr(checks, "model_sha256", hashed := Mock(return_value="another"))
    monkeypatch.setattr(checks.LogitsManifest, "parse", Mock())
    for rank, n_calls in (("1", 0), ("0", 1)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert checks.own_logits_warning(inputs["model"], tmp_path) is None
        assert hashed.call_count == n_calls
