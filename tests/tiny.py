"""Tiny random checkpoints, made by transformers: what the converter meets, at a size that takes milliseconds."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from model.families import FAMILIES

N_LAYERS, N_HEADS, HIDDEN = 2, 8, 32
SIDE_FILES = {
    "tokenizer.json": '{"version": "1.0"}',
    "tokenizer_config.json": '{"model_max_length": 64}',
    "chat_template.jinja": "{{ messages }}",
    "chat_templates/tool.jinja": "{{ tools }}",
    "LICENSE": "be kind\n",
    "README.md": "---\nlicense: mit\n---\n\n# The source's own card\r\n",
    "modeling_extra.py": "# remote code travels along\n",
}


def build(family: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a random float32 model; biases, where the family has them, are random too."""
    assert family in FAMILIES
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": 67, "hidden_size": HIDDEN, "intermediate_size": 40, "num_hidden_layers": N_LAYERS,
        "num_attention_heads": N_HEADS, "num_key_value_heads": N_HEADS, "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }  # fmt: skip
    config = AutoConfig.for_model(family, **{**settings, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
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
