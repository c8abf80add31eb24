"""Run `uptrain teach`: write a teacher's logits of a token cache."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from model.common import console
from model.common.checks import MAX_SIZE
from model.common.command_options import PathType, WholeNumber, json_option
from model.common.counts import counted
from uptrain.commands.options import ModelFolder, check_one_process, shard_is_done, shard_option
from uptrain.distributed.signals import CONTINUES, interruptible

if TYPE_CHECKING:
    from uptrain.machine_shards import MachineShard


@click.command("teach")
@click.argument("model", type=ModelFolder())
@click.option("--data", type=PathType(), required=True, metavar="CACHE", help="The token cache that runs train on.")
@click.option("--out", type=PathType(), required=True, metavar="LOGITS", help="The folder of logits to write.")
@click.option(
    "--top-k",
    type=WholeNumber(1, MAX_SIZE),
    default=64,
    show_default=True,
    metavar="K",
    help="Log-probabilities to keep for each token. The probabilities of all other tokens are summed.",
)
@shard_option(
    "Compute only the I-th of N shards, on one of several devices or machines that share the folder of LOGITS."
)
@json_option()
def command(
    model: Path, data: Path, out: Path, top_k: int, machine_shard: "MachineShard | None", as_json: bool
) -> None:
    """Write a teacher's predictions for a token cache.

    LOGITS are the top log-probabilities that MODEL gives for each token. `uptrain run --teacher-logits` distils from
    them without the teacher in memory, in many runs. If the command is killed, LOGITS is not written; run the same
    command again to continue.
    """
    check_one_process("teach", "start one for each device, with --shard 1/N to N/N")
    with interruptible(CONTINUES):
        from uptrain.teach import TeachOptions, teach

        result = teach(TeachOptions(model, data, out, top_k, machine_shard), quiet=as_json)
    if as_json:
        console.print_json(result)
    elif "shard" in result:
        contents = f"{result['windows']:,} of the {counted(result['windows_in_all'], 'window')}"
        console.echo(shard_is_done(result["shard"], contents))
    else:
        if result["was_complete"]:
            console.echo(f"{out} was complete already, of the same model, cache and --top-k.\n")
        rows = [
            ("teacher", f"{result['teacher']}, {result['vocab_size']:,} tokens"),
            ("windows", f"{result['n_windows']:,} of {result['seq_len']:,} tokens"),
            ("for each token", f"{top_k:,} log-probabilities, and the mass of the rest"),
            ("size", console.format_bytes(result["bytes"])),
        ]
        console.print_key_values(f"Logits {out}", rows)
        given = f"--data {shlex.quote(str(data))} --teacher-logits {shlex.quote(str(out))}"
        console.echo(f"Next: uptrain run STUDENT {given} --alpha A --out RUN")
