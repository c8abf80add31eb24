"""Readers of checkpoint formats, one module or folder each. `model.checkpoint.READERS` lists them."""
