"""Turn the K/V heads of a layer into latent attention (MLA): arithmetic on matrices, without torch."""

from typing import Literal

# Read by the command line for its help, without the time to import numpy.
LatentNormKind = Literal["eps", "bias"]
LATENT_NORMS: tuple[LatentNormKind, ...] = ("eps", "bias")
Frequencies = Literal["stock", "longrope"]
FREQUENCIES: tuple[Frequencies, ...] = ("stock", "longrope")
LatentMethod = Literal["fit", "transmla", "care", "svd"]
LATENT_METHODS: tuple[LatentMethod, ...] = ("fit", "transmla", "care", "svd")
LATENT_SOURCES = ("llama", "mistral")
"""The model types that can be converted."""
DEFAULT_LATENT, DEFAULT_ROPE = 512, 64
