"""Define the options of the commands that write a checkpoint. The values of each set become one dataclass.

`OutputOptions` is here. `MergeOptions` and `LatentOptions` are in `convert.planning`, which resolves them.
"""

from dataclasses import dataclass

import click

from convert.calibration_text.choices import DEFAULT_TOKENS, MAX_TOKENS
from convert.latent import DEFAULT_CACHED, FREQUENCIES, LATENT_DTYPES, LATENT_METHODS, LATENT_NORMS
from convert.merging.methods import HEAD_METHODS, LAYER_METHODS
from model.common.checks import MAX_COUNT
from model.common.command_options import (
    Command,
    CountType,
    SizeType,
    WholeNumber,
    add_options,
    device_option,
    json_option,
)

WORKERS = 4


class GroupsType(click.types.IntParamType):
    """The type of a number of groups."""

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str:
        return "`convert inspect SOURCE` lists the possible numbers."


_calibration_tokens_option = click.option(
    "--calibration-tokens", type=CountType(), metavar="N",
    help=f"Tokens of the text to use, at least four windows.  [default: {DEFAULT_TOKENS}]",
)  # fmt: skip


@dataclass(frozen=True)
class OutputOptions:
    """Options for writing OUT and for printing."""

    max_shard_size: int | None
    workers: int
    dry_run: bool
    overwrite: bool
    as_json: bool


def output_options(command: Command) -> Command:
    """Add the options of OutputOptions to a command."""
    return add_options(
        command,
        click.option("--max-shard-size", type=SizeType(least=10**4), metavar="SIZE",
                     help="Largest weight file of OUT, e.g. 5GB.  [default: the shards of SOURCE; 5GB for GGUF, Meta's "
                     "format and torch.distributed.checkpoint]"),
        click.option("--workers", type=WholeNumber(1), default=WORKERS, show_default=True, metavar="N",
                     help="Threads that write and checksum. They mostly wait for the disk."),
        click.option("--dry-run", is_flag=True,
                     help="Print sizes, memory and the time of any calibration, and write nothing."),
        click.option("--overwrite", is_flag=True, help="Replace OUT if it is a checkpoint folder."),
        json_option(),
    )  # fmt: skip


def merge_options(command: Command) -> Command:
    """Add the options of MergeOptions to a command."""
    return add_options(
        command,
        click.option("--method", type=click.Choice((*HEAD_METHODS, *LAYER_METHODS)),
                     help="How to merge heads. mean: average them, as in the paper. first, random: the paper's "
                     "baselines. aligned: rotate the heads to be similar, then average. pca: shared principal "
                     "components. fit: heads fitted to what attention computes on a text. aligned, pca and fit also "
                     "change queries and output projections, to match.  [default: fit with --refit and --refine]"),
        click.option("--refit", is_flag=True,
                     help="Fit output projections to the outputs of SOURCE's layers, where that lowers the error on "
                     "the validation windows (every fourth).  [default: only without --method]"),
        click.option("--refine", type=CountType(0, MAX_TOKENS), metavar="TOKENS",
                     help="After merging, train each layer's attention on this many tokens of the calibration text, to "
                     "reproduce the output of SOURCE's layer. Keep the weights with the least error on "
                     "the validation windows (every fourth).  "
                     "[default: as many as --calibration-tokens without --method, else 0]"),
        click.option("--calibration", metavar="TEXT",
                     help="Text to run the model on, for aligned, pca and fit. shipped: a mixture that comes with "
                     "Groupwise. self: the model generates it, which needs the whole model in memory. Or a .jsonl, "
                     ".json, .parquet or .txt file, a folder of these, or hub:NAME[:[CONFIG:]SPLIT]. self+shipped, "
                     "self+TEXT, …: windows of each in turn. none: no text; without --method, this is the "
                     "paper's mean.  [default: shipped]"),
        _calibration_tokens_option,
        device_option("calibrate on"),
        click.option("--seed", type=WholeNumber(0, MAX_COUNT), metavar="N",
                     help="Seed of --method random, of --calibration self, and of the order of the text in --refine.  "
                     "[default: 0]"),
    )  # fmt: skip


def latent_options(command: Command) -> Command:
    """Add the options of LatentOptions to a command."""
    return add_options(
        command,
        click.option("--latent", type=WholeNumber(1), metavar="N",
                     help="Size of the latent, from which the values and unrotated keys of all heads are computed.  "
                     f"[default: {DEFAULT_CACHED} less --rope]"),
        click.option("--rope", type=WholeNumber(2), metavar="N",
                     help="Size of the rotated key that all heads share. vLLM has fast kernels for --latent 512 "
                     "--rope 64; with heads of 128, the default of 448 + 128 loses less at the same KV cache.  "
                     "[default: the size of a head, if it is 64 to 256; else 64, or the size of all keys if that is "
                     "less]"),
        click.option("--latent-norm", type=click.Choice(LATENT_NORMS), default="eps", show_default=True,
                     help="How to undo the norm that the class applies to the latent. eps: by small numbers and the "
                     "norm's epsilon, for bfloat16 and float32. bias: by a constant channel of the latent, for "
                     "float16 too, but only where the engine reads biases."),
        click.option("--dtype", type=click.Choice(LATENT_DTYPES),
                     help="Dtype of the weights. bfloat16: for a float16 SOURCE, whose dtype cannot hold the small "
                     "numbers of --latent-norm eps.  [default: the source's]"),
        click.option("--frequencies", type=click.Choice(FREQUENCIES),
                     help="Frequencies of the rotated key. stock: powers of a base, as in DeepSeek's own models. "
                     "longrope: those that the heads use most, each as often as needed. It loses much less, but "
                     "llama.cpp computes it wrongly, without a message, and SGLang and vLLM's own code do not compute "
                     "it; transformers 5 does.  [default: longrope; stock where it loses "
                     "nothing]"),
        # Published methods beside `fit`, for the study (docs/study/latent.md).
        click.option("--method", type=click.Choice(LATENT_METHODS), default="fit", hidden=True),
        click.option("--refine", type=CountType(0, MAX_TOKENS), metavar="TOKENS",
                     help="Train each layer's attention on this many tokens of the calibration text, to reproduce "
                     "the output of SOURCE's layer. Keep the weights with the least error on "
                     "the validation windows (every fourth).  "
                     "[default: as many as --calibration-tokens]"),
        click.option("--calibration", metavar="TEXT",
                     help="Text to run the model on, as for mha-to-gqa. none: convert by the weights alone.  "
                     "[default: shipped; none where the sizes lose nothing]"),
        _calibration_tokens_option,
        device_option("calibrate on"),
        click.option("--seed", type=WholeNumber(0, MAX_COUNT), metavar="N",
                     help="Seed of --calibration self, and of the order of the text in --refine.  [default: 0]"),
    )  # fmt: skip
