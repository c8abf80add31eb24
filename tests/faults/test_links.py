"""Only files inside SOURCE are copied. Links out of it are not followed, and FIFOs and devices are never opened."""

import json
import os
import shutil
import socket
from pathlib import Path

import pytest
import tiny
from commands import MEAN
from tiny_tokenizers import make_tokenizer

SECRET = b"a key of this machine"
REVISION = "0" * 40


@pytest.fixture
def secret(tmp_path):
    """Return a file outside SOURCE."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home/id_rsa").write_bytes(SECRET)
    return tmp_path / "home/id_rsa"


def all_bytes(folder):
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def skipped_files(convert, source):
    return json.loads(convert("inspect", source, "--json").out)["skipped_files"]


def test_links_out_of_source_are_not_copied(convert, source, tmp_path, secret):
    (source / "docs").symlink_to(secret.parent)
    (source / "vocab.txt").symlink_to(secret)
    (source / "deep").mkdir()
    (source / "deep/relative.txt").symlink_to("../../home/id_rsa")
    (source / "README.md").unlink()
    (source / "README.md").symlink_to(secret)
    outside = " (a link out of the folder)"
    names = [f"{name}{outside}" for name in ("README.md", "deep/relative.txt", "docs/", "vocab.txt")]
    assert sorted(skipped_files(convert, source)) == names
    assert f"vocab.txt{outside}" in convert("inspect", source).out
    result = convert("mha-to-gqa", source, tmp_path / "out", *MEAN).succeeded()
    assert f"docs/{outside}" in result.out
    assert SECRET not in all_bytes(tmp_path / "out")
    convert("verify", source, tmp_path / "out").succeeded()


def test_verify_names_links_in_out(convert, source, tmp_path, secret):
    convert("mha-to-gqa", source, tmp_path / "out", *MEAN).succeeded()
    (tmp_path / "out/vocab.txt").symlink_to(secret)
    result = convert("verify", source, tmp_path / "out")
    assert (result.code, "the file vocab.txt (a link out of the folder) is not the source's" in result.err) == (3, True)


def test_links_inside_source_are_followed(convert, source, tmp_path):
    (source / "texts").mkdir()
    (source / "texts/a.txt").write_text("inside")
    (source / "b.txt").symlink_to("texts/a.txt")
    (source / "c.txt").symlink_to(source / "texts/a.txt")
    (tmp_path / "link to source").symlink_to(source)
    convert("mha-to-gqa", tmp_path / "link to source", tmp_path / "out", *MEAN).succeeded()
    for name in ("texts/a.txt", "b.txt", "c.txt"):
        assert (tmp_path / "out" / name).read_text() == "inside"


def hub_cache(tmp_path):
    """Return a snapshot as huggingface_hub lays it out: relative links into the blobs of its model."""
    model = tmp_path / "cache/models--org--model"
    snapshot = model / "snapshots" / REVISION
    stored = tiny.save(tiny.build(), tmp_path / "stored")
    (stored / "sub").mkdir()
    (stored / "sub/notes.txt").write_text("notes")
    (model / "blobs").mkdir(parents=True)
    for i, file in enumerate(p for p in sorted(stored.rglob("*")) if p.is_file()):
        link = snapshot / file.relative_to(stored)
        link.parent.mkdir(parents=True, exist_ok=True)
        file.rename(model / "blobs" / str(i))
        link.symlink_to(os.path.relpath(model / "blobs" / str(i), link.parent))
    return snapshot


def test_a_snapshot_of_the_hub_is_whole_but_links_elsewhere_are_not_followed(convert, tmp_path, secret):
    snapshot = hub_cache(tmp_path)
    (snapshot / "vocab.txt").symlink_to(secret)
    other = tmp_path / "cache/models--org--other/blobs"
    other.mkdir(parents=True)
    (other / "1").write_bytes(SECRET)
    (snapshot / "other.txt").symlink_to(other / "1")
    result = convert("mha-to-gqa", snapshot, tmp_path / "out", *MEAN, "--json").succeeded()
    assert sorted(json.loads(result.out)["skipped_files"]) == [
        "other.txt (a link out of the folder)", "vocab.txt (a link out of the folder)",
    ]  # fmt: skip
    assert (tmp_path / "out/sub/notes.txt").read_text() == "notes"
    assert (tmp_path / "out/tokenizer.json").is_file()
    assert SECRET not in all_bytes(tmp_path / "out")


def test_a_copied_snapshot_whose_links_dangle(convert, uptrain, tmp_path):
    copied = shutil.copytree(hub_cache(tmp_path), tmp_path / "copied", symlinks=True)
    words = f"{copied}/config.json is a dangling symlink to", "copy the folder with its files (cp -rL)"
    convert("inspect", copied).refused(*words)
    uptrain("plan", copied, "--steps", 4).refused(*words)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_tokenizer_that_is_a_link_is_said_to_be_one(convert, source, tmp_path, name):
    """To save it there, as the advice for a missing one is, would write to where the link leads."""
    elsewhere = make_tokenizer(tmp_path / "elsewhere", 300) / "tokenizer.json"
    (source / "tokenizer.json").unlink()
    (source / name).symlink_to(elsewhere)
    words = f"{source / name}, which calibrating needs, is a link out of the folder"
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--calibration-tokens", 1024).refused(words)
    result = convert("mha-to-gqa", source, tmp_path / "out", *MEAN, "--json").succeeded()
    (note,) = json.loads(result.out)["notes"]
    assert note == f"{name} is a link out of SOURCE and is not copied; put the file itself there, or into OUT."


def test_a_folder_in_a_snapshot(convert, tmp_path):
    """Such as `original` with Meta's files."""
    snapshot = hub_cache(tmp_path)
    (snapshot / "inner").mkdir()
    for link in [path for path in snapshot.iterdir() if path.is_symlink()]:
        (snapshot / "inner" / link.name).symlink_to(Path("..") / link.readlink())
    result = convert("mha-to-gqa", snapshot / "inner", tmp_path / "out", *MEAN, "--json")
    assert (result.code, json.loads(result.out)["skipped_files"]) == (0, [])
    assert (tmp_path / "out/tokenizer.json").is_file()


