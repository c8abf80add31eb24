"""Distributed training: the Accelerator, collectives and FSDP2."""
