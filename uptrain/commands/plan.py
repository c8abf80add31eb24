"""Run `uptrain plan`: show budget, learning rates, memory and time of a run."""

import re
import shlex
from collections.abc import Iterator
from decimal import ROUND_UP, Decimal
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from model.common.checks import MAX_COUNT
from model.common.command_options import SizeType, WholeNumber, json_option, pop_fields
from model.common.console import (
    echo,
    echo_line,
    format_bytes,
    format_duration,
    print_columns,
    print_json,
    print_key_values,
)
from model.common.counts import counted, format_count
from uptrain.budget.budget import BudgetOptions
from uptrain.commands.options import (
    ModelFolder,
    budget_options,
    lora_rank_option,
    micro_batch_option,
    optimizer_option,
    schedule_options,
    seq_len_option,
    trainable_option,
)
from uptrain.estimates import REPLICATED, SHARDED
from uptrain.models.trainable_choices import DEFAULT_LORA_RANK, TRAINABLE
from uptrain.training.learning_rate import Schedule, learning_rate

BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 48
COMMAND_WIDTH = 70
"""Columns of a line of a command, without its indent and the backslash at its end."""
KINDS = {
    "frozen": "frozen weights",
    "masters": "float32 masters",
    "copies": "bfloat16 copies",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "logits": "logits",
}
"""Kinds of memory, and their rows in the table."""


@click.command("plan")
@click.argument("model", type=ModelFolder())
@budget_options
@schedule_options
@click.option(
    "--data",
    multiple=True,
    metavar="CACHE|PATH[=WEIGHT]",
    help="What to train on, as for `uptrain run`: a token cache, of which the epochs are shown, or texts.",
)
@seq_len_option
@click.option("--teacher", type=ModelFolder(), metavar="FOLDER", help="The parent, to distil from.")
@click.option(
    "--processes",
    type=WholeNumber(1, MAX_COUNT),
    metavar="N",
    default=1,
    show_default=True,
    help="Number of devices to train on.",
)
@trainable_option
@lora_rank_option
@optimizer_option
@micro_batch_option(
    "Windows that a process computes at a time.  [default: as many as make 8192 tokens, at most its part of a step]"
)
@click.option(
    "--memory",
    type=SizeType(least=10**4),
    metavar="SIZE",
    help="Memory that a run may take on a device: 8 % less than it has, e.g. 22GB of 24GB. Also name commands that "
    "fit.",
)
@click.option("--details", is_flag=True, help="Also show all choices of --trainable, and the learning rates.")
@json_option("Print the plan as JSON.")
def command(model: Path, details: bool, as_json: bool, **options: Any) -> None:
    """Show steps, learning rates, memory and time, without training.

    Give one of --alpha, --tokens and --steps. The tokens, batch and learning rate of well-known pre-trainings
    are looked up.
    """
    from uptrain.estimates.plan import PlanOptions, plan_run

    data = options.pop("data")
    options["data"] = _cache_in(data)
    texts = () if options["data"] else data
    plan = plan_run(PlanOptions(model=model, budget=pop_fields(BudgetOptions, options), **options))
    lora_rank = options["lora_rank"] or DEFAULT_LORA_RANK
    plan["warnings"] += _check_inputs(
        model, options["teacher"], options["data"], plan["seq_len"], plan["trainable"], lora_rank
    )
    if as_json:
        print_json(plan)
        return
    rows = [
        ("in short", _summary(plan)),
        *_budget(plan, details),
        *([("epochs", "known after `uptrain prepare`, which counts the tokens")] if texts else []),
        *_learning(plan, details),
        *_estimates(plan, details),
    ]
    print_key_values(f"Uptraining {plan['model']}", rows)
    if details:
        chosen = "default" if options["trainable"] is None else "chosen"
        columns = [f"{part}*" if part == plan["trainable"] else part for part in TRAINABLE]
        print_columns(f"\nMemory of a device for --trainable (* {chosen})", columns, _memory_rows(plan["memory"]))
        print_columns(f"\nTime for --trainable (* {chosen})", columns, _time_rows(plan["time"], plan["processes"]))
    elif options["memory"] is None:
        print_columns(f"\nMemory of a device for --trainable {plan['trainable']}, in bfloat16", *_layouts(plan))
    if any((plan["memory"]["fitting"] or {}).values()):
        print_key_values(f"\nOptions that fit into {format_bytes(options['memory'])}, in bfloat16", _fitting_rows(plan))
    if not details:
        echo("\n--details shows all choices of --trainable, and the learning rates.")
    for warning in plan["warnings"]:
        echo_line(f"Warning: {warning}")
    echo(f"\nNext:\n{_next_command(plan, texts)}")


