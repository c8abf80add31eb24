"""The choices of `--calibration`, its sizes and windows, in a module of their own: the command line needs no numpy."""

SHIPPED, SELF, NONE = "shipped", "self", "none"
DEFAULT_TOKENS = 65_536
MAX_TOKENS = 1 << 24
"""Maximum tokens of calibration text, and of refinement."""
VALIDATION_EVERY = 4
"""The last of so many windows is for validation."""
