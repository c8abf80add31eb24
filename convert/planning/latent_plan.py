"""Plan a conversion to latent attention completely, before anything is written."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from convert.latent.frequencies import rope_parameters
from convert.latent.layer import LatentLayer
from convert.latent.recipe import LatentRecipe, is_exact
from convert.latent.sizes import FAST_KERNEL_SIZES, LatentSizes, choose_sizes
from convert.latent.stock_tensors import rounded_weight
from convert.planning.notes import partly_cached
from convert.planning.plan import TORCH_BYTES, Plan, plan_shards
from convert.planning.tensors import OutputTensor, Rows, Scaled
from model.checkpoint import Checkpoint, Shard, TensorInfo
from model.checkpoint.latent_norm import EPSILON, KEY
from model.checkpoint.llama_config import rope_entries
from model.checkpoint.tensor import is_rope_buffer
from model.checkpoint.tied import EMBEDDING, HEAD
from model.common.errors import CheckpointError
from model.common.file_names import CONVERSION_RECORD
from model.families import Family
from model.geometry import Geometry


@dataclass(frozen=True)
class LatentPlan(Plan):
    """One conversion to latent attention."""

    recipe: LatentRecipe
    sizes: LatentSizes
    config: dict[str, Any]
    """The output's `config.json`."""

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    @property
    def is_exact(self) -> bool:
        return is_exact(self.sizes, self.recipe.frequencies)

    @property
    def kv_cache_bytes(self) -> tuple[int, int]:
        n_layers = self.geometry.n_layers
        return 2 * n_layers * self.sizes.source_cached, 2 * n_layers * self.sizes.cached

    @property
    def layers(self) -> list[LatentLayer]:
        """The layers, in order."""
        return [conversion for conversion in self.conversions if isinstance(conversion, LatentLayer)]

    def _calibration_memory(self) -> int:
        """Estimate the bytes to run one layer: its weights in float32, its moments and its attention in float64."""
        layer = sum(t.nbytes for name, t in self.tensors.items() if self.in_layer(name)) // self.geometry.n_layers
        square = 8 * self.sizes.hidden_size**2
        reads = 2 * 8 * self.sizes.n_heads * self.sizes.cached**2
        # Moments, their roots and decompositions; copies of the attention: original, candidates, gradients, Adam's.
        running = 2 * layer + 8 * square + reads + (8 if self.recipe.refine else 5) * (self.largest_group // 2)
        return TORCH_BYTES + self.reader_bytes + max(running, self._embedding_memory())


def make_latent_plan(checkpoint: Checkpoint, recipe: LatentRecipe, max_shard_size: int | None) -> LatentPlan:
    """Plan a conversion of `checkpoint` to latent attention. Raises CheckpointError if that is impossible."""
    from convert.calibration.latent_source import read_source  # imported here, because it needs torch

    source = read_source(checkpoint)
    geometry = source.geometry
    sizes = choose_sizes(geometry, recipe.latent, recipe.rope_dims, recipe.norm, recipe.frequencies)
    _check_dtype(checkpoint, recipe)
    if recipe.positions is not None and max(recipe.positions) > source.rope.n_rotary_pairs:
        raise CheckpointError(
            f"{CONVERSION_RECORD} records a channel at position {max(recipe.positions):g}, but the source's heads have "
            f"{source.rope.n_rotary_pairs} RoPE pairs; the record is damaged, or that of another model."
        )
    scale = math.sqrt(EPSILON / source.config.rms_norm_eps)
    layers = [
        LatentLayer(
            recipe, sizes, source.rope, f"{prefix}self_attn.", f"{prefix}input_layernorm.weight", scale
        )
        for prefix in (f"model.layers.{index}." for index in range(geometry.n_layers))
    ]  # fmt: skip
    computed = _computed(checkpoint, layers, scale)
    shards = _shards(checkpoint, layers, computed)
    names = [name for shard in shards for name in shard.tensors]
    tensors = {name: computed[name].tensor if name in computed else checkpoint.tensors[name] for name in names}
    positions = recipe.positions
    rope = None if positions is None else rope_parameters(source.rope, positions)
    return LatentPlan(
        geometry=geometry,
        n_kv_heads=geometry.n_heads,
        recipe=recipe,
        max_shard_size=max_shard_size,
        tensors=tensors,
        shards=plan_shards(checkpoint, shards, tensors, max_shard_size),
        computed=computed,
        code=None,
        notes=(*checkpoint.notes, *partly_cached(checkpoint), *_notes(sizes, recipe, rope)),
        largest_group=max(2 * layer.nbytes for layer in layers),
        rewrites=any(checkpoint.span(name) is None for name in tensors.keys() - computed.keys()),
        reader_bytes=checkpoint.reader_bytes,
        sizes=sizes,
        config=_config(geometry, source.config.vocab_size, source.config.intermediate_size, source.rope.context, sizes)
        | {KEY: {"kind": sizes.norm, "weight": rounded_weight(sizes)}}
        | ({"rope_parameters": None} if rope is None else _rope_settings(rope))
        | _token_settings(checkpoint.config, geometry.attention.family)
        | _dtype_settings(checkpoint, layers[0].dtype(checkpoint)),
    )


def _token_settings(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return the settings of `config.json` that the output keeps: of the tokenizer, and the dtype.

    DeepSeek-V3's class has other defaults of the special tokens than Llama's and Mistral's, so these are written out.
    """
    defaults = {"bos_token_id": 1, "eos_token_id": 2}
    keys = ["bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "initializer_range", "use_cache"]
    if not family.ignores_tokenizer_class:  # transformers would not ignore it for the output's type
        keys.append("tokenizer_class")
    return defaults | {key: config[key] for key in keys if key in config}


def _dtype_settings(checkpoint: Checkpoint, tensors_dtype: str) -> dict[str, str]:
    """Return the entries of `config.json` on the dtype: that of the layers, whatever the source's config says.

    Programs load a model in that dtype, and in float16 the latent's norm would overflow.
    """
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    dtype = names.get(tensors_dtype)
    return {key: dtype for key in ("dtype", "torch_dtype") if key in checkpoint.config and dtype}


def _check_dtype(checkpoint: Checkpoint, recipe: LatentRecipe) -> None:
    """Raise CheckpointError if a layer's dtype cannot hold the latent's rows."""
    halves = [name for name, tensor in checkpoint.tensors.items() if tensor.dtype == "F16" and ".self_attn." in name]
    if halves and recipe.norm == "eps" and recipe.dtype is None:
        raise CheckpointError(
            f"the tensor {halves[0]} is float16, which cannot hold the small numbers of --latent-norm eps; give "
            "--dtype bfloat16, or keep float16 with --latent-norm bias, which few engines read."
        )


def _computed(checkpoint: Checkpoint, layers: list[LatentLayer], scale: float) -> dict[str, OutputTensor]:
    """Return the tensors of the output that differ from the source's, by name."""
    computed: dict[str, OutputTensor] = {}
    for layer in layers:
        dtype = layer.dtype(checkpoint)
        for name, shape in layer.names.shapes(layer.sizes).items():
            computed[name] = OutputTensor(TensorInfo(name, dtype, shape), layer=layer)
    written = [f"{layer.prefix.removesuffix('self_attn.')}mlp.down_proj.weight" for layer in layers]
    factors = dict.fromkeys((EMBEDDING, *written), scale)
    replaced = {name for layer in layers for name in layer.source}
    kept = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in replaced}
    if HEAD not in checkpoint.tensors:
        kept[HEAD] = replace(checkpoint.tensors[EMBEDDING], name=HEAD)
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


def _shards(
    checkpoint: Checkpoint, layers: list[LatentLayer], computed: dict[str, OutputTensor]
) -> tuple[Shard, ...]:  # fmt: skip
    """Return the source's shards with the output's tensors: each takes the place of the one that it replaces."""
    replaced: dict[str, tuple[str, ...]] = {}
    for layer in layers:
        query, key, value, output = layer.source
        q, kv_a, norm, kv_b, o, *biases = layer.tensors
        kv_a_bias, o_bias = (biases[:1], biases[1:])
        replaced |= {query: (q,), key: (kv_a, *kv_a_bias, norm), value: (kv_b,), output: (o, *o_bias)}
    if HEAD not in checkpoint.tensors:
        replaced[EMBEDDING] = (EMBEDDING, HEAD)

    def names(shard: Shard) -> Iterator[str]:
        for name in shard.tensors:
            if not is_rope_buffer(name):
                yield from replaced.get(name, (name,))

    shards = (replace(shard, tensors=tuple(names(shard))) for shard in checkpoint.shards)
    return tuple(shard for shard in shards if shard.tensors)


def _config(
    geometry: Geometry, vocab_size: int, intermediate_size: int, context: int, sizes: LatentSizes
) -> dict[str, Any]:
    """Return `config.json` of transformers' DeepSeek-V3 with dense layers only, but for its rotary embedding."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": vocab_size,
        "hidden_size": geometry.hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": geometry.n_layers,
        "num_attention_heads": geometry.n_heads,
        "num_key_value_heads": geometry.n_heads,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": EPSILON,
        "tie_word_embeddings": False,
        "attention_bias": sizes.norm == "bias",
        "attention_dropout": 0.0,
        "kv_lora_rank": sizes.latent,
        "q_lora_rank": None,
        "qk_rope_head_dim": sizes.rope_dims,
        "qk_nope_head_dim": sizes.nope,
        "v_head_dim": sizes.head_dim,
        "rope_interleave": True,
        # All layers are dense. Engines read the numbers of experts nevertheless.
        "first_k_dense_replace": geometry.n_layers,
        "moe_layer_freq": 1,
        "n_routed_experts": 1,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "moe_intermediate_size": intermediate_size,
        "num_nextn_predict_layers": 0,
    }


def _rope_settings(rope: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary embedding in the spellings of transformers 4 and 5."""
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return rope_entries(rope["rope_theta"], None if rope["rope_type"] == "default" else scaling)


def _notes(sizes: LatentSizes, recipe: LatentRecipe, rope: dict[str, Any] | None) -> Iterator[str]:
    if sizes.cached >= sizes.source_cached:
        yield (
            f"the latent and the rotated key are {sizes.cached} numbers for each token and layer, and the source "
            f"caches {sizes.source_cached}: nothing is saved."
        )
    if sizes.norm == "eps":
        yield "open the output in bfloat16 or float32: in float16 it computes NaN (--latent-norm bias does not)."
    if not sizes.has_fast_kernel:
        known = " and ".join(f"{latent} + {rope_dims}" for latent, rope_dims in FAST_KERNEL_SIZES)
        yield (
            f"vLLM has fast kernels of latent attention for {known}, and not for {sizes.latent} + {sizes.rope_dims}. "
            "On a GPU its Triton kernel takes any size (read in its source, not run). On a CPU it needs "
            "VLLM_MLA_DISABLE=1, and caches full keys and values."
        )
    # On a text, the frequencies are chosen later.
    if recipe.frequencies == "longrope" if rope is None else rope["rope_type"] != "default":
        yield (
            "the rotated key has frequencies of its own (rope_type longrope): transformers 5 computes them, and vLLM "
            "with --model-impl transformers; vLLM's own code of DeepSeek-V3 and SGLang do not, and llama.cpp computes "
            "other frequencies without a message. transformers warns of an unrecognised key, beta_fast, which is "
            "harmless: there it has no use, and it makes vLLM's own code stop."
        )
    if sizes.norm == "bias":
        yield (
            "--latent-norm bias puts the constant of the latent's norm into a bias: transformers reads it, and vLLM "
            "with --model-impl transformers; vLLM's own code of DeepSeek-V3 and SGLang ignore it, and llama.cpp "
            "refuses it."
        )
    if recipe.text is None and not is_exact(sizes, recipe.frequencies):
        yield "the heads are converted by the weights alone, without any text, which costs much quality."
