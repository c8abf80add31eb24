"""`convert verify` passes good outputs and finds every kind of change."""

import json
import os
import re
import shutil
import time
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from convert.verification import verify
from model.checkpoint import open_checkpoint
from model.common import console


@pytest.fixture
def out(convert, source, tmp_path):
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2).succeeded()
    return tmp_path / "out"


@pytest.mark.parametrize("method", ["mean", "first", "random"])
@pytest.mark.parametrize("groups", [8, 4, 1])
@pytest.mark.parametrize("shard_size", [None, "10KB"])
def test_good_outputs_pass(convert, source, tmp_path, method, groups, shard_size):
    options = ("--max-shard-size", shard_size) if shard_size else ()
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", groups, "--method", method, "--seed", 3, *options)
    result = convert("verify", source, tmp_path / "out", "--json")
    report = json.loads(result.out)
    assert (result.code, report["ok"], report["differences"]) == (0, True, [])
    assert report["n_computed"] == (0 if groups == 8 else 4)


def flip(folder, tensor, byte=0):
    """Flip one bit in one byte of a tensor's data."""
    for file in folder.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        if tensor in header:
            data[start + header[tensor]["data_offsets"][0] + byte] ^= 1
            file.write_bytes(data)
            return
    raise AssertionError(tensor)


def test_flipped_byte_in_an_untouched_tensor(convert, source, out):
    flip(out, "model.layers.1.mlp.down_proj.weight", byte=77)
    result = convert("verify", source, out)
    assert result.code == 3
    assert "model.layers.1.mlp.down_proj.weight differs from the one copied" in result.err


@pytest.mark.parametrize("is_flipped", [False, True])
def test_short_reads(convert, source, out, monkeypatch, is_flipped):
    """As of FUSE with direct_io: a read may return fewer bytes than were asked for."""

    class ShortReads(FileIO):
        def read(self, size=-1):
            return super().read(min(size, 1000) if size > 0 else size)

    real, preadv = Path.open, os.preadv

    def opened(path, mode="r", buffering=-1, *arguments, **options):
        is_raw = (mode, buffering) == ("rb", 0)
        return ShortReads(path) if is_raw else real(path, mode, buffering, *arguments, **options)

    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(os, "preadv", lambda file, views, at: preadv(file, [views[0][:1000]], at))
    if is_flipped:
        flip(out, "model.embed_tokens.weight", byte=4000)
    result = convert("verify", source, out)
    assert (result.code, "embed_tokens.weight differs" in result.err) == ((3, True) if is_flipped else (0, False))


def test_the_tokens_of_another_conversion(convert, source, out):
    (out / "groupwise_calibration.xz").write_text("private")
    result = convert("verify", source, out)
    assert (result.code, "groupwise_calibration.xz is not the source's" in result.err) == (3, True)


def test_flipped_byte_in_a_merged_tensor(convert, source, out):
    flip(out, "model.layers.0.self_attn.k_proj.weight", byte=3)
    result = convert("verify", source, out)
    assert result.code == 3
    assert "model.layers.0.self_attn.k_proj.weight differs from the one recomputed" in result.err


def test_flipped_byte_in_the_source(convert, source, out):
    flip(source, "model.layers.0.self_attn.k_proj.weight", byte=3)
    result = convert("verify", source, out)
    assert result.code == 3
    assert "SHA-256" in result.err


def test_an_interrupt_leaves_the_rest_unread(source, out, monkeypatch):
    compared = []

    def compare_slowly(comparison, layers, name):
        time.sleep(0.05)
        compared.append(name)
        return []

    @contextmanager
    def interrupt(*arguments):
        def advance(nbytes):
            raise KeyboardInterrupt

        yield advance

    monkeypatch.setattr(verify, "_compare_tensor", compare_slowly)
    monkeypatch.setattr(console, "progress_bar", interrupt)
    with open_checkpoint(source) as checkpoint:
        with pytest.raises(KeyboardInterrupt):
            verify.verify(checkpoint, out, 1)  # its threads have ended then
        assert len(compared) < len(checkpoint.tensors) / 2


def test_a_device_that_is_not_there_is_refused_where_nothing_was_calibrated(convert, source, out):
    convert("verify", source, out, "--device", "cuda:9").refused("--device cuda:9 is not available here")


def test_no_such_output(convert, source, tmp_path):
    convert("verify", source, tmp_path / "none").refused("none does not exist; give a folder that convert made.")