def test_blobs_that_are_a_link_are_elsewhere(convert, tmp_path, secret):
    """A cloned repository may look like the cache."""
    source = tiny.save(tiny.build(), tmp_path / f"clone/models--a--b/snapshots/{REVISION}")
    (source.parents[1] / "blobs").symlink_to(secret.parent)
    (source / "vocab.txt").symlink_to("../../blobs/id_rsa")
    assert skipped_files(convert, source) == ["vocab.txt (a link out of the folder)"]


@pytest.mark.parametrize("name", ["config.json", "groupwise.json"])
def test_what_the_output_repeats_is_refused_outside(convert, source, tmp_path, name):
    elsewhere = tmp_path / name
    elsewhere.write_text((source / "config.json").read_text())
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(elsewhere)
    convert("inspect", source).refused(f"{name} is a symlink out of its folder", "copy the file there")


def test_weights_may_lie_elsewhere(convert, tmp_path):
    """They are parsed as weights, and nothing else could become part of the output."""
    source = tiny.save(tiny.build(), tmp_path / "source")
    (source / "model.safetensors").rename(tmp_path / "big.safetensors")
    (source / "model.safetensors").symlink_to(tmp_path / "big.safetensors")
    convert("mha-to-gqa", source, tmp_path / "out", *MEAN).succeeded()
    assert skipped_files(convert, source) == []


def test_special_files_are_not_opened(convert, source, tmp_path, monkeypatch):
    os.mkfifo(source / "notes.txt")
    (source / "null").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(source)  # a socket's path may have no more than 107 bytes
        server.bind("s")
        skipped = sorted(skipped_files(convert, source))
    assert skipped == [
        "notes.txt (not a regular file)", "null (a link out of the folder)", "s (not a regular file)",
    ]  # fmt: skip
    convert("mha-to-gqa", source, tmp_path / "out", *MEAN).succeeded()
    assert not (tmp_path / "out/notes.txt").exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "consolidated.00.pth"],
)
def test_special_files_in_place_of_the_model_s_own(convert, tmp_path, name):
    source = tiny.save(tiny.build(), tmp_path / "source")
    if name != "config.json":
        (source / "model.safetensors").unlink()
    if name.startswith("consolidated"):
        (source / "params.json").write_text(json.dumps({"dim": 16, "n_layers": 2, "n_heads": 4, "norm_eps": 1e-5}))
    (source / name).unlink(missing_ok=True)
    os.mkfifo(source / name)
    result = convert("inspect", source)
    result.refused(name)


