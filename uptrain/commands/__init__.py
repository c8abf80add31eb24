"""Commands of `uptrain`, one per file: they parse options, call the library, which they import late, and print."""

COMMANDS: tuple[str, ...] = (
    "prepare", "plan", "teach", "run", "resume", "extend", "status", "report", "evaluate", "export",
)  # fmt: skip
