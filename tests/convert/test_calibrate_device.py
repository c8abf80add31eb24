"""`--device`: calibrate on another device than the CPU, which is pretended here; tests/gpu use a real one."""

import json
import time
from itertools import count

import pytest
import tiny
import torch
from calibrated import FIT
from pretended_device import NAME, pretended_device
from safetensors.torch import load_file
from tiny_tokenizers import make_tokenizer

from convert.calibration import convert_layers
from convert.estimates.timing import fastest_seconds

WAYS = {
    "fit": ("--method", "fit", "--refit", "--refine", 1024, "--calibration-tokens", 1024),
    "pca": ("--method", "pca", "--calibration-tokens", 1024),
    "self": ("--method", "fit", "--calibration", "self+shipped", "--calibration-tokens", 1024),
}


def source(family, folder, **changes):
    return make_tokenizer(tiny.save(tiny.build(family, vocab_size=300, **changes), folder), 300)


@pytest.mark.parametrize("way", WAYS)
def test_calibrates_on_the_device_that_is_named(convert, tmp_path, monkeypatch, way):
    """No tensor is left on the CPU, the draws are the same, and `verify` on the CPU agrees."""
    folder = source("mistral", tmp_path / "source", sliding_window=20)
    with pretended_device(monkeypatch):
        for out, device in (("device", NAME), ("auto", "auto")):
            convert("mha-to-gqa", folder, tmp_path / out, "--groups", 2, *WAYS[way], "--device", device).succeeded()
    convert("mha-to-gqa", folder, tmp_path / "cpu", "--groups", 2, *WAYS[way], "--device", "cpu").succeeded()
    compare(tmp_path / "device", tmp_path / "cpu", 0.3 if "--refine" in WAYS[way] else 1e-3)
    assert tiny.snapshot(tmp_path / "device") == tiny.snapshot(tmp_path / "auto")
    convert("verify", folder, tmp_path / "device", "--device", "cpu").succeeded()
    with pretended_device(monkeypatch):
        convert("verify", folder, tmp_path / "cpu", "--device", NAME).succeeded()


@pytest.mark.parametrize("text", ["shipped", "self+shipped"])
def test_latent_attention_calibrates_on_a_device(convert, tmp_path, monkeypatch, text):
    folder = source("llama", tmp_path / "source", hidden_size=128)
    options = ("--latent", 40, "--rope", 16, "--refine", 1024, "--calibration", text, "--calibration-tokens", 1024)
    with pretended_device(monkeypatch):
        convert("mha-to-mla", folder, tmp_path / "device", *options, "--device", NAME).succeeded()
    convert("verify", folder, tmp_path / "device", "--device", "cpu").succeeded()


@pytest.mark.parametrize("family", tiny.kinds_first(tiny.FITTED))
def test_every_family_calibrates_on_a_device(convert, tmp_path, monkeypatch, family):
    size = {} if family in tiny.IMPLIED_HEAD_DIM else {"head_dim": 16}
    folder = source(family, tmp_path / "source", hidden_size=128, **size)
    with pretended_device(monkeypatch):
        convert("mha-to-gqa", folder, tmp_path / "device", "--groups", tiny.few(family), *WAYS["fit"]).succeeded()


def compare(one, other, limit):
    """Compare the merged weights of two conversions: the largest difference as a share of a tensor's norm."""
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    for name, tensor in ours.items():
        assert float((tensor - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-9)) <= limit, name
    records = [json.loads((folder / "groupwise.json").read_text()) for folder in (one, other)]
    assert records[0].keys() == records[1].keys()


