"""The families whose stock class holds any number of K/V heads: their layouts, and models in those classes."""

from pathlib import Path

import tiny
import torch
from transformers import PreTrainedModel

# Layouts beside the plain one.
VARIANTS = {
    "cohere": [{"use_qk_norm": True}, {"attention_bias": True}],
    "ernie4_5": [{"use_bias": True}],
    "gemma": [{"tie_word_embeddings": True}],
    "glm": [{"attention_bias": True}],
    "granite": [{"attention_bias": True}],
    "llama": [{"attention_bias": True}, {"tie_word_embeddings": True}, {"head_dim": 24}],
    "mistral": [{"head_dim": 24}],
    "nemotron": [{"head_dim": 24}],
    "olmo": [{"clip_qkv": 0.1}],
    "olmo2": [{"attention_bias": True}],
    "phi": [{"qk_layernorm": True}],
    "phimoe": [{"attention_bias": True}],
    "qwen2": [{"tie_word_embeddings": True}],
    "qwen3": [{"head_dim": 24, "attention_bias": True}],
    "stablelm": [{"use_qkv_bias": True}, {"qk_layernorm": True}],
    "starcoder2": [{"use_bias": False}],
}
CASES = [(family, changes) for family in tiny.STOCK for changes in [{}, *VARIANTS.get(family, [])]]
# Wide enough that the matrix products of the two models, which have different numbers of columns, run the same way.
SIZE = {"hidden_size": 128, "intermediate_size": 192}


def open_folder(family: str, folder: Path) -> PreTrainedModel:
    """Open a folder in transformers and check that every tensor found its place."""
    model, loading = tiny.model_class(family).from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(loading.values()), loading
    return model.eval()


def difference(parent: torch.nn.Module, child: torch.nn.Module) -> float:
    """Return the largest difference of two models' logits."""
    ids = torch.randint(0, 66, (3, 17), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = parent(input_ids=ids).logits
        assert logits.std() > 1e-3
        return (logits - child(input_ids=ids).logits).abs().max().item()