def _cache_in(data: tuple[str, ...]) -> Path | None:
    """Return the token cache that `--data` names; None for texts. Raises InputError for texts that `run` refuses."""
    from model.texts.hub import HUB
    from uptrain.data.prepare.sources import find_sources
    from uptrain.data.token_cache import MANIFEST

    if len(data) == 1 and (Path(data[0]) / MANIFEST).is_file():
        return Path(data[0])
    find_sources(tuple(name for name in data if not name.startswith(HUB)))  # what is on the hub is not fetched for this
    return None


def _check_inputs(
    model: Path, teacher: Path | None, data: Path | None, seq_len: int, trainable: str, lora_rank: int
) -> list[str]:
    """Raise InputError for models and data that `uptrain run` refuses; return a warning if that cannot be checked.

    Classes of transformers are built for it, without weights. Of Llama-like models, `plan_run` has read the headers.
    """
    from model.decoder.config import is_native
    from model.language_model import read_language_config
    from uptrain.data.token_cache import CacheManifest

    reads_headers = all(is_native(read_language_config(folder)) for folder in (model, teacher) if folder)
    sha256 = "" if data is None else CacheManifest.parse(data).tokenizer_sha256
    if reads_headers and not sha256 and teacher is None:
        return []
    if find_spec("torch") is None:
        return ["whether `uptrain run` takes this model and data was not checked, because that needs torch."]
    from uptrain.data.checks import check_tokenizer
    from uptrain.models.checks import check_models, check_teacher_tokenizer
    from uptrain.runs.checks import check_is_not_student

    if data is not None:
        check_tokenizer(sha256, data, model)
    if not reads_headers:
        check_models(model, teacher, [seq_len], trainable, lora_rank)
    if teacher is None:
        return []
    check_is_not_student(model, teacher)
    warning = check_teacher_tokenizer(model, teacher)
    return [] if warning is None else [warning]


def _summary(plan: dict[str, Any]) -> str:
    """Return the memory and time of training the part, on the devices that were asked for."""
    part, n, fitting = _planned_part(plan), plan["processes"], plan["memory"]["fitting"]
    fit = fitting[str(n)] if fitting else None
    if fitting and fit is None:
        return _nothing_fits(n)
    devices = "on one device" if n == 1 else f"on each of {n} devices"
    time = plan["time"][part]
    share = time["recomputing_share"] if fit and fit["activation_checkpointing"] else 0
    hours = f"{_hours((1 + share) * time['hours']['H100'])} on {n} H100"
    if fit is None:
        memory = plan["memory"][part]
        each = memory[REPLICATED] if n == 1 else memory[SHARDED][str(n)]
        return f"training {part} takes {format_bytes(each)} {devices}, and {hours}"
    each = format_bytes(fit["bytes_per_process"])
    return f"training {part} takes {each} {devices} with the options below, and {hours}"


def _planned_part(plan: dict[str, Any]) -> str:
    """Return the part to train: with --memory the first that fits, if one does."""
    fitting = plan["memory"]["fitting"]
    fit = fitting[str(plan["processes"])] if fitting else None
    return str(fit["trainable"] if fit else plan["trainable"])


def _nothing_fits(n: int) -> str:
    return f"nothing fits {counted(n, 'device')} of {format_bytes(click.get_current_context().params['memory'])}"


def _next_command(plan: dict[str, Any], texts: tuple[str, ...]) -> str:
    """Return the commands that prepare the data and train as planned, with the options that were given.

    With --memory, it is the first that fits.
    """
    from uptrain.estimates.plan import program_on

    context, n = click.get_current_context(), plan["processes"]
    covered = {"model", "processes", "memory", "details", "data"}
    if plan["memory"]["fitting"]:
        fit = plan["memory"]["fitting"][str(n)]
        if fit is None:
            return f"  {_nothing_fits(n)}"
        # The estimate is for bfloat16, a GPU's default. A CPU, whose default is float32, would be slow with it.
        parts = [part for part in re.split(" (?=--)", fit["command"]) if not part.startswith("--precision")]
        covered |= {"teacher", "trainable", "lora_rank", "optimizer", "micro_batch", "seq_len"}
    else:
        parts = [f"{program_on(n)} run {shlex.quote(plan['model'])}"]
    for parameter in context.command.params:
        name = str(parameter.name)
        if context.get_parameter_source(name) == ParameterSource.COMMANDLINE and name not in covered:
            parts.append(f"{parameter.opts[0]} {shlex.quote(str(context.params[name]))}")
    if plan["data"]:
        return _wrapped([*parts, f"--data {shlex.quote(plan['data']['cache'])}", "--out RUN"])
    return f"{_prepare_command(plan, texts)}\n{_wrapped([*parts, '--data CACHE', '--out RUN'])}"


