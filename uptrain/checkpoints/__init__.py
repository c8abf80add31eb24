"""Training checkpoints: list, verify, save and load."""
