"""Lets accelerate shard (FSDP2) on CPUs, which torch can and accelerate drops without a word.

Import it in a process before it makes an Accelerator; only tests do.
"""

from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

_init = AcceleratorState.__init__


def _init_sharded(self: AcceleratorState, *arguments: Any, **options: Any) -> None:
    _init(self, *arguments, **options)
    plugin = options.get("fsdp_plugin")
    if plugin is not None and self.distributed_type in (DistributedType.MULTI_CPU, DistributedType.FSDP):
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = plugin


AcceleratorState.__init__ = _init_sharded