@pytest.mark.parametrize("change", [{"rms_norm_eps": 0.1}, {"extra": 1}, {"vocab_size": ...}])
def test_changed_config_key(convert, source, out, change):
    tiny.edit_config(out, **change)
    result = convert("verify", source, out)
    assert result.code == 3
    assert f"key {next(iter(change))}" in result.err or f"has {next(iter(change))}" in result.err


def test_wrong_number_of_heads_in_the_config_is_refused(convert, source, out):
    tiny.edit_config(out, num_key_value_heads=4)
    result = convert("verify", source, out)
    assert result.code == 3
    assert "num_key_value_heads = 4; it should be 2" in result.err


def test_missing_and_changed_files(convert, source, out):
    (out / "tokenizer.json").unlink()
    (out / "LICENSE").write_text("be unkind")
    (out / "README.md").write_text("all new")
    result = convert("verify", source, out)
    assert result.code == 3
    assert "the file tokenizer.json is missing" in result.err
    assert "the file LICENSE differs" in result.err
    assert "the file README.md differs" in result.err


def test_added_files_and_a_shortened_card(convert, source, out):
    card = (out / "README.md").read_bytes()
    (out / "README.md").write_bytes(card[: card.index(b"<!-- groupwise")])
    (out / "modeling_evil.py").write_text("import os")
    (out / "pytorch_model.bin").write_text("")
    result = convert("verify", source, out)
    assert result.code == 3
    for words in ("README.md differs", "modeling_evil.py is not the source's", "pytorch_model.bin is not the source's"):
        assert words in result.err


