"""`--refine`: each merged layer is trained to give what it gave before."""

import json
import lzma
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from damage import record_sha256, rewrite
from equivalent_heads import equivalent_mha, logits
from safetensors.torch import load_file
from tiny_tokenizers import make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import convert as package
from convert.calibration import refine
from convert.layers.runnable_layer import HeadWeights

SHIPPED = Path(package.__file__).parent / "calibration_text/sample_texts/mixture.jsonl.xz"
OPTIONS = ("--groups", 2, "--calibration-tokens", 1024)


@pytest.fixture
def source(tmp_path):
    return make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "source"), 300)


def log_probabilities(folder):
    """Return what a model expects on pieces of the shipped text that lie far behind what a short calibration reads."""
    lines = lzma.decompress(SHIPPED.read_bytes()).decode().splitlines()[-40:]
    ids = AutoTokenizer.from_pretrained(folder)("".join(json.loads(line)["text"] for line in lines)).input_ids[:4096]
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model(torch.tensor(ids).view(-1, 512)).logits.log_softmax(-1)


@pytest.mark.slow
def test_refining_lowers_the_distance_to_the_parent(convert, tmp_path):
    parent, divergences = log_probabilities(tiny.DEMO), {}
    for tokens in (0, 16384):
        command = ("--groups", 2, "--calibration-tokens", 8192, "--refine", tokens)
        convert("mha-to-gqa", tiny.DEMO, tmp_path / str(tokens), *command).succeeded()
        merged = log_probabilities(tmp_path / str(tokens))
        divergences[tokens] = float((parent.exp() * (parent - merged)).sum(-1).mean())
    assert divergences[16384] < 0.8 * divergences[0], divergences


def test_the_same_bytes_again_and_verified(convert, source, tmp_path):
    for name in ("one", "two"):
        convert("mha-to-gqa", source, tmp_path / name, *OPTIONS, "--refine", 2048).succeeded()
    assert tiny.snapshot(tmp_path / "one") == tiny.snapshot(tmp_path / "two")
    assert json.loads((tmp_path / "one/groupwise.json").read_text())["refine"] == 2048
    assert "each layer refined on 2,048 tokens" in (tmp_path / "one/README.md").read_text()
    result = convert("verify", source, tmp_path / "one")
    assert (result.code, "rounding" in result.out) == (0, False)


def test_biases_do_not_change_the_learning_rate():
    """Those of Qwen 2.5's keys are up to a hundred times larger than its weights."""
    weights = torch.randn(6, 4)
    rate = refine.root_mean_square(weights, 4)
    assert rate == pytest.approx(float(weights.square().mean().sqrt()))
    assert refine.root_mean_square(torch.cat([weights, torch.full((6, 1), 100.0)], dim=1), 4) == rate


def test_steps_are_adams(monkeypatch):
    """Against Adam by its definition, in float64."""
    n_steps, n_rows = 12, 6
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(n_rows, n_rows, generator=generator) for _ in range(4)]
    x, target = torch.randn(2, 1, 50, n_rows, generator=generator)

    def heads_out(layer, weights, x):
        return torch.tanh(x @ weights.q_CX.T) * (x @ weights.k_CX.T) + x @ weights.v_CX.T

    monkeypatch.setattr(refine, "heads_out", heads_out)
    monkeypatch.setattr(refine, "original_output", lambda layer, windows: target)
    training = refine._Training(SimpleNamespace(inputs=lambda windows: x), HeadWeights(*matrices), n_steps)
    wide = [matrix.double().requires_grad_() for matrix in matrices]
    rates = [refine.PEAK_LEARNING_RATE / n_rows**0.5 * float(matrix.square().mean().sqrt()) for matrix in matrices]
    mean, square = ([torch.zeros_like(matrix) for matrix in wide] for _ in range(2))
    for step in range(1, n_steps + 1):
        training.step([0])
        weights = HeadWeights(*wide)
        out = heads_out(None, weights, x.double()) @ weights.o_MC.T
        error = (out - target.double()).square().mean() / target.double().square().mean()
        share = training._share_of_peak(step - 1)
        for i, gradient in enumerate(torch.autograd.grad(error, wide)):
            mean[i] = 0.9 * mean[i] + 0.1 * gradient
            square[i] = 0.95 * square[i] + 0.05 * gradient.square()
            move = mean[i] / (1 - 0.9**step) / ((square[i] / (1 - 0.95**step)).sqrt() + 1e-8)
            with torch.no_grad():
                wide[i] -= share * rates[i] * move
    assert training._optimizer.defaults["fused"]  # six times as fast
    for trained, expected, matrix in zip(training.weights(), wide, matrices, strict=True):
        assert (trained - expected).norm() < 1e-4 * (expected - matrix).norm()


