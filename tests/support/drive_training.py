"""Runs several `uptrain` commands in one process (of however many torchrun started), each perhaps stopped on the way.

    python drive_training.py '[{"arguments": ["run", …], "stop_in": 7, "gradient": "FILE"}, …]'

`stop_in` is the step during which a stop is asked for, as a signal would. Tests use this to prove that a run stopped
and resumed is the run uninterrupted; starting processes again for each of them would take minutes. `gradient` is the
file for the gradient of the last step, before it is clipped. With `"apart": true`, student and teacher share nothing.
`dtypes` is the file for the dtypes of the states that choose how to attend; with `"wide": true`, those of a frozen
embedding stay float32.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState

import model.decoder.llama
import uptrain.runs.build
import uptrain.training.loop
from model.decoder.linear import matmul_dtype
from uptrain.cli import cli
from uptrain.distributed.signals import stop_request

_windows_of_step = uptrain.training.loop.windows_of_step
_equal_tensors = uptrain.runs.build.equal_tensors
_set_state_dtype = uptrain.runs.build.set_state_dtype
_has_packed_attention = model.decoder.llama.has_packed_attention
_clip_grad_norm = accelerate.Accelerator.clip_grad_norm_
_stop_in: int | None = None
_gradient: str | None = None
_dtypes: set[str] = set()


def _windows(step: int, *arguments: Any) -> Any:
    if step == _stop_in and int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1:
        stop_request.reason = "test"  # one process asks, the last; all must agree
    return _windows_of_step(step, *arguments)


def _clip(self: accelerate.Accelerator, parameters: Any, max_norm: float) -> Any:
    if _gradient is not None:
        module = self.unwrap_model(self._models[-1])
        gradients = {name: _whole(p.grad) for name, p in module.student.named_parameters()}
        if self.is_main_process:
            torch.save(gradients, _gradient)
    return _clip_grad_norm(self, parameters, max_norm)


def _whole(gradient: Any) -> torch.Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()


def _has_packed(x: torch.Tensor, head_dim: int) -> bool:
    _dtypes.add(str(matmul_dtype(x)))
    return _has_packed_attention(x, head_dim)


def _keep(*arguments: Any) -> None:
    pass


def _no_tensors(*arguments: Any) -> list[str]:
    return []


def drive(jobs: list[dict[str, Any]]) -> None:
    """Run the commands in this process, which serves for nothing else."""
    global _stop_in, _gradient
    if os.environ.get("ACCELERATE_USE_FSDP") and os.environ.get("ACCELERATE_USE_CPU"):
        import fsdp_on_cpu  # noqa: F401
    uptrain.training.loop.windows_of_step = _windows
    model.decoder.llama.has_packed_attention = _has_packed
    accelerate.Accelerator.clip_grad_norm_ = _clip
    accelerate.PartialState.destroy_process_group = lambda self: None  # the next command uses these processes
    for job in jobs:
        AcceleratorState._reset_state(reset_partial_state=True)
        stop_request.reason, _stop_in, _gradient = "", job.get("stop_in"), job.get("gradient")
        uptrain.runs.build.equal_tensors = _no_tensors if job.get("apart") else _equal_tensors
        uptrain.runs.build.set_state_dtype = _keep if job.get("wide") else _set_state_dtype
        _dtypes.clear()
        cli.main(job["arguments"], standalone_mode=False)
        if "dtypes" in job and os.environ.get("RANK", "0") == "0":
            Path(job["dtypes"]).write_text(json.dumps(sorted(_dtypes)))
    if dist.is_initialized():
        gc.collect()  # DDP's reducer must not be what ends the process group
        dist.destroy_process_group()


if __name__ == "__main__":
    drive(json.loads(sys.argv[1]))
