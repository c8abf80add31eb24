"""Packed rows: where documents begin and end, and when no mask is needed."""

import pytest
import torch

from model.attention import Mask
from model.masks import document_mask

N_TOKENS = 5


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("border", range(1, N_TOKENS))
def test_one_border_anywhere(row, border):
    """Also where the first or the last document is one token long."""
    documents = torch.zeros(2, N_TOKENS, dtype=torch.long)
    documents[row, border:] = 1
    whole, parts = [(1 - row, 0, N_TOKENS)], [(row, 0, border), (row, border, N_TOKENS)]
    assert document_mask(documents, None) == Mask(segments=tuple(sorted(whole + parts)))


def test_a_document_a_row_needs_no_mask():
    assert document_mask(torch.tensor([[0] * N_TOKENS, [7] * N_TOKENS]), None) == Mask()
