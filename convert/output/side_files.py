"""List the files that are copied beside the weights."""

from pathlib import Path

from convert.planning.plan import Plan
from model.checkpoint import Checkpoint
from model.families import our_code
from model.files.names import UPTRAINING_RECORD


def copied_files(checkpoint: Checkpoint, plan: Plan) -> dict[str, Path | bytes]:
    """Return the copied files by relative name: the source's, and the model code that the output needs, as it is today.

    The record of an uptraining is left out where heads change: it is about other weights.
    """
    files = {**checkpoint.side_files, **our_code(checkpoint.config)}
    if plan.computed:
        files.pop(UPTRAINING_RECORD, None)
    return {**files, **plan.added_files(checkpoint)}
