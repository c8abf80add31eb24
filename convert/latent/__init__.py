"""Turn the K/V heads of a layer into latent attention (MLA): arithmetic on matrices, without torch."""

from typing import Literal

# Read by the command line for its help, without the time to import numpy.
LatentNormKind = Literal["eps", "bias"]
LATENT_NORMS: tuple[LatentNormKind, ...] = ("eps", "bias")
Frequencies = Literal["stock", "longrope"]
FREQUENCIES: tuple[Frequencies, ...] = ("stock", "longrope")
LatentMethod = Literal["fit", "transmla", "care", "svd"]
LATENT_METHODS: tuple[LatentMethod, ...] = ("fit", "transmla", "care", "svd")
LatentDtype = Literal["bfloat16"]
LATENT_DTYPES: tuple[LatentDtype, ...] = ("bfloat16",)
"""The dtypes that weights can be rounded to. bfloat16 holds the small numbers of `eps`, which float16 does not."""
LATENT_SOURCES = ("llama", "mistral")
"""The model types that can be converted."""
DEFAULT_CACHED = 576
"""Elements to cache for each token and layer, of latent and rotated key, where the size of the latent is not given."""
