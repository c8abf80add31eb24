"""Write MHA models whose K/V heads are equal up to an invertible map of each head."""

import json

import tiny
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

IDS = torch.randint(0, 66, (3, 17), generator=torch.Generator().manual_seed(0))


def logits(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return model(input_ids=IDS).logits


def equivalent_mha(source, folder, n_kv_heads, share=1.0, output="o_proj", unrotated=()):
    """Write the model `source` with one K/V head per query head, each rotated differently; the logits stay.

    Uses torch and complex numbers, not the tested code. `share` of a head's coordinates have rotary embeddings, and
    none in the layers `unrotated`. The other coordinates of a key get a random orthogonal map.
    """
    tensors, generator = tiny.tensors(source), torch.Generator().manual_seed(0)
    for stem in {name.rpartition("k_proj")[0] for name in tensors if name.endswith("k_proj.weight")}:
        heads_per_group = tiny.N_HEADS // n_kv_heads
        head_dim = len(tensors[f"{stem}q_proj.weight"]) // tiny.N_HEADS
        n_rotated = 0 if int(stem.split(".")[2]) in unrotated else int(head_dim * share)
        angles = torch.rand(tiny.N_HEADS, n_rotated // 2, 1, generator=generator, dtype=torch.float64) * 6.28
        rotation = torch.polar(torch.ones_like(angles), angles)
        value_maps = torch.linalg.qr(torch.randn(tiny.N_HEADS, head_dim, head_dim, generator=generator).double())[0]
        n_unrotated = head_dim - n_rotated
        key_maps = torch.linalg.qr(torch.randn(tiny.N_HEADS, n_unrotated, n_unrotated, generator=generator).double())[0]
        for part in ("q_proj", "k_proj", "v_proj"):
            for kind in ("weight", "bias"):
                name = f"{stem}{part}.{kind}"
                if name not in tensors:
                    continue
                heads = tensors[name].double().reshape(-1, head_dim, tensors[name][0].numel())
                if part != "q_proj":
                    heads = heads.repeat_interleave(heads_per_group, 0)
                if part == "v_proj":
                    heads = value_maps @ heads
                else:
                    rotated = torch.complex(heads[:, : n_rotated // 2], heads[:, n_rotated // 2 : n_rotated]) * rotation
                    heads = torch.cat([rotated.real, rotated.imag, key_maps @ heads[:, n_rotated:]], dim=1)
                shape = (-1, *tensors[name].shape[1:])
                tensors[name] = heads.flatten(0, 1).reshape(shape).float().contiguous()
        name = f"{stem}{output}.weight"
        read = tensors[name].double().unflatten(1, (tiny.N_HEADS, head_dim))
        tensors[name] = torch.einsum("mhd,hed->mhe", read, value_maps).flatten(1).float().contiguous()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for file in source.glob("generation_config.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_key_value_heads": tiny.N_HEADS}))
    return folder
