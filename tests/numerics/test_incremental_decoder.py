"""Whole models run token by token with a KV cache, against one forward pass of transformers' class over all tokens."""

import pytest
import tiny
import torch

from convert.layers.incremental_decoder import open_model
from model.checkpoint import open_checkpoint

LENGTH = 16
IDS = torch.randint(0, 60, (3, LENGTH), generator=torch.Generator().manual_seed(0))
SLIDING = {"sliding_window": 5}
CHANGES = {"gemma2": SLIDING, "gpt_oss": SLIDING, "mistral": SLIDING}


@pytest.mark.parametrize("family", [*tiny.FITTED, *tiny.WRAPPERS])
def test_one_token_at_a_time(tmp_path, family):
    model = tiny.build(family, initializer_range=0.2, **CHANGES.get(tiny.inner(family), {}))
    folder = tiny.save(model, tmp_path / "source")
    with open_checkpoint(folder) as checkpoint, torch.inference_mode():
        ours = open_model(checkpoint, "cpu")
        ours.begin(len(IDS), LENGTH)
        logits_BTV = torch.stack([ours.append(ids_B) for ids_B in IDS.T], dim=1)
        expected_BTV = model(IDS).logits
        if family in ("aya_vision", "cohere2_vision"):  # classes around Cohere 2 leave out the scale of its logits
            expected_BTV *= model.config.text_config.logit_scale
    assert float((logits_BTV - expected_BTV).norm()) <= 1e-5 * float(expected_BTV.norm())
    assert ours.n_embeddings == 67
