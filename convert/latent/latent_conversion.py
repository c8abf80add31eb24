"""Describe the conversion of one layer to latent attention, read its source and finish its tensors."""

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from convert.latent.baselines import solve_as
from convert.latent.closed_form import LatentTarget, moments_from_norm, solve
from convert.latent.frequencies import SourceRope
from convert.latent.matrices import LatentMatrices
from convert.latent.sizes import LatentSizes
from convert.latent.stock_tensors import StockNames, from_stock_tensors, to_stock_tensors
from convert.layer_tensors.converted_layer import ConvertedLayer
from convert.layer_tensors.head_matrices import HeadMatrices, Real, split_heads
from convert.layer_tensors.rounding import DTYPE_ADVICE, read_finite, rounded
from model.checkpoint.tensor import FLOAT_DTYPES

if TYPE_CHECKING:
    from convert.latent.latent_recipe import LatentRecipe
    from model.attention_layout import Heads
    from model.checkpoint import Checkpoint


@dataclass(frozen=True)
class LatentConversion:
    """A request to convert one layer's attention, with the names of its tensors."""

    recipe: "LatentRecipe"
    sizes: LatentSizes
    source_rope: SourceRope
    prefix: str
    """The beginning of the attention's tensor names."""
    attention_norm: str
    """The weight of the norm before the attention."""
    residual_scale: float
    """The factor of the residual stream."""

    @property
    def target(self) -> LatentTarget:
        """The target with the recipe's pair indices, which must have been chosen."""
        assert self.recipe.pair_indices is not None
        return self.target_at(self.recipe.pair_indices)

    def target_at(self, pair_indices: tuple[float, ...]) -> LatentTarget:
        """Return the target with other pair indices."""
        return LatentTarget(self.sizes, self.source_rope, pair_indices)

    @property
    def names(self) -> StockNames:
        """The names of the output's tensors."""
        return StockNames(self.prefix, self.sizes.norm == "bias")

    @property
    def source_projections(self) -> tuple[str, str, str, str]:
        """The projections of queries, keys, values and output in the source."""
        q, k, v, o = (f"{self.prefix}{part}_proj.weight" for part in "qkvo")
        return q, k, v, o

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """All tensors of the converted layer."""
        return (*self.names.weights, *self.names.biases)

    @property
    def file(self) -> str:
        """The name of the layer's file in the calibration folder."""
        return f"{self.prefix}latent.npz"

    @property
    def reported_heads(self) -> tuple["Heads", ...]:
        """Merged heads that have a report: none, because no heads are merged."""
        return ()

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's attention in float64, the source's and the output's."""
        sizes = self.sizes
        before = 2 * (sizes.n_heads + sizes.n_kv_heads) * sizes.head_dim * sizes.hidden_size
        return 8 * (before + sum(prod(shape) for shape in self.names.shapes(sizes).values()))

    def dtype(self, checkpoint: "Checkpoint") -> str:
        """Return the dtype of the layer's tensors: the recipe's, or that of the source's queries."""
        return self.recipe.tensor_dtype or checkpoint.tensors[self.source_projections[0]].dtype

    def compute(self, checkpoint: "Checkpoint") -> ConvertedLayer:
        """Convert the layer by its weights alone."""
        before, moments = self.read(checkpoint), moments_from_norm(read_finite(checkpoint, self.attention_norm))
        method = self.recipe.latent_method
        if method == "fit":
            latent = solve(before, moments, self.target)
        else:
            latent = solve_as(method, before, moments, self.target)
        return self.finish(checkpoint, self.balance(latent))

    def balance(self, latent: LatentMatrices) -> LatentMatrices:
        """Return the same function with balanced weights.

        An output projection that is not refitted stays as it is, so that a teacher can share it.
        """
        return latent.balanced(keep_output=not self.recipe.refit)

    def read(self, checkpoint: "Checkpoint") -> HeadMatrices:
        """Read the layer's attention from the source. Raises CheckpointError for NaN or infinity."""
        q, k, v, o = (read_finite(checkpoint, name) for name in self.source_projections)
        size = self.sizes.head_dim
        q_HDX, k_KDX, v_KDX = (rows.reshape(-1, size, rows.shape[1]) for rows in (q, k, v))
        o_HMD = split_heads(o, self.sizes.n_heads)
        return HeadMatrices(q_HDX, k_KDX, v_KDX, o_HMD, size // 2)

    def finish(self, checkpoint: "Checkpoint", latent: LatentMatrices) -> ConvertedLayer:
        """Return the layer's tensors in the output's dtype. Raises CheckpointError if one overflows."""
        dtype = FLOAT_DTYPES[self.dtype(checkpoint)]
        exact = to_stock_tensors(latent, self.sizes, self.names, self.residual_scale)
        return ConvertedLayer({name: rounded(name, values, dtype, DTYPE_ADVICE) for name, values in exact.items()}, {})

    def latent_of(self, tensors: dict[str, Real]) -> LatentMatrices:
        """Return the latent attention in the output's tensors, given in float64."""
        return from_stock_tensors(tensors, self.sizes, self.names, self.residual_scale)
