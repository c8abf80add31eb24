"""Find the device that runs a model, and compute in float64 for it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from model.common.command_options import AUTO_DEVICE
from model.common.errors import InputError, RunError


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


@contextmanager
def naming_lack_of_memory(device: str) -> Iterator[None]:
    """Raise RunError where a GPU lacks memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(".")[0]
        raise RunError(f"{device} has too little memory ({reason}); continue with --device cpu.") from error


def float64_device(device: torch.device) -> torch.device:
    """Return the device for float64: the CPU for mps, which has none."""
    return torch.device("cpu") if device.type == "mps" else device


def to_float64(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, on its `float64_device`."""
    return tensor.to(float64_device(tensor.device)).double()
