"""Helpers of all packages: checks, console, errors, files, processes, staging folders, the machine, the tokenizer."""
