"""Packed documents in transformers' classes with sliding windows: their logits are those of each document alone."""

import pytest
import tiny
import torch

from model.common.errors import CheckpointError
from model.decoder.transformers_model import TransformersModel

DOCUMENTS = [[15, 25], [40]]
"""Tokens of the documents in each row. All are longer than the window."""
WINDOW = 7
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
USED = {"use_sliding_window": True}
CASES = [
    *((family, MIXED) for family in ("cohere2", "dots1", "exaone4", "gemma2", "gemma3_text", "gpt_oss", "olmo3")),
    *((family, {**MIXED, **USED}) for family in ("qwen2_moe", "qwen3", "smollm3")),
    *((family, {"layer_types": ["sliding_attention"] * 2}) for family in ("cohere2", "gemma3_text")),
    *((family, {}) for family in ("gemma2", "gpt_oss", "ministral3", "mixtral", "phi3", "phimoe", "starcoder2")),
    ("qwen3_moe", USED),
]
IGNORED = [
    ("granite", {}),  # whose class has no windows
    ("phi3", MIXED),  # all of whose layers slide
    ("qwen3", {}),
    ("qwen3_moe", {}),
]


def build(family, changes):
    torch.manual_seed(0)
    model = tiny.build(family, sliding_window=WINDOW, **changes).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return TransformersModel(model)


@pytest.mark.parametrize(("family", "changes"), [*CASES, *IGNORED])
@torch.no_grad()
def test_packed_documents_equal_the_same_alone(family, changes):
    model = build(family, changes)
    ids = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([[0] * 15 + [1] * 25, [0] * 40])
    packed = model(ids, None, documents)
    for row, lengths in enumerate(DOCUMENTS):
        start = 0
        for n in lengths:
            alone = model.hf_model(ids[row : row + 1, start : start + n], use_cache=False).logits[0].float()
            assert (packed[row, start : start + n] - alone).abs().max() <= 1e-5 * alone.std()
            start += n


@pytest.mark.parametrize(("family", "changes"), CASES)
@torch.no_grad()
def test_layers_see_no_more_than_their_window(family, changes):
    """The test above can fail: without the window, the logits beyond it are others."""
    model = build(family, changes)
    ids = torch.randint(3, 60, (1, 40), generator=torch.Generator().manual_seed(1))
    slides = model(ids, None, torch.zeros_like(ids))
    model._masks = lambda documents: model._mask(documents, None)
    sees_all = model(ids, None, torch.zeros_like(ids))
    difference = (slides - sees_all).abs().amax(dim=(0, 2))
    assert difference[:WINDOW].max() <= 1e-5 * slides.std() < 0.1 * slides.std() < difference[2 * WINDOW :].min()


def test_layers_that_slide_without_a_window_are_refused():
    model = TransformersModel(tiny.build("qwen3", sliding_window=WINDOW, **MIXED))
    with pytest.raises(CheckpointError, match="sliding_attention and no sliding_window"):
        model.check_packing(40)
