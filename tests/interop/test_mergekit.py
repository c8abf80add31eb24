"""mergekit reads what we write, tensor by tensor."""

import json
from pathlib import Path

import interop
import pytest
import tiny
import torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FAMILIES = ("llama", "mistral", "qwen2", "phi3", "gemma")
SETTINGS = {"gemma": {"tie_word_embeddings": True}}  # mergekit knows no other Gemma


def merge(recipe: dict, place: Path) -> Path:
    """Run mergekit's own program; return the folder that it wrote."""
    recipe_file, out = place / "recipe.yml", place / "merged"
    recipe_file.write_text(json.dumps(recipe, default=str))  # JSON is YAML
    interop.run(interop.need("mergekit") / "bin/mergekit-yaml", recipe_file, out, "--no-write-model-card")
    return out


@pytest.fixture
def make_source(tmp_path):
    interop.need("mergekit")
    tokenizer = interop.make_tokenizer(tmp_path / "tokenizer")

    def make(name: str, family: str = "llama", **changes) -> Path:
        return interop.make_source(tmp_path / name, family, tokenizer, **{**interop.WIDE, **changes})

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_passthrough(make_source, tmp_path, figure, family):
    out = tmp_path / "out"
    interop.call(
        "mha-to-gqa", "--method", "mean", make_source("source", family, **SETTINGS.get(family, {})), out, "--groups", 2
    )
    recipe = {"merge_method": "passthrough", "models": [{"model": out}], "dtype": "float32"}
    merged = merge(recipe, tmp_path)
    expected, passed = tiny.tensors(out), tiny.tensors(merged)
    assert expected.keys() == passed.keys()
    assert all(torch.equal(tensor, passed[name]) for name, tensor in expected.items())
    figure(f"mergekit: passthrough, {family}", 0.0)
    assert json.loads((merged / "config.json").read_text())["num_key_value_heads"] == 2
    ids = interop.token_ids()
    assert (interop.logits_of(merged, ids) == interop.logits_of(out, ids)).all()


@pytest.mark.parametrize("groups", [8, 4, 2, 1])
def test_mean_of_two(make_source, tmp_path, figure, groups):
    outs = [tmp_path / f"out-{seed}" for seed in (0, 1)]
    for seed, out in enumerate(outs):
        interop.call(
            "mha-to-gqa", "--method", "mean", make_source(f"source-{seed}", seed=seed), out, "--groups", groups
        )
    models = [{"model": out, "parameters": {"weight": 0.5}} for out in outs]
    merged = tiny.tensors(merge({"merge_method": "linear", "models": models, "dtype": "float32"}, tmp_path))
    first, second = map(tiny.tensors, outs)
    assert merged.keys() == first.keys()
    assert not torch.equal(
        first["model.layers.0.self_attn.k_proj.weight"], second["model.layers.0.self_attn.k_proj.weight"]
    )
    difference = max(float((merged[name] - (first[name] + second[name]) / 2).abs().max()) for name in first)
    figure("mergekit: mean of two outputs", difference)
    assert difference <= 1e-6
