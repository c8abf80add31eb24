"""`convert to-hf`: every format as the Hugging Face folder it was made from; names of the hub; the order of formats."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from families_without_gqa import t5
from gguf_files import write_gguf
from torch_files import write_bin, write_dcp, write_meta

from model.checkpoint import READERS

REVISION = "0123456789abcdef0123456789abcdef01234567"


def write(kind, place, model):
    """Write a model in a format; return what to name as SOURCE."""
    if kind == "gguf":
        return write_gguf(place / "model.gguf", model)
    if kind == "safetensors":
        return tiny.save(model, place / "model")
    if kind == "bin":
        return write_bin(place / "model", model)
    if kind == "meta":
        return write_meta(place / "model", model, 2)
    folder = write_dcp(place / "model", {f"model.{n}": t for n, t in model.state_dict().items()}, 2)
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    return folder


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("n_kv_heads", [8, 2])
def test_every_format_becomes_the_same_folder(convert, tmp_path, kind, n_kv_heads):
    model = tiny.build(vocab_size=64, num_key_value_heads=n_kv_heads)
    source, out = write(kind, tmp_path, model), tmp_path / "out"
    plan = json.loads(convert("to-hf", source, out, "--dry-run", "--json").out)
    assert (plan["n_computed"], plan["groups"], out.exists()) == (0, n_kv_heads, False)
    result = convert("to-hf", source, out).succeeded()
    assert "The number of K/V heads is unchanged." in result.out
    written, expected = tiny.tensors(out), model.state_dict()
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    config = json.loads((out / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (8, n_kv_heads)
    convert("verify", source, out).succeeded()
    card = (out / "README.md").read_text()
    assert "No heads were merged" in card
    assert "Merging costs quality" not in card
    assert json.loads((out / "groupwise.json").read_text())["source"]["format"] == kind


def test_modelling_code_of_an_earlier_version_is_replaced(convert, tmp_path):
    """What `convert` writes beside a merged T5 is its own code, which a later version may have mended."""
    merged, copy = tmp_path / "merged", tmp_path / "copy"
    convert("mha-to-gqa", tiny.save(t5(), tmp_path / "source"), merged, "--groups", 2, "--method", "mean").succeeded()
    names = ("configuration_t5_gqa.py", "modeling_t5_gqa.py")
    ours = {name: (merged / name).read_bytes() for name in names}
    for name in names:
        (merged / name).write_text("# of an earlier version\n")
    convert("to-hf", merged, copy).succeeded()
    assert {name: (copy / name).read_bytes() for name in names} == ours
    convert("verify", merged, copy).succeeded()
    for name in names:  # which copied them
        shutil.copy(merged / name, copy / name)
    convert("verify", merged, copy).succeeded()
    (copy / names[0]).write_text("# of somebody else\n")
    assert f"{names[0]} differs" in convert("verify", merged, copy).err


@pytest.mark.parametrize("kind", READERS)
def test_both_steps_make_what_one_does(convert, tmp_path, kind):
    source = write(kind, tmp_path, tiny.build(vocab_size=64))
    convert("to-hf", source, tmp_path / "hf").succeeded()
    convert("mha-to-gqa", "--method", "mean", tmp_path / "hf", tmp_path / "two", "--groups", 2).succeeded()
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "one", "--groups", 2).succeeded()
    one, two = tiny.tensors(tmp_path / "one"), tiny.tensors(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], tensor) for name, tensor in two.items())
    assert (tmp_path / "one/config.json").read_bytes() == (tmp_path / "two/config.json").read_bytes()


def test_the_card_tells_what_had_to_be_assumed(convert, tmp_path):
    convert("to-hf", write("meta", tmp_path, tiny.build(vocab_size=64)), tmp_path / "out").succeeded()
    card = (tmp_path / "out/README.md").read_text()
    assert "value for value" in card
    assert "- params.json does not give the context length" in card
    assert "- there is no tokenizer.json" in card


def test_the_order_of_formats_in_one_folder(convert, tmp_path):
    """Each is of another seed; what is read is the first of the table in docs/cli.md, and the others are named."""
    folder = tmp_path / "model"
    files = {
        "dcp": (".metadata", "__0_0.distcp", "__1_0.distcp"),
        "meta": ("consolidated.00.pth", "consolidated.01.pth", "params.json"),
        "bin": ("pytorch_model.bin",),
        "safetensors": ("model.safetensors",),
    }
    folder.mkdir()
    models = {kind: tiny.build(seed=i, vocab_size=64) for i, kind in enumerate(files)}
    for kind, names in files.items():
        source = write(kind, tmp_path / kind, models[kind])
        for name in (*names, *(["config.json"] if kind == "safetensors" else [])):
            shutil.copy(source / name, folder)
    left = sorted(name for names in files.values() for name in names)
    for kind in ("safetensors", "bin", "meta", "dcp"):
        summary = json.loads(convert("inspect", folder, "--json").out)
        read = {*files[kind]}
        assert summary["format"] == kind
        config = ["config.json"] * (kind == "meta")  # made of params.json instead
        assert sorted(summary["skipped_files"]) == sorted([name for name in left if name not in read] + config)
        convert("to-hf", folder, tmp_path / f"out-{kind}").succeeded()
        tensors = tiny.tensors(tmp_path / f"out-{kind}")
        assert all(torch.equal(tensors[name], tensor) for name, tensor in models[kind].state_dict().items())
        for name in files[kind]:
            (folder / name).unlink()
        left = [name for name in left if name not in read]


@pytest.mark.parametrize("name", ["org/model", "org/model@main", f"org/model@{REVISION}"])
def test_names_of_the_hub_resolve_in_the_cache(convert, tmp_path, monkeypatch, name):
    cache = tmp_path / "cache/models--org--model"
    stored = tiny.save(tiny.build(), tmp_path / "stored")
    snapshot = cache / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for i, file in enumerate(p for p in stored.iterdir() if p.is_file()):  # links, as in the real cache
        file.rename(cache / "blobs" / str(i))
        (snapshot / file.name).symlink_to(cache / "blobs" / str(i))
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text(REVISION)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    convert("mha-to-gqa", "--method", "mean", name, "out", "--groups", 2, "--json").succeeded()
    record = json.loads((tmp_path / "out/groupwise.json").read_text())
    assert (record["source"]["name"], record["source"]["revision"]) == ("org/model", REVISION)
    convert("verify", name, "out").succeeded()


def test_a_gguf_file_in_the_hubs_cache_is_named_by_its_model(convert, tmp_path):
    snapshot, blobs = (tmp_path / "cache/models--org--model" / name for name in (f"snapshots/{REVISION}", "blobs"))
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    write_gguf(blobs / "a1", tiny.build())
    (snapshot / "model.gguf").symlink_to("../../blobs/a1")
    elsewhere = Path(shutil.copy(blobs / "a1", tmp_path / "own.gguf"))
    for source, name, revision in ((snapshot / "model.gguf", "org/model", REVISION), (elsewhere, "own.gguf", None)):
        out = tmp_path / f"out of {source.name}"
        convert("to-hf", source, out).succeeded()
        origin = json.loads((out / "groupwise.json").read_text())["source"]
        assert (origin["name"], origin["revision"]) == (name, revision)


def test_sha256_is_taken_from_the_names_of_the_hubs_cache(convert, tmp_path):
    stored = tiny.save(tiny.build(), tmp_path / "stored")
    content = (stored / "model.safetensors").read_bytes()
    digest, other = hashlib.sha256(content).hexdigest(), "e" * 64
    # in the cache with the right and with a wrong name, and elsewhere
    for place, name, recorded in (
        ("cache/models--org--model", digest, digest),
        ("cache/models--org--wrong", other, other),
        ("models", other, digest),
    ):
        snapshot, blobs = tmp_path / place / "snapshots" / REVISION, tmp_path / place / "blobs"
        shutil.copytree(stored, snapshot)
        blobs.mkdir()
        (snapshot / "model.safetensors").rename(blobs / name)
        (snapshot / "model.safetensors").symlink_to(blobs / name)
        out = tmp_path / f"out of {Path(place).name}"
        convert("mha-to-mqa", "--method", "mean", snapshot, out).succeeded()
        (file,) = json.loads((out / "groupwise.json").read_text())["source"]["files"]
        assert file == {"name": "model.safetensors", "bytes": len(content), "sha256": recorded}
        verified = convert("verify", snapshot, out)
        assert verified.code == (0 if recorded == digest else 3)
        assert recorded == digest or f"has SHA-256 {digest[:12]}…, not the one recorded" in verified.err


def test_a_folder_goes_before_a_name_of_the_hub(convert, tmp_path, monkeypatch):
    tiny.save(tiny.build(), tmp_path / "org/model")
    monkeypatch.chdir(tmp_path)
    assert json.loads(convert("inspect", "org/model", "--json").out)["source"] == "org/model"
