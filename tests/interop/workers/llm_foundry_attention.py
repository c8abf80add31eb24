"""Run llm-foundry's own grouped-query attention on the attention weights of MPT folders; answer with its outputs.

Only its file `attention.py` is loaded, with stand-ins for what it imports of the rest, which wants a training cluster's
libraries: registries, and functions that make plain linear layers and norms.
"""

import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn


class Registry(dict):
    """What functions and classes are entered into by name."""

    def register_class(self, name):
        return lambda cls: self.setdefault(name, cls)

    def register(self, name, func):
        self[name] = func


def build_fc(name, in_features, out_features, fc_kwargs):
    return nn.Linear(in_features, out_features, bias=fc_kwargs["bias"])


def build_norm(name, normalized_shape, eps, device):
    return nn.LayerNorm(normalized_shape, eps, bias=False)


def load_attention():
    stand_ins = {
        "llmfoundry": {},
        "llmfoundry.layers_registry": {"attention_classes": Registry(), "attention_implementations": Registry()},
        "llmfoundry.models": {},
        "llmfoundry.models.layers": {},
        "llmfoundry.models.layers.layer_builders": {"build_fc": build_fc, "build_norm": build_norm},
        "llmfoundry.models.utils": {},
        "llmfoundry.models.utils.config_defaults": {"fc_type_defaults": {"name": "torch"}},
    }
    for name, content in stand_ins.items():
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = []
        vars(module).update(content)
    file = next(f for f in importlib.metadata.files("llm-foundry") if f.name == "attention.py")
    spec = importlib.util.spec_from_file_location("attention", file.locate())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


here = Path(sys.argv[1])
request = json.loads((here / "request.json").read_text())
torch.set_num_threads(1)
attention = load_attention()
arrays = {}
for name, folder in request["folders"].items():
    config = SimpleNamespace(**json.loads((Path(folder) / "config.json").read_text()))
    tensors = load_file(next(Path(folder).glob("*.safetensors")))
    x = torch.randn(2, 11, config.d_model, generator=torch.Generator().manual_seed(1))
    for layer in range(config.n_layers):
        stem = f"transformer.blocks.{layer}.attn."
        weights = {n.removeprefix(stem): t for n, t in tensors.items() if n.startswith(stem)}
        module = attention.GroupedQueryAttention(
            config.d_model, config.n_heads, config.attn_config.get("kv_n_heads", config.n_heads), attn_impl="torch",
            qk_ln="k_ln.weight" in weights, bias=False, attention_bias=False,
        )  # fmt: skip
        module.load_state_dict(weights)
        with torch.inference_mode():
            arrays[f"{name} {layer}"] = module(x, is_causal=True)[0].numpy()
(here / "answer.json").write_text(json.dumps({"version": importlib.metadata.version("llm-foundry")}))
np.savez(here / "answer.npz", **arrays)
