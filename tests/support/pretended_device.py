"""A GPU, pretended on the CPU, to find tensors that are created on the wrong device.

Its tensors compute on the CPU. As on a GPU, they have no numpy array, and an operation on tensors of both devices
fails, except for single numbers, indices and copies. Its draws and sums are the CPU's.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from model.decoder import devices

NAME = "lazy:0"
"""The only name that every torch knows and that needs no driver."""
_MIXED = {torch.ops.aten.copy_.default, torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default}


class _Tensor(torch.Tensor):
    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "_Tensor":
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=NAME, requires_grad=False
        )
        tensor.inner = inner
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Sees the operations without tensors of the device too, such as `torch.zeros(3, device=NAME)`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_inference_mode_enabled():  # then torch leaves compound operations whole
            with self:
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, _Tensor)]
    of_cpu = [tensor for tensor in tensors if not isinstance(tensor, _Tensor) and tensor.dim()]
    assert not (ours and of_cpu) or func in _MIXED, f"{func} has tensors on {NAME} and on the CPU"
    device = kwargs.get("device")
    on_device = bool(ours) if device is None else torch.device(device).type == torch.device(NAME).type
    if device is not None and on_device:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if func is torch.ops.aten.copy_.default:
        on_device = isinstance(args[0], _Tensor)
    of_inner = {id(tensor.inner): tensor for tensor in ours}

    def wrapped(out: Any) -> Any:
        if not isinstance(out, torch.Tensor) or not on_device:
            return out
        return of_inner[id(out)] if id(out) in of_inner else _Tensor(out)

    if func is torch.ops.aten.histc.default:
        args = (args[0].float(), *args[1:])  # GPUs count integers too
    plain = tree_map(lambda x: x.inner if isinstance(x, _Tensor) else x, (args, kwargs))
    return tree_map(wrapped, func(*plain[0], **plain[1]))


@contextmanager
def pretended_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the name of the device, which `--device auto` finds."""
    with monkeypatch.context() as patch, _Mode():
        patch.setattr(torch, "is_autocast_enabled", lambda *device: False)  # torch knows no autocast for it
        adam = import_module("torch.optim.adam")
        patch.setattr(adam, "_device_dtype_check_for_fused", lambda matrix: None)  # nor a fused optimizer
        patch.setattr(torch, "autocast", lambda *device, enabled: nullcontext())
        patch.setattr(devices, "available_devices", lambda: [NAME, "cpu"])
        to_list, generator = torch.Tensor.tolist, torch.Generator
        patch.setattr(torch.Tensor, "tolist", lambda self: to_list(self.inner if isinstance(self, _Tensor) else self))
        patch.setattr(torch, "Generator", lambda device="cpu": generator())
        yield NAME
