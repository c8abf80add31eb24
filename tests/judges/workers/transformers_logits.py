"""Open folders in the transformers of this environment; answer with their logits and what the config was taken for."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText


def base_of_rope(config):
    """Return it as version 4 has it, or version 5, or version 5 where kinds of layers differ."""
    if hasattr(config, "rope_theta"):
        return config.rope_theta
    rope = config.rope_parameters
    return rope.get("full_attention", rope)["rope_theta"]


here = Path(sys.argv[1])
request = json.loads((here / "request.json").read_text())
torch.set_num_threads(1)
answer, arrays = {"version": transformers.__version__, "models": {}}, {}
for name, folder in request["folders"].items():
    wrapper = "vision_config" in json.loads((Path(folder) / "config.json").read_text())
    auto = AutoModelForImageTextToText if wrapper else AutoModelForCausalLM
    found = answer["models"][name] = {}
    model, loading = auto.from_pretrained(folder, output_loading_info=True, attn_implementation="eager", dtype="auto")
    config = model.config.get_text_config()
    found["loading"] = {key: sorted(map(str, value)) for key, value in loading.items() if value}
    found["class"] = type(model).__name__
    found["n_kv_heads"] = config.num_key_value_heads
    found["theta"] = base_of_rope(config)
    found["dtype"] = str(next(p for p in model.parameters() if p.dim() > 1).dtype)
    with torch.inference_mode():
        arrays[name] = model.float().eval()(input_ids=torch.tensor(request["ids"])).logits.numpy()
(here / "answer.json").write_text(json.dumps(answer))
np.savez(here / "answer.npz", **arrays)
