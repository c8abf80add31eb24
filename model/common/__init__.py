"""Helpers of all packages: checks, console, errors, processes, the machine."""
