"""Files of a few bytes that claim sizes whose tables would fill the memory: refused in one line, before any is made."""

import json
import shutil

import frameworks
import pytest
import tiny
import torch
from gguf_files import write_gguf
from limits import bounded
from safetensors_headers import write_headers

from model.checkpoint import TensorInfo
from model.files import read

HUGE = 1 << 28


def test_an_empty_tensor_that_claims_many_heads(convert, tmp_path):
    """StableLM's norms are a tensor for each head."""
    folder = write_headers(
        tmp_path / "source", [TensorInfo("model.layers.0.self_attn.q_proj.weight", "BF16", (HUGE, 0))]
    )
    config = {
        "model_type": "stablelm", "num_hidden_layers": 1, "hidden_size": HUGE, "num_attention_heads": HUGE,
        "num_key_value_heads": HUGE, "qk_layernorm": True, "partial_rotary_factor": 1.0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    with bounded(100):
        convert("inspect", folder).refused("q_proj.weight has shape (268435456, 0)")


def test_a_fused_tensor_of_few_rows_that_claims_many_heads(convert, tmp_path):
    model = tiny.build(num_key_value_heads=8)
    folder = tiny.save(model, tmp_path / "folder")
    tensors = frameworks.titan_tensors(model, "float32", new=True, fused=True)
    path = frameworks.save_titan(tmp_path / "checkpoint", tensors)
    shutil.copy(folder / "config.json", path)
    convert("inspect", path).succeeded()  # and imports what reading needs
    tiny.edit_config(path, hidden_size=HUGE, num_attention_heads=HUGE // 2, num_key_value_heads=HUGE // 2, head_dim=2)
    with bounded(100):
        convert("inspect", path).refused("they do not match")


@pytest.mark.parametrize(("size", "words"), [(1 << 31, "rope_freqs"), (5, "heads of 5 dimensions")])
def test_heads_of_a_size_that_no_tensor_has(convert, tmp_path, size, words):
    model = tiny.build()
    model.rope_factors = [1.0, 1.0]
    sizes = {f"llama.{key}": size for key in ("attention.key_length", "attention.value_length", "rope.dimension_count")}
    path = write_gguf(tmp_path / "x.gguf", model, **sizes)
    convert("to-hf", tmp_path / "none.gguf", tmp_path / "warm")  # imports what reading GGUF needs
    with bounded(200):
        convert("to-hf", path, tmp_path / "out").refused("x.gguf", words)


def test_an_empty_tensor_of_a_size_that_numpy_cannot_hold(convert, tmp_path):
    folder = tiny.save(tiny.build(), tmp_path / "source")
    (folder / "model.safetensors").unlink()
    write_headers(tmp_path / "header", [TensorInfo("model.embed_tokens.weight", "F32", (0, 1 << 59, 64))])
    shutil.copy(tmp_path / "header/model.safetensors", folder)
    convert("inspect", folder).refused("has the impossible shape")
    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": torch.empty(0, 1 << 62)}, folder / "pytorch_model.bin")
    convert("inspect", folder).refused("of the impossible shape")


def many_lists(begin, end):
    """Return JSON of 4 MB that takes 100 MB in memory."""
    return begin + b"[]," * 1_300_000 + b"[]" + end


@pytest.mark.parametrize("name", ["config.json", "groupwise.json", "model.safetensors.index.json", "model.safetensors"])
def test_very_many_lists_in_a_file(convert, tmp_path, name):
    folder = tiny.save(tiny.build(), tmp_path / "source")
    if name == "model.safetensors":
        header = many_lists(b'{"x": [', b"]}")
        (folder / name).write_bytes(len(header).to_bytes(8, "little") + header)
    else:
        (folder / name).write_bytes(many_lists(b'{"weight_map": {"a": "b"}, "x": [', b"]}"))
    with bounded(30):
        result = convert("to-hf", folder, tmp_path / "out")
    result.refused(name, "more than 1,000,000 objects and lists in 3,900,")


def test_as_many_lists_as_the_shortest_entries_of_safetensors_have(monkeypatch):
    monkeypatch.setattr(read, "MAX_CONTAINERS", 10)
    entry = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    header = {chr(ord("a") + i): entry for i in range(20)}
    text = json.dumps(header, separators=(",", ":")).encode()
    assert read.parse_json(text) == header
    with pytest.raises(ValueError, match="more than 10 objects and lists in 81 bytes"):
        read.parse_json(b"[" + b"[]," * 26 + b"0]")
    assert read.parse_json(json.dumps("[" * 99).encode()) == "[" * 99
