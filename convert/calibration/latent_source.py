"""Read the source of a conversion to latent attention, and refuse sources that do not fit the class.

The target is transformers' DeepseekV3ForCausalLM with dense layers: Llama's decoder, but for attention.
"""

from dataclasses import dataclass
from typing import Any

import torch

from convert.latent.check_source import check_latent_source
from convert.latent.frequencies import SourceRope
from model.checkpoint import Checkpoint
from model.common.errors import CheckpointError
from model.decoder.config import LlamaConfig
from model.decoder.llama import Block
from model.decoder.loading import check_no_others
from model.decoder.rope import inverse_frequencies
from model.geometry import Geometry, read_geometry


@dataclass(frozen=True)
class LatentSource:
    """A source that fits latent attention."""

    geometry: Geometry
    config: LlamaConfig
    rope: SourceRope

    @property
    def rms_norm_eps(self) -> float:
        return self.config.rms_norm_eps


def read_source(checkpoint: Checkpoint) -> LatentSource:
    """Return a source's geometry and settings.

    Raises CheckpointError for a source that latent attention cannot compute, with the reason.
    """
    config = check_latent_source(checkpoint)
    geometry = read_geometry(checkpoint)
    with torch.device("meta"):
        parameters = [name for name, _ in Block(config).named_parameters()]
    for index in range(config.n_layers):
        prefix = f"model.layers.{index}."
        for name in parameters:
            if f"{prefix}{name}" not in checkpoint.tensors:
                raise CheckpointError(f"{checkpoint.path} lacks the tensor {prefix}{name}.")
        check_no_others(checkpoint, prefix, {f"{prefix}{name}" for name in parameters})
    frequencies, scale = inverse_frequencies(config.rope)
    rope = SourceRope(
        tuple(frequencies.double().tolist()), scale, config.rope.theta, config.rope.kind == "default",
        config.rope.max_positions,
    )  # fmt: skip
    return LatentSource(geometry, config, rope)


def token_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of `config.json` that the output keeps: of the tokenizer, and the dtype."""
    keys = ["bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "initializer_range", "use_cache"]
    if config["model_type"] != "mistral":  # for which transformers ignores it, but not for the output's type
        keys.append("tokenizer_class")
    return {key: config[key] for key in keys if key in config}
