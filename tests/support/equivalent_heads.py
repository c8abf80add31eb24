"""Write MHA models whose K/V heads are equal up to an invertible map of each head."""

import json

import tiny
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

IDS = torch.randint(0, 66, (3, 17), generator=torch.Generator().manual_seed(0))
INTERLEAVED = ("cohere", "cohere2", "ernie4_5", "glm", "glm4", "helium")
"""Families that rotate neighbouring dimensions together; the others rotate i with i + half."""
SHARES = {
    "falcon": 0.0, "glm": 0.5, "glm4": 0.5, "gpt_neox": 0.25, "mpt": 0.0, "nemotron": 0.5, "phi": 0.5, "stablelm": 0.25,
}  # fmt: skip
"""Share of a head's dimensions that have rotary embeddings, where that is not all."""
OUTPUTS = {"falcon": "dense", "gpt_neox": "dense", "mpt": "out_proj", "phi": "dense"}


def logits(folder, **how):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **how).eval()
    with torch.inference_mode():
        return model(input_ids=IDS).logits


def equivalent_mha(source, folder, n_kv_heads, unrotated=()):
    """Write the model `source` with one K/V head per query head, each mapped differently; the logits stay.

    Norms must be `equal_in_pairs`.

    Uses torch and complex numbers, not the tested code. The layers `unrotated` have no rotary embedding. Coordinates of
    a key without rotary embedding get a random orthogonal map. A family whose stock class holds no fewer heads
    starts from heads that are equal already.
    """
    config = json.loads((source / "config.json").read_text())
    family = config["model_type"]
    tensors, generator = tiny.tensors(source), torch.Generator().manual_seed(0)
    output = OUTPUTS.get(family, "o_proj")
    for stem in sorted({name.rpartition(output)[0] for name in tensors if name.endswith(f".{output}.weight")}):
        read = tensors[f"{stem}{output}.weight"]
        head_dim = read.shape[1] // tiny.N_HEADS
        n_rotated = 0 if _layer(stem) in unrotated else int(head_dim * SHARES.get(family, 1.0))
        angles = torch.rand(tiny.N_HEADS, n_rotated // 2, 1, generator=generator, dtype=torch.float64) * 6.28
        rotation = torch.polar(torch.ones_like(angles), angles)
        value_maps = torch.linalg.qr(torch.randn(tiny.N_HEADS, head_dim, head_dim, generator=generator).double())[0]
        n_unrotated = head_dim - n_rotated
        key_maps = torch.linalg.qr(torch.randn(tiny.N_HEADS, n_unrotated, n_unrotated, generator=generator).double())[0]
        first, second = slice(0, n_rotated // 2), slice(n_rotated // 2, n_rotated)
        if family in INTERLEAVED:
            first, second = slice(0, n_rotated, 2), slice(1, n_rotated, 2)
        for kind in ("weight", "bias"):
            parts = _parts(tensors, stem, kind, head_dim, n_kv_heads)
            for part, rows in parts.items():
                heads = rows.double().reshape(-1, head_dim, rows[0].numel())
                heads = heads.repeat_interleave(tiny.N_HEADS // len(heads), 0)
                if part == "v":
                    parts[part] = value_maps @ heads
                    continue
                rotated = torch.complex(heads[:, first], heads[:, second]) * rotation
                parts[part] = heads.clone()
                parts[part][:, first], parts[part][:, second] = rotated.real, rotated.imag
                parts[part][:, n_rotated:] = key_maps @ heads[:, n_rotated:]
            _put(tensors, stem, kind, parts)
        norm = f"{stem}k_norm.weight"
        if norm in tensors and len(tensors[norm]) > head_dim:  # of all heads together
            tensors[norm] = tensors[norm].view(-1, head_dim).repeat_interleave(tiny.N_HEADS // n_kv_heads, 0).flatten()
        per_head = read.double().unflatten(1, (tiny.N_HEADS, head_dim))
        tensors[f"{stem}{output}.weight"] = torch.einsum("mhd,hed->mhe", per_head, value_maps).flatten(1).float()
    folder.mkdir()
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    for file in (*source.glob("generation_config.json"), *source.glob("tokenizer*"), *source.glob("*.py")):
        (folder / file.name).write_bytes(file.read_bytes())
    if family not in tiny.ALWAYS_MHA:
        config["num_key_value_heads"] = tiny.N_HEADS
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def share_heads(source, n_kv_heads):
    """Give neighbouring heads of a model in ALWAYS_MHA one key and one value, in place."""
    tensors = tiny.tensors(source)
    size = tiny.N_HEADS // n_kv_heads
    for name in tensors:
        if "query_key_value" in name:
            heads = tensors[name].unflatten(0, (tiny.N_HEADS, 3, -1)).clone()
            heads[:, 1:] = heads[::size, 1:].repeat_interleave(size, 0)
            tensors[name] = heads.flatten(0, 2)
        elif "Wqkv" in name:
            heads = tensors[name].unflatten(0, (3, tiny.N_HEADS, -1)).clone()
            heads[1:] = heads[1:, ::size].repeat_interleave(size, 1)
            tensors[name] = heads.flatten(0, 2)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return source


def for_stock_class(folder):
    """Return a merged model for the stock class. MPT's holds no fewer K/V heads: it gets a copy with them repeated."""
    config = json.loads((folder / "config.json").read_text())
    if "kv_n_heads" not in config.get("attn_config", ()):
        return folder
    n_kv_heads, tensors = config["attn_config"].pop("kv_n_heads"), tiny.tensors(folder)
    for name in [name for name in tensors if "Wqkv" in name]:
        q, kv = tensors[name].tensor_split([config["d_model"]])
        kv = kv.unflatten(0, (2, n_kv_heads, -1)).repeat_interleave(tiny.N_HEADS // n_kv_heads, 1).flatten(0, 2)
        tensors[name] = torch.cat([q, kv])
    config["attn_config"]["attn_type"] = "multihead_attention"
    repeated = folder.with_name(f"{folder.name}-repeated")
    repeated.mkdir()
    save_file(tensors, repeated / "model.safetensors", metadata={"format": "pt"})
    (repeated / "config.json").write_text(json.dumps(config))
    return repeated


def _layer(stem):
    return next(int(part) for part in stem.split(".") if part.isdigit())


def _parts(tensors, stem, kind, head_dim, n_kv_heads):
    """Return the rows of queries, keys and values, from three tensors or from a fused one; empty if there are none."""
    if f"{stem}query_key_value.{kind}" in tensors:  # query, key and value of each head
        heads = tensors[f"{stem}query_key_value.{kind}"].unflatten(0, (tiny.N_HEADS, 3, head_dim))
        return {part: heads[:, i].flatten(0, 1) for i, part in enumerate("qkv")}
    for name in (f"{stem}qkv_proj.{kind}", f"{stem}Wqkv.{kind}"):  # all queries, all keys, all values
        if name in tensors:
            n = tiny.N_HEADS if "Wqkv" in name else n_kv_heads
            sizes = [tiny.N_HEADS * head_dim, n * head_dim, n * head_dim]
            return dict(zip("qkv", tensors[name].split(sizes), strict=True))
    names = {part: f"{stem}{part}_proj.{kind}" for part in "qkv"}
    return {part: tensors[name] for part, name in names.items() if name in tensors}


def _put(tensors, stem, kind, parts):
    """Replace the tensors of `_parts` by heads [heads, head_dim, inputs]."""
    if not parts:
        return
    for name, joined in (
        (f"{stem}query_key_value.{kind}", lambda: torch.stack([parts[part] for part in "qkv"], 1).flatten(0, 2)),
        (f"{stem}qkv_proj.{kind}", lambda: torch.cat([parts[part] for part in "qkv"]).flatten(0, 1)),
        (f"{stem}Wqkv.{kind}", lambda: torch.cat([parts[part] for part in "qkv"]).flatten(0, 1)),
    ):
        if name in tensors:
            tensors[name] = joined().reshape(-1, *tensors[name].shape[1:]).float()
            return
    for part, heads in parts.items():
        name = f"{stem}{part}_proj.{kind}"
        tensors[name] = heads.flatten(0, 1).reshape(-1, *tensors[name].shape[1:]).float()
