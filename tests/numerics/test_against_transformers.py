"""Converted folders in transformers: they open without a missing key, and compute what they should.

(What each family computes: test_families.)
"""

import pytest
import tiny
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer


def open_folder(folder, **options):
    """Open a folder in transformers and check that every tensor found its place."""
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", **options
    )
    assert not any(loading.values()), loading
    return model.eval()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "mixed"])
def test_dtypes_open(convert, tmp_path, dtype):
    source = tiny.save(tiny.build(), tmp_path / "source", dtype, "20KB")
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2)
    model = open_folder(tmp_path / "out", dtype="auto")
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_identity_leaves_the_logits(convert, tmp_path):
    parent = tiny.build(attention_bias=True)
    source = tiny.save(parent, tmp_path / "source")
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 8)
    ids = torch.arange(20).view(2, 10)
    with torch.inference_mode():
        assert torch.equal(parent(ids).logits, open_folder(tmp_path / "out")(ids).logits)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_gguf_opens_as_transformers_reads_it(convert, tmp_path, family):
    """A GGUF converted by us has the tensors that transformers' own GGUF reader finds."""
    from gguf_files import write_gguf

    model = tiny.build(family, num_key_value_heads=4, head_dim=8, hidden_size=64, intermediate_size=96, vocab_size=300)
    path = write_gguf(tmp_path / "model.gguf", model, "Q8_0")
    convert("mha-to-gqa", "--method", "mean", path, tmp_path / "out", "--groups", 4)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").state_dict()
    ours = open_folder(tmp_path / "out").state_dict()
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        assert torch.equal(tensor, ours[name]), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    written = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    for text in ("ab ba 12", "it'Sab 1234 e\u0301 \n\n ba"):
        assert tokenizer(text).input_ids == written.encode(text).ids
    assert tokenizer.decode(tokenizer("ab ba 12").input_ids) == "ab ba 12"
