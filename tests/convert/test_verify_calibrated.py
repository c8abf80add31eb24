"""`convert verify` of calibrated conversions: what it recomputes, and what it cannot check."""

import hashlib
import json
import lzma
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from calibrated import FIT, TEXT, TOKENS, record
from damage import record_sha256, rewrite
from safetensors.torch import save_file
from tiny_tokenizers import make_tokenizer

from convert.calibration.convert_layers import validation_errors
from convert.calibration.float32_weights import head_weights
from convert.calibration.layer_output import squared_error
from convert.calibration_text.read import read_calibration_text
from convert.errors import UnsupportedMethodError
from convert.layers.layer_stream import iter_layers
from convert.layers.native_layers import NativeLayer
from convert.merging.layer_merge import read_attention
from convert.merging.merge_recipe import MergeRecipe
from convert.planning.merge_plan import make_merge_plan
from model.checkpoint import open_checkpoint


def lost(path):
    path.unlink()


def damaged(path):
    path.write_bytes(path.read_bytes()[:-9])


def of_another_text(path):
    path.write_bytes(lzma.compress(np.arange(1024, dtype="<u2").tobytes()))


def endless(path):
    path.write_bytes(lzma.compress(bytes(1 << 26)))


def no_xz(path):
    path.write_bytes(b"no xz")


OTHER_TOKENS = "does not hold the tokens that were recorded at conversion"


@pytest.mark.parametrize(
    ("harm", "code", "reason"),
    [
        (lost, 4, "which keeps the tokens it was calibrated on"), (no_xz, 3, "is damaged ("),
        (damaged, 3, OTHER_TOKENS), (of_another_text, 3, OTHER_TOKENS), (endless, 3, OTHER_TOKENS),
    ],
)  # fmt: skip
def test_verify_lists_unchecked_parts(convert, parent, tmp_path, prose, harm, code, reason):
    out = tmp_path / "out"
    convert("mha-to-gqa", parent, out, "--groups", 2, *FIT, "--calibration", prose).succeeded()
    harm(out / TOKENS)
    result = convert("verify", parent, out)
    assert (result.code, "NOT CHECKED: the converted layers, since" in result.err) == (code, True)
    assert reason in result.err
    assert "all agree" not in result.out
    report = json.loads(convert("verify", parent, out, "--json").out)
    assert (report["ok"], report["n_computed"], len(report["unchecked"])) == (False, 0, 1)
    tensors = tiny.tensors(out)  # all the rest is checked nevertheless
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] += 1
    for file in out.glob("*.safetensors"):
        file.unlink()
    (out / "model.safetensors.index.json").unlink()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    result = convert("verify", parent, out)
    assert (result.code, "mlp.up_proj.weight differs" in result.err) == (3, True)


@pytest.mark.parametrize(
    ("windows", "window"), [(1 << 40, 64), (0, 64), (-1, -1024), (1 << 60, 1 << 60), (4, 1025), (3, 64), (4, 0)]
)
def test_verify_of_an_impossible_calibration(convert, parent, tmp_path, prose, windows, window):
    out = tmp_path / "out"
    convert("mha-to-gqa", parent, out, "--groups", 2, *FIT, "--calibration", prose).succeeded()
    named = record(out)
    named["calibration"] |= {"windows": windows, "window": window}
    (out / "groupwise.json").write_text(json.dumps(named))
    result = convert("verify", parent, out)
    assert (result.code in (3, 4), "records a calibration of" in result.err) == (True, True)


def test_tokens_that_the_model_does_not_know(convert, parent, tmp_path, prose):
    out = tmp_path / "out"
    convert("mha-to-gqa", parent, out, "--groups", 2, *FIT, "--calibration", prose).succeeded()
    ids = np.full(1024, 60_000, dtype="<u2")
    (out / TOKENS).write_bytes(lzma.compress(ids.tobytes()))
    named = record(out)
    named["calibration"]["sha256_of_ids"] = hashlib.sha256(ids.astype(np.int64).tobytes()).hexdigest()
    (out / "groupwise.json").write_text(json.dumps(named))
    result = convert("verify", parent, out)
    assert (result.code, "has the token id 60000" in result.err) == (3, True)


