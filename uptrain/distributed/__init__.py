"""Distributed training: the Accelerator, collectives, FSDP2 and signals."""
