"""A Training of a small model and no files but its token cache, to watch what its loop does."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import caches
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from uptrain.data.token_cache import TokenCache
from uptrain.distributed.accelerator import uses_gpu
from uptrain.training.learning_rate import Schedule
from uptrain.training.loop import Training
from uptrain.training.optimizer import make_optimizer

VOCAB = 32


class Bigrams(nn.Module):
    """A LossModule that predicts a token from the one before. Its forward pass never waits for the device."""

    teacher = None

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, VOCAB)

    def forward(self, ids_BT: Tensor, labels_BT: Tensor, documents_BT: Tensor, top: None = None) -> Tensor:
        logits_BTV = self.table(ids_BT[:, :-1])
        return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT[:, 1:].flatten(), reduction="sum")


def make_training(folder: Path, steps: int, report: Any, optimizer: str = "adamw", **changes: Any) -> Training:
    """Return a Training that calls `report` with "update" for each update, and with the record of each step."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=not uses_gpu(), mixed_precision="no")
    torch.manual_seed(0)
    module = Bigrams().to(accelerator.device)
    updated = make_optimizer(optimizer, module, 0.0)
    updated.register_step_pre_hook(lambda *_: report("update"))
    documents = [[(3 * i + j) % VOCAB for j in range(9)] for i in range(40)]
    values = {
        "loss_module": module, "optimizer": updated, "accelerator": accelerator,
        "cache": TokenCache.open(caches.write_cache(folder / "cache", [documents], 8, VOCAB)),
        "schedule": Schedule("constant", 0.1, steps, 0), "global_batch": 6, "micro_batch": 2, "seed": 0,
        "checkpoints": SimpleNamespace(save=lambda *_: None, rotate=lambda *_: "", has_lost_lock=lambda: False),
        "metrics": SimpleNamespace(write=lambda record: "", repeated_evaluation=None),
        "stop_request": SimpleNamespace(reason=""),
        "save_every": 10**6, "eval_cache": None, "eval_every": 1, "spike_sigma": None, "deadline": math.inf,
        "show": report,
    }  # fmt: skip
    return Training(**values | changes)
