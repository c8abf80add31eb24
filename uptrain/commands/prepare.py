"""Run `uptrain prepare`: tokenise texts into a token cache."""

import shlex
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from model.common import console
from model.common.checks import MAX_SIZE
from model.common.command_options import PathType, WholeNumber, json_option
from model.common.counts import counted, parse_count
from model.common.errors import InputError
from uptrain.commands.options import ModelFolder, check_one_process, shard_is_done, shard_option
from uptrain.distributed.signals import CONTINUES, interruptible

if TYPE_CHECKING:
    from uptrain.data.prepare.prepare import PrepareOptions

MAX_IGNORED_SHOWN = 10
"""Ignored files that are shown."""


@click.command("prepare")
@click.option(
    "--data",
    multiple=True,
    required=True,
    metavar="PATH[=WEIGHT]",
    help="A file, a folder of files, or hub:NAME[:[CONFIG:]SPLIT]. Repeat the option for several sources; weights "
    "set their shares of the tokens.",
)
@click.option(
    "--tokenizer",
    type=ModelFolder(file_okay=False),
    metavar="FOLDER",
    help="Hugging Face folder with the tokenizer, such as the model's, or its name in the cache (org/name).",
)
@click.option(
    "--vocab-size",
    type=WholeNumber(1, 1 << 32),
    metavar="N",
    help="Size of the vocabulary, for data that is tokenised already (column input_ids). Replaces --tokenizer.",
)
@click.option("--seq-len", type=WholeNumber(2, MAX_SIZE), required=True, metavar="N", help="Tokens in a window.")
@click.option(
    "--tokens", default="all", show_default=True, metavar="N|all", help="Take the first N tokens, e.g. 50M or 1.5B."
)
@click.option("--out", type=PathType(), required=True, metavar="CACHE", help="The token cache to write.")
@click.option(
    "--text-column",
    default="text",
    show_default=True,
    metavar="NAME",
    help="Column of the records that holds the text.",
)
@click.option(
    "--on-bad-record",
    type=click.Choice(["stop", "skip"]),
    default="stop",
    show_default=True,
    help="stop: stop at the first bad record. skip: leave out and count up to 0.1 % of all records.",
)
@click.option(
    "--workers", type=WholeNumber(min=1), metavar="N", help="Processes that tokenise.  [default: one per core]"
)
@shard_option("Tokenise only the I-th of N shards, on one of several machines that share the folder of CACHE.")
@json_option()
def command(**options: Any) -> None:
    """Tokenise texts once, into a token cache.

    Training maps the cache into memory. Texts are JSON Lines (.jsonl, .ndjson, .json) and .txt files (also compressed:
    .gz, .xz, .zst), .parquet files, and folders of `datasets.save_to_disk`. A record is a document, and so is a .txt
    file. A record that has input_ids instead of a text is taken as token ids. If the command is killed, CACHE is not
    written; run the same command again to continue.
    """
    check_one_process("prepare")
    from uptrain.data.prepare.prepare import prepare

    as_json = options.pop("as_json")
    with interruptible(CONTINUES):
        result = prepare(_prepare_options(**options), quiet=as_json)
    if as_json:
        console.print_json(result)
    else:
        _show(result)


def _prepare_options(*, tokens: str, on_bad_record: str, workers: int | None, **options: Any) -> "PrepareOptions":
    from model.common.machine import n_cores
    from uptrain.data.prepare.prepare import PrepareOptions

    try:
        n_tokens = None if tokens == "all" else parse_count(tokens)
    except InputError as error:
        raise click.BadParameter(str(error), param_hint="--tokens") from error
    return PrepareOptions(
        n_tokens=n_tokens,
        skip_bad=on_bad_record == "skip",
        workers=workers or n_cores(),
        **options,
    )


def _show(result: dict[str, Any]) -> None:
    if "shard" in result:
        contents = f"{counted(result['documents'], 'document')}, {counted(result['tokens'], 'token')}"
        console.echo(shard_is_done(result["shard"], contents))
        return
    if result["was_complete"]:
        console.echo(f"{result['out']} was complete already, with the same data and options.\n")
    counts = (Counter({**source["dropped"], "bad": source["skipped"]}) for source in result["sources"])
    dropped = [f"{n:,} {reason}" for reason, n in sorted(sum(counts, Counter[str]()).items())]
    rows = [
        ("documents", f"{result['documents']:,}"),
        ("tokens", f"{result['tokens']:,}, {result['dtype']}, of a vocabulary of {result['vocab_size']:,}"),
        ("windows", f"{result['windows']:,} of {result['seq_len']:,} tokens"),
        ("dropped", ", ".join(dropped) or "none"),
        *((source["path"], _described(source)) for source in result["sources"]),
        *(("ignored", text) for text in _ignored(result["ignored"])),
    ]
    console.print_key_values(f"Token cache {result['out']}", rows)
    console.echo(f"\nNext: uptrain run MODEL --data {shlex.quote(result['out'])} --alpha A --out RUN")


def _ignored(files: list[str]) -> list[str]:
    from model.texts.sources import why_ignored

    more = [f"and {len(files) - MAX_IGNORED_SHOWN:,} more"] * (len(files) > MAX_IGNORED_SHOWN)
    return [*(f"{file}: {why_ignored(file)}" for file in files[:MAX_IGNORED_SHOWN]), *more]


def _described(source: dict[str, Any]) -> str:
    weight = "" if source["weight"] is None else f", weight {source['weight']:g}"
    documents, files = counted(source["documents"], "document"), counted(source["files"], "file")
    return f"{documents}, {source['tokens']:,} tokens, {files}{weight}"
