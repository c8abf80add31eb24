"""The real weights that the package glassllm carries (a tiny Llama, 3 MB), through the whole of `convert`."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

PACKAGE = importlib.util.find_spec("glassllm")
pytestmark = pytest.mark.skipif(
    PACKAGE is None, reason="needs `pip install --no-deps glassllm==0.1.0` (scripts/setup does)"
)
# Its names for those of Llama. Its matrices stand the other way round.
PARTS = {
    "norm1.gamma": "input_layernorm", "norm2.gamma": "post_attention_layernorm", "attn.W_Q": "self_attn.q_proj",
    "attn.W_K": "self_attn.k_proj", "attn.W_V": "self_attn.v_proj", "attn.W_O": "self_attn.o_proj",
    "ffn.W1": "mlp.gate_proj", "ffn.W3": "mlp.up_proj", "ffn.W2": "mlp.down_proj",
}  # fmt: skip


def weights() -> Path:
    assert PACKAGE is not None and PACKAGE.origin is not None
    return Path(PACKAGE.origin).parent / "weights/en.npz"


def half_split(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Order each head's rows as Llama rotates them: glassllm rotates neighbours, Llama the two halves."""
    return rows.view(-1, head_dim // 2, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return the model as a Hugging Face folder, every number as it is in the package."""
    folder = tmp_path_factory.mktemp("glassllm") / "source"
    folder.mkdir()
    with np.load(weights()) as data:
        config = json.loads(str(data["__config__"]))
        arrays = {name: torch.from_numpy(data[name]) for name in data if name != "__config__"}
    head_dim = config["d_model"] // config["n_heads"]
    tensors = {"model.embed_tokens.weight": arrays.pop("E"), "model.norm.weight": arrays.pop("norm_f.gamma")}
    for name, tensor in arrays.items():
        _, layer, part = name.split(".", 2)
        rows = tensor.T.contiguous() if tensor.ndim == 2 else tensor
        if part in ("attn.W_Q", "attn.W_K"):
            rows = half_split(rows, head_dim)
        tensors[f"model.layers.{layer}.{PARTS[part]}.weight"] = rows.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(
        json.dumps({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float16",
            "vocab_size": config["vocab_size"], "hidden_size": config["d_model"],
            "intermediate_size": len(tensors["model.layers.0.mlp.gate_proj.weight"]),
            "num_hidden_layers": config["n_layers"], "num_attention_heads": config["n_heads"],
            "num_key_value_heads": config["n_kv_heads"], "max_position_embeddings": config["max_len"],
            "rope_theta": config["rope_base"], "rms_norm_eps": config["eps"], "tie_word_embeddings": True,
            "hidden_act": "silu", "bos_token_id": 2, "eos_token_id": 3,
        })
    )  # fmt: skip
    return folder


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return model(input_ids=ids).logits


@pytest.fixture(scope="module")
def ids():
    return torch.randint(4, 1024, (2, 48), generator=torch.Generator().manual_seed(0))


def test_the_folder_is_the_package_s_model(source, ids):
    from glassllm.model import GlassLM

    theirs = torch.from_numpy(GlassLM.load(weights()).forward(ids.numpy()).data)
    assert theirs.std() > 1
    assert (logits(source, ids) - theirs).abs().max() < 1e-4


def replicated(source: Path, out: Path, folder: Path) -> Path:
    """Return the parent with each of its K/V heads replaced by its group's mean."""
    tensors, merged = tiny.tensors(source), tiny.tensors(out)
    for name in filter(tiny.is_kv, tensors):
        times = len(tensors[name]) // len(merged[name])
        head_dim = 32
        tensors[name] = merged[name].view(-1, head_dim, 128).repeat_interleave(times, 0).reshape(tensors[name].shape)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


@pytest.mark.parametrize("groups", [2, 1])
def test_replicated_heads_oracle(convert, source, ids, tmp_path, groups):
    out = tmp_path / "out"
    assert [row["groups"] for row in json.loads(convert("inspect", source, "--json").out)["groups"]] == [2, 1]
    convert("mha-to-gqa", "--method", "mean", source, out, "--groups", groups).succeeded()
    convert("verify", source, out).succeeded()
    before, after = tiny.tensors(source), tiny.tensors(out)
    for name, tensor in after.items():
        if tiny.is_kv(name):
            mean = before[name].double().view(groups, 2 // groups, 32, 128).mean(1).half()
            assert torch.equal(tensor, mean.view(tensor.shape)), name
        else:
            assert torch.equal(tensor, before[name]), name
    child = logits(out, ids)
    assert torch.equal(child, logits(replicated(source, out, tmp_path / "again"), ids))
    assert torch.equal(child, logits(source, ids)) == (groups == 2)
