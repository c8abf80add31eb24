"""Which devices are trained on."""

import pytest
import torch

from model.common.errors import InputError
from uptrain.distributed.accelerator import choose_device, has_accelerator, make_accelerator


@pytest.mark.parametrize(("available", "kind", "expected"), [
    (False, None, False), (True, "cuda", True), (True, "xpu", True), (True, "mps", False),
])  # fmt: skip
def test_all_but_apples(monkeypatch, available, kind, expected):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: available)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: kind and torch.device(kind))
    assert has_accelerator() == expected
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert not has_accelerator()


def test_the_loop_alone_accumulates(monkeypatch):
    """Else accelerate would divide the gradient by what stands in the environment."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert make_accelerator("fp32", ()).gradient_accumulation_steps == 1


def test_one_device_for_many_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="--device cpu is for one process, but 2 were started; leave it out"):
        choose_device("cpu")
    assert choose_device("auto").type == "cpu"


def test_a_device_against_the_environment(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(InputError, match="--device cuda:0 is not possible with ACCELERATE_USE_CPU; unset"):
        make_accelerator("fp32", (), device=torch.device("cuda:0"))
    assert choose_device("auto").type == "cpu"
