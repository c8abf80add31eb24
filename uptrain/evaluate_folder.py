"""Evaluate a checkpoint folder on a token cache or texts, beside a teacher."""

import math
import os
import shlex
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from model.common import console
from model.common.errors import InputError
from model.decoder.devices import faster_products
from uptrain.data.default_sizes import default_micro_batch
from uptrain.data.run_data import cache_of, is_cache, seq_len_of
from uptrain.data.token_cache import TokenCache
from uptrain.distributed.accelerator import choose_device, make_accelerator
from uptrain.distributed.collectives import destroy_process_group, on_main
from uptrain.distributed.fsdp import is_sharded
from uptrain.runs.checks import (
    check_packing,
    check_teacher,
    check_teachers_tokenizer,
    check_tokenizer,
    check_vocabulary,
)
from uptrain.training.eval_metrics import EvalResult
from uptrain.training.evaluate import evaluate
from uptrain.training.losses import WITHOUT_TEACHER
from uptrain.training.models import block_names, load_student, load_teacher
from uptrain.training.module import LossModule


def _on_several_machines() -> bool:
    n_processes = os.environ.get("WORLD_SIZE", "1")
    return os.environ.get("LOCAL_WORLD_SIZE", n_processes) != n_processes


def evaluate_folder(model: Path, **options: Any) -> dict[str, Any]:
    """Evaluate a checkpoint folder on a token cache or texts; return the `EvalResult` and perplexity, ready for JSON.

    Raises InputError if model, teacher and data are incompatible, or the data have no targets.
    """
    with TemporaryDirectory(prefix="groupwise-") as scratch:
        result = _evaluate_folder(model, scratch=Path(scratch), **options)
    destroy_process_group()
    return {**result.to_dict(), "perplexity": result.perplexity}


def _evaluate_folder(
    model: Path,
    *,
    data: str,
    seq_len: int | None,
    teacher: Path | None,
    precision: str | None,
    micro_batch: int | None,
    device: str,
    quiet: bool,
    scratch: Path,
) -> EvalResult:
    seq_len = seq_len_of([data], model, seq_len)
    chosen = choose_device(device)
    if teacher is not None:
        check_teachers_tokenizer(model, teacher)
    if not is_cache([data]) and _on_several_machines():
        raise InputError(
            f"{data} is tokenised on one machine only; for several, write a token cache to a shared disk first: "
            f"uptrain prepare --data {shlex.quote(data)} --tokenizer {shlex.quote(str(model))} --seq-len {seq_len} "
            "--out CACHE"
        )
    precision = precision or ("fp32" if chosen.type in ("cpu", "mps") else "bf16")
    accelerator = make_accelerator(precision, block_names(model), device=chosen)
    if is_sharded(accelerator):
        raise InputError("evaluating with FSDP is part of `uptrain run`; start this command without it.")
    path = on_main(
        accelerator, lambda: cache_of([data], model, seq_len, scratch / "tokens", temporary=True, quiet=quiet)
    )
    cache = TokenCache.open(path)
    check_tokenizer(cache, path, model)
    student = load_student(model)
    check_vocabulary(cache, student.head_weight.shape[0], data)
    check_packing(student, cache.seq_len)
    teacher_model = None
    if teacher is not None:
        teacher_model = load_teacher(teacher, precision)
        check_teacher(student.head_weight.shape[0], teacher_model.head_weight.shape[0], str(teacher))
        check_packing(teacher_model, cache.seq_len)
        teacher_model.to(accelerator.device)
    loss_module = accelerator.prepare(LossModule(student, WITHOUT_TEACHER, teacher_model))
    size = micro_batch or default_micro_batch(cache.seq_len)
    progress = console.progress_bar("Evaluating", cache.n_windows, quiet, unit="windows")
    with faster_products(accelerator.device.type), progress as advance:
        result = evaluate(loss_module, cache, size, accelerator, teacher_model is not None, advance=advance)
    if not result.targets:
        raise InputError(f"{data} has nothing to predict: no document in it has two tokens.")
    for folder, loss in ((model, result.loss), (teacher, result.teacher_loss)):
        if loss is not None and not math.isfinite(loss):
            raise InputError(
                f"{folder} computes a loss of {loss} on {data}: its weights are damaged, or too large for {precision}."
            )
    return result
