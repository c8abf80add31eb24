"""Compute the plan of a run from file headers: budget, learning rates, memory and time."""

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from model.common.errors import InputError
from model.completeness import check_lm_head
from model.language_model import open_language_model, read_language_config
from uptrain.budget.budget import (
    Budget,
    BudgetOptions,
    check_default_lr,
    check_repetition,
    default_peak_lr,
    default_trainable,
    few_steps_warning,
    make_budget,
    repetition_warning,
)
from uptrain.budget.conversion_record import (
    conversion_method,
    no_teacher_warning,
    source_names,
    teacher_warning,
    was_uptrained,
)
from uptrain.budget.identify import find_original, shape_warning
from uptrain.budget.methods import find_facts, peak_divisor
from uptrain.checkpoints.files import DEFAULT_KEEP_LAST, checkpoints_on_disk, default_interval
from uptrain.data.default_sizes import choose_seq_len, context_warning, default_micro_batch
from uptrain.data.token_cache import CacheManifest
from uptrain.estimates import REPLICATED, SHARDED
from uptrain.estimates.memory import MEMORY_FORMULA, Memory, MemoryEstimator, MemoryOptions
from uptrain.estimates.memory_fit import first_that_fits
from uptrain.estimates.parameter_counts import count_parameters
from uptrain.estimates.training_time import MFU, TIME_FORMULA, estimate_time, flops_per_token_of, recomputing_share
from uptrain.models.trainable_choices import DEFAULT_LORA_RANK, TRAINABLE, resolve_lora_rank
from uptrain.models.trainable_parts import part_pattern, parts_of, text_only_warning
from uptrain.models.vocabularies import check_embedding_rows, check_same_vocab_size
from uptrain.training.learning_rate import Schedule, decay_start, learning_rate

DEVICES = (1, 2, 4, 8)
"""Numbers of devices for which the memory is shown, besides --processes."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `uptrain plan` as given; None stands for a default that depends on others."""

    model: Path
    budget: BudgetOptions
    data: Path | None
    """A token cache."""
    seq_len: int | None
    schedule: str
    warmup_steps: int | None
    teacher: Path | None
    trainable: str | None
    lora_rank: int | None
    optimizer: str
    micro_batch: int | None
    """In windows."""
    processes: int
    memory: int | None
    """Bytes that each device has, for `memory.fitting` of the plan."""


@dataclass(frozen=True)
class _Run:
    """The run that is planned: its options, and what the defaults resolve to."""

    options: PlanOptions
    trainable: str
    method: str | None
    """How Groupwise changed the attention (`conversion_method`)."""
    budget: Budget
    schedule: Schedule
    estimator: MemoryEstimator
    n_windows: int
    """Windows of a step."""
    micro_batch: int
    """Windows that a device computes at a time."""

    @property
    def device_counts(self) -> list[int]:
        """The numbers of devices for which the memory is shown."""
        return sorted({*DEVICES, self.options.processes})


def plan_run(options: PlanOptions) -> dict[str, Any]:
    """Return the plan of a run, ready for JSON. Defaults follow from the model, the cache and the original.

    Raises InputError for what `uptrain run` refuses: other vocabularies, a part that the model lacks, an optimizer
    without its learning rate, uneven steps, data that are read too often.
    """
    manifest = CacheManifest.parse(options.data) if options.data is not None else None
    _check_lm_heads_and_vocabularies(options.model, options.teacher)
    run = _resolve(options)
    budget, estimator = run.budget, run.estimator
    n_params, data_use = count_parameters(estimator.tensors), _data_use(run, manifest)
    if data_use:
        check_repetition(options.budget, budget.steps, data_use["epochs"])
    return {
        "model": str(options.model),
        "trainable": run.trainable,
        "n_params": n_params,
        "n_kv_heads": estimator.sizes.n_kv_heads,
        "latent": estimator.sizes.latent,
        "alpha": budget.alpha,
        "steps": budget.steps,
        "tokens": budget.tokens,
        "tokens_per_parameter": budget.tokens / n_params,
        "global_batch_tokens": budget.global_batch_tokens,
        "seq_len": estimator.seq_len,
        "windows_per_step": run.n_windows,
        "original": _original(budget.original) if budget.original else None,
        "original_tokens": budget.original_tokens,
        "data": data_use,
        "schedule": {**asdict(run.schedule), "decay_start": decay_start(run.schedule)},
        "learning_rates": learning_rates(run.schedule),
        "default_peak_lrs": _default_peak_lrs(budget, run.method) if options.budget.lr is None else None,
        "memory": _memory(run),
        "time": _time(run),
        "processes": options.processes,
        "first_loss": _first_loss(options.model, options.teacher),
        "warnings": _warnings(run, data_use),
    }


