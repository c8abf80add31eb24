"""Plan a conversion to latent attention completely, before anything is written."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from convert.latent.frequencies import SourceRope, rope_parameters
from convert.latent.latent_conversion import LatentConversion
from convert.latent.latent_recipe import LatentRecipe, is_exact
from convert.latent.sizes import DEEPSEEK_SIZES, FAST_KERNEL_SIZES, LatentSizes, checked_sizes
from convert.planning.latent_config import MODEL_TYPE, latent_config, tokenizer_config
from convert.planning.latent_source import read_source
from convert.planning.notes import note_on_card, note_on_uncached_tokenizer
from convert.planning.plan import CALIBRATION_PROGRAM_BYTES, Plan, lay_out
from convert.planning.tensors import OutputTensor, Rows, Scaled
from model.checkpoint import Checkpoint, TensorInfo
from model.checkpoint.latent_norm import LATENT_NORM_EPSILON
from model.checkpoint.tensor import is_rope_buffer
from model.checkpoint.tied import EMBEDDING, LM_HEAD
from model.common.errors import CheckpointError
from model.files.names import CONVERSION_RECORD


@dataclass(frozen=True)
class LatentPlan(Plan):
    """One conversion to latent attention."""

    recipe: LatentRecipe
    conversions: tuple[LatentConversion, ...]
    sizes: LatentSizes

    @property
    def model_type(self) -> str:
        return MODEL_TYPE

    @property
    def is_exact(self) -> bool:
        return is_exact(self.sizes)

    @property
    def has_new_lm_head(self) -> bool:
        """Whether the source's LM head is its embedding; the output's is a tensor of its own."""
        lm_head = self.computed.get(LM_HEAD)
        return lm_head is not None and (lm_head.scaled is None or lm_head.scaled.source != LM_HEAD)

    @property
    def kv_cache_bytes(self) -> tuple[int, int]:
        geometry = self.geometry
        before = geometry.kv_cache_bytes_per_token(geometry.n_kv_heads)
        return before, self.sizes.kv_cache_bytes_per_token(geometry.n_layers)

    def added_files(self, checkpoint: Checkpoint) -> dict[str, Path | bytes]:
        return {**super().added_files(checkpoint), **tokenizer_config(checkpoint, self.geometry.family)}

    def _calibration_memory(self) -> int:
        """Estimate the bytes to run one layer: its weights in float32, its moments and its attention in float64."""
        layer = self.mean_layer_bytes
        square = 8 * self.sizes.hidden_size**2
        query_sums = 2 * 8 * self.sizes.n_heads * self.sizes.cached**2
        # Moments, their roots and decompositions; copies of the attention: original, candidates, gradients, Adam's.
        running = 2 * layer + 8 * square + query_sums + (8 if self.recipe.refine else 5) * self.largest_layer_bytes
        return CALIBRATION_PROGRAM_BYTES + self.reader_bytes + max(running, self._embedding_memory())


def make_latent_plan(checkpoint: Checkpoint, recipe: LatentRecipe, max_shard_size: int | None) -> LatentPlan:
    """Plan a conversion of `checkpoint` to latent attention. Raises CheckpointError if that is impossible."""
    source = read_source(checkpoint)
    geometry = source.geometry
    sizes = checked_sizes(geometry, recipe.kv_lora_rank, recipe.qk_rope_head_dim, recipe.norm, recipe.frequencies)
    _check_dtype(checkpoint, recipe)
    if recipe.pair_indices is not None and max(recipe.pair_indices) > source.rope.n_rotary_pairs:
        raise CheckpointError(
            f"{CONVERSION_RECORD} records the pair index {max(recipe.pair_indices):g}, but the source's heads have "
            f"{source.rope.n_rotary_pairs} RoPE pairs; the record is damaged, or that of another model."
        )
    scale = math.sqrt(LATENT_NORM_EPSILON / source.config.rms_norm_eps)
    layers = tuple(
        LatentConversion(
            recipe=recipe,
            sizes=sizes,
            source_rope=source.rope,
            prefix=f"{prefix}self_attn.",
            attention_norm=f"{prefix}input_layernorm.weight",
            residual_scale=scale,
        )
        for prefix in (f"model.layers.{index}." for index in range(geometry.n_layers))
    )
    computed = _computed(checkpoint, layers, scale)
    tensors, shards, rewrites = lay_out(checkpoint, _replaced(checkpoint, layers), computed, max_shard_size)
    pair_indices = recipe.pair_indices
    rope = None if pair_indices is None else rope_parameters(source.rope, pair_indices)
    return LatentPlan(
        geometry=geometry,
        n_kv_heads=geometry.n_heads,
        recipe=recipe,
        max_shard_size=max_shard_size,
        tensors=tensors,
        shards=shards,
        computed=computed,
        conversions=layers,
        config_json=latent_config(checkpoint, geometry, source.config, sizes, rope, layers[0].dtype(checkpoint)),
        code=None,
        notes=(
            *checkpoint.notes,
            *note_on_card(checkpoint),
            *note_on_uncached_tokenizer(checkpoint),
            *_notes(sizes, recipe, source.rope),
        ),
        rewrites=rewrites,
        reader_bytes=checkpoint.reader_bytes,
        sizes=sizes,
    )


def _check_dtype(checkpoint: Checkpoint, recipe: LatentRecipe) -> None:
    """Raise CheckpointError if a layer's dtype cannot hold the latent's rows."""
    halves = [name for name, tensor in checkpoint.tensors.items() if tensor.dtype == "F16" and ".self_attn." in name]
    if halves and recipe.norm == "eps" and recipe.dtype is None:
        raise CheckpointError(
            f"the tensor {halves[0]} is float16, which cannot hold the small numbers of --latent-norm eps; give "
            "--dtype bfloat16, or keep float16 with --latent-norm bias, which few engines read."
        )


def _computed(checkpoint: Checkpoint, layers: Sequence[LatentConversion], scale: float) -> dict[str, OutputTensor]:
    """Return the tensors of the output that differ from the source's, by name."""
    computed: dict[str, OutputTensor] = {}
    for layer in layers:
        dtype = layer.dtype(checkpoint)
        for name, shape in layer.names.shapes(layer.sizes).items():
            computed[name] = OutputTensor(TensorInfo(name, dtype, shape), layer=layer)
    written = [f"{layer.prefix.removesuffix('self_attn.')}mlp.down_proj.weight" for layer in layers]
    factors = dict.fromkeys((EMBEDDING, *written), scale)
    replaced = {name for layer in layers for name in layer.source_projections}
    kept = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in replaced}
    if LM_HEAD not in checkpoint.tensors:
        kept[LM_HEAD] = replace(checkpoint.tensors[EMBEDDING], name=LM_HEAD)
    for name, tensor in kept.items():
        if is_rope_buffer(name):
            continue
        output = replace(tensor, dtype=layers[0].recipe.tensor_dtype or tensor.dtype)
        factor, source = factors.get(name, 1.0), name if name in checkpoint.tensors else EMBEDDING
        if factor != 1 or output.dtype != tensor.dtype:
            computed[name] = OutputTensor(output, scaled=Scaled(source, factor))
        elif source != name:
            computed[name] = OutputTensor(output, copies=(Rows(0, source, 0, tensor.shape[0]),))
    return computed