@pytest.mark.timeout(60)
def test_pipes_as_data(uptrain, convert, tmp_path):
    source = make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "source"))
    os.mkfifo(tmp_path / "a.jsonl")
    command = ("prepare", "--vocab-size", 300, "--seq-len", 8, "--out", tmp_path / "out", "--data")
    uptrain(*command, tmp_path / "a.jsonl").refused("a.jsonl is not a regular file")
    (tmp_path / "texts").mkdir()
    os.mkfifo(tmp_path / "texts/a.jsonl")
    uptrain(*command, tmp_path / "texts").refused("no file of a known format")
    calibration = ("--method", "pca", "--groups", 2, "--calibration", tmp_path / "texts")
    (tmp_path / "texts/b.fifo.txt").symlink_to(tmp_path / "a.jsonl")
    convert("mha-to-gqa", source, tmp_path / "out", *calibration).refused("no file of a known format")


@pytest.mark.parametrize(
    "content", ['{"_data_files": [{}]}', '{"_data_files": {}}', '{"_data_files": [{"filename": "../x.arrow"}]}']
)
def test_data_files_elsewhere(uptrain, tmp_path, content):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/state.json").write_text(content)
    command = ("prepare", "--vocab-size", 300, "--seq-len", 8, "--out", tmp_path / "out", "--data")
    uptrain(*command, tmp_path / "saved").refused("state.json is damaged", "_data_files")


def test_the_card_of_an_export_takes_no_file_from_outside(tmp_path, secret):
    from uptrain.export.model_card import model_card

    record = {
        "settings": {"model": "m", "steps": 2, "loss": "next-token", "teacher": "", "schedule": "cosine", "lr": 1e-3,
                     "optimizer": "adamw", "precision": "fp32"},
        "budget": {"alpha": None}, "step": 1, "tokens": 10, "data_sha256": "0" * 64, "evaluations": [],
    }  # fmt: skip
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "README.md").symlink_to(secret)
    (folder / "config.json").write_text("{}")
    assert SECRET not in model_card(folder, record)


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("config.json", 100_000_000), ("model.safetensors.index.json", 100_000_000), ("groupwise.json", 100_000_000),
        ("tokenizer.json", 1_000_000_000),
    ],
)  # fmt: skip
def test_enormous_files_are_refused_at_once(convert, source, tmp_path, name, limit):
    """Sparse files, which take no room on the disk."""
    with (source / name).open("ab") as file:
        file.truncate(limit + 1)
    command = ("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--dry-run")
    result = convert(*command, "--method", "pca" if name == "tokenizer.json" else "mean")
    result.refused(name, f"{limit + 1:,} bytes", f"at most {limit:,}")


def test_an_enormous_tokenizer(uptrain, tmp_path):
    folder = make_tokenizer(tmp_path / "t")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    command = ("prepare", "--data", tmp_path / "a.jsonl", "--seq-len", 8, "--out", tmp_path / "out", "--tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        with (folder / name).open("r+b") as file:
            before = file.seek(0, os.SEEK_END)
            file.truncate(50 << 30)
            uptrain(*command, folder).refused(name, "53,687,091,200 bytes")
            file.truncate(before)


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("model-00001-of-00002.safetensors", "model.safetensors.index.json"),
        ("pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"),
    ],
)
def test_shards_without_their_index(convert, tmp_path, name, index):
    source = tiny.save(tiny.build(), tmp_path / "source")
    (source / "model.safetensors").rename(source / name)
    convert("inspect", source).refused(f"holds {name} but no {index}", "download it again")
