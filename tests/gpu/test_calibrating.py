"""Calibration on a GPU against calibration on the CPU: `scripts/test --gpu tests/gpu`."""

import pytest
import tiny
from calibrated import FIT
from safetensors.torch import load_file
from tiny_tokenizers import make_tokenizer

pytestmark = pytest.mark.usefixtures("gpu_only")

ALLOWED = 1e-2
"""Largest difference of a merged tensor, as a share of its norm. It is what `convert verify` allows: sums in another
order change some of the drawn keys."""


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma", "mixtral"])
def test_fit_with_refit(convert, tmp_path, device, family):
    folder = convert_on_both(convert, tmp_path, device, family, *FIT, "--refit")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in (device.type, "cpu"))
    for name, tensor in ours.items():
        assert float((tensor - theirs[name]).norm()) <= ALLOWED * float(theirs[name].norm()), name
    verify_on_both(convert, tmp_path, device, folder)


@pytest.mark.parametrize("family", ["llama", "gemma"])
@pytest.mark.parametrize(
    "options",
    [
        (*FIT, "--refit", "--refine", 2048),
        ("--method", "pca", "--calibration-tokens", 1024),
    ],
)
def test_other_ways(convert, tmp_path, device, family, options):
    """Training magnifies rounding, so `verify` compares refined layers by their validation errors."""
    verify_on_both(convert, tmp_path, device, convert_on_both(convert, tmp_path, device, family, *options))


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_a_text_that_the_model_writes(convert, tmp_path, device, family):
    folder = make_tokenizer(tiny.save(tiny.build(family, vocab_size=300), tmp_path / "source"), 300)
    options = ("--groups", 2, *FIT, "--calibration", "self", "--device", device.type)
    convert("mha-to-gqa", folder, tmp_path / "out", *options).succeeded()
    convert("verify", folder, tmp_path / "out", "--device", "cpu").succeeded()


def test_latent_attention(convert, tmp_path, device):
    folder = make_tokenizer(tiny.save(tiny.build(vocab_size=300, hidden_size=128), tmp_path / "source"), 300)
    options = ("--latent", 40, "--rope", 16, "--refine", 1024, "--calibration-tokens", 1024)
    for name in (device.type, "cpu"):
        convert("mha-to-mla", folder, tmp_path / name, *options, "--device", name).succeeded()
    verify_on_both(convert, tmp_path, device, folder)


def convert_on_both(convert, tmp_path, device, family, *options):
    folder = make_tokenizer(tiny.save(tiny.build(family, vocab_size=300), tmp_path / "source"), 300)
    for name in (device.type, "cpu"):
        convert("mha-to-gqa", folder, tmp_path / name, "--groups", 2, *options, "--device", name).succeeded()
    return folder


def verify_on_both(convert, tmp_path, device, folder):
    for out, other in ((device.type, "cpu"), ("cpu", device.type)):
        convert("verify", folder, tmp_path / out, "--device", other).succeeded()
