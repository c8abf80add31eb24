"""Tiny random checkpoints, made by transformers: what the converter meets, at a size that takes milliseconds."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PretrainedConfig,  # so named in transformers 4 too
    PreTrainedModel,
)

from model.families import FAMILIES
from model.families.family import Family, Wrapper

DEMO = Path(__file__).parents[2] / "assets/demo-mha"
"""The model that the repository holds, which is trained."""
N_LAYERS, N_HEADS, HIDDEN = 2, 8, 32
SIDE_FILES = {
    "tokenizer.json": '{"version": "1.0"}',
    "tokenizer_config.json": '{"model_max_length": 64}',
    "chat_template.jinja": "{{ messages }}",
    "chat_templates/tool.jinja": "{{ tools }}",
    "LICENSE": "be kind\n",
    "README.md": "---\nlicense: mit\n---\n\n# The source's own card\r\n",
    "modeling_extra.py": "# remote code travels along, and reads kv_n_heads\n",
}


EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}
LOCAL_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
# The families whose stock class holds any number of K/V heads; tests/support/families_without_gqa.py has the rest.
STOCK = tuple(
    name for name in FAMILIES if isinstance(entry := FAMILIES[name], Wrapper) or entry.stock_class_supports_gqa
)
# The families that `fit`, `pca` and `aligned` merge; tests/numerics/test_layers_of_t5.py has T5.
FITTED = tuple(
    name
    for name, entry in FAMILIES.items()
    if not isinstance(entry, Wrapper) and (entry.positions.rotary_fraction is not None or entry.positions.alibi)
    and not entry.is_encoder_decoder and name[-4:] != "_gqa"
)  # fmt: skip
# Of these, a family of each kind of attention; tests of more than a second leave the others to `scripts/test --all`.
KINDS = ("falcon", "gemma3_text", "glm", "gpt_neox", "gpt_oss", "llama", "mixtral", "mpt", "olmo2", "phi", "qwen3")
# The families with one norm over all heads together.
FLAT_NORMS = ("flex_olmo", "olmo2", "olmo3", "olmoe")
# Those whose stock class holds a K/V head for each query head only, or one.
ALWAYS_MHA = ("falcon", "gpt_neox", "mpt")
# Those whose config has no `head_dim` of its own.
IMPLIED_HEAD_DIM = (*ALWAYS_MHA, "olmo", *FLAT_NORMS)
# What keeps a family tiny, or its special tokens inside the vocabulary.
SETTINGS: dict[str, dict[str, Any]] = {
    "cwm": {"head_dim": 4, "sliding_window": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "dots1": {
        "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "n_shared_experts": 1,
    },
    "ernie4_5": {"head_dim": 4},
    "falcon": {"multi_query": False, "alibi": True, "bias": True, "parallel_attn": False},
    "flex_olmo": EXPERTS,
    "gemma": {"head_dim": 4},
    "gemma2": {"head_dim": 4},
    "gemma3_text": {"head_dim": 4},
    "glm": {"head_dim": 4},
    "glm4": {"head_dim": 4},
    "gpt_oss": {"head_dim": 4, **LOCAL_EXPERTS},
    "granitemoe": LOCAL_EXPERTS,
    "granitemoeshared": {**LOCAL_EXPERTS, "shared_intermediate_size": 24},
    "helium": {"head_dim": 4},
    "hunyuan_v1_dense": {"head_dim": 4},
    "hunyuan_v1_moe": {"head_dim": 4, "num_experts": 2, "moe_topk": [1, 1], "num_shared_expert": [1, 1]},
    "hyperclovax": {"head_dim": 4},
    "ministral": {"head_dim": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "ministral3": {"head_dim": 4, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 64,
    }},
    "mixtral": {"num_local_experts": 2},
    "mpt": {
        "max_seq_len": 64, "attn_config": {"attn_type": "multihead_attention", "alibi": True},
        "auto_map": {"AutoModelForCausalLM": "modeling_extra.MPTForCausalLM"},
    },
    "olmoe": EXPERTS,
    "phimoe": {"num_local_experts": 2},
    "qwen2_moe": {**EXPERTS, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    "qwen3": {"head_dim": 4},
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 24},
    "seed_oss": {"head_dim": 4},
    "solar_open": {
        "head_dim": 4, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_shared_experts": 1,
        "moe_intermediate_size": 24,
    },
}  # fmt: skip
# For phi3. Beyond 16 tokens, the longest document of a batch decides on the frequencies of all.
LONGROPE = {
    "original_max_position_embeddings": 16,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 2, "long_factor": [2.0] * 2,
    },
}  # fmt: skip
# Around language models: the family of the one inside, and what keeps the rest tiny.
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION = {**SIZES, "image_size": 8, "patch_size": 4}
CLIP = {"model_type": "clip_vision_model", **VISION, "projection_dim": 8}
SIGLIP = {"model_type": "siglip_vision_model", **VISION}
GOT = {**VISION, "window_size": 1, "global_attn_indexes": [1], "mlp_dim": 24, "output_channels": 8}
SAM = {
    "hidden_size": 16, "output_channels": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 8, "window_size": 2, "global_attn_indexes": [0], "mlp_dim": 24,
}  # fmt: skip
JANUS = {**VISION, "projection_dim": HIDDEN, "mlp_ratio": 2}
VQ = {
    "embed_dim": 4, "num_embeddings": 8, "latent_channels": 4, "base_channels": 32, "channel_multiplier": [1],
    "num_res_blocks": 1, "projection_dim": HIDDEN, "image_token_embed_dim": HIDDEN,
}  # fmt: skip
AUDIO = {
    "num_mel_bins": 4, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "d_model": 16,
    "max_source_positions": 8,
}  # fmt: skip
RESAMPLER = {
    "hidden_size": HIDDEN, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 4,
    "resampler_head_dim": 8, "num_key_value_heads": 2,
}  # fmt: skip
IMAGE_TOKEN = dict.fromkeys(
    (
        "cohere2_vision", "deepseek_vl", "deepseek_vl_hybrid", "idefics2", "idefics3", "internvl", "janus", "ovis2",
        "qwen3_vl", "smolvlm",
    ),
    "image_token_id",
)  # fmt: skip
IMAGE_TOKEN["qwen2_audio"] = "audio_token_index"
TEXT_TYPES = {"qwen3_vl": "qwen3_vl_text"}
"""Of wrappers whose language model computes what a family does, but has a type of its own."""
WRAPPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "aya_vision": ("cohere2", {"vision_config": SIGLIP}),
    "cohere2_vision": ("cohere2", {"vision_config": SIGLIP, "alignment_intermediate_size": 24}),
    "deepseek_vl": ("llama", {"vision_config": SIGLIP}),
    "deepseek_vl_hybrid": ("llama", {"vision_config": SIGLIP, "high_res_vision_config": SAM}),
    "gemma3": ("gemma3_text", {"vision_config": SIGLIP, "mm_tokens_per_image": 4}),
    "got_ocr2": ("qwen2", {"vision_config": GOT}),
    "idefics2": ("mistral", {"vision_config": VISION, "perceiver_config": RESAMPLER}),
    "idefics3": ("llama", {"vision_config": VISION, "scale_factor": 2}),
    "internvl": ("qwen2", {"vision_config": {**SIZES, "image_size": [8, 8], "patch_size": [4, 4]}}),
    "janus": ("llama", {"vision_config": JANUS, "vq_config": VQ}),
    "llava": ("llama", {"vision_config": CLIP}),
    "llava_next": ("llama", {"vision_config": CLIP}),
    "llava_next_video": ("llama", {"vision_config": CLIP}),
    "llava_onevision": ("qwen2", {"vision_config": SIGLIP}),
    "mistral3": ("ministral3", {"vision_config": {"model_type": "pixtral", **VISION}, "spatial_merge_size": 1}),
    "ovis2": ("qwen2", {"vision_config": {**VISION, "vocab_size": 16}, "hidden_size": HIDDEN, "vocab_size": 67}),
    "paligemma": ("gemma2", {"vision_config": SIGLIP, "projection_dim": HIDDEN}),
    "qwen2_audio": ("qwen2", {"audio_config": AUDIO}),
    "qwen3_vl": (
        "qwen3",
        {
            "vision_config": {
                "depth": 2,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_heads": 2,
                "patch_size": 4,
                "spatial_merge_size": 1,
                "out_hidden_size": HIDDEN,
                "num_position_embeddings": 4,
                "deepstack_visual_indexes": [0],
            },
        },
    ),
    "smolvlm": ("llama", {"vision_config": VISION, "scale_factor": 2}),
    "video_llava": ("llama", {"vision_config": CLIP}),
    "vipllava": ("llama", {"vision_config": CLIP, "vision_feature_layers": [0, 1]}),
}


def kinds_first(families: tuple[str, ...]) -> list[Any]:
    """Return parameters of a test: the families of KINDS, and the others with the mark `slow`."""
    others = [pytest.param(family, marks=pytest.mark.slow) for family in families if family not in KINDS]
    return [*(family for family in families if family in KINDS), *others]


def few(family: str) -> int:
    """Return a number of K/V heads to merge to: two if the family allows it."""
    entry = FAMILIES[inner(family)]
    return 1 if isinstance(entry, Family) and entry.only_multi_query else 2


def inner(family: str) -> str:
    """Return the family of the language model itself."""
    return WRAPPERS[family][0] if family in WRAPPERS else family


def make_config(family: str = "llama", **changes: Any) -> PretrainedConfig:
    """Return the config of a tiny model; of a wrapper, `changes` are the language model's."""
    settings: dict[str, Any] = {
        "vocab_size": 67, "hidden_size": HIDDEN, "intermediate_size": 40, "num_hidden_layers": N_LAYERS,
        "num_attention_heads": N_HEADS, "num_key_value_heads": N_HEADS, "max_position_embeddings": 64,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
    }  # fmt: skip
    settings |= {**SETTINGS.get(inner(family), {}), **changes}
    if family in WRAPPERS:
        text = {"model_type": TEXT_TYPES.get(family, inner(family)), **settings}
        image = IMAGE_TOKEN.get(family, "image_token_index")
        return AutoConfig.for_model(family, text_config=text, **{image: 66}, **copy.deepcopy(WRAPPERS[family][1]))
    return AutoConfig.for_model(family, **settings)