def _replaced(checkpoint: Checkpoint, layers: Sequence[LatentConversion]) -> dict[str, tuple[str, ...]]:
    """Return the tensors of the output that take the place of the source's, by the source's names."""
    replaced: dict[str, tuple[str, ...]] = {name: () for name in checkpoint.tensors if is_rope_buffer(name)}
    for layer in layers:
        query, key, value, output = layer.source_projections
        q, kv_a, norm, kv_b, o, *biases = layer.tensor_names
        kv_a_bias, o_bias = (biases[:1], biases[1:])
        replaced |= {query: (q,), key: (kv_a, *kv_a_bias, norm), value: (kv_b,), output: (o, *o_bias)}
    if LM_HEAD not in checkpoint.tensors:
        replaced[EMBEDDING] = (EMBEDDING, LM_HEAD)
    return replaced


def _notes(sizes: LatentSizes, recipe: LatentRecipe, source_rope: SourceRope) -> Iterator[str]:
    if sizes.cached >= sizes.source_cached:
        yield (
            f"the latent and the rotated key are {sizes.cached} elements for each token and layer, and the source "
            f"caches {sizes.source_cached}: nothing is saved."
        )
    if sizes.norm == "eps":
        yield "open the output in bfloat16 or float32: in float16 it computes NaN (--latent-norm bias does not)."
    yield from _notes_on_kernels(sizes.kv_lora_rank, sizes.qk_rope_head_dim)
    if recipe.frequencies == "longrope":
        yield (
            "the calibration text decides whether the rotated key gets frequencies of its own (rope_type longrope in "
            "config.json)."
            if recipe.pair_indices is None and source_rope.is_plain
            else "the rotated key has frequencies of its own (rope_type longrope)."
        )
        yield "llama.cpp computes rope_type longrope wrongly, without a message; for it, use --frequencies stock."
        yield (
            "rope_type longrope: transformers 5 computes such frequencies, and vLLM with --model-impl transformers; "
            "vLLM's own code of DeepSeek-V3 and SGLang do not. transformers warns of an unrecognised key, "
            "beta_fast, which is harmless: there it has no use, "
            "and it makes vLLM's own code stop."
        )
    if sizes.norm == "bias":
        yield (
            "--latent-norm bias puts the constant of the latent's norm into a bias: transformers reads it, and vLLM "
            "with --model-impl transformers; vLLM's own code of DeepSeek-V3 and SGLang ignore it, and llama.cpp "
            "refuses it."
        )
    if recipe.text is None and not is_exact(sizes):
        yield "the heads are converted by the weights alone, without any text, which costs much quality."


def _notes_on_kernels(kv_lora_rank: int, qk_rope_head_dim: int) -> Iterator[str]:
    if (kv_lora_rank, qk_rope_head_dim) == DEEPSEEK_SIZES:
        return
    size = f"{kv_lora_rank} + {qk_rope_head_dim}"
    everywhere, on_some_gpus = (f"{latent} + {rope}" for latent, rope in FAST_KERNEL_SIZES)
    not_for_this = "" if size == on_some_gpus else f", and not for {size}"
    yield (
        f"vLLM has fast kernels of latent attention for {everywhere} and, on some GPUs, {on_some_gpus}{not_for_this}. "
        "On a GPU its Triton kernel takes any size (read in its source, not run)."
    )
    yield f"on a CPU, vLLM needs VLLM_MLA_DISABLE=1 for {size}, and then caches full keys and values."
