"""Run the command line: `python -m uptrain`."""

from uptrain.cli import main

main()
