"""The choices of `--calibration` and its sizes, in a module of their own: the command line starts without numpy."""

SHIPPED, SELF, NONE = "shipped", "self", "none"
DEFAULT_TOKENS = 65_536
MAX_TOKENS = 1 << 24
"""Maximum tokens of calibration text, and of refinement."""
