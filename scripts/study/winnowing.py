"""Fingerprints of texts by winnowing: which texts share a passage, without holding the texts.

Schleimer, Wilkerson and Aiken, "Winnowing: Local Algorithms for Document Fingerprinting", SIGMOD 2003. Two texts that
share a run of RUN + WINDOW - 1 words share a fingerprint. Their k-grams are of characters; these are of words, so that
spaces and punctuation do not count.
"""

import re
from collections.abc import Iterator
from hashlib import blake2b

RUN = 12
"""Words under one hash."""
WINDOW = 40
"""Hashes of which the smallest is kept."""
# The smallest of many lie close together: of two times 10,000 fingerprints of 32 bits, one is often equal by chance.
HASH_BYTES = 6

# Chinese and Japanese are written without spaces: each character counts as a word.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")


def fingerprints(text: str) -> set[str]:
    """Return 48-bit hashes, each 12 hexadecimal digits; none where the text has fewer than RUN words."""
    hashes = list(run_hashes(text))
    return {min(hashes[i : i + WINDOW]) for i in range(max(len(hashes) - WINDOW + 1, min(len(hashes), 1)))}


def run_hashes(text: str) -> Iterator[str]:
    words = [word.encode() for word in WORD.findall(text.lower())]
    for i in range(len(words) - RUN + 1):
        yield blake2b(b" ".join(words[i : i + RUN]), digest_size=HASH_BYTES).hexdigest()
