"""Runs: their settings and folders, start, resume and extension, signals, fingerprints and metrics."""