def _prepare_command(plan: dict[str, Any], texts: tuple[str, ...]) -> str:
    """Return the command that makes the token cache, with a little more than the planned tokens, in three digits."""
    more = Decimal(plan["tokens"]) * Decimal("1.001")
    digits = more.quantize(Decimal(1).scaleb(max(0, more.adjusted() - 2)), ROUND_UP)
    unit, power = next(
        ((unit, power) for unit, power in (("B", 9), ("M", 6), ("K", 3)) if digits >= 10**power), ("", 0)
    )
    tokens = f"{digits.scaleb(-power).normalize():f}{unit}"
    model = shlex.quote(plan["model"])
    data = [f"--data {shlex.quote(name)}" for name in texts] or ["--data TEXTS"]
    parts = [f"uptrain prepare {data[0]}", *data[1:], f"--tokenizer {model}", f"--seq-len {plan['seq_len']}"]
    return _wrapped([*parts, f"--tokens {tokens}", "--out CACHE"])


def _wrapped(parts: list[str]) -> str:
    """Return a command in lines of up to COMMAND_WIDTH columns."""
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + len(part) > COMMAND_WIDTH:
            lines.append(part)
        else:
            lines[-1] = f"{lines[-1]} {part}".strip()
    return "  " + " \\\n    ".join(lines)


def _attention(plan: dict[str, Any]) -> str:
    if plan["latent"]:
        return "latent attention ({} + {} elements cached)".format(*plan["latent"])
    return f"{plan['n_kv_heads']} K/V heads"


def _budget(plan: dict[str, Any], details: bool) -> list[tuple[str, str]]:
    original, data, alpha = plan["original"], plan["data"], plan["alpha"]
    rows = [("parameters", f"{format_count(plan['n_params'])}, {_attention(plan)}")]
    if original or details:
        rows.append(("original", _original_text(original) if original else "not in the table"))
    if alpha is not None or details:
        rows.append(("α", "unknown without --original-tokens" if alpha is None else f"{alpha:.4g}"))
    rows += [
        ("steps", f"{plan['steps']:,}"),
        ("tokens", f"{plan['tokens']:,} ({format_count(plan['tokens'])})"),
        ("a step", f"{plan['global_batch_tokens']:,} tokens: {plan['windows_per_step']:,} x {plan['seq_len']:,}"),
    ]
    if details:
        rows.append(("tokens per parameter", f"{plan['tokens_per_parameter']:.3g}"))
    if data:
        rows.append(("epochs", f"{data['epochs']:.3g} over {data['tokens']:,} tokens in {data['cache']}"))
    return rows


def _original_text(original: dict[str, Any]) -> str:
    note = f"; {original['note']}" if original["note"] else ""
    return (
        f"{original['name']}: {format_count(original['tokens'])} tokens in {original['steps']:,} steps, peak "
        f"{original['peak_lr']:g}{note} ({original['certainty']}; {original['source']})"
    )


def _learning(plan: dict[str, Any], details: bool) -> list[tuple[str, str]]:
    peaks = plan["default_peak_lrs"] or {}
    values = plan["schedule"] | {"peak_lr": peaks.get(_planned_part(plan), plan["schedule"]["peak_lr"])}
    decay = f", decay from step {values['decay_start']:,}" if values["decay_start"] is not None else ""
    warmup = f"{counted(values['warmup_steps'], 'step')} of warm-up{decay}"
    rows = [("learning rate", f"{values['kind']}, peak {values['peak_lr']:.3g}, {warmup}")]
    if details and len(set(peaks.values())) > 1:
        listed = ", ".join(f"{part} {peak:.3g}" for part, peak in peaks.items())
        rows.append(("default peaks", f"for --trainable: {listed}"))
    if details:
        schedule = Schedule(**{key: value for key, value in values.items() if key != "decay_start"})
        rates = _rates(schedule, [row["step"] for row in plan["learning_rates"]])
        rows.append(("its course", "\n".join((_curve(schedule), *rates))))
    return rows


def _rates(schedule: Schedule, steps: list[int]) -> Iterator[str]:
    """Yield a line for each learning rate at some steps, with the first and last of them."""
    for rate, group in groupby(steps, lambda step: f"{learning_rate(schedule, step):.3e}"):
        first, *others = group
        yield f"{rate} at step {first:,}{f' to {others[-1]:,}' if others else ''}"