@pytest.mark.slow
def test_the_seed_draws_the_order_of_the_text(convert, source, tmp_path):
    """The closed form does not depend on it; verify repeats the order."""
    for name, options in (("zero", ()), ("one", ("--seed", 1)), ("closed", ("--refine", 0)),
                          ("closed one", ("--refine", 0, "--seed", 1))):  # fmt: skip
        command = ("mha-to-gqa", source, tmp_path / name, "--groups", 2, "--calibration-tokens", 8192, *options)
        convert(*command).succeeded()
    weights = {path.name: (path / "model.safetensors").read_bytes() for path in tmp_path.iterdir()}
    assert weights["zero"] != weights["one"]
    assert weights["closed"] == weights["closed one"]
    result = convert("verify", source, tmp_path / "one")
    assert (result.code, "rounding" in result.out) == (0, False)


def test_verify_tolerates_another_end_of_training(convert, source, tmp_path, monkeypatch):
    """As on another processor: other weights, which serve as well."""
    convert("mha-to-gqa", source, tmp_path / "out", *OPTIONS, "--refine", 2048).succeeded()
    monkeypatch.setattr(refine, "PEAK_LEARNING_RATE", refine.PEAK_LEARNING_RATE * 1.01)
    result = convert("verify", source, tmp_path / "out")
    assert (result.code, "but for rounding" in result.out) == (0, True)


@pytest.mark.parametrize("value", [0.05, float("nan")])
def test_verify_finds_a_worse_refined_layer(convert, source, tmp_path, value):
    """Even where the record says that it should be so."""
    out = tmp_path / "out"
    convert("mha-to-gqa", source, out, *OPTIONS, "--refine", 2048).succeeded()
    rewrite(out, lambda tensors: tensors["model.layers.1.self_attn.o_proj.weight"].add_(value))
    record_sha256(out)
    result = convert("verify", source, out)
    assert (result.code, "layer 1 has a validation error" in result.err) == (3, True), result.err


def test_refinement_without_gain_is_dropped(convert, source, tmp_path, monkeypatch):
    monkeypatch.setattr(refine, "PEAK_LEARNING_RATE", 1e4)
    for name, options in (("without", ()), ("with", ("--refine", 2048))):
        convert("mha-to-gqa", source, tmp_path / name, *OPTIONS, *options).succeeded()
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("without", "with"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_lossless_merges_stay_lossless(convert, tmp_path):
    few = tiny.save(tiny.build(vocab_size=300, num_key_value_heads=2), tmp_path / "few")
    many = make_tokenizer(equivalent_mha(few, tmp_path / "many", 2), 300)
    convert("mha-to-gqa", many, tmp_path / "out", *OPTIONS, "--refine", 2048).succeeded()
    assert (logits(tmp_path / "out") - logits(few)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--method", "mean"), "--refine needs a calibration text and one of"),
        (("--method", "pca", "--calibration", "none"), "--refine needs a calibration text"),
    ],
)
def test_refused_without_text_or_a_method_for_layers(convert, source, tmp_path, options, words):
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--refine", 2048, *options).refused(words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("tokens", "words"), [(-1, "'-1' is not a count"), (2**24 + 1, "more than 16,777,216")])
def test_refused_beyond_what_verify_reads(convert, source, tmp_path, tokens, words):
    convert("mha-to-gqa", source, tmp_path / "out", *OPTIONS, "--refine", tokens).refused("--refine", words)
    assert not (tmp_path / "out").exists()
