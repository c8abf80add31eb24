"""Run `uptrain`, or `python -m uptrain`."""

import signal

from model.common import interrupts


def main() -> None:
    """Run the command line. An interrupt during its imports, which take a while, is one line, too."""
    interrupts.install(signal.SIGINT)
    from uptrain.cli import main as run_command_line

    run_command_line()


if __name__ == "__main__":
    main()
