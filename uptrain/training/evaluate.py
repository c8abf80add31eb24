"""Evaluation on held-out windows: every target counts once, however many processes share the work."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from model.common import console
from model.common.errors import InputError
from uptrain.data.batch import Batch, micro_batches
from uptrain.data.token_cache import Cache
from uptrain.distributed.accelerator import has_accelerator, make_accelerator
from uptrain.distributed.collectives import all_reduce_sum, destroy_process_group
from uptrain.distributed.fsdp import is_sharded
from uptrain.runs.checks import check_packing, check_teacher, check_tokenizer, check_vocabulary
from uptrain.runs.settings import default_micro_batch
from uptrain.training.eval_metrics import EvalResult
from uptrain.training.losses import WITHOUT_TEACHER
from uptrain.training.models import block_names, load_student, load_teacher
from uptrain.training.module import LossModule


class Stopped(Exception):
    """A process was asked to stop during an evaluation; all have left it."""


def evaluate(
    trainee: nn.Module,
    cache: Cache,
    micro_batch: int,
    accelerator: Accelerator,
    with_teacher: bool,
    should_stop: Callable[[], bool] = lambda: False,
    advance: Callable[[float], None] = lambda n: None,
) -> EvalResult:
    """Measure a prepared trainee on all windows of a cache. Raises Stopped on all processes once one should stop."""
    sums = torch.zeros(5, dtype=torch.float64, device=accelerator.device)
    was_training = trainee.training
    trainee.eval()
    with torch.no_grad():
        for batch in _batches(cache, micro_batch, accelerator):
            sums += trainee(batch.ids_BT, batch.labels_BT, batch.documents_BT, measure=True)
            stop = torch.tensor([float(should_stop())], device=accelerator.device)
            if all_reduce_sum(accelerator, stop).item():
                trainee.train(was_training)
                raise Stopped
            advance(len(batch.ids_BT) * accelerator.num_processes)
    trainee.train(was_training)
    return EvalResult.from_sums(all_reduce_sum(accelerator, sums), with_teacher)


def _batches(cache: Cache, micro_batch: int, accelerator: Accelerator) -> Iterator[Batch]:
    """Yield this process' share. All get equally many batches, since sharded models run in step."""
    rank, world = accelerator.process_index, accelerator.num_processes
    n_batches = -(-cache.n_windows // (micro_batch * world))
    mine = np.arange(rank, cache.n_windows, world)
    yield from micro_batches(cache, mine, micro_batch, accelerator.device)
    for _ in range(n_batches - -(-len(mine) // micro_batch)):
        yield Batch.ignored(cache.seq_len, accelerator.device)


def evaluate_folder(model: Path, **options: Any) -> dict[str, Any]:
    """Measure a checkpoint folder on a cache; return `Measures` and perplexity, ready for JSON.

    Raises InputError where model, teacher and cache do not fit together, or nothing is to be predicted.
    """
    found = _evaluate_folder(model, **options)
    destroy_process_group()
    return {**{k: v for k, v in asdict(found).items() if v is not None}, "perplexity": found.perplexity}


def _evaluate_folder(
    model: Path, *, data: Path, teacher: Path | None, precision: str | None, micro_batch: int | None, quiet: bool
) -> EvalResult:
    cache = Cache.open(data)
    check_tokenizer(cache, data, model)
    precision = precision or ("bf16" if has_accelerator() else "fp32")
    accelerator = make_accelerator(precision, block_names(model))
    if is_sharded(accelerator):
        raise InputError("evaluating with FSDP is part of `uptrain run`; start this command without it.")
    student = load_student(model)
    check_vocabulary(cache, student.head_weight.shape[0], str(data))
    check_packing(student, cache.seq_len)
    parent = load_teacher(teacher, precision) if teacher else None
    if parent is not None:
        check_teacher(student.head_weight.shape[0], parent.head_weight.shape[0], str(teacher))
        check_packing(parent, cache.seq_len)
        parent.to(accelerator.device)
    trainee = accelerator.prepare(LossModule(student, WITHOUT_TEACHER, parent))
    size = micro_batch or default_micro_batch(cache.seq_len)
    with console.progress_bar("Evaluating", cache.n_windows, quiet, unit="windows") as advance:
        found = evaluate(trainee, cache, size, accelerator, parent is not None, advance=advance)
    if not found.targets:
        raise InputError(f"{data} has nothing to predict: no document in it has two tokens.")
    return found
