"""Read the source of a conversion to latent attention, and refuse sources that do not fit the class."""

from dataclasses import dataclass

from convert.latent.check_source import check_latent_source
from convert.latent.frequencies import SourceRope
from model.checkpoint import Checkpoint
from model.decoder.config import LlamaConfig
from model.geometry import Geometry, read_geometry


@dataclass(frozen=True)
class LatentSource:
    """A source that fits latent attention."""

    geometry: Geometry
    config: LlamaConfig
    rope: SourceRope


def read_source(checkpoint: Checkpoint) -> LatentSource:
    """Return a source's geometry and settings.

    Raises CheckpointError for a source that latent attention cannot compute, with the reason.
    """
    from model.decoder.loading import check_shapes  # imported here, because both need torch
    from model.decoder.rope import inverse_frequencies

    config = check_latent_source(checkpoint)
    geometry = read_geometry(checkpoint)
    check_shapes(checkpoint)
    frequencies, attention_scaling = inverse_frequencies(config.rope)
    rope = SourceRope(
        frequencies=tuple(frequencies.double().tolist()),
        attention_scaling=attention_scaling,
        theta=config.rope.theta,
        is_plain=config.rope.kind == "default",
        context=config.rope.max_positions,
    )
    return LatentSource(geometry, config, rope)
