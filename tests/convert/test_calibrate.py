"""Conversions that are calibrated on a text: what is recorded, verified, and refused."""

import errno
import gzip
import json
import lzma
import os
import subprocess
import sys
from functools import partial
from importlib.metadata import version

import datasets
import numpy as np
import pytest
import tiny
import torch
import zstandard
from calibrated import FIT, TEXT, TOKENS, record
from commands import left_behind
from families_without_gqa import t5
from safetensors.torch import save_file
from tiny_tokenizers import make_tokenizer
from tokenizers import Tokenizer, processors

from convert import conversion
from convert.calibration_text import read
from convert.calibration_text.read import read_calibration_text
from convert.merging.merge_recipe import MergeRecipe
from convert.output.write_shards import write_shards
from convert.planning.calibration_options import CalibrationOptions, read_text
from convert.planning.merge_plan import make_merge_plan
from model.checkpoint import open_checkpoint
from model.common.errors import CheckpointError
from model.tokenizer import open_tokenizer


def test_record_and_verify(convert, parent, tmp_path, prose):
    out = tmp_path / "out"
    result = convert(
        "mha-to-gqa", parent, out, "--groups", 2, *FIT, "--refit", "--calibration", prose, "--json"
    ).succeeded()
    planned = json.loads(result.out)
    expected = {"method": "fit", "refit": True}
    for report in (planned, record(out)):
        assert {key: report[key] for key in expected} == expected
        assert report["calibration"]["text"] == str(prose)
        assert (report["calibration"]["windows"], report["calibration"]["window"]) == (16, 64)
    prose.unlink()
    report = json.loads(convert("verify", parent, out, "--json").out)
    assert (report["ok"], report["unchecked"], report["rounded"]) == (True, [], {})
    assert "calibrated on 1,024 tokens (text.txt)" in (out / "README.md").read_text()
    versions = record(out)["versions"]
    assert {name: version(name) for name in ("torch", "transformers")}.items() <= versions.items()


def test_a_text_needs_no_pyarrow(parent, tmp_path, prose):
    code = "import sys; sys.modules['pyarrow'] = None; from convert.cli import main; main()"
    command = ["mha-to-gqa", parent, tmp_path / "out", "--groups", 2, *FIT, "--calibration", prose]
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, command)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("workers", [1, 3])
def test_the_same_bytes_again(convert, parent, tmp_path, workers):
    for name in ("one", "two"):
        convert("mha-to-gqa", parent, tmp_path / name, "--groups", 2, *FIT, "--workers", workers).succeeded()
    assert tiny.snapshot(tmp_path / "one") == tiny.snapshot(tmp_path / "two")


def test_out_keeps_its_tokens(convert, parent, tmp_path, prose):
    """They are what the tokenizer makes of the text, window by window."""
    from transformers import AutoTokenizer

    convert("mha-to-gqa", parent, tmp_path / "out", "--groups", 2, *FIT, "--calibration", prose).succeeded()
    ids = np.frombuffer(lzma.decompress((tmp_path / "out" / TOKENS).read_bytes()), "<u2").reshape(16, 64)
    tokenizer = AutoTokenizer.from_pretrained(parent)
    expected = tokenizer(TEXT, add_special_tokens=False).input_ids
    assert (ids[:, 0] == tokenizer.bos_token_id).all()
    assert ids[:, 1:].flatten().tolist() == expected[: 16 * 63]


def test_a_finished_calibration_is_not_lost_to_another_command(convert, parent, tmp_path, prose, monkeypatch):
    """Another spelling of the text's path continues it. Another option is refused."""
    arguments = ("mha-to-gqa", parent, tmp_path / "out", "--groups", 2, *FIT, "--calibration")
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "write_shards", interrupt)
        assert convert(*arguments, prose).code == 1
    layers = {path: path.stat().st_mtime_ns for path in (tmp_path / ".out.groupwise/scratch").iterdir()}
    assert layers
    convert(*arguments, prose, "--refit").refused("holds the finished work of a command with another --refit; give")
    convert(*arguments, "shipped").refused("with another --calibration;")
    convert(*arguments, prose, "--max-shard-size", "9MB").refused("with another --max-shard-size;")
    monkeypatch.setattr(conversion, "write_shards", lambda *given: compare(layers) or write_shards(*given))
    monkeypatch.chdir(prose.parent)
    convert(*arguments, f"./{prose.name}").succeeded()
    convert("verify", parent, tmp_path / "out").succeeded()


