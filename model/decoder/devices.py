"""Find the device of a model and its free memory, multiply float32 fast on a CPU, compute in float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from model.common.command_options import AUTO_DEVICE
from model.common.errors import InputError, RunError, is_out_of_memory
from model.common.machine import available_memory


def available_devices() -> list[str]:
    """Return the names of the devices here, the best first."""
    gpu = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if gpu is None or gpu.type == "mps":
        return ["cpu"] if gpu is None else ["mps", "cpu"]
    return [*(f"{gpu.type}:{index}" for index in range(torch.accelerator.device_count())), "cpu"]


def find_device(name: str) -> torch.device:
    """Return the device that `--device` names. Raises InputError if this machine, or torch, lacks it."""
    available = available_devices()
    full_name = available[0] if name == AUTO_DEVICE else f"{name}:0" if f"{name}:0" in available else name
    if full_name not in available:
        choices = ", ".join([AUTO_DEVICE, *available])
        raise InputError(f"--device {name} is not available here; choose one of {choices}.")
    return torch.device(full_name)


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a device. A Mac's GPU (mps) shares the memory of the CPU."""
    module: Any = getattr(torch, device.type, None)
    return int(module.mem_get_info(device.index)[0]) if hasattr(module, "mem_get_info") else available_memory()


@contextmanager
def fast_float32_matmul(device: str) -> Iterator[None]:
    """Let oneDNN multiply float32 matrices on the CPU, where it is as exact as torch's default library, MKL.

    MKL leaves half of an AMD processor's vector units unused. oneDNN uses all of them, but torch gives it float32 only
    with leave to round to bfloat16. It rounds on processors with AMX. So try it, and keep it if it does not round.
    """
    is_cpu = (find_device(device) if device == AUTO_DEVICE else torch.device(device)).type == "cpu"
    if not is_cpu or not _is_default_precision():
        yield
        return
    matmuls: list[Any] = [getattr(each, "matmul", None) for each in (torch.backends.mkldnn, torch.backends.cuda)]
    newer = [each for each in matmuls if hasattr(each, "fp32_precision")]
    before = [each.fp32_precision for each in newer]
    torch.set_float32_matmul_precision("medium")
    try:
        if not _is_exact():
            torch.set_float32_matmul_precision("highest")
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        # set_float32_matmul_precision changes these newer settings too.
        for each, value in zip(newer, before, strict=True):
            each.fp32_precision = value


def _is_default_precision() -> bool:
    """Return whether nobody has chosen the precision of float32 products."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # chosen by the newer of torch's two interfaces
        return False


def _is_exact() -> bool:
    """Return whether the CPU's float32 products are as exact as float32 (bfloat16 has a relative error of 2e-3).

    oneDNN chooses its code by shapes and layouts, so some of each are tried.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator, device="cpu") for _ in range(2))
    pairs = [(a, b), (a, b.T), (a.T, b), (a[:1], b.T), (a.view(4, 64, 256), b.expand(4, 256, 256))]
    exact = [(x.double() @ y.double()).norm() for x, y in pairs]
    errors = [(x @ y - x.double() @ y.double()).norm() for x, y in pairs]
    return all(bool(error <= 1e-5 * norm) for error, norm in zip(errors, exact, strict=True))


@contextmanager
def computing_on(device: str) -> Iterator[None]:
    """Multiply float32 fast and exactly on the CPU (`fast_float32_matmul`). Raise RunError where a GPU lacks memory."""
    with out_of_memory_as_run_error(device), fast_float32_matmul(device):
        yield


@contextmanager
def out_of_memory_as_run_error(device: str, advice: str = "continue with --device cpu") -> Iterator[None]:
    """Raise RunError where a GPU lacks memory. `advice`: what to do then."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error) or "can't allocate memory" in str(error):  # of the host
            raise
        reason = str(error).partition(".")[0]
        raise RunError(f"{device} has too little memory ({reason}); {advice}.") from error


def float64_device(device: torch.device) -> torch.device:
    """Return the device for float64: the CPU for mps, which has none."""
    return torch.device("cpu") if device.type == "mps" else device


def to_float64(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, on its `float64_device`."""
    return tensor.to(float64_device(tensor.device)).double()
