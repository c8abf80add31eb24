"""`--device`: which device a name means, float64, and products on the CPU."""

from types import SimpleNamespace

import pytest
import torch

from model.common.errors import InputError
from model.decoder import devices


@pytest.mark.parametrize(
    ("available", "name", "expected"),
    [
        (["cuda:0", "cuda:1", "cpu"], "auto", "cuda:0"),
        (["cuda:0", "cuda:1", "cpu"], "cuda", "cuda:0"),
        (["cuda:0", "cuda:1", "cpu"], "cuda:1", "cuda:1"),
        (["cuda:0", "cpu"], "cpu", "cpu"),
        (["mps", "cpu"], "auto", "mps"),
        (["mps", "cpu"], "mps", "mps"),
        (["cpu"], "auto", "cpu"),
    ],
)
def test_names(monkeypatch, available, name, expected):
    monkeypatch.setattr(devices, "available_devices", lambda: available)
    assert str(devices.find_device(name)) == expected


@pytest.mark.parametrize("name", ["cuda:2", "cuda:", "mps", "CPU", "cpu:0", "", "meta"])
def test_refused_names(monkeypatch, name):
    monkeypatch.setattr(devices, "available_devices", lambda: ["cuda:0", "cuda:1", "cpu"])
    with pytest.raises(InputError, match="choose one of auto, cuda:0, cuda:1, cpu"):
        devices.find_device(name)


@pytest.mark.parametrize(
    ("gpu", "expected"), [("cuda", ["cuda:0", "cuda:1", "cpu"]), ("mps", ["mps", "cpu"]), (None, ["cpu"])]
)
def test_devices_of_torch(monkeypatch, gpu, expected):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(gpu))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert devices.available_devices() == expected


def test_float64_without_it_on_the_device():
    assert devices.float64_device(torch.device("mps")) == torch.device("cpu")
    assert devices.float64_device(torch.device("cuda:1")) == torch.device("cuda:1")
    assert devices.to_float64(torch.ones(2)).dtype == torch.float64


@pytest.mark.parametrize(("is_exact", "precision"), [(True, "medium"), (False, "highest")])
def test_float32_matmuls_are_kept_where_they_are_exact(monkeypatch, is_exact, precision):
    monkeypatch.setattr(devices, "_is_exact", lambda: is_exact)
    with devices.fast_float32_matmul("cpu"):
        assert torch.get_float32_matmul_precision() == precision
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_torch_without_the_newer_settings(monkeypatch):
    """2.6 has none for oneDNN. (Here, the test has to restore what only torch sees.)"""
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    monkeypatch.setattr(torch.backends, "mkldnn", SimpleNamespace())
    with devices.fast_float32_matmul("cpu"):
        pass
    matmul.fp32_precision = before
    assert torch.get_float32_matmul_precision() == "highest"


def test_float32_matmuls_round_to_float32_only():
    """On any processor, also one that rounds to bfloat16 where it may."""
    a, b = (torch.randn(300, 300, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    exact = a.double() @ b.double()
    with devices.fast_float32_matmul("cpu"):
        assert (a @ b - exact).norm() <= 1e-6 * exact.norm()
    assert torch.get_float32_matmul_precision() == "highest"
    with pytest.raises(ZeroDivisionError), devices.fast_float32_matmul("cpu"):
        _ = 1 / 0
    assert torch.get_float32_matmul_precision() == "highest"
