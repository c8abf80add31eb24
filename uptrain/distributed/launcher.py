"""Run `accelerate launch`, and end as the process that failed first: with its exit code.

    python -m uptrain.distributed.launcher --config_file FILE --num_processes N -m uptrain run …

The launcher of accelerate ends with a traceback of its own and code 1 instead, which hides what a process has said.
"""

import signal
import sys

from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from model.common.console import echo_line


def main(arguments: list[str]) -> int:
    """Return the exit code: 128 + N after signal N, at which the processes stop in order."""
    try:
        launch_command(launch_command_parser().parse_args(arguments))
    except SignalException as stopped:
        return 128 + stopped.sigval
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        number = -failure.exitcode
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        memory = "; if nobody sent it, the machine has run out of memory" if name == "SIGKILL" else ""
        echo_line(f"Error: process {rank} was ended by {name}{memory}.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
