"""Run `accelerate launch`, and end as the process that failed first: with its exit code.

    python -m uptrain.distributed.launcher --config_file FILE --num_processes N -m uptrain run …

The launcher of accelerate ends with a traceback of its own and code 1 instead, which hides what a process has said. The
signals at which a run saves and stops reach all processes, which have time to save. The first process on a machine
prints the error that all have; this prints errors that only others had.
"""

import os
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from model.common.console import echo_line
from model.common.launcher_variables import FIRST, MESSAGES

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
SECONDS_TO_SAVE = 600
"""Time that stopped processes have before they are killed. torch's default is 30."""


def main(arguments: list[str]) -> int:
    """Return the exit code: 128 + N after signal N, at which the processes stop in order."""
    # torchrun, which accelerate calls, reads these variables. It would pass on a signal that `nohup` makes us ignore.
    passed_on = [each.name for each in STOPS if signal.getsignal(each) != signal.SIG_IGN]
    os.environ["PET_SIGNALS_TO_HANDLE"] = ",".join(passed_on)
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(SECONDS_TO_SAVE)
    with TemporaryDirectory(prefix="groupwise-") as messages:
        os.environ[MESSAGES] = messages
        return _launch(arguments, Path(messages))


def _launch(arguments: list[str], messages: Path) -> int:
    try:
        launch_command(launch_command_parser().parse_args(arguments))
    except SignalException as stopped:
        return 128 + stopped.sigval
    except ChildFailedError as failed:
        _print_others(messages)
        rank, failure = failed.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        number = -failure.exitcode
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        memory = "; if nobody sent it, the machine has run out of memory" if name == "SIGKILL" else ""
        echo_line(f"Error: process {rank} was ended by {name}{memory}.")
        return 1
    return 0


def _print_others(messages: Path) -> None:
    """Print the messages of processes that the first process on this machine has not printed."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in messages.iterdir()}
    printed = {texts.pop(FIRST, "")}
    for rank, text in sorted(texts.items(), key=lambda item: int(item[0])):
        if text not in printed:
            echo_line(f"Error: process {rank}: {text}")
        printed.add(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