def _resolve(options: PlanOptions) -> _Run:
    """Resolve the defaults, and read the headers of the models' files.

    Raises InputError for a part or adapters that the model cannot have, an unknown original, an optimizer without its
    learning rate, and uneven steps.
    """
    check_default_lr(options.budget, options.optimizer)
    seq_len = choose_seq_len(options.seq_len, options.data, options.model)
    with open_language_model(options.model) as checkpoint:
        method = conversion_method(options.model)
        trainable = options.trainable or default_trainable(options.model, checkpoint.config)
        part_pattern(trainable, checkpoint.config)
        lora_rank = resolve_lora_rank(options.lora_rank, trainable) or DEFAULT_LORA_RANK
        names = source_names(options.model)
        budget = make_budget(options.budget, checkpoint.config, names, seq_len, method, trainable)
    schedule = budget.schedule(options.schedule, options.warmup_steps)
    estimator = MemoryEstimator.read(
        options.model, options.teacher, seq_len, optimizer=options.optimizer, lora_rank=lora_rank
    )
    estimator.check_lora_rank(trainable)
    n_windows, processes = budget.global_batch_tokens // seq_len, options.processes
    if n_windows % processes:
        raise InputError(
            f"a step of {n_windows} windows of {seq_len} tokens cannot be divided evenly among {processes} processes; "
            "change --global-batch-tokens or --processes."
        )
    micro_batch = min(options.micro_batch or default_micro_batch(seq_len), n_windows // processes)
    return _Run(options, trainable, method, budget, schedule, estimator, n_windows, micro_batch)


def _warnings(run: _Run, data_use: dict[str, Any] | None) -> list[str]:
    options, config = run.options, run.estimator.config
    warnings = [
        repetition_warning(data_use["epochs"]) if data_use else None,
        shape_warning(read_language_config(options.model), options.budget.original),
        few_steps_warning(options.budget, run.budget),
        context_warning(config, run.estimator.seq_len),
        text_only_warning(config),
        run.estimator.activation_warning(run.trainable),
        teacher_warning(options.model, options.teacher) if options.teacher else no_teacher_warning(options.model),
    ]
    return list(filter(None, warnings))


def _check_lm_heads_and_vocabularies(model: Path, teacher: Path | None) -> None:
    """Raise InputError for models that `uptrain run` refuses: without an LM head, of other vocabularies or formats."""
    folders = [model, *([teacher] if teacher else [])]
    sizes = [read_language_config(folder).get("vocab_size") for folder in folders]
    for folder, vocab_size in zip(folders, sizes, strict=True):
        with open_language_model(folder) as checkpoint:
            check_lm_head(checkpoint)
        if isinstance(vocab_size, int):  # a config may leave out the default of its class
            check_embedding_rows(folder, vocab_size)
    if isinstance(sizes[0], int) and isinstance(sizes[-1], int):
        check_same_vocab_size(sizes[0], sizes[-1], str(teacher))


def learning_rates(schedule: Schedule) -> list[dict[str, Any]]:
    """Return the learning rates at chosen steps: first, last, 25, 50, 75, 90 %, ends of warm-up and plateau."""
    last = schedule.total_steps - 1
    steps = {0, last, *(min(round(last * share), last) for share in (0.25, 0.5, 0.75, 0.9))}
    steps |= {max(schedule.warmup_steps - 1, 0), min(decay_start(schedule) or 0, last)}
    return [{"step": step, "lr": learning_rate(schedule, step)} for step in sorted(steps)]


def _default_peak_lrs(budget: Budget, method: str | None) -> dict[str, float] | None:
    """Return the default peak of each choice of `--trainable`; None if the original is unknown."""
    if budget.original is None:
        return None
    return {
        trainable: default_peak_lr(find_original(budget.original).peak_lr, peak_divisor(method, trainable))
        for trainable in TRAINABLE
    }


def _memory(run: _Run) -> dict[str, Any]:
    """Return the memory of each choice of `--trainable`, and with `memory` the commands that fit."""
    options, seq_len = run.options, run.estimator.seq_len
    return {
        **{trainable: _memory_of(run, trainable) for trainable in TRAINABLE},
        "micro_batch_tokens": run.micro_batch * seq_len,
        "minimum_micro_batch_tokens": seq_len,
        "optimizer": options.optimizer,
        "formula": MEMORY_FORMULA,
        "fitting": options.memory and _fitting(run, options.memory),
    }


def _memory_of(run: _Run, trainable: str) -> dict[str, Any] | None:
    """Return the bytes of each kind, and of a device: for replicas (DDP), and for shards (FSDP2) over some numbers.

    `minimum`: the same with micro-batches of one window, whose activations are computed again. None if the model does
    not have the part.
    """
    estimator, numbers = run.estimator, run.device_counts
    if trainable not in parts_of(estimator.config):
        return None
    steps = run.budget.steps
    on_disk = checkpoints_on_disk(DEFAULT_KEEP_LAST, default_interval(steps), steps, run.schedule.kind)
    needed = estimator.memory(MemoryOptions(trainable, run.micro_batch))
    minimum = estimator.memory(MemoryOptions(trainable, 1, activation_checkpointing=True))
    kinds = {f"{name}_bytes": value for name, value in asdict(needed).items()}
    others = {
        "host_bytes": estimator.host_bytes(needed),
        "disk_bytes": round(on_disk * (needed.masters + needed.optimizer)),
    }
    return {**kinds, **_totals(needed, numbers), "minimum": _totals(minimum, numbers), **others}


def _totals(needed: Memory, numbers: list[int]) -> dict[str, Any]:
    return {
        REPLICATED: needed.replicated(),
        SHARDED: {str(n): needed.sharded(n) for n in numbers if n > 1},
    }


def _fitting(run: _Run, memory: int) -> dict[str, dict[str, Any] | None]:
    """Return, by the number of devices, the first command that fits into their memory; None where none does.

    The part that is planned is tried first, then smaller ones.
    """
    estimator, options = run.estimator, run.options

    def describe(chosen: MemoryOptions, n: int) -> dict[str, Any]:
        return {
            "trainable": chosen.trainable,
            "activation_checkpointing": chosen.activation_checkpointing,
            "micro_batch_tokens": chosen.micro_batch * estimator.seq_len,
            "bytes_per_process": estimator.memory(chosen).per_device(n),
            "command": run_command(chosen, str(options.model), options.teacher, estimator, n),
        }

    parts = TRAINABLE[TRAINABLE.index(run.trainable) :]
    fitting = {
        n: first_that_fits(estimator, parts, memory, run.n_windows // n, n, micro_batch=options.micro_batch)
        for n in run.device_counts
        if run.n_windows % n == 0
    }
    return {str(n): describe(chosen, n) if chosen else None for n, chosen in fitting.items()}


def _time(run: _Run) -> dict[str, Any]:
    """Return the time of training each choice of `--trainable`."""
    return {**{trainable: _time_of(run, trainable) for trainable in TRAINABLE}, "mfu": MFU, "formula": TIME_FORMULA}


def _time_of(run: _Run, trainable: str) -> dict[str, Any] | None:
    """Return the time of training a part; None if the model does not have it."""
    if trainable not in parts_of(run.estimator.config):
        return None
    flops = flops_per_token_of(run.estimator, trainable) * run.budget.tokens
    return estimate_time(flops, run.options.processes, recomputing_share(run.estimator, trainable))


def program_on(devices: int) -> str:
    """Return the program of a command that uses some devices, before the name of the subcommand."""
    return "uptrain" if devices == 1 else f"GPUS={devices} scripts/uptrain_multi_gpu.sh"


def run_command(
    chosen: MemoryOptions, model: str, teacher: Path | None, estimator: MemoryEstimator, devices: int
) -> str:
    """Return the beginning of a command that trains as chosen, without data, budget and output."""
    words = [program_on(devices), "run", shlex.quote(model)]
    words += ["--teacher", shlex.quote(str(teacher))] if teacher else []
    words += [chosen.flags]
    words += ["--optimizer", estimator.optimizer] if estimator.optimizer != "adamw" else []
    words += (
        [f"--lora-rank {estimator.lora_rank}"]
        if chosen.trainable == "lora" and estimator.lora_rank != DEFAULT_LORA_RANK
        else []
    )
    sizes = f"--precision {estimator.precision} --micro-batch {chosen.micro_batch} --seq-len {estimator.seq_len}"
    return " ".join([*words, sizes])


def _original(name: str) -> dict[str, Any]:
    keys = ("name", "tokens", "batch_tokens", "steps", "peak_lr", "certainty", "source", "note")
    return {key: getattr(find_original(name), key) for key in keys}


def _data_use(run: _Run, manifest: CacheManifest | None) -> dict[str, Any] | None:
    """Return how much of the token cache the run reads; None without one."""
    if manifest is None:
        return None
    n_windows = -(-manifest.n_tokens // run.estimator.seq_len)
    epochs = run.budget.steps * run.n_windows / n_windows
    return {"cache": str(run.options.data), "tokens": manifest.n_tokens, "windows": n_windows, "epochs": epochs}


def _first_loss(model: Path, teacher: Path | None) -> str:
    """Return the first loss to expect after a conversion, and the command that measures it.

    Nothing is expected of a model trained since.
    """
    words = [
        "uptrain evaluate",
        shlex.quote(str(model)),
        *(["--teacher", shlex.quote(str(teacher))] if teacher else []),
    ]
    measure = " ".join([*words, "--data HELD-OUT"])
    facts = None if was_uptrained(model) else find_facts(conversion_method(model))
    expected = f"{facts.first_loss}. " if facts else ""
    return f"{expected}Measure it with: {measure}"