def test_an_interrupt_before_anything_is_finished_says_so(convert, parent, tmp_path, monkeypatch):
    def stop(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr("convert.calibration.calibrate.calibrate", stop)
    result = convert("mha-to-gqa", parent, tmp_path / "out", "--groups", 2, *FIT)
    assert (result.code, result.err.splitlines()[-1]) == (
        1, "Error: interrupted; nothing is finished yet, and the same command starts again."
    )  # fmt: skip
    assert not left_behind(tmp_path)


def interrupt(*given):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def compare(layers):
    assert {path: path.stat().st_mtime_ns for path in layers} == layers


def test_tokens_are_not_copied_into_the_next_conversion(convert, parent, tmp_path, prose):
    convert("mha-to-gqa", parent, tmp_path / "out", "--groups", 2, *FIT, "--calibration", prose).succeeded()
    convert("mha-to-gqa", tmp_path / "out", tmp_path / "next", "--groups", 1, "--method", "mean").succeeded()
    assert not (tmp_path / "next" / TOKENS).exists()
    convert("verify", tmp_path / "out", tmp_path / "next").succeeded()


@pytest.mark.parametrize(
    "kind", ["txt.gz", "txt.xz", "jsonl", "jsonl.xz", "jsonl.zst", "parquet", "arrow", "ids", "folder", "hub"]
)
def test_every_kind_of_text_gives_the_same(convert, parent, tmp_path, prose, kind):
    """What `uptrain` trains on, conversions are calibrated on."""
    plain = TEXT.encode()
    lines = (json.dumps({"text": TEXT[:3000]}) + "\n" + json.dumps({"text": TEXT[3000:]}) + "\n").encode()
    path = tmp_path / f"other.{kind}"
    if kind == "folder":
        (path / "not a file.txt").mkdir(parents=True)
        (path / "1.txt").write_text(TEXT)
        (path / "notes.md").write_text("not a text")
    elif kind == "hub":
        path.mkdir()
        (path / "train.jsonl").write_bytes(lines)
    elif kind == "parquet":
        datasets.Dataset.from_list([json.loads(line) for line in lines.splitlines()]).to_parquet(path)
    elif kind == "arrow":
        datasets.Dataset.from_list([json.loads(line) for line in lines.splitlines()]).save_to_disk(path)
    elif kind == "ids":
        path = path.with_suffix(".jsonl")
        tokenizer = Tokenizer.from_file(str(parent / "tokenizer.json"))
        path.write_text(json.dumps({"input_ids": tokenizer.encode(TEXT, add_special_tokens=False).ids}))
    else:
        pack = {"gz": gzip.compress, "xz": lzma.compress, "zst": zstandard.compress}.get(kind.rpartition(".")[2], bytes)
        path.write_bytes(pack(lines if "jsonl" in kind else plain))
    for name, given in (("one", prose), ("two", f"hub:{path}" if kind == "hub" else path)):
        options = ("--groups", 2, "--method", "pca", "--calibration-tokens", 512, "--calibration", given)
        convert("mha-to-gqa", parent, tmp_path / name, *options).succeeded()
    assert (
        record(tmp_path / "one")["calibration"]["sha256_of_ids"]
        == record(tmp_path / "two")["calibration"]["sha256_of_ids"]
    )


def test_dataset_without_texts(convert, parent, tmp_path):
    (tmp_path / "numbers").mkdir()
    (tmp_path / "numbers/train.jsonl").write_text('{"text": 1, "title": "a"}\n')
    options = ("--method", "pca", "--calibration", f"hub:{tmp_path / 'numbers'}")
    result = convert("mha-to-gqa", parent, tmp_path / "out", "--groups", 2, *options)
    assert (result.code, "column 'text' is int64, not text" in result.err) == (2, True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--method", "fit", "--calibration", "none"), "--method fit needs a calibration text"),
        (("--method", "pca", "--calibration", "none", "--refit"), "--refit needs a calibration text"),
        (
            ("--method", "pca", "--calibration", "none", "--calibration-tokens", "999"),
            "but --calibration none was given",
        ),
        (
            ("--method", "mean", "--calibration-tokens", "999"),
            "--calibration-tokens cannot be combined with --method mean",
        ),
        (("--method", "mean", "--refit"), "--refit needs a calibration text"),
        (("--method", "pca", "--calibration", "/nowhere/text.txt"), "/nowhere/text.txt: no such file or folder. --cal"),
        (("--method", "pca", "--calibration", "SOURCE"), "no file of a known format; known are .jsonl, "),
        (("--method", "pca", "--calibration", "hub:nobody/nothing"), "hub:nobody/nothing cannot be loaded ("),
        (("--method", "pca", "--calibration-tokens", "100"), "is too few; give at least 256"),
        (("--method", "pca", "--calibration-tokens", "16777217"), "is too many; give at most 16777216"),
        (("--method", "pca", "--calibration-tokens", "4 kilo"), "'4 kilo' is not a count; give a whole number"),
        (("--method", "pca", "--refine", "-1"), "'-1' is not a count; give a whole number such as 4096, or 4K"),
        (("--method", "pca", "--refine", "17M"), "'17M' is more than 16,777,216"),
        (("--method", "pca", "--calibration", "TEXT", "--calibration-tokens", "1M"), "give a longer text"),
    ],
)
def test_refused(convert, parent, tmp_path, prose, options, words):
    named = {"TEXT": str(prose), "SOURCE": str(parent)}
    given = [named.get(option, option) for option in options]
    convert("mha-to-gqa", parent, tmp_path / "out", "--groups", 2, *given).refused(words)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "text.txt"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("bad.txt.xz", b"no xz", "bad.txt.xz: the compressed data is damaged"),
        ("bad.txt", b"\xff\xfe\x00", "bad.txt: not valid UTF-8 at byte 1; convert it with iconv."),
        ("bad.jsonl", b'{"text": "a"}\n{"texts": 1}\n', "bad.jsonl:2: no field 'text' among 'texts'"),
        ("bad.jsonl", b"[1", "bad.jsonl is a JSON array; write one object per line"),
        ("bad.jsonl", b"{1", "bad.jsonl:1: not valid JSON"),
        ("bad.jsonl", b'{"text": null}\n', "has only 0 tokens"),
        ("bad.jsonl", b'{"text": "\\ud800"}\n', "bad.jsonl:1: half of a surrogate pair"),
        ("bad.txt.gz", gzip.compress(b"words" * 99, mtime=0)[:-9], "bad.txt.gz: the compressed data is cut off"),
        (
            "bad.jsonl",
            b'{"input_ids": [300' + b", 1" * 99999 + b"]}",
            "has the token id 300, but the model has a vocabulary of 300",
        ),
        (
            "bad.jsonl",
            b'{"input_ids": [-1' + b", 1" * 99999 + b"]}",
            "has the token id -1, but the model has a vocabulary of 300",
        ),
        ("bad.md", b"words", "bad.md: not a known format; known are .jsonl, "),
        ("bad.md", b"words", "--calibration also takes self, shipped and none."),
    ],
)
def test_calibration_texts_that_cannot_be_read(convert, parent, tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    options = ("--method", "pca", "--calibration", tmp_path / name)
    convert("mha-to-gqa", parent, tmp_path / "out", "--groups", 2, *options).refused(words)


def test_none_is_not_joined(convert, parent, tmp_path):
    convert("mha-to-gqa", parent, tmp_path / "out", "--groups", 2, "--calibration", "self+none").refused(
        "--calibration self+none: give each of self and shipped once, then a text"
    )


@pytest.mark.parametrize("wrong", [300, -1])
def test_token_ids_of_another_model(convert, parent, tmp_path, wrong):
    (tmp_path / "ids.jsonl").write_text(json.dumps({"input_ids": [wrong, *([1] * 1023)]}))
    options = ("--method", "pca", "--calibration-tokens", 1024, "--calibration", tmp_path / "ids.jsonl")
    words = f"has the token id {wrong}, but the model has a vocabulary of 300"
    convert("mha-to-gqa", parent, tmp_path / "out", "--groups", 2, *options).refused(words)


def test_no_tokenizer_or_a_damaged_one(convert, parent, tmp_path):
    (parent / "tokenizer.json").write_text("{}")
    convert("mha-to-gqa", parent, tmp_path / "out", "--groups", 2, *FIT).refused("tokenizer.json is damaged")
    (parent / "tokenizer.json").unlink()
    convert("mha-to-gqa", parent, tmp_path / "out", "--groups", 2, *FIT).refused("has no tokenizer.json")


@pytest.mark.parametrize(
    ("settings", "begins"),
    [
        ({"add_bos_token": True, "bos_token": "<s>"}, True),
        ({"add_bos_token": True, "bos_token": {"__type": "AddedToken", "content": "<s>"}}, True),
        ({"add_bos_token": True}, True),  # bos_token_id of config.json
        ({"add_bos_token": False, "bos_token": "<s>"}, False),
        ({"bos_token": "<s>"}, False),
    ],
)
def test_the_beginning_of_text_that_only_the_settings_name(tmp_path, settings, begins):
    """As in DeepSeek-LLM. Attention collects on this token, so calibrating without it would not see its key."""
    folder = make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "source"), 300)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.save(str(folder / "tokenizer.json"))
    tiny.edit_config(folder, bos_token_id=backend.token_to_id("<s>"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizerFast", **settings}))
    with open_checkpoint(folder) as checkpoint:
        text = read_calibration_text(checkpoint, "shipped", 1024)
    bos = [backend.token_to_id("<s>")] if begins else []
    assert list(text.bos_ids) == bos
    ids = text.ids_NT[:, : len(bos)] if begins else text.ids_NT[:, :1]
    assert (ids == backend.token_to_id("<s>")).all() == begins
    assert open_tokenizer(folder)("a").input_ids == bos + backend.encode("a").ids


def test_token_ids_need_no_tokenizer(convert, parent, tmp_path):
    """The first token of each window is then the config's."""
    given = [10 + n * n % 250 for n in range(1024)]
    (tmp_path / "ids.jsonl").write_text(json.dumps({"input_ids": given}))
    for file in parent.glob("*token*"):
        file.unlink()
    options = ("--groups", 2, "--method", "pca", "--calibration-tokens", 1024)
    for bos, name in ((7, "one"), (None, "none")):
        tiny.edit_config(parent, bos_token_id=bos)
        convert("mha-to-gqa", parent, tmp_path / name, *options, "--calibration", tmp_path / "ids.jsonl").succeeded()
        ids = np.frombuffer(lzma.decompress((tmp_path / name / TOKENS).read_bytes()), "<u2").reshape(16, 64)
        n_bos = bos is not None
        assert (ids[:, :n_bos] == bos).all()
        assert ids[:, n_bos:].flatten().tolist() == given[: 16 * (64 - n_bos)]
    for text in ("shipped", "self"):
        convert("mha-to-gqa", parent, tmp_path / text, *options, "--calibration", text).refused(
            "has no tokenizer.json", "or give a text of token ids with --calibration"
        )


def test_a_tokenizer_that_cannot_read_the_text(convert, parent, tmp_path):
    model = {"type": "WordLevel", "vocab": {"nothing": 0}, "unk_token": "[UNK]"}
    (parent / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    convert("mha-to-gqa", parent, tmp_path / "out", "--groups", 2, *FIT).refused("cannot read the calibration text")
    convert("mha-to-gqa", parent, tmp_path / "out", "--groups", 2).refused(
        "the default merge is not possible: ", "cannot read the calibration text"
    )


def test_sizes_that_the_config_leaves_to_the_class(convert, tmp_path):
    model = tiny.build(vocab_size=300, hidden_size=64, num_attention_heads=32, num_key_value_heads=32)
    folder = make_tokenizer(tiny.save(model, tmp_path / "source"), 300)
    convert("mha-to-gqa", folder, tmp_path / "stated", "--groups", 2, *FIT).succeeded()
    config = json.loads((folder / "config.json").read_text())
    del config["num_attention_heads"]
    (folder / "config.json").write_text(json.dumps(config))
    convert("mha-to-gqa", folder, tmp_path / "out", "--groups", 2, *FIT).succeeded()
    stated, left_out = tiny.tensors(tmp_path / "stated"), tiny.tensors(tmp_path / "out")
    assert all(torch.equal(tensor, left_out[name]) for name, tensor in stated.items())


@pytest.mark.parametrize("option", ["--overwrite", "--dry-run"])
def test_a_tokenizer_of_another_model(convert, tmp_path, option):
    """Whatever the config says: the embedding's rows count. A wrong config is refused before the text is read."""
    folder = make_tokenizer(tiny.save(tiny.build(vocab_size=100), tmp_path / "source"), 300)
    given = ("mha-to-gqa", folder, tmp_path / "out", "--groups", 2, *FIT, option)
    words = "the model has a vocabulary of 100; the tokenizer, or a text of token ids, belongs to another model"
    convert(*given).refused(words)
    tiny.edit_config(folder, vocab_size=300)
    convert(*given).refused("config.json has vocab_size = 300, but model.embed_tokens.weight has 100 rows")
    with open_checkpoint(folder) as checkpoint, pytest.raises(CheckpointError, match=words):
        read_text(checkpoint, CalibrationOptions())


def test_the_memory_estimate_counts_the_embedding(convert, tmp_path):
    """It is read before the layers."""
    folder = make_tokenizer(tiny.save(tiny.build(vocab_size=1_000_000), tmp_path / "source"), 300)
    embedding = 4 * 1_000_000 * tiny.HIDDEN
    result = convert("mha-to-gqa", folder, tmp_path / "out", "--groups", 2, *FIT, "--dry-run", "--json")
    assert embedding < json.loads(result.out)["peak_memory_bytes"]


@pytest.mark.parametrize(
    ("make", "layers"),
    [(t5, "decoder.block."), (partial(tiny.build, "llava"), "language_model.model.layers.")],
)
def test_encoders_and_towers_do_not_count_as_layers(tmp_path, make, layers):
    """The estimates of memory and time count what one layer of the language model takes."""
    folder = tiny.save(make(), tmp_path / "source")
    with open_checkpoint(folder) as checkpoint:
        plan = make_merge_plan(checkpoint, 2, MergeRecipe("mean"), None)
    names = {name for name in plan.tensors if plan.in_layer(name)}
    assert names == {name for name in plan.tensors if name.startswith(layers)}
    assert any(".layers." in name or ".block." in name for name in plan.tensors.keys() - names)


def test_short_records_without_a_beginning_token(convert, tmp_path):
    folder = tiny.save(tiny.build(vocab_size=300), tmp_path / "source")
    make_tokenizer(folder, 300, bos=False)
    text = tmp_path / "short.jsonl"
    text.write_text("".join(json.dumps({"text": "A folder."}) + "\n" for _ in range(3000)))
    options = ("--groups", 2, "--method", "pca", "--calibration", text, "--calibration-tokens", 8192)
    convert("mha-to-gqa", folder, tmp_path / "out", *options).succeeded()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model.layers.1.mlp.up_proj.weight", float("nan"), "layer 1 produces NaN or infinite values"),
        ("model.layers.1.input_layernorm.weight", float("nan"), "layer 1 produces NaN or infinite values"),
        ("model.layers.0.mlp.down_proj.weight", None, "lacks the tensor model.layers.0.mlp.down_proj.weight"),
    ],
)
def test_damage_outside_of_attention(convert, tmp_path, name, value, words):
    folder = make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "source"), 300)
    tensors = tiny.tensors(folder)
    if value is None:
        del tensors[name]
    else:
        tensors[name].view(-1)[0] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    convert("mha-to-gqa", folder, tmp_path / "out", "--groups", 2, *FIT, "--refit").refused(words)


