"""Converted folders in transformers: they open without a missing key, and compute what they should."""

import pytest
import tiny
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from model.families import FAMILIES

# Wide enough that the matrix products of the two models, which have different numbers of columns, run the same way.
SIZE = {"hidden_size": 128, "intermediate_size": 192}
LAYOUTS = {
    "llama": [{}, {"attention_bias": True}, {"tie_word_embeddings": True}, {"head_dim": 24}],
    "mistral": [{}, {"head_dim": 24}],
    "qwen2": [{}, {"tie_word_embeddings": True}],
}
CASES = [(family, changes) for family in FAMILIES for changes in LAYOUTS[family]]


def open_folder(folder, **options):
    """Open a folder in transformers and check that every tensor found its place."""
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", **options
    )
    assert not any(loading.values()), loading
    return model.eval()


@pytest.mark.parametrize("groups", [8, 4, 2, 1])
@pytest.mark.parametrize(("family", "changes"), CASES)
def test_replicated_heads_oracle(convert, tmp_path, family, changes, groups):
    """The parent with each merged head repeated over its group gives the very same logits."""
    parent = tiny.build(family, **SIZE, **changes)
    source = tiny.save(parent, tmp_path / "source", max_shard_size="200KB")
    assert convert("mha-to-gqa", source, tmp_path / "out", "--groups", groups).code == 0
    converted = open_folder(tmp_path / "out")
    assert converted.config.num_key_value_heads == groups
    merged = {n: t for f in (tmp_path / "out").glob("*.safetensors") for n, t in load_file(f).items()}
    repeated = {
        n: t.view(groups, -1, *t.shape[1:]).repeat_interleave(tiny.N_HEADS // groups, 0).flatten(0, 1)
        for n, t in merged.items()
        if tiny.is_kv(n)
    }
    assert len(repeated) == (8 if family == "qwen2" or changes.get("attention_bias") else 4)
    parent.load_state_dict({**parent.state_dict(), **repeated})
    ids = torch.randint(0, 67, (3, 17), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        difference = (parent(ids).logits - converted(ids).logits).abs().max().item()
    assert difference == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "mixed"])
def test_dtypes_open(convert, tmp_path, dtype):
    source = tiny.save(tiny.build(), tmp_path / "source", dtype, "20KB")
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2)
    model = open_folder(tmp_path / "out", dtype="auto")
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_identity_leaves_the_logits(convert, tmp_path):
    parent = tiny.build(attention_bias=True)
    source = tiny.save(parent, tmp_path / "source")
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 8)
    ids = torch.arange(20).view(2, 10)
    with torch.inference_mode():
        assert torch.equal(parent(ids).logits, open_folder(tmp_path / "out")(ids).logits)


def test_gguf_opens_as_transformers_reads_it(convert, tmp_path):
    """A GGUF converted by us has the tensors that transformers' own GGUF reader finds."""
    from gguf_files import write_gguf

    model = tiny.build(num_key_value_heads=4, head_dim=8, hidden_size=64, intermediate_size=96, vocab_size=300)
    path = write_gguf(tmp_path / "model.gguf", model, "Q8_0")
    convert("mha-to-gqa", path, tmp_path / "out", "--groups", 4)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").state_dict()
    ours = open_folder(tmp_path / "out").state_dict()
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        assert torch.equal(tensor, ours[name]), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer("ab ba 12").input_ids) == "ab ba 12"
