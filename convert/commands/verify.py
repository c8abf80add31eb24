"""`convert verify`: check an output against its source."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from convert.commands.options import WORKERS
from model.common import console
from model.common.command_options import PathType, device_option, json_option

if TYPE_CHECKING:
    from convert.verification.comparison import Findings

DIFFERENT, NOT_ALL_CHECKED = 3, 4


@click.command("verify")
@click.argument("source", type=PathType())
@click.argument("out", type=PathType())
@device_option("repeat the calibration on")
@json_option()
def command(source: Path, out: Path, device: str, as_json: bool) -> None:
    """Check OUT against SOURCE.

    Recompute every merged tensor, and compare all other tensors, config.json, groupwise.json and the other files. The
    exit code is 0 if all agree, 3 if anything differs, and 4 if something could not be compared, for instance because
    OUT lacks the tokens it was calibrated on. If OUT was calibrated, this takes as long as the conversion.
    """
    from convert.verification.verify import verify
    from model.checkpoint import open_checkpoint

    with open_checkpoint(source) as checkpoint:
        findings = verify(checkpoint, out, WORKERS, as_json, device)
    if as_json:
        console.print_json(findings.record)
    else:
        _print(findings)
    sys.exit(DIFFERENT if findings.differences else NOT_ALL_CHECKED if findings.unchecked else 0)


def _print(findings: "Findings") -> None:
    for remark in findings.unchecked:
        console.echo_line(f"NOT CHECKED: {remark}")
    if findings.ok:
        errors = findings.rounded
        rounded = ""
        if errors:
            rounded = (
                f", {len(errors)} of them but for rounding (relative difference at most {max(errors.values()):.2g})"
            )
        console.echo(
            f"OK: {findings.n_computed} tensors recomputed; {findings.n_copied} other tensors, the config and "
            f"{findings.n_files} other files compared; all agree{rounded}."
        )
    for difference in findings.differences:
        console.echo_line(f"DIFFERENT: {difference}")
