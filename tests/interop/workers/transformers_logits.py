"""Open folders in the transformers of this environment; answer with what the config was taken for, and logits.

Models of Groupwise's own code also decode some tokens.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM


def base_of_rope(config):
    """Return it as version 4 has it, or version 5, or version 5 where kinds of layers differ."""
    if hasattr(config, "rope_theta"):
        return config.rope_theta
    rope = getattr(config, "rope_parameters", None)
    if rope is None:
        return None
    return rope.get("full_attention", rope)["rope_theta"]


def open_and_run(folder, ids):
    """Return what the model was taken for, and its logits: of one forward pass, and of each token that it decodes."""
    config = json.loads((Path(folder) / "config.json").read_text())
    inputs = {"input_ids": torch.tensor(ids)}
    auto = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    if config.get("is_encoder_decoder"):
        auto, inputs["decoder_input_ids"] = AutoModelForSeq2SeqLM, inputs["input_ids"].flip(1)
    has_own_code = "auto_map" in config
    model, loading = auto.from_pretrained(
        folder,
        output_loading_info=True,
        attn_implementation="eager",
        dtype="auto",
        trust_remote_code=has_own_code,
    )
    config = model.config.get_text_config()
    facts = {
        "loading": {key: sorted(map(str, value)) for key, value in loading.items() if value},
        "class": type(model).__name__,
        "n_kv_heads": getattr(config, "num_key_value_heads", config.num_attention_heads),
        "theta": base_of_rope(config),
        "dtype": str(next(p for p in model.parameters() if p.dim() > 1).dtype),
    }
    model = model.float().eval()
    with torch.inference_mode():
        logits = [model(**inputs).logits.flatten()]
        if has_own_code:  # to which versions hand the cache by different names
            options = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}
            options |= {"output_logits": True, "return_dict_in_generate": True}
            given = inputs["input_ids"]
            decoded = model.generate(given, attention_mask=torch.ones_like(given), **options)
            facts["decoded"] = decoded.sequences.tolist()
            logits += [step.flatten() for step in decoded.logits]
        return facts, torch.cat(logits).numpy()


here = Path(sys.argv[1])
request = json.loads((here / "request.json").read_text())
torch.set_num_threads(1)
answer, arrays = {"version": transformers.__version__, "models": {}}, {}
for name, folder in request["folders"].items():
    try:
        answer["models"][name], arrays[name] = open_and_run(folder, request["ids"])
    except Exception as error:  # of one folder; the others are asked about all the same
        answer["models"][name] = {"error": f"{type(error).__name__}: {error}"}
(here / "answer.json").write_text(json.dumps(answer))
np.savez(here / "answer.npz", **arrays)
