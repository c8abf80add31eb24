"""Run `python -m convert`. It works even where ImageMagick's `convert` comes first on the PATH."""

from convert.cli import main

main()
