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
