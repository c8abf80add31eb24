"""Choose how many tokens of a large vocabulary's logits are computed at a time. Needs no torch."""

MIN_CHUNK_LOGITS = 1 << 23
"""Smallest number of logits in a chunk, 32 MB in float32. Fewer would need too many passes over the weight's
gradient."""


def max_chunk_logits(n_tokens: int, hidden_size: int) -> int:
    """Return the limit of logits in a chunk; a chunk holds one whole token even if that has more.

    It is the number of elements in the hidden states of all tokens, at least MIN_CHUNK_LOGITS: a chunk then takes no
    more memory than these states. The rule is Liger's (Hsu et al. 2024).
    """
    return max(MIN_CHUNK_LOGITS, n_tokens * hidden_size)


def chunk_size(n_tokens: int, hidden_size: int, vocab_size: int) -> int:
    """Return the number of tokens per chunk, at least 1. The last chunk may have fewer."""
    return max(1, max_chunk_logits(n_tokens, hidden_size) // vocab_size)
