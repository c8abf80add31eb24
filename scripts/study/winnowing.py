"""Compute fingerprints of texts by winnowing, which show whether texts share a passage without storing the texts.

Schleimer, Wilkerson and Aiken, "Winnowing: Local Algorithms for Document Fingerprinting", SIGMOD 2003. Two texts that
share a run of RUN + WINDOW - 1 words share a fingerprint. The paper hashes k-grams of characters; here they are of
words, so that spaces and punctuation do not count.
"""

import re
from collections.abc import Iterator
from hashlib import blake2b

RUN = 12
"""Words per hash."""
WINDOW = 40
"""Hashes per window; the smallest is kept."""
# Minima of many hashes are close together: two sets of 10,000 fingerprints of 32 bits often share one by chance.
HASH_BYTES = 6

# Chinese and Japanese have no spaces between words, so each character counts as a word.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")


def fingerprints(text: str) -> set[str]:
    """Return 48-bit hashes, each 12 hexadecimal digits; none if the text has fewer than RUN words."""
    hashes = list(run_hashes(text))
    return {min(hashes[i : i + WINDOW]) for i in range(max(len(hashes) - WINDOW + 1, min(len(hashes), 1)))}


def run_hashes(text: str) -> Iterator[str]:
    words = [word.encode() for word in WORD.findall(text.lower())]
    for i in range(len(words) - RUN + 1):
        yield blake2b(b" ".join(words[i : i + RUN]), digest_size=HASH_BYTES).hexdigest()
