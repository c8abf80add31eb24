"""Estimates of the memory and time of a run from file headers, and the plan that shows them."""

REPLICATED, SHARDED = "replicated_bytes_per_process", "sharded_bytes_per_process"
"""Keys of a plan's memory: bytes of a device with all parameters, and of each of several that share them (FSDP2)."""
