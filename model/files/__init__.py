"""Read, write and lock files, and check their paths."""