@pytest.mark.parametrize("change", [0.03, -0.5, float("nan")])
def test_verify_sees_a_changed_merge_and_forgives_rounding(convert, parent, tmp_path, change):
    out = tmp_path / "out"
    convert("mha-to-gqa", parent, out, "--groups", 2, *FIT, "--max-shard-size", "1GB").succeeded()
    name = "model.layers.1.self_attn.k_proj.weight"
    rewrite(out, lambda tensors: tensors[name].view(torch.int16)[0, 0].add_(1))  # the next bfloat16
    result = convert("verify", parent, out)
    assert (result.code, f"{name} has SHA-256" in result.err, "differs" in result.err) == (3, True, False)
    record_sha256(out)  # as on another machine, whose sums come out a little different
    report = json.loads(convert("verify", parent, out, "--json").out)
    assert (report["ok"], list(report["rounded"])) == (True, [name])
    assert report["rounded"][name] < 1e-5
    rewrite(out, lambda tensors: tensors[name][2, 1].add_(change))
    record_sha256(out)
    result = convert("verify", parent, out)
    assert (result.code, f"{name} differs" in result.err, "has SHA-256" in result.err) == (3, True, False)


@pytest.mark.parametrize(
    ("elements", "difference", "code"),
    [((2, 1), 0.2, 0), ((2, 1), 0.3, 3), (..., 0.004, 0), (..., 0.03, 3)],
)
def test_how_far_an_element_and_a_tensor_may_differ(convert, parent, tmp_path, elements, difference, code):
    """By 0.25 of the tensor's root mean square, and by 0.01 of its norm, both beyond a step of bfloat16."""
    out, name = tmp_path / "out", "model.layers.1.self_attn.q_proj.weight"
    convert("mha-to-gqa", parent, out, "--groups", 2, *FIT).succeeded()

    def edit(tensors):
        exact = tensors[name].double()
        assert exact.numel() > 1 / 0.04**2, "an element at its limit must not bring the tensor to its own"
        rms = exact.square().mean().sqrt()
        changed = exact * (1 + 2**-7) + difference * rms * exact.sign()
        exact[elements] = changed[elements]
        tensors[name] = exact.to(tensors[name].dtype)

    rewrite(out, edit)
    record_sha256(out)
    assert convert("verify", parent, out).code == code


@pytest.mark.parametrize("name", ["hub:evil/data", "text.txt", "../text.txt"])
def test_verify_opens_no_text_that_only_out_names(convert, parent, tmp_path, prose, name, monkeypatch):
    """It may come from anybody."""
    out, opened = tmp_path / "out", []
    convert("mha-to-gqa", parent, out, "--groups", 2, *FIT, "--calibration", prose).succeeded()
    named = record(out)
    named["calibration"]["text"] = str(tmp_path / name) if name == "text.txt" else name
    (out / "groupwise.json").write_text(json.dumps(named))
    from convert.calibration_text import read

    monkeypatch.setattr(read, "find_files", lambda *given: opened.append(given))
    monkeypatch.setattr(read, "find_reader", lambda *given: opened.append(given))
    result = convert("verify", parent, out)
    assert (result.code, opened) == (3 if "hub" in name else 0, [])  # 3: the card names the text, too


def test_terminated_verify_leaves_no_scratch(convert, parent, tmp_path):
    out, scratch = tmp_path / "out", tmp_path / "tmp"
    scratch.mkdir()
    convert("mha-to-gqa", parent, out, "--groups", 2, *FIT).succeeded()
    code = "import os, signal; from convert.calibration import calibrate\n"
    code += "calibrate.calibrate = lambda *a: os.kill(os.getpid(), signal.SIGTERM)\n"
    code += "from convert.cli import main\nmain()"
    command = [sys.executable, "-c", code, "verify", str(parent), str(out)]
    result = subprocess.run(
        command, env=os.environ | {"TMPDIR": str(scratch)}, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr.strip().count("\n")) == (1, 0), result.stderr
    assert list(scratch.iterdir()) == []