def model_class(family: str) -> Any:
    return AutoModelForMultimodalLM if family in WRAPPERS else AutoModelForCausalLM


def build(family: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a random float32 model; biases and attention's norms, where the family has them, are random too."""
    assert family in FAMILIES
    torch.manual_seed(seed)
    attention = None if family == "falcon" else "eager"  # its eager code adds ALiBi twice
    model = model_class(family).from_config(make_config(family, **changes), attn_implementation=attention).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or ("self_attn" in name and "norm" in name):
            torch.nn.init.normal_(parameter, mean=float(name.endswith("weight")), std=0.1)
    return model


def equal_in_pairs(model: PreTrainedModel, head_dim: int) -> PreTrainedModel:
    """Give both dimensions of a RoPE pair one norm weight, so that norms and rotations can change places."""
    for name, parameter in model.named_parameters():
        if "self_attn" in name and "norm" in name:
            half = parameter.data.view(-1, 2, head_dim // 2)[:, :1]
            parameter.data = half.repeat(1, 2, 1).flatten()
    return model


def save(model: PreTrainedModel, folder: Path, dtype: str = "float32", max_shard_size: str = "1GB") -> Path:
    """Save a model as users have it, with the other files of such a folder. `mixed` keeps norms in float32."""
    wanted = torch.bfloat16 if dtype == "mixed" else getattr(torch, dtype)
    model.to(wanted).save_pretrained(folder, max_shard_size=max_shard_size)
    model.float()
    if dtype == "mixed":
        for file in folder.glob("*.safetensors"):
            tensors = {n: t.float() if "norm" in n or "v_proj" in n else t for n, t in load_file(file).items()}
            save_file(tensors, file, metadata={"format": "pt"})
        fix_index(folder)
    for name, text in SIDE_FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode())
    return folder


def fix_index(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    if path.exists():
        index = json.loads(path.read_text())
        index["metadata"]["total_size"] = sum(t.nbytes for t in tensors(folder).values())
        path.write_text(json.dumps(index))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a folder with the safetensors library."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def is_kv(name: str) -> bool:
    return ".self_attn.k_proj." in name or ".self_attn.v_proj." in name


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; a value of `...` removes the key."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder with its content."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
