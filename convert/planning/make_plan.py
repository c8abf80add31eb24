"""Plan a conversion by a recipe of either kind."""

from convert.latent.latent_recipe import LatentRecipe
from convert.merging.merge_recipe import MergeRecipe
from convert.planning.latent_plan import make_latent_plan
from convert.planning.merge_plan import make_merge_plan
from convert.planning.plan import Plan
from convert.recipe import Recipe
from model.checkpoint import Checkpoint


def make_plan(checkpoint: Checkpoint, n_kv_heads: int, recipe: Recipe, max_shard_size: int | None) -> Plan:
    """Plan a conversion of `checkpoint`. A latent recipe ignores `n_kv_heads`.

    Raises CheckpointError if that is impossible.
    """
    if isinstance(recipe, LatentRecipe):
        return make_latent_plan(checkpoint, recipe, max_shard_size)
    assert isinstance(recipe, MergeRecipe)
    return make_merge_plan(checkpoint, n_kv_heads, recipe, max_shard_size)