def test_too_little_memory_on_the_device(convert, parent, tmp_path, monkeypatch):
    """What is finished stays, and the CPU continues."""
    refit_output, calls = convert_layers.refit_output, count()

    def fail(*arguments):
        if next(calls):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return refit_output(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(convert_layers, "refit_output", fail)
        result = convert("mha-to-gqa", parent, tmp_path / "out", "--groups", 2, *FIT, "--refit")
    words = "Error: cpu has too little memory (CUDA out of memory); continue with --device cpu; finished work is kept"
    assert (result.code, words in result.err, result.err.count("\n")) == (1, True, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.groupwise", "source"]
    convert("mha-to-gqa", parent, tmp_path / "out", "--groups", 2, *FIT, "--refit").succeeded()


@pytest.mark.parametrize(
    ("work", "options", "end"),
    [
        ("convert.estimates.merge._measure", FIT, "."),
        (
            "convert.calibration.generated_text._Generator",
            ("--calibration", "self", *FIT),
            "; nothing is finished yet, and the same command starts again.",
        ),
    ],
)
def test_too_little_memory_before_the_first_layer(convert, parent, tmp_path, monkeypatch, work, options, end):
    def fail(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr(work, fail)
    result = convert("mha-to-gqa", parent, tmp_path / "out", "--groups", 2, *options)
    line = f"Error: cpu has too little memory (CUDA out of memory); continue with --device cpu{end}\n"
    assert (result.code, result.err) == (1, line)


def test_times_wait_for_the_device(monkeypatch):
    """A GPU works on after its operations were queued."""
    waits = []
    monkeypatch.setattr(torch, "ones", lambda *shape, device: waits.append(device) or 1.0)
    assert fastest_seconds(lambda: time.sleep(0.01), "cuda:1") >= 0.01
    assert waits == ["cuda:1"] * 3


def test_the_plan_names_the_device_and_the_time(convert, parent, tmp_path, monkeypatch):
    command = ("mha-to-gqa", parent, tmp_path / "out", "--groups", 2, *FIT, "--dry-run")
    with pretended_device(monkeypatch):
        assert f"1,024 tokens on {NAME}, estimate " in convert(*command).out
        assert json.loads(convert(*command, "--json").out)["device"] == NAME
    assert json.loads(convert(*command, "--device", "cpu", "--json").out)["device"] == "cpu"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("mha-to-gqa", "--groups", 2),
        ("mha-to-gqa", "--groups", 2, "--refine", 16384),
        ("mha-to-gqa", "--groups", 2, "--method", "pca"),
        ("mha-to-gqa", "--groups", 2, "--calibration", "self"),
        ("mha-to-mla", "--latent", 128, "--rope", 32),
        ("mha-to-mla", "--latent", 128, "--rope", 32, "--calibration", "self"),
    ],
)
def test_the_estimate_is_within_a_factor_of_two(convert, tmp_path, options):
    """One of three tries must be: the estimate and the conversion may meet a machine that is busy differently."""
    name, *more = options

    def ratio(out):
        command = (name, tiny.DEMO, out, *more, "--calibration-tokens", 32768)
        estimate = json.loads(convert(*command, "--dry-run", "--json").out)["estimated_calibration_seconds"]
        started = time.perf_counter()
        convert(*command).succeeded()
        seconds = time.perf_counter() - started
        print(f"{' '.join(map(str, options))}: estimate {estimate} s, took {seconds:.1f} s")
        return estimate / seconds

    assert any(0.5 < ratio(tmp_path / f"out-{i}") < 2 for i in range(3))


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps", "xla", "gpu", "cpu:1"])
def test_a_device_that_is_not_there(convert, uptrain, generation, parent, tmp_path, device):
    words = f"Error: --device {device} is not available here; choose one of auto, cpu."
    out = tmp_path / "out"
    for option in ("--overwrite", "--dry-run"):
        convert("mha-to-gqa", parent, out, "--groups", 2, *FIT, "--device", device, option).refused(words)
        convert("mha-to-mqa", parent, out, "--device", device, option).refused(words)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    convert("mha-to-gqa", parent, out, "--groups", 2, *FIT).succeeded()
    convert("verify", parent, out, "--device", device).refused(words)
    generation(parent, "--prompt", "a", "--device", device).refused(words)
    (tmp_path / "text.txt").write_text("Some words. " * 99)
    uptrain("evaluate", parent, "--data", tmp_path / "text.txt", "--seq-len", 16, "--device", device).refused(words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--method", "mean"), "--device cannot be combined with --method mean, which needs no text"),
        (("--method", "pca", "--calibration", "none"), "--device needs a calibration text, but --calibration none"),
        (("--calibration", "none"), "--device needs a calibration text, but --calibration none"),
    ],
)
def test_a_device_without_a_calibration(convert, parent, tmp_path, options, words):
    convert("mha-to-gqa", parent, tmp_path / "out", "--groups", 2, *options, "--device", "cpu").refused(words)