@pytest.mark.parametrize("part", ["mlp.down_proj", "post_attention_layernorm"])
@pytest.mark.parametrize("command", ["mha-to-gqa", "mha-to-mla"])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_a_tensor_that_all_layers_lack(convert, tmp_path, command, part, eps):
    folder = tiny.save(tiny.build(rms_norm_eps=eps), tmp_path / "source")
    tensors = {name: tensor for name, tensor in tiny.tensors(folder).items() if part not in name}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    by_weights = ("--latent", 16, "--rope", 8, "--calibration", "none")
    options = {"mha-to-gqa": ("--groups", 2, "--method", "mean"), "mha-to-mla": by_weights}
    convert(command, folder, tmp_path / "out", *options[command]).refused(
        f"lacks the tensor model.layers.0.{part}.weight"
    )


def test_the_files_of_a_folder_take_turns(parent, tmp_path, capsys, monkeypatch):
    """Each may hold another kind of text."""
    monkeypatch.setattr(read, "_PIECE_CHARACTERS", 50)
    for n, length in enumerate((1000, 120, 1000)):
        (tmp_path / f"{n}.jsonl").write_text(json.dumps({"input_ids": [10 + n] * length}) + "\n")
    (tmp_path / "notes.md").write_text("not a text")
    with open_checkpoint(parent) as checkpoint:
        text = read_calibration_text(checkpoint, str(tmp_path), 1024)
    body = text.ids_NT[:, len(text.bos_ids) :].flatten()[:350].tolist()
    pieces = [*((token, 50) for _ in range(2) for token in (10, 11, 12)), (10, 50), (11, 20), (12, 50)]
    assert body == [token for token, n in pieces for _ in range(n)][:350]
    assert {tuple(text.ids_NT.flatten()).count(token) for token in (10, 12)} <= set(range(400, 551))
    assert f"{tmp_path}/notes.md is left out (not a known format)" in " ".join(capsys.readouterr().err.split())


