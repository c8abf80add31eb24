"""Run `uptrain plan`: show budget, learning rates, memory and time of a run."""

from pathlib import Path
from typing import Any

import click

from model.common.checks import LARGEST_COUNT
from model.common.command_options import pop_fields
from model.common.console import echo_line, print_json, print_key_values, size
from uptrain.budget.budget import BudgetOptions
from uptrain.budget.counts import show_count
from uptrain.budget.learning_rate import Schedule, learning_rate
from uptrain.commands.options import budget_options, count_option, schedule_options

BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 48


@click.command("plan")
@click.argument("model", type=click.Path(path_type=Path))
@budget_options
@schedule_options
@click.option("--data", type=click.Path(path_type=Path), metavar="CACHE", help="The token cache to train on.")
@count_option("--seq-len", "Tokens of a sequence.  [default: the cache's, or the model's context, at most 4096]")
@click.option("--teacher", type=click.Path(path_type=Path), metavar="FOLDER", help="The parent, to distil from.")
@click.option(
    "--processes", type=click.IntRange(1, LARGEST_COUNT), default=1, show_default=True, help="Devices to train on."
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def command(model: Path, as_json: bool, **options: Any) -> None:
    """Show steps, learning rates, memory and time; run nothing.

    Give one of --alpha, --tokens and --steps. What a well-known original was trained with is looked up.
    """
    from uptrain.budget.plan import make_plan

    plan = make_plan(model, pop_fields(BudgetOptions, options), **options)
    if as_json:
        print_json(plan)
        return
    print_key_values(f"Uptraining {plan['model']}", [*_budget(plan), *_learning(plan), *_estimates(plan)])
    for warning in plan["warnings"]:
        echo_line(f"Warning: {warning}")


def _budget(plan: dict[str, Any]) -> list[tuple[str, str]]:
    original, data = plan["original"], plan["data"]
    rows = [
        ("parameters", f"{show_count(plan['n_params'])}, {plan['n_kv_heads']} K/V heads"),
        ("original", _original(original) if original else "not in the table"),
        ("α", "unknown without --original-tokens" if plan["alpha"] is None else f"{plan['alpha']:.4g}"),
        ("steps", f"{plan['steps']:,}"),
        ("tokens", f"{plan['tokens']:,} ({show_count(plan['tokens'])})"),
        ("tokens per parameter", f"{plan['tokens_per_parameter']:.3g}"),
        ("a step", f"{plan['global_batch_tokens']:,} tokens: {plan['sequences_per_step']:,} x {plan['seq_len']:,}"),
    ]
    if data:
        rows.append(("epochs", f"{data['epochs']:.3g} over {data['tokens']:,} tokens in {data['cache']}"))
    return rows


def _original(original: dict[str, Any]) -> str:
    note = f"; {original['note']}" if original["note"] else ""
    return (
        f"{original['name']}: {show_count(original['tokens'])} tokens in {original['steps']:,} steps, peak "
        f"{original['peak_lr']:g}{note} ({original['certainty']}; {original['source']})"
    )


def _learning(plan: dict[str, Any]) -> list[tuple[str, str]]:
    values = plan["schedule"]
    schedule = Schedule(**{key: value for key, value in values.items() if key != "decay_start"})
    decay = f", decay from step {values['decay_start']:,}" if values["decay_start"] is not None else ""
    rates = "\n".join(f"{row['lr']:.3e} at step {row['step']:,}" for row in plan["learning_rates"])
    return [
        (
            "schedule",
            f"{values['kind']}, peak {values['peak']:.3g}, {values['warmup_steps']:,} steps of warm-up{decay}",
        ),
        ("learning rate", f"{_curve(schedule)}\n{rates}"),
    ]


def _curve(schedule: Schedule) -> str:
    last = schedule.total_steps - 1
    steps = [round(last * i / (CURVE_WIDTH - 1)) for i in range(CURVE_WIDTH)]
    shares = [learning_rate(schedule, step) / schedule.peak for step in steps]
    return "".join(BARS[round(share * (len(BARS) - 1))] for share in shares)


def _estimates(plan: dict[str, Any]) -> list[tuple[str, str]]:
    memory, time, n = plan["memory"], plan["time"], plan["processes"]
    hours = "\n".join(
        f"{_hours(time['hours'][name])} on {n} {name} ({_hours(time['device_hours'][name])} of a device)"
        for name in time["hours"]
    )
    return [
        (
            "memory, estimate",
            f"{size(memory['replicated_bytes_per_process'])} a device as replicas (DDP), "
            f"{size(memory['sharded_bytes_per_process'])} sharded over {n} (FSDP2); "
            f"{size(memory['activation_bytes'])} of it for a micro-batch of {memory['micro_batch_tokens']:,} tokens\n"
            f"= {memory['formula']}\n"
            f"The host: {size(memory['host_bytes'])} while models are read: in each process, or once if sharded",
        ),
        ("time, estimate", f"{hours}\n= {time['formula']}"),
        ("loss at step 0", plan["first_loss"]),
    ]


def _hours(value: float) -> str:
    return f"{value:,.0f} h" if value >= 100 else f"{value:.3g} h"
