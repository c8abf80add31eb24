"""Read a file of a package as held-out documents.

A reader takes a file and returns its documents, each a text or, for dialogues, a list of messages.
"""

import ast
import bz2
import html
import json
import lzma
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

Document = str | list[dict[str, str]]

MAX_LINE_LENGTH = 400
"""Characters. A longer line in a source file is generated or minified code, or data."""
SOURCE = 2_500
"""Minimum characters of a source file."""
ENGLISH = 1_500
"""Minimum characters of a translated page per English word "the" or "and"."""
PAGE = 8_000
"""Characters of one document from a long HTML page."""
ARTICLES = 6
"""Short news articles in one document."""
TURNS = 24
"""Maximum number of messages in a dialogue."""
ANSWER = 400
"""Minimum characters of an answer in a FAQ."""
SAID, FUNCTION = 150, 4_000
"""Minimum characters of a docstring, and maximum characters of a function."""

FORMULA = r":math:|\.\. math::|`\\|\$\$"
COMMENT = re.compile(r"\s*(?:/\*.*?\*/|<!--.*?-->|(?:(?://|#)[^\n]*\n)+)\s*", re.DOTALL)


def messages(*turns: str) -> list[dict[str, str]]:
    """Return a dialogue that begins with the user."""
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


def plain(file: Path) -> list[Document]:
    return [file.read_text(encoding="utf-8", errors="replace").strip()]


def code(file: Path) -> list[Document]:
    """Return a source file without its licence. Tests, short files and files with overlong lines give nothing."""
    if "test" in file.name.lower():
        return []
    text = file.read_text(encoding="utf-8", errors="replace")
    head = []
    while comment := COMMENT.match(text):
        if not re.search(r"copyright|licen[cs]e", comment[0], re.IGNORECASE):
            head.append(comment[0])
        text = text[comment.end() :]
    text = ("".join(head) + text).strip()
    by_hand = all(len(line) <= MAX_LINE_LENGTH for line in text.splitlines())
    return [text] if by_hand and len(text) >= SOURCE else []


def data(file: Path) -> list[Document]:
    """Return a data file unchanged, or nothing if a line is overlong."""
    text = file.read_text(encoding="utf-8").strip()
    return [text] if all(len(line) <= MAX_LINE_LENGTH for line in text.splitlines()) else []


def page(file: Path) -> list[Document]:
    """Return an HTML page with its mark-up, from the start of its body."""
    text = file.read_text(encoding="utf-8", errors="replace")
    return [text[max(text.find("<body"), 0) :].strip()]


class Paragraphs(HTMLParser):
    """Parses the text of an HTML page into paragraphs, without menus, tables of contents and scripts."""

    BLOCKS = re.compile("h[1-6]|p|div|li|d[tdl]|pre|td|th|tr|table|[uo]l|blockquote|section|article|hr")
    ASIDE = re.compile("head|script|style|nav|header|footer|form")
    ASIDE_CLASS = re.compile(
        r"\b(nav|docnav|navheader|navfooter|toc|contents|sidebar|header|footer|banner|headerlink)\b"
    )
    CLASSED = re.compile("div|ul|table|p|a|section|dl")
    """Elements that always have an end tag, so that they can be skipped by counting."""

    def __init__(self) -> None:
        super().__init__()
        self.paragraphs: list[tuple[str, str]] = []
        """The element, and its text."""
        self.block, self.parts = "p", list[str]()
        self.skipped, self.depth = "", 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self.depth:
            self.depth += tag == self.skipped
            return
        named = " ".join(value or "" for key, value in attrs if key in ("class", "id"))
        if self.ASIDE.fullmatch(tag) or (self.CLASSED.fullmatch(tag) and self.ASIDE_CLASS.search(named)):
            self.skipped, self.depth = tag, 1
        elif self.BLOCKS.fullmatch(tag):
            self.end_paragraph()
            self.block = tag
        elif tag == "br":
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if self.depth:
            self.depth -= tag == self.skipped
        elif self.BLOCKS.fullmatch(tag):
            self.end_paragraph()
            self.block = "p"

    def handle_data(self, data: str) -> None:
        if not self.depth:
            self.parts.append(data)

    def end_paragraph(self) -> None:
        text = "".join(self.parts)
        text = text.strip("\n") if self.block == "pre" else " ".join(text.split())
        if text.strip():
            self.paragraphs.append((self.block, text.rstrip()))
        self.parts = []