def test_a_text_that_begins_with_the_beginning_token(parent, tmp_path):
    """A chat template writes it. It is not put there again."""
    with open_checkpoint(parent) as checkpoint:
        (bos,) = read_calibration_text(checkpoint, "shipped", 1024).bos_ids
        given = [bos, *range(5, 68), *([7] * 1000)]
        (tmp_path / "ids.jsonl").write_text(json.dumps({"input_ids": given}) + "\n")
        windows = read_calibration_text(checkpoint, str(tmp_path / "ids.jsonl"), 1024).ids_NT.tolist()
    n = len(windows[0])
    assert windows[0] == given[:n]
    assert windows[1] == [bos, *given[n : 2 * n - 1]]


def test_of_many_token_ids_only_those_needed_are_read(parent, tmp_path):
    """A text that is tokenised already may have billions."""
    path = tmp_path / "ids.jsonl"
    line = json.dumps({"input_ids": [5] * 4000}) + "\n"
    path.write_text(line * 3 + "no record\n")
    with open_checkpoint(parent) as checkpoint:
        assert read_calibration_text(checkpoint, str(path), 4096).n_windows >= 4
        with pytest.raises(CheckpointError, match=r"ids\.jsonl:4"):
            read_calibration_text(checkpoint, str(path), 16384)


