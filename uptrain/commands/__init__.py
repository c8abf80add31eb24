"""The commands, one file each. They parse, call and print; what a command needs is imported when it runs."""

COMMANDS: tuple[str, ...] = ("prepare", "plan", "run", "resume", "extend", "status", "report", "evaluate", "export")
