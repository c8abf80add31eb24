"""Merge the K/V heads of a checkpoint, file to file: `convert mha-to-gqa SOURCE OUT --groups 8`."""