@pytest.mark.parametrize("part", ["v_proj", "k_proj", "q_proj", "o_proj"])
def test_heads_of_zeros(convert, tmp_path, part):
    folder = make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "source"), 300)
    tensors = tiny.tensors(folder)
    tensors[f"model.layers.0.self_attn.{part}.weight"].zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    convert("mha-to-gqa", folder, tmp_path / "out", "--groups", 2, *FIT, "--refit").succeeded()
    assert all(tensor.isfinite().all() for tensor in tiny.tensors(tmp_path / "out").values())


@pytest.mark.parametrize("method", ["fit", "pca"])
def test_text_is_ignored_if_nothing_is_merged(convert, parent, tmp_path, prose, method):
    options = ("--groups", 8, "--method", method, "--calibration", prose, "--calibration-tokens", 1024)
    result = convert("mha-to-gqa", parent, tmp_path / "out", *options, "--json").succeeded()
    assert json.loads(result.out)["n_computed"] == 0
    assert record(tmp_path / "out")["calibration"] is None
    prose.unlink()
    convert("verify", parent, tmp_path / "out").succeeded()


def test_a_text_for_a_method_that_needs_none(convert, parent, tmp_path, prose):
    convert("mha-to-gqa", parent, tmp_path / "out", "--groups", 2, "--method", "mean", "--calibration", prose).refused(
        "--calibration cannot be combined with --method mean"
    )