def paragraphs(file: Path) -> list[tuple[str, str]]:
    parser = Paragraphs()
    parser.feed(file.read_text(encoding="utf-8", errors="replace"))
    parser.close()
    parser.end_paragraph()
    return parser.paragraphs


def prose(file: Path) -> list[Document]:
    """Return the text of an HTML page. A long page gives several documents."""
    pieces, length = [list[str]()], 0
    for _, text in paragraphs(file):
        if length + len(text) > PAGE and pieces[-1]:
            pieces.append([])
            length = 0
        pieces[-1].append(text)
        length += len(text) + 2
    return ["\n\n".join(piece) for piece in pieces]


def translated(file: Path) -> list[Document]:
    """Return the text of an HTML page, or nothing if it is in English: manuals leave new pages untranslated."""
    texts = [text for text in prose(file) if isinstance(text, str)]
    return [text for text in texts if len(re.findall(r"\b(?:the|and)\b", text)) * ENGLISH < len(text)]


def faq(file: Path) -> list[Document]:
    """Return a dialogue for each heading of an HTML page that is a question."""
    dialogues: list[Document] = []
    for heading, texts in groupby_heading(paragraphs(file)):
        question = re.sub(r"^(Chapter\s)?[\d.]+\s*", "", heading).strip()
        answer = "\n\n".join(texts)
        if question.endswith("?") and len(answer) >= ANSWER:
            dialogues.append(messages(question, answer))
    return dialogues


def groupby_heading(page: list[tuple[str, str]]) -> Iterator[tuple[str, list[str]]]:
    heading, texts = "", list[str]()
    for block, text in [*page, ("h1", "")]:
        if re.fullmatch(r"h\d", block):
            yield heading, texts
            heading, texts = text, []
        else:
            texts.append(text)


def news(file: Path) -> list[Document]:
    """Return the Lee corpus, one article a line, several articles to a document."""
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    return ["\n\n".join(lines[i : i + ARTICLES]) for i in range(0, len(lines), ARTICLES)]


def wiki(file: Path) -> list[Document]:
    """Return the articles in a compressed dump of Wikipedia, without mark-up."""
    dump = bz2.decompress(file.read_bytes()).decode()
    pages = re.findall(r"<title>(.*?)</title>.*?<text[^>]*>(.*?)</text>", dump, re.DOTALL)
    return [
        f"{title}\n\n{article(html.unescape(text))}"
        for title, text in pages
        if not re.match(r"#redirect|.*may refer to", text[:1000], re.I | re.S)
    ]


