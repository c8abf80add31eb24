"""`layer_errors` of `groupwise.json`: how far each converted layer's attention is from the original's."""

import json
import lzma
import re

import numpy as np
import pytest
import tiny
import torch
from equivalent_heads import equivalent_mha
from tiny_tokenizers import make_tokenizer
from transformers import AutoModelForCausalLM

from convert.calibration import convert_layers
from convert.commands import tables
from convert.layers.layer_stream import is_validation_window

OPTIONS = ("--groups", 2, "--calibration-tokens", 1024)


@pytest.fixture
def source(tmp_path):
    return make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "source"), 300)


def record_of(out):
    return json.loads((out / "groupwise.json").read_text())


def errors_of(out):
    return [entry["output_error"] for entry in record_of(out)["layer_errors"]]


def validation_windows(out):
    """Return the windows of the recorded text that no layer was trained on, [N, T]."""
    calibration = record_of(out)["calibration"]
    ids = np.frombuffer(lzma.decompress((out / "groupwise_calibration.xz").read_bytes()), "<u2").astype(np.int64)
    ids_NT = ids.reshape(calibration["windows"], calibration["window"])
    return torch.from_numpy(ids_NT[[is_validation_window(i) for i in range(len(ids_NT))]])


@torch.inference_mode()
def errors_by_transformers(source, out):
    """Run each layer's attention of both models on the states of the original, which hooks keep."""
    before, after = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (source, out))
    calls = []
    for layer in before.model.layers:
        keep = lambda module, args, kwargs, output: calls.append((args, kwargs, output[0]))  # noqa: E731
        layer.self_attn.register_forward_hook(keep, with_kwargs=True)
    before(validation_windows(out), use_cache=False)
    return [
        float((layer.self_attn(*args, **kwargs)[0] - expected).square().sum() / expected.square().sum())
        for layer, (args, kwargs, expected) in zip(after.model.layers, calls, strict=True)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [(), ("--method", "pca", "--calibration", "shipped")])
def test_the_errors_are_those_of_transformers(convert, tmp_path, options, dtype):
    """Of the tensors as they are written, which are rounded."""
    source = make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "source", dtype), 300)
    convert("mha-to-gqa", source, tmp_path / "out", *OPTIONS, *options).succeeded()
    expected = errors_by_transformers(source, tmp_path / "out")
    assert errors_of(tmp_path / "out") == pytest.approx(expected, rel=1e-3)
    assert min(expected) > 1e-3


def test_a_merge_without_loss_has_no_error(convert, tmp_path):
    few = tiny.save(tiny.build(vocab_size=300, num_key_value_heads=2), tmp_path / "few")
    many = make_tokenizer(equivalent_mha(few, tmp_path / "many", 2), 300)
    convert("mha-to-gqa", many, tmp_path / "out", *OPTIONS).succeeded()
    assert max(errors_of(tmp_path / "out")) < 1e-9


def test_latent_attention_has_errors_too(convert, source, tmp_path):
    options = ("--latent", 16, "--rope", 4, "--calibration-tokens", 1024, "--refine", 0)
    convert("mha-to-mla", source, tmp_path / "out", *options).succeeded()
    errors = errors_of(tmp_path / "out")
    assert len(errors) == tiny.N_LAYERS and all(0 <= error < 1 for error in errors), errors


def test_the_mean_and_the_worst_layer_are_printed(convert, source, tmp_path):
    out = tmp_path / "out"
    printed = convert("mha-to-gqa", source, out, *OPTIONS).succeeded().out
    errors = errors_of(out)
    row = f"{sum(errors) / len(errors):.1%} on average, at most {max(errors):.1%} (layer {np.argmax(errors)})"
    assert row in re.sub(r"\s+", " ", printed)
    given = json.loads(convert("mha-to-gqa", source, tmp_path / "again", *OPTIONS, "--json").out)
    assert given["layer_errors"] == record_of(out)["layer_errors"]


def test_both_attentions_of_a_block_are_named():
    tensors = [
        f"decoder.block.0.layer.{i}.{name}.q.weight" for i, name in enumerate(("SelfAttention", "EncDecAttention"))
    ]
    entries = [{"tensor": tensor, "output_error": error} for tensor, error in zip(tensors, (0.1, 0.3), strict=True)]
    ((_, row),) = tables._layer_errors(entries)
    assert row == "20.0% on average, at most 30.0% (decoder.block.0.layer.1.EncDecAttention)"


def test_no_errors_without_a_text(convert, source, tmp_path):
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", "mean").succeeded()
    assert "layer_errors" not in record_of(tmp_path / "out")


def shorten(record):
    record["layer_errors"].pop()


def lower(record):
    record["layer_errors"][1]["output_error"] /= 2


def forget(record):
    record["layer_errors"][1]["output_error"] = None


@pytest.mark.parametrize(
    ("harm", "difference"),
    [
        (shorten, "groupwise.json does not give layer_errors of exactly the converted layers"),
        (lower, "groupwise.json has layer_errors[1].output_error = "),
        (forget, "groupwise.json has layer_errors[1].output_error = None; it should be 0."),
    ],
)
def test_verify_compares_the_errors(convert, source, tmp_path, harm, difference):
    out = tmp_path / "out"
    convert("mha-to-gqa", source, out, *OPTIONS).succeeded()
    assert convert("verify", source, out).code == 0
    record = record_of(out)
    harm(record)
    (out / "groupwise.json").write_text(json.dumps(record, indent=2) + "\n")
    result = convert("verify", source, out)
    assert (result.code, difference in result.err) == (3, True), result.err


def test_a_record_of_an_earlier_version_has_none(convert, source, tmp_path):
    out = tmp_path / "out"
    convert("mha-to-gqa", source, out, *OPTIONS).succeeded()
    record = record_of(out)
    del record["layer_errors"]
    (out / "groupwise.json").write_text(json.dumps(record, indent=2) + "\n")
    result = convert("verify", source, out)
    assert (result.code, result.err) == (
        4,
        "NOT CHECKED: layer_errors of groupwise.json, which earlier versions left out\n",
    )


@pytest.mark.parametrize("error", ["0.1", True, -0.5, float("nan"), float("inf"), [0.1], {}])
def test_an_error_that_is_no_share_is_refused(convert, source, tmp_path, error):
    out = tmp_path / "out"
    convert("mha-to-gqa", source, out, *OPTIONS, "--refine", 0).succeeded()
    record = record_of(out)
    record["layer_errors"][0]["output_error"] = error
    (out / "groupwise.json").write_text(json.dumps(record))
    convert("verify", source, out).refused("groupwise.json is damaged: ", "layer_errors[0].output_error is ")


def test_an_infinite_error_names_its_layer(convert, source, tmp_path, monkeypatch):
    monkeypatch.setattr(convert_layers, "relative_error", lambda *arguments: float("inf"))
    words = "layer 0's converted attention produces NaN or infinite values on the text"
    convert("mha-to-gqa", source, tmp_path / "out", *OPTIONS, "--method", "pca").refused(words)
    assert not (tmp_path / "out").exists()