def test_attention_sinks_that_take_everything(convert, tmp_path):
    """Then a query's weights on its keys may all be 0."""
    model = tiny.build("gpt_oss", vocab_size=300)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.fill_(150.0)
    folder = make_tokenizer(tiny.save(model, tmp_path / "source"), 300)
    convert("mha-to-gqa", folder, tmp_path / "out", "--groups", 2, "--calibration-tokens", 1024).succeeded()
    assert all(tensor.isfinite().all() for tensor in tiny.tensors(tmp_path / "out").values())


def test_two_bases_of_the_rotary_embedding(convert, parent, tmp_path):
    tiny.edit_config(parent, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, rope_theta=5e5)
    result = convert("mha-to-gqa", parent, tmp_path / "out", "--groups", 2, "--calibration-tokens", 1024)
    result.refused("rope_theta = 500000.0", "make them equal")


@pytest.mark.parametrize(
    ("option", "name"),
    [
        (("--calibration", "/no/such/text"), "--calibration"),
        (("--calibration-tokens", 1024), "--calibration-tokens"),
        (("--method", "fit", "--refit", "--device", "cpu"), "--method, --refit, --device"),
        (("--refine", 1024), "--refine"),
    ],
)
def test_what_has_no_effect_where_the_heads_stay(convert, parent, tmp_path, option, name):
    """The command does not read a text either."""
    result = convert("mha-to-gqa", parent, tmp_path / "out", "--groups", 8, *option).succeeded()
    have = "have" if "," in name else "has"
    assert result.err == f"Warning: {name} {have} no effect: the model has 8 K/V heads already.\n"


def test_an_empty_calibration_is_no_default(convert, parent, tmp_path):
    options = ("--groups", 2, "--calibration-tokens", 1024, "--calibration", "")
    convert("mha-to-gqa", parent, tmp_path / "out", *options).refused("--calibration is empty")
