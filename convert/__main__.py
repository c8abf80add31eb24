"""`python -m convert`, which works where ImageMagick's `convert` comes first on the PATH."""

from convert.cli import main

main()