def test_verify_on_another_kind_of_processor(convert, parent, tmp_path):
    """There, some keys are drawn differently that calibrating looks at."""
    out = tmp_path / "out"
    convert("mha-to-gqa", parent, out, "--groups", 2, *FIT, "--refit").succeeded()
    command = [sys.executable, "-m", "convert", "verify", parent, out, "--json"]
    other = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    report = json.loads(subprocess.run(command, env=other, check=True, capture_output=True).stdout)
    assert report["ok"]


@pytest.mark.parametrize(("window", "n_windows", "batches"), [(64, 16, [4]), (512, 13, [2, 1])])
def test_the_errors_of_refined_layers_need_only_validation_windows(
    tmp_path, prose, monkeypatch, window, n_windows, batches
):
    """They equal those of a run over the whole text, but for rounding; it ends at the last layer that is compared."""
    model = tiny.build(vocab_size=300, num_hidden_layers=4, max_position_embeddings=window)
    source = make_tokenizer(tiny.save(model, tmp_path / "source"), 300)
    prose.write_text(TEXT * 3)
    rng, run = np.random.default_rng(0), []
    with open_checkpoint(source) as checkpoint, torch.no_grad():
        text = read_calibration_text(checkpoint, str(prose), n_windows * window)
        plan = make_merge_plan(checkpoint, 4, MergeRecipe("fit", refit=True, refine=64, text=text), None)
        read = [read_attention(checkpoint, merge) for merge in plan.conversions]
        versions = [
            [head_weights(replace(a, o_HMD=a.o_HMD + s * rng.normal(size=a.o_HMD.shape))) for s in (0.01, 1)]
            for a in read
        ]
        expected = {}
        (tmp_path / "whole").mkdir()
        for layer in iter_layers(checkpoint, text, tmp_path / "whole", lambda n: None, "cpu"):
            layer.run(lambda heads: None)
            windows = layer.windows.validation_windows
            expected[layer.index] = [squared_error(layer, weights, windows) for weights in versions[layer.index]]
        run_layer = NativeLayer.run

        def counted(layer, states_BTM, observer):
            run.append((layer.index, len(states_BTM)))
            return run_layer(layer, states_BTM, observer)

        monkeypatch.setattr(NativeLayer, "run", counted)
        errors = validation_errors(checkpoint, plan.recipe, tmp_path / "scored", {0, 2}, versions.__getitem__)
    assert run == [(index, n) for index in range(3) for n in batches]
    assert list(errors) == [0, 2]
    for index, found in errors.items():
        assert found == pytest.approx(expected[index], rel=1e-5)
        assert found[1] > 100 * found[0] > 0


def test_verify_without_torch_or_room(convert, parent, tmp_path, monkeypatch):
    out = tmp_path / "out"
    convert("mha-to-gqa", parent, out, "--groups", 2, *FIT).succeeded()
    with monkeypatch.context() as patch:
        patch.setattr("convert.verification.layers.shutil.disk_usage", lambda path: SimpleNamespace(free=1))
        convert("verify", parent, out).refused("1 B free", "set TMPDIR")
    with monkeypatch.context() as patch:
        patch.setattr("convert.layers.layer_stream.open_layers", refuse_to_run)
        result = convert("verify", parent, out)
        assert (result.code, "needs accelerate" in result.err) == (4, True)
    monkeypatch.setattr("convert.verification.recorded_recipe.find_spec", lambda name: None)
    result = convert("verify", parent, out)
    assert (result.code, "needs torch" in result.err) == (4, True)


def refuse_to_run(*given):
    raise UnsupportedMethodError("calibrating needs accelerate")


def test_verify_where_the_source_lies_elsewhere(convert, parent, tmp_path):
    out = tmp_path / "out"
    (parent / "README.md").unlink()
    convert("mha-to-gqa", parent, out, "--groups", 2, "--method", "mean").succeeded()
    convert("verify", parent.rename(tmp_path / "moved"), out).succeeded()


def test_verify_needs_no_dataset(convert, parent, tmp_path):
    out, dataset = tmp_path / "out", tmp_path / "texts"
    dataset.mkdir()
    (dataset / "train.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    convert("mha-to-gqa", parent, out, "--groups", 2, *FIT, "--calibration", f"hub:{dataset}").succeeded()
    dataset.rename(tmp_path / "elsewhere")
    convert("verify", parent, out).succeeded()