def _curve(schedule: Schedule) -> str:
    last = schedule.total_steps - 1
    steps = [round(last * i / (CURVE_WIDTH - 1)) for i in range(CURVE_WIDTH)]
    shares = [learning_rate(schedule, step) / schedule.peak_lr for step in steps]
    return "".join(BARS[round(share * (len(BARS) - 1))] for share in shares)


def _estimates(plan: dict[str, Any], details: bool) -> list[tuple[str, str]]:
    """Return the rows of time and disk: of the part to train, or of all with --details, whose table has the time."""
    part, n, memory = _planned_part(plan), plan["processes"], plan["memory"]
    if details:
        disk = ", ".join(f"{each} {format_bytes(memory[each]['disk_bytes'])}" for each in TRAINABLE if memory[each])
        return [("disk, estimate", f"for checkpoints: {disk}"), ("loss at step 0", plan["first_loss"])]
    time = ", ".join(f"{_hours(hours)} on {n} {name}" for name, hours in plan["time"][part]["hours"].items())
    disk = f"{format_bytes(memory[part]['disk_bytes'])} for checkpoints"
    more = f"with --activation-checkpointing {plan['time'][part]['recomputing_share']:.0%} more"
    return [("time, estimate", f"{time}; {more}"), ("disk, estimate", disk)]


def _layouts(plan: dict[str, Any]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return columns and rows of the table of the part to train: the memory of a device, by how the run is laid out."""
    memory = plan["memory"]
    totals = [memory[plan["trainable"]], memory[plan["trainable"]]["minimum"]]
    default = counted(memory["micro_batch_tokens"] // plan["seq_len"], "window")
    columns = [f"{default} at a time", "1 window, --activation-checkpointing"]
    return columns, _device_rows("one device, or DDP", "FSDP2", totals, list(totals[0][SHARDED]))


def _memory_rows(memory: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of the table; a part that the model does not have is a dash."""
    parts = [memory[part] for part in TRAINABLE]
    of_any = next(filter(None, parts))
    counts = list(of_any[SHARDED])
    rows = [_size_row(label, [part and part[f"{name}_bytes"] for part in parts]) for name, label in KINDS.items()]
    if of_any["teacher_bytes"]:
        own = [part and part["teacher_bytes"] - part["shared_bytes"] for part in parts]
        rows.append(_size_row("teacher, not shared", own))
    rows += _device_rows("one device, or DDP", "FSDP2", parts, counts)
    rows += _device_rows("minimum, one device", "minimum, FSDP2", [part and part["minimum"] for part in parts], counts)
    rows.append(_size_row("host, while reading", [part and part["host_bytes"] for part in parts]))
    return rows


def _device_rows(
    alone: str, sharded: str, totals: list[dict[str, Any] | None], counts: list[Any]
) -> list[tuple[str, ...]]:
    """Return the rows of a device on its own, and of each of several with FSDP2."""
    rows = [_size_row(alone, [total and total[REPLICATED] for total in totals])]
    for n in counts:
        rows.append(_size_row(f"{sharded} over {n}", [total and total[SHARDED][n] for total in totals]))
    return rows


def _size_row(label: str, sizes: list[Any]) -> tuple[str, ...]:
    return (label, *("–" if nbytes is None else format_bytes(nbytes) for nbytes in sizes))


def _time_rows(time: dict[str, Any], processes: int) -> list[tuple[str, ...]]:
    """Return the hours of a run on each kind of device, and of one device if there are several."""
    parts = [time[part] for part in TRAINABLE]
    counts = [(processes, "hours"), *([(1, "device_hours")] if processes > 1 else [])]
    rows = []
    for name in next(filter(None, parts))["hours"]:
        for n, key in counts:
            rows.append((f"{n} {name}", *("–" if part is None else _hours(part[key][name]) for part in parts)))
    return rows


def _fitting_rows(plan: dict[str, Any]) -> list[tuple[str, str]]:
    """Return for each number of devices the memory of each device, and the options that make it fit."""
    return [(counted(int(n), "device"), _fit_text(plan, fit)) for n, fit in plan["memory"]["fitting"].items()]


def _fit_text(plan: dict[str, Any], fit: dict[str, Any] | None) -> str:
    if fit is None:
        return "none fits"
    recomputes = " --activation-checkpointing" if fit["activation_checkpointing"] else ""
    micro_batch = fit["micro_batch_tokens"] // plan["seq_len"]
    options = f"--trainable {fit['trainable']}{recomputes} --micro-batch {micro_batch}"
    return f"{format_bytes(fit['bytes_per_process'])}: {options}"


def _hours(hours: float) -> str:
    if hours < 0.1:
        return format_duration(3600 * hours) if hours > 1 / 3600 else "< 1 s"
    return f"{hours:,.0f} h" if hours >= 100 else f"{hours:.3g} h"
