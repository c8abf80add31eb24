"""Evaluate a checkpoint folder on a token cache or texts, and compare it with a teacher."""

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from accelerate import Accelerator

from model.common import console
from model.common.errors import InputError, prefix_path
from model.common.launcher_variables import several_machines
from model.decoder.devices import fast_float32_matmul
from model.language_model import read_language_config
from uptrain.data.checks import check_cache_vocabulary, check_has_targets, check_tokenizer
from uptrain.data.default_sizes import context_warning
from uptrain.data.run_data import ensure_cache, is_prepared_data, seq_len_of
from uptrain.data.token_cache import TokenCache
from uptrain.distributed.accelerator import choose_device, default_precision, make_accelerator
from uptrain.distributed.collectives import destroy_process_group, on_main, warn_on_local_main
from uptrain.distributed.fsdp import is_sharded
from uptrain.models.checks import check_lm_heads, check_packing, check_teacher_tokenizer
from uptrain.models.decoder_layers import layer_class_names
from uptrain.models.load import build_meta_from_folder, load_evaluated, load_teacher
from uptrain.models.trainable_parts import text_only_warning
from uptrain.models.vocabularies import check_same_vocab_size
from uptrain.runs.explain_errors import device_errors_as_run_error
from uptrain.training.eval_metrics import EvalResult
from uptrain.training.evaluate import evaluate
from uptrain.training.logits import micro_batch_without_gradients
from uptrain.training.loss_module import LossModule
from uptrain.training.loss_values import perplexity
from uptrain.training.losses import WITHOUT_TEACHER


@dataclass(frozen=True)
class EvaluateOptions:
    """Options of `uptrain evaluate`; None stands for a default that depends on others."""

    model: Path
    data: str
    seq_len: int | None
    teacher: Path | None
    precision: str | None
    micro_batch: int | None
    device: str


def evaluate_folder(options: EvaluateOptions, quiet: bool) -> dict[str, Any]:
    """Evaluate a checkpoint folder on a token cache or texts.

    Returns the `EvalResult`, the perplexity and the tokens of a window, ready for JSON.

    Raises InputError if model, teacher and data are incompatible, or the data have no targets.
    """
    with TemporaryDirectory(prefix="groupwise-") as scratch:
        result, seq_len = _evaluate(options, Path(scratch), quiet)
    destroy_process_group()
    return {**result.to_dict(), "perplexity": perplexity(result.loss), "seq_len": seq_len}


def _evaluate(options: EvaluateOptions, scratch: Path, quiet: bool) -> tuple[EvalResult, int]:
    """Return the result, and the tokens of the windows that it was measured on."""
    layer_names = layer_class_names(options.model)  # also refuses what is no causal language model
    check_lm_heads(filter(None, (options.model, options.teacher)))
    seq_len = seq_len_of([options.data], options.model, options.seq_len)
    for each in filter(None, (options.model, options.teacher)):  # before texts are tokenised
        with prefix_path(each):
            check_packing(build_meta_from_folder(each), seq_len)
    config = read_language_config(options.model)
    warn_on_local_main(
        context_warning(config, seq_len),
        text_only_warning(config, trained=False),
        check_teacher_tokenizer(options.model, options.teacher) if options.teacher else None,
    )
    device = choose_device(options.device)
    _check_one_machine(options, seq_len)
    precision = options.precision or default_precision(device)
    accelerator = make_accelerator(precision, layer_names, device=device)
    if is_sharded(accelerator):
        raise InputError("evaluating with FSDP is part of `uptrain run`; start this command without it.")
    cache = _open_data(options, seq_len, accelerator, scratch, quiet)
    advice = "give --micro-batch 1, or " if options.micro_batch != 1 else ""
    advice += "use another --device." if accelerator.num_processes == 1 else "use devices with more."
    with device_errors_as_run_error(accelerator, advice):
        models = _load_models(options, cache, precision, accelerator)
        loss_module = accelerator.prepare_model(models, evaluation_mode=True)
        size = options.micro_batch or min(
            micro_batch_without_gradients(models.student, cache.seq_len),
            micro_batch_without_gradients(models.teacher or models.student, cache.seq_len),
        )
        progress = console.progress_bar("Evaluating", cache.n_windows, quiet, unit="windows")
        with fast_float32_matmul(accelerator.device.type), progress as advance:
            result = evaluate(loss_module, cache, size, accelerator, advance=advance)
    for folder, loss in ((options.model, result.loss), (options.teacher, result.teacher_loss)):
        if loss is not None and not math.isfinite(loss):
            raise InputError(
                f"{folder} computes a loss of {loss} on {options.data}: its weights are damaged, or too large for "
                f"{precision}."
            )
    return result, cache.seq_len


def _check_one_machine(options: EvaluateOptions, seq_len: int) -> None:
    """Raise InputError if processes on several machines would evaluate texts, whose cache only one could open."""
    if several_machines() and not is_prepared_data([options.data]):
        raise InputError(
            f"{options.data} is tokenised on one machine only; for several, write a token cache to a shared disk "
            f"first: uptrain prepare --data {shlex.quote(options.data)} --tokenizer {shlex.quote(str(options.model))} "
            f"--seq-len {seq_len} --out CACHE"
        )


def _open_data(
    options: EvaluateOptions, seq_len: int, accelerator: Accelerator, scratch: Path, quiet: bool
) -> TokenCache:  # fmt: skip
    """Open the token cache, or make one of the texts in a temporary folder."""

    def make() -> Path:
        path = ensure_cache([options.data], options.model, seq_len, scratch / "tokens", temporary=True, quiet=quiet)
        cache = TokenCache.open(path)
        with console.progress_bar("Checking the token cache", cache.nbytes, quiet) as advance:
            cache.verify(advance)
        return path

    path = on_main(accelerator, make)
    cache = TokenCache.open(path)
    check_tokenizer(cache.manifest.tokenizer_sha256, path, options.model)
    check_has_targets(cache, options.data)
    return cache


def _load_models(options: EvaluateOptions, cache: TokenCache, precision: str, accelerator: Accelerator) -> LossModule:
    """Load student and teacher, and check that they fit each other and the data."""
    student = load_evaluated(options.model)
    vocab_size = student.lm_head_weight.shape[0]
    check_cache_vocabulary(cache, vocab_size, options.data)
    teacher = None
    if options.teacher is not None:
        teacher = load_teacher(options.teacher, precision, float32_states=True)
        check_same_vocab_size(vocab_size, teacher.lm_head_weight.shape[0], str(options.teacher))
        teacher.to(accelerator.device)
    return LossModule(student, WITHOUT_TEACHER, teacher)