def test_what_the_hub_adds_is_no_difference(convert, source, out):
    (out / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    for folder in (".git", ".cache/huggingface"):
        (out / folder).mkdir(parents=True)
        (out / folder / "x").write_text("")
    result = convert("verify", source, out)
    assert result.code == 0, result.err + result.out


def test_types_in_the_config_and_the_shards_metadata_count(convert, source, out):
    tiny.edit_config(out, vocab_size=67.0)
    shard = next(out.glob("model-00001*"))
    save_file(load_file(shard), shard)
    result = convert("verify", source, out)
    assert result.code == 3
    assert "vocab_size = 67.0; it should be 67" in result.err
    assert "lacks format: pt" in result.err


def test_stray_weights_and_wrong_index(convert, source, out):
    shutil.copy(next(out.glob("*.safetensors")), out / "stray.safetensors")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    index["metadata"]["total_size"] += 1
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    result = convert("verify", source, out)
    assert result.code == 3
    assert "stray.safetensors belongs to no tensor" in result.err
    assert "total_size" in result.err


def test_a_tensor_that_only_the_source_has(convert, tmp_path):
    source, out = tiny.save(tiny.build(hidden_size=64), tmp_path / "source"), tmp_path / "out"
    sizes = ("--latent", 16, "--rope", 8)
    convert("mha-to-mla", source, out, *sizes, "--calibration", "none").succeeded()
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors = tiny.tensors(out) | {name: tiny.tensors(source)[name]}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    result = convert("verify", source, out)
    assert result.code == 3
    assert f"the tensor {name} is not one that the conversion writes" in result.err


MERGE = ("mha-to-gqa", "--groups", 2, "--method", "mean")
PCA = ("mha-to-gqa", "--groups", 2, "--method", "pca", "--calibration", "none")
LATENT = ("mha-to-mla", "--latent", 16, "--rope", 8, "--calibration", "none")


@pytest.mark.parametrize(
    ("command", "entry", "value", "expected"),
    [
        (("to-hf",), "method", "random", "'mean'"), (("to-hf",), "seed", 77, "0"), (LATENT, "groups", 12345, "8"),
        (MERGE, "merge_report.0.norm_ratio", 9.5, "0."), (MERGE, "merge_report.1.mean_cosine", None, ""),
        (PCA, "merge_report.0.norm_ratio", 9.5, ""), (MERGE, "source.files.0.bytes", 1, ""),
        (MERGE, "geometry.head_dim", 4, "8"), (MERGE, "source.format", "gguf", "'safetensors'"),
    ],
)  # fmt: skip
def test_changes_of_the_record(convert, tmp_path, command, entry, value, expected):
    source, out = tiny.save(tiny.build(hidden_size=64), tmp_path / "source"), tmp_path / "out"
    convert(command[0], source, out, *command[1:]).succeeded()
    convert("verify", source, out).succeeded()
    record = json.loads((out / "groupwise.json").read_text())
    *folders, key = entry.split(".")
    inner = record
    for name in folders:
        inner = inner[int(name) if isinstance(inner, list) else name]
    inner[key] = value
    (out / "groupwise.json").write_text(json.dumps(record))
    result = convert("verify", source, out)
    name = re.sub(r"\.(\d+)", r"[\1]", entry)
    assert (result.code, len(result.err.splitlines())) == (3, 1), result.err
    assert f"groupwise.json has {name} = {value!r}; it should be {expected}" in result.err


def test_an_unknown_key_in_the_record(convert, source, out):
    record = json.loads((out / "groupwise.json").read_text())
    (out / "groupwise.json").write_text(json.dumps({**record, "renorm": "none"}))
    result = convert("verify", source, out)
    assert (result.code, result.err) == (3, "DIFFERENT: groupwise.json has unknown keys: ['renorm']\n")


def test_other_source_or_no_record_is_refused(convert, source, out, tmp_path):
    other = tiny.save(tiny.build(seed=1), tmp_path / "other", "bfloat16")
    result = convert("verify", other, out)
    assert (result.code, result.err.count("\n")) == (3, 1)
    assert result.err.startswith(f"DIFFERENT: {out} was not made from {other} as it is now: the source file model")
    wider = tiny.save(tiny.build(num_attention_heads=3, num_key_value_heads=3, hidden_size=48), tmp_path / "wider")
    convert("verify", wider, out).refused(f"{out} cannot have been made from {wider}: ")
    record = json.loads((out / "groupwise.json").read_text())
    for change, words in (
        ({"seed": -1}, "records seed = -1, which must be at least 0."), ({"seed": "0"}, "damaged: seed = '0'"),
        ({"refit": "yes"}, "records refit = 'yes', which must be true or false."),
        ({"refit": 1}, "records refit = 1, which must be true or false."),
        ({"method": "median"}, "records the method 'median', which this version does not know; verify"),
        ({"method": []}, "damaged: method = []"), ({"refine": 2}, "a recipe that is not possible: --refine needs"),
    ):  # fmt: skip
        (out / "groupwise.json").write_text(json.dumps({**record, **change}))
        convert("verify", source, out).refused("groupwise.json", words)
    (out / "groupwise.json").write_text("{}")
    convert("verify", source, out).refused("groupwise.json", "damaged")
    (out / "groupwise.json").unlink()
    convert("verify", source, out).refused("no groupwise.json")


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("geometry", {"n_kv_heads": 77}, "geometry.n_kv_heads = 77; it should be 2"),
        ("source", {"n_kv_heads": 99}, "source.n_kv_heads = 99; it should be 8"),
        ("source", {"format": "gguf"}, "source.format = 'gguf'; it should be 'safetensors'"),
        ("source", {"groupwise": {"source": {"name": "Llama-2-7b-hf"}}}, "source.groupwise = "),
        ("source", {"files": []}, "names [] as files of the source, which has ['model-00001-of-0"),
        ("sha256", {"x": "y"}, "does not hold the checksums of exactly the converted layers"),
    ],
)
def test_a_changed_record(convert, source, out, part, change, words):
    record = json.loads((out / "groupwise.json").read_text())
    (out / "groupwise.json").write_text(json.dumps({**record, part: {**record[part], **change}}))
    result = convert("verify", source, out)
    assert result.code == 3
    assert words in result.err


def test_an_output_in_another_format(convert, source, out):
    torch.save(tiny.tensors(out), out / "pytorch_model.bin")
    for path in (*out.glob("*.safetensors"), out / "model.safetensors.index.json"):
        path.unlink()
    convert("verify", source, out).refused(
        f"{out} holds weights in another format (bin)", "give the folder that convert"
    )


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_byte_order_mark_in_the_output(convert, source, out, name):
    """Groupwise reads such a file, but transformers does not."""
    (out / name).write_text((out / name).read_text(), encoding="utf-8-sig")
    result = convert("verify", source, out)
    assert result.code == 3
    assert f"{name} begins with a byte-order mark" in result.err


@pytest.mark.parametrize("key", ["seed_note", "\ud800"])
def test_half_a_letter_in_the_record(convert, source, out, tmp_path, key):
    record = json.loads((out / "groupwise.json").read_text())
    (out / "groupwise.json").write_text(json.dumps({**record, key: "\ud800"}))
    convert("verify", source, out).refused("groupwise.json is damaged", "surrogates not allowed")
    convert("to-hf", out, tmp_path / "again").refused("groupwise.json is damaged", "surrogates not allowed")
