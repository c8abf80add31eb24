"""Runs: their settings and folders, start, resume and extension, checks, fingerprints and progress."""
