"""Packed rows: where documents begin and end, and when no mask is needed."""

import pytest
import torch

from model.decoder.attention import Mask, Segments
from model.decoder.masks import document_lengths, document_mask

N_TOKENS = 5


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("border", range(1, N_TOKENS))
def test_one_border_anywhere(row, border):
    """Also where the first or the last document is one token long."""
    documents = torch.zeros(2, N_TOKENS, dtype=torch.long)
    documents[row, border:] = 1
    whole, parts = [(1 - row, 0, N_TOKENS)], [(row, 0, border), (row, border, N_TOKENS)]
    assert document_mask(documents, None) == Mask(segments=Segments(tuple(sorted(whole + parts))))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [N_TOKENS, 4096])
def test_a_window_as_long_as_the_rows_needs_no_mask(window, packed):
    """As that of Mistral 7B, trained in windows of 4,096."""
    documents = torch.tensor([[0, 0, 1, 1, 1], [2, 2, 2, 2, 2]])
    with_window, without = (document_mask(documents, each, packed) for each in (window, None))
    assert (with_window.segments, with_window.window, with_window.allowed_B1TS) == (without.segments, None, None)
    assert document_mask(documents, N_TOKENS - 1).allowed_B1TS is not None


def test_a_document_a_row_needs_no_mask():
    assert document_mask(torch.tensor([[0] * N_TOKENS, [7] * N_TOKENS]), None) == Mask()


@pytest.mark.parametrize("window", [None, 2])
def test_a_number_that_comes_again_is_another_document(window):
    """The dense mask keeps apart what the segments and the packed boundaries do."""
    again, counted = torch.tensor([[0, 0, 1, 0, 0]]), torch.tensor([[0, 0, 1, 2, 2]])
    allowed = [document_mask(documents, window, dense=True).allowed_B1TS for documents in (again, counted)]
    assert torch.equal(*allowed)
    assert document_mask(again, None).segments == Segments(((0, 0, 2), (0, 2, 3), (0, 3, 5)))
    assert document_mask(again, None, packed=True).boundaries.tolist() == [0, 2, 3, 5]


def test_the_length_of_each_token_s_document():
    documents = torch.tensor([[0, 0, 1, 0, 0], [3, 3, 3, 3, -1]])
    assert document_lengths(documents).tolist() == [[2, 2, 1, 2, 2], [4, 4, 4, 4, 1]]
