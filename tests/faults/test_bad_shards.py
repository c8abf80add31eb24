"""Every damaged index and shard gets one clear line, exit code 2, and leaves nothing behind."""

import json

import pytest
import tiny
import torch
from damage import edit_index
from safetensors.torch import load_file, save_file
from transformers import T5Config, T5ForConditionalGeneration

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def test_index_names_a_missing_shard(refuse_source, source):
    shard = next(source.glob("model-00002*"))
    shard.unlink()
    refuse_source("names the shard", shard.name, "missing")


def test_shard_lacks_a_named_tensor(refuse_source, source):
    shard = next(source.glob("model-00002*"))
    edit_index(source, lambda index: index["weight_map"].update({"model.extra.weight": shard.name}))
    refuse_source("model.extra.weight", shard.name, "does not hold it")


def test_shard_holds_an_unnamed_tensor(refuse_source, source):
    edit_index(source, lambda index: index["weight_map"].pop("model.norm.weight"))
    refuse_source("model.norm.weight", "does not name")


def test_index_lacks_a_shard(refuse_source, source):
    """Left over from another number of shards, a file does no harm."""
    *_, last = sorted(source.glob("*.safetensors"))

    def forget(index):
        index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != last.name}

    (source / "model-00001-of-00009.safetensors").write_bytes(b"left over")
    edit_index(source, forget)
    refuse_source("names", f"but not {last.name}", "of the same set")


def test_tensor_in_two_shards(refuse_source, source):
    first, second = sorted(source.glob("*.safetensors"))[:2]
    both = load_file(second)
    both.update(list(load_file(first).items())[:1])
    save_file(both, second, metadata={"format": "pt"})
    refuse_source("is in two shards")


@pytest.mark.parametrize("name", ["../stolen.safetensors", "/etc/passwd", "sub/x.safetensors", ".."])
def test_index_names_a_path_outside_the_folder(refuse_source, source, name):
    edit_index(source, lambda index: index["weight_map"].update({"model.norm.weight": name}))
    refuse_source(name, "inside the folder")


@pytest.mark.parametrize("name", ["README.md", "tokenizer.json", "x.SAFETENSORS"])
def test_index_names_a_file_of_another_kind(refuse_source, source, name):
    shard = next(source.glob("model-00002*"))
    shard.rename(source / name)

    def rename(index):
        index["weight_map"] = {t: name if f == shard.name else f for t, f in index["weight_map"].items()}

    edit_index(source, rename)
    refuse_source(name, "not a .safetensors file")


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_damaged_index(refuse_source, source, text):
    (source / "model.safetensors.index.json").write_text(text)
    refuse_source("is not a shard index")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_safetensors(refuse_source, source, keep):
    shard = next(source.glob("model-00002*"))
    shard.write_bytes(shard.read_bytes()[:keep])
    refuse_source(shard.name, "truncated")


def test_trailing_bytes(refuse_source, source):
    shard = next(source.glob("model-00002*"))
    shard.write_bytes(shard.read_bytes() + b"x")
    refuse_source(shard.name, "belong to no tensor")


def test_git_lfs_pointer(refuse_source, source):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    shard = next(source.glob("model-00001*"))
    shard.write_text(pointer)
    refuse_source(shard.name, "git-lfs pointer", "git lfs pull")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "chat_templates/tool.jinja"])
def test_git_lfs_pointer_beside_the_weights(refuse_source, source, name):
    (source / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    refuse_source(name, "git-lfs pointer", "git lfs pull")


def test_shards_that_the_index_does_not_name(convert, source, tmp_path):
    """Left from another download: no part of the model, and said so."""
    stray = {"model.layers.0.self_attn.k_proj.weight": torch.ones(32, 32)}
    save_file(stray, source / "model-00009-of-00009.safetensors")
    result = convert("mha-to-gqa", "--method", "mean", source, tmp_path / "good", "--groups", 2, "--json")
    assert "model-00009-of-00009.safetensors" in json.loads(result.out)["skipped_files"]
    assert not (tmp_path / "good/model-00009-of-00009.safetensors").exists()
    assert not torch.equal(tiny.tensors(tmp_path / "good")["model.layers.0.self_attn.k_proj.weight"], torch.ones(8, 32))


def entry(**changes):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


HEADERS = {
    "no JSON": b"{",
    "not an object": b"[1]",
    "unknown dtype": {"a": entry(dtype="Q9")},
    "negative shape": {"a": entry(shape=[-2])},
    "endless product": {"a": entry(shape=[10**4000] * 300)},
    "too many axes": {"a": entry(shape=[1] * 99 + [2])},
    "shape of text": {"a": entry(shape="2")},
    "wrong length": {"a": entry(shape=[3])},
    "hole": {"a": entry(data_offsets=[4, 12])},
    "overlap": {"a": entry(), "b": entry(data_offsets=[4, 12])},
    "offsets in fractions": {"a": entry(data_offsets=[0.0, 8.0])},
    "no offsets": {"a": {"dtype": "F32", "shape": [2]}},
    "long name and dtype": {"a" * 10**5: entry(dtype="Q" * 10**5)},
    "long offsets": {"a": entry(data_offsets=[10**3999, 10**4000])},
    "metadata": {"__metadata__": {"a": 1}},
    "twice": b'{"a":%s,"a":%s}' % ((b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}',) * 2),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_damaged_header(refuse_source, source, kind):
    header = HEADERS[kind]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    shard = next(source.glob("model-00001*"))
    shard.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    shaped = kind in ("negative shape", "endless product", "too many axes")
    refused = refuse_source(shard.name, "damaged safetensors header", "impossible shape" if shaped else "")
    assert len(refused.err) < 1000


def test_index_names_a_t5_s_embedding_thrice(convert, tmp_path):
    """As the Hub's conversion of `.bin` files does: it leaves out tensors that share memory, but not their names."""
    config = T5Config(vocab_size=67, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4)
    source = tiny.save(T5ForConditionalGeneration(config), tmp_path / "t5", max_shard_size="12KB")
    weight_map = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    home = weight_map["shared.weight"]
    copies = dict.fromkeys(("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), home)
    assert not copies.keys() & weight_map.keys()
    edit_index(source, lambda index: index["weight_map"].update(copies))
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "merged", "--groups", 2).succeeded()
    edit_index(source, lambda index: index["weight_map"].update({"model.extra.weight": home}))
    convert("inspect", source).refused("model.extra.weight", "does not hold it")


def test_weights_in_mistrals_own_format(convert, tmp_path):
    source = tiny.save(tiny.build("mistral"), tmp_path / "source")
    (source / "model.safetensors").rename(source / "consolidated.safetensors")
    convert("inspect", source).refused("consolidated.safetensors, Mistral's own format", "model*.safetensors")


def test_weights_under_another_name(convert, tmp_path):
    source = tiny.save(tiny.build(), tmp_path / "source")
    (source / "model.safetensors").rename(source / "pytorch_model.safetensors")
    words = "but pytorch_model.safetensors; rename it to model.safetensors"
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", "mean").refused(words)