def article(text: str) -> str:
    text = re.split(r"\n==+ *(?:See also|References|Notes|External links|Further reading) *==+", text)[0]
    text = re.sub(r"<!--.*?-->|<ref[^>]*/>|<ref.*?</ref>|<gallery.*?</gallery>", "", text, flags=re.DOTALL)
    # Inner templates first.
    while re.search(r"\{[{|][^{}]*\}", text):
        text = re.sub(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}|\{[{|][^{}]*\}", "", text)
    text = re.sub(r"\[\[(?:File|Image|Category):(?:[^\[\]]|\[\[[^\[\]]*\]\])*\]\]", "", text)
    text = re.sub(r"\[\[(?:[^\[\]|]*\|)?([^\[\]]*)\]\]", r"\1", text)
    text = re.sub(r"\[https?://\S+ ([^\]]*)\]|'{2,}|</?\w[^>]*>", r"\1", text)
    return re.sub(r"\n{3,}", "\n\n", html.unescape(text)).strip()


def formulas(file: Path) -> list[Document]:
    """Return the docstrings and other strings in a Python file that contain several formulas in TeX."""
    documents: list[Document] = []
    source = file.read_bytes()
    # Most files have no formulas, and are not parsed.
    tree = ast.parse(source) if re.search(FORMULA.encode(), source) else ast.Module([], [])
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            count = len(re.findall(FORMULA, node.value))
            if count >= 4 and count * 400 > len(node.value):
                first, _, rest = node.value.partition("\n")
                margin = min((len(s) - len(s.lstrip()) for s in rest.splitlines() if s.strip()), default=0)
                documents.append("\n".join([first.strip(), *(line[margin:] for line in rest.splitlines())]).strip())
    return documents


class AnyTag(yaml.SafeLoader):
    """A YAML loader that ignores a program's own tags."""


AnyTag.add_multi_constructor("!", lambda loader, suffix, node: None)


def word_problems(file: Path) -> list[Document]:
    """Return the worked examples of an evaluation's prompt as one document."""
    config: dict[str, Any] = AnyTag(file.read_text(encoding="utf-8")).get_single_data()
    samples = config["fewshot_config"]["samples"]
    return ["\n\n".join(f"Question: {s['question']}\n\nAnswer: {s['target']}" for s in samples)]


def solved(file: Path) -> list[Document]:
    """Return the problems and solutions in a Python file's literals as one document."""
    problems = []
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Dict) and all(isinstance(value, ast.Constant) for value in node.values):
            sample = ast.literal_eval(node)
            if {"problem", "solution"} <= sample.keys():
                problems.append(f"Problem: {sample['problem']}\n\nSolution: {sample['solution']}")
    return ["\n\n".join(problems)]


def chitchat(file: Path) -> list[Document]:
    """Return dialogues of two people, with consecutive messages of one person joined."""
    dialogues: list[Document] = []
    for talk in json.loads(file.read_text(encoding="utf-8")).values():
        said = [message for turn in talk["messages"] for message in turn]
        turns = ["\n".join(m["text"] for m in of) for _, of in groupby(said, key=lambda m: m["sender"])]
        if len(turns) >= TURNS:
            dialogues.append(messages(*turns[:TURNS]))
    return dialogues


def small_talk(file: Path) -> list[Document]:
    """Return a category of ChatterBot's corpus as one dialogue."""
    talks = AnyTag(file.read_text(encoding="utf-8")).get_single_data()["conversations"]
    pairs = [turn for talk in talks for turn in talk[: len(talk) // 2 * 2]]
    return [messages(*map(str, pairs[:TURNS]))]


def reasoning(file: Path) -> list[Document]:
    """Return a dialogue for each subject of the MMLU prompts with reasoned answers."""
    subjects = json.loads(file.read_text(encoding="utf-8")).values()
    questions = [re.findall(r"^Q: (.*?)^A: (.*?)(?=^Q: |\Z)", text, re.DOTALL | re.MULTILINE) for text in subjects]
    return [messages(*(turn.strip() for pair in pairs for turn in pair)) for pairs in questions if pairs]


def functions(file: Path) -> list[Document]:
    """Return dialogues that request the functions of a Python file by their docstrings."""
    text = file.read_text(encoding="utf-8-sig")
    lines = text.split("\n")
    dialogues: list[Document] = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and (said := ast.get_docstring(node)):
            source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if len(said) >= SAID and len(said) * 2 < len(source) < FUNCTION:
                names = ", ".join(argument.arg for argument in node.args.args)
                ask = f"Write a Python function `{node.name}({names})` that does the following.\n\n{said}"
                dialogues.append(messages(ask, f"```python\n{source}\n```"))
    return dialogues


def novels(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the author and title of each book in a compressed file, and its text without the first third."""
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        for book in map(json.loads, lines):
            _, _, text = book["text"][len(book["text"]) // 3 :].partition("\n\n")
            yield f"{book['author']}, {book['title']}", text
