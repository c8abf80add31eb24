"""Read, write and run checkpoints: the package that both `convert` and `uptrain` build on.

    from model import load_model, generate

imports torch. `model.checkpoint` and `model.geometry`, which handle files only, do not.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model.decoder.generation import generate as generate
    from model.decoder.loading import load_model as load_model

__all__ = ["generate", "load_model"]


def __getattr__(name: str) -> Any:
    if name == "load_model":
        from model.decoder.loading import load_model

        return load_model
    if name == "generate":
        from model.decoder.generation import generate

        return generate
    raise AttributeError(f"module 'model' has no attribute {name!r}")
