"""Markup and data made with seeded numbers: JSON, YAML, TOML, CSV, HTML, XML, Markdown tables, logs."""

# ruff: noqa: E501  (templates keep the lines of their text)
import json
import random
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta
from itertools import pairwise
from typing import Any

FIRST = [
    "Ada",
    "Ben",
    "Chen",
    "Dara",
    "Elif",
    "Femi",
    "Goran",
    "Hana",
    "Ines",
    "Jonas",
    "Kofi",
    "Lena",
    "Mina",
    "Noor",
    "Omar",
    "Petra",
    "Quim",
    "Rosa",
    "Sami",
    "Tove",
]
PLACES = [
    "Alder Bay",
    "Brook Hill",
    "Cedar Point",
    "Dunmore",
    "Eastfield",
    "Fenwick",
    "Glen Ross",
    "Harbour End",
    "Ivy Cross",
]
GOODS = [
    "desk lamp",
    "oak table",
    "wool blanket",
    "steel kettle",
    "garden fork",
    "tea tin",
    "canvas bag",
    "brass hook",
    "glass jar",
    "paper lantern",
    "clay pot",
    "linen shirt",
    "rain coat",
    "bread knife",
    "wall clock",
    "floor mat",
]
COLOURS = ["red", "green", "blue", "white", "black", "grey", "amber", "teal"]
WORDS = [
    "signal",
    "harbour",
    "lantern",
    "meadow",
    "copper",
    "river",
    "window",
    "market",
    "station",
    "garden",
    "winter",
    "letter",
    "bridge",
    "engine",
    "paper",
    "orchard",
    "compass",
    "thread",
    "valley",
    "ticket",
]
SERVICES = ["gateway", "billing", "search", "mailer", "catalogue", "sessions", "images", "reports", "scheduler"]
Row = dict[str, object]


def documents() -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each kind of document, and documents of it."""
    makers: tuple[tuple[str, int, Callable[[random.Random], str]], ...] = (
        ("json orders", 14, orders), ("json lines", 8, json_lines), ("geojson", 6, geojson), ("openapi", 6, openapi),
        ("yaml deployment", 10, deployment), ("yaml workflow", 8, workflow), ("toml", 10, toml), ("ini", 6, ini),
        ("csv", 16, csv), ("html page", 12, html_page), ("html table", 8, html_table), ("xml feed", 8, feed),
        ("xml records", 8, xml_records), ("svg", 5, svg), ("markdown table", 14, markdown_table),
        ("access log", 10, access_log), ("service log", 10, service_log), ("fixed-width table", 10, fixed_width),
        ("recipe", 4, recipe_json), ("calendar", 5, calendar), ("changelog", 6, changelog), ("diff", 8, diff),
    )  # fmt: skip
    for name, count, make in makers:
        yield name, [make(random.Random(f"{name} {index}")) for index in range(count)]


def _day(rng: random.Random) -> date:
    return date(2015, 1, 1) + timedelta(days=rng.randrange(3650))


def _name(rng: random.Random) -> str:
    return rng.choice(FIRST)


def _dump(value: object, rng: random.Random) -> str:
    return json.dumps(value, indent=rng.choice((None, 2, 2, 4)), ensure_ascii=False)


def orders(rng: random.Random) -> str:
    lines: list[dict[str, Any]] = [
        {"sku": f"{good[:2].upper()}-{rng.randrange(1000, 9999)}", "name": good, "colour": rng.choice(COLOURS),
         "quantity": rng.randint(1, 6), "unit_price": rng.randrange(250, 9000) / 100}
        for good in rng.sample(GOODS, rng.randint(2, 5))
    ]  # fmt: skip
    total = round(sum(line["quantity"] * line["unit_price"] for line in lines), 2)
    order: Row = {
        "order": rng.randrange(10_000, 99_999), "placed": f"{_day(rng)}T{rng.randrange(24):02}:{rng.randrange(60):02}:00Z",
        "customer": {"name": _name(rng), "city": rng.choice(PLACES), "returning": rng.random() < 0.5}, "lines": lines,
        "total": total, "currency": rng.choice(("EUR", "USD", "GBP")), "status": rng.choice(("paid", "packed", "sent")),
        "notes": rng.choice((None, "leave with a neighbour", "gift: no invoice, please", "ring twice")),
    }  # fmt: skip
    return _dump(order, rng)


def json_lines(rng: random.Random) -> str:
    start = datetime(2024, 1, 1) + timedelta(minutes=rng.randrange(500_000))
    lines = []
    for step in range(rng.randint(9, 16)):
        start += timedelta(seconds=rng.randrange(1, 90))
        lines.append(json.dumps({
            "time": start.isoformat(), "sensor": f"{rng.choice(WORDS)}-{rng.randrange(8)}", "step": step,
            "temperature": round(rng.gauss(19, 4), 1), "humidity": round(rng.uniform(0.2, 0.9), 2),
            "ok": rng.random() < 0.93,
        }))  # fmt: skip
    return "\n".join(lines)


def geojson(rng: random.Random) -> str:
    features = [
        {"type": "Feature", "geometry": {"type": "Point", "coordinates": [
            round(rng.uniform(-180, 180), 4), round(rng.uniform(-80, 80), 4)]},
         "properties": {"name": place, "kind": rng.choice(("harbour", "station", "peak", "well")),
                        "height_m": rng.randrange(0, 2400)}}
        for place in rng.sample(PLACES, 4)
    ]  # fmt: skip
    return _dump({"type": "FeatureCollection", "features": features}, rng)


def openapi(rng: random.Random) -> str:
    thing = rng.choice(WORDS)
    return f"""openapi: 3.1.0
info:
  title: {thing.title()} service
  version: {rng.randrange(4)}.{rng.randrange(20)}.0
paths:
  /{thing}s:
    get:
      summary: List all {thing}s
      parameters:
        - name: limit
          in: query
          schema: {{type: integer, minimum: 1, maximum: {rng.choice((50, 100, 500))}, default: 20}}
        - name: after
          in: query
          description: The last id of the page before.
          schema: {{type: string}}
      responses:
        "200":
          description: A page of {thing}s, oldest first.
          content:
            application/json:
              schema:
                type: array
                items: {{$ref: "#/components/schemas/{thing.title()}"}}
  /{thing}s/{{id}}:
    delete:
      summary: Delete one {thing}
      parameters:
        - {{name: id, in: path, required: true, schema: {{type: string, format: uuid}}}}
      responses:
        "204": {{description: It is deleted.}}
        "404": {{description: There is none with this id.}}
components:
  schemas:
    {thing.title()}:
      type: object
      required: [id, name]
      properties:
        id: {{type: string, format: uuid}}
        name: {{type: string, maxLength: {rng.choice((40, 80, 200))}}}
        {rng.choice(WORDS)}: {{type: number}}
        tags: {{type: array, items: {{type: string}}}}"""


def deployment(rng: random.Random) -> str:
    service, replicas, port = rng.choice(SERVICES), rng.randint(1, 6), rng.choice((3000, 5000, 8000, 8080, 9090))
    return f"""apiVersion: apps/v1
kind: Deployment
metadata:
  name: {service}
  labels: {{app: {service}, tier: {rng.choice(("front", "back"))}}}
spec:
  replicas: {replicas}
  selector:
    matchLabels:
      app: {service}
  template:
    metadata:
      labels:
        app: {service}
    spec:
      containers:
        - name: {service}
          image: registry.example/{service}:{rng.randrange(5)}.{rng.randrange(30)}.{rng.randrange(9)}
          ports:
            - containerPort: {port}
          env:
            - name: LOG_LEVEL
              value: {rng.choice(("debug", "info", "warning"))}
            - name: WORKERS
              value: "{rng.randint(1, 16)}"
          resources:
            requests: {{cpu: {rng.choice(("100m", "250m", "500m"))}, memory: {rng.choice((128, 256, 512))}Mi}}
            limits: {{cpu: "{rng.choice((1, 2))}", memory: {rng.choice((1, 2, 4))}Gi}}
          readinessProbe:
            httpGet: {{path: /health, port: {port}}}
            periodSeconds: {rng.choice((5, 10, 30))}
---
apiVersion: v1
kind: Service
metadata:
  name: {service}
spec:
  selector: {{app: {service}}}
  ports:
    - {{port: 80, targetPort: {port}}}"""


def workflow(rng: random.Random) -> str:
    versions = rng.sample(("3.10", "3.11", "3.12", "3.13"), 3)
    branch = rng.choice(("main", "develop", "release"))
    return f"""name: checks
on:
  push:
    branches: [{branch}]
  pull_request:

jobs:
  test:
    runs-on: {rng.choice(("ubuntu-latest", "ubuntu-24.04", "macos-latest"))}
    timeout-minutes: {rng.choice((10, 15, 30))}
    strategy:
      fail-fast: false
      matrix:
        python: [{", ".join(f'"{version}"' for version in sorted(versions))}]
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: ${{{{ matrix.python }}}}
          cache: pip
      - run: pip install -e '.[test]'
      - name: Run the tests
        run: pytest --durations={rng.choice((5, 10, 20))} {rng.choice(("-n auto", "-x", "--strict-markers"))}
        env:
          SEED: {rng.randrange(1000)}
      - if: failure()
        uses: actions/upload-artifact@v4
        with:
          name: output-${{{{ matrix.python }}}}
          path: tmp/{rng.choice(WORDS)}/"""


def toml(rng: random.Random) -> str:
    name = rng.choice(WORDS)
    tables = [
        f"""[project]
name = "{name}-tools"
version = "{rng.randrange(3)}.{rng.randrange(12)}.{rng.randrange(9)}"
description = "Reads {rng.choice(WORDS)} files and draws a {rng.choice(WORDS)} of them."
requires-python = ">=3.{rng.randrange(9, 13)}"

[project.scripts]
{name} = "{name}.cli:main"
"""
    ]
    for _ in range(rng.randint(2, 4)):
        keys = rng.sample(WORDS, 5)
        tables.append(f"""[tool.{name}.{keys[0]}]
{keys[1]} = {rng.choice(("true", "false"))}
{keys[2]} = {rng.randrange(1, 500)}
{keys[3]} = {round(rng.uniform(0, 1), 3)}
{keys[4]} = {json.dumps(rng.sample(COLOURS, 3))}
started = {_day(rng)}
""")
    return "\n".join(tables)


def ini(rng: random.Random) -> str:
    lines = ["; settings of the measuring station", ""]
    for section in rng.sample(SERVICES, 4):
        lines += [f"[{section}]", f"host = {section}.internal.example", f"port = {rng.randrange(1024, 9999)}",
                  f"timeout = {rng.choice((5, 10, 30, 60))}s", f"retries = {rng.randrange(6)}",
                  f"# {rng.choice(WORDS)} only", f"verbose = {rng.choice(('yes', 'no'))}", ""]  # fmt: skip
    return "\n".join(lines)


def csv(rng: random.Random) -> str:
    mark = rng.choice((",", ",", ";", "\t"))
    header, make = rng.choice((
        (("date", "place", "min_c", "max_c", "rain_mm"), lambda: (
            _day(rng), rng.choice(PLACES), rng.randrange(-9, 14), rng.randrange(14, 33), round(rng.expovariate(0.3), 1))),
        (("id", "item", "colour", "stock", "price"), lambda: (
            rng.randrange(100, 999), rng.choice(GOODS), rng.choice(COLOURS), rng.randrange(80),
            f"{rng.randrange(200, 9900) / 100:.2f}")),
        (("name", "team", "played", "won", "points", "note"), lambda: (
            _name(rng), rng.choice(COLOURS), rng.randrange(5, 30), rng.randrange(12), rng.randrange(90),
            rng.choice(("", "injured", '"new, from May"', "captain")))),
        (("time", "cpu", "memory_mb", "requests", "errors"), lambda: (
            f"{rng.randrange(24):02}:{rng.randrange(60):02}", f"{rng.random():.3f}", rng.randrange(200, 8000),
            rng.randrange(5000), rng.choice((0, 0, 0, 1, 2, 7)))),
    ))  # fmt: skip
    rows = [header, *(make() for _ in range(rng.randint(20, 38)))]
    return "\n".join(mark.join(str(value) for value in row) for row in rows)


def _sentence(rng: random.Random) -> str:
    a, b, c = rng.sample(WORDS, 3)
    return rng.choice((
        f"The {a} near {rng.choice(PLACES)} opens on {_day(rng):%d %B}.", f"Bring a {a}, a {b} and a {c}.",
        f"{_name(rng)} wrote about the {a} and the {b}.", f"Each {a} costs {rng.randrange(3, 40)} euros with its {b}.",
        f"In {rng.randrange(1850, 2020)} the old {a} became a {b}.",
    ))  # fmt: skip


def html_page(rng: random.Random) -> str:
    title = f"The {rng.choice(WORDS)} and the {rng.choice(WORDS)}"
    items = "\n".join(f'      <li><a href="/{word}.html">{word.title()}</a></li>' for word in rng.sample(WORDS, 4))
    parts = "\n".join(
        f'    <section id="{word}">\n      <h2>{word.title()}</h2>\n      <p>{_sentence(rng)} {_sentence(rng)}</p>\n'
        f"      <p>{_sentence(rng)} <em>{_sentence(rng)}</em></p>\n    </section>"
        for word in rng.sample(WORDS, 3)
    )
    return f"""<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <title>{title}</title>
  <link rel="stylesheet" href="/style.css">
</head>
<body>
  <nav>
    <ul>
{items}
    </ul>
  </nav>
  <main>
    <h1>{title}</h1>
{parts}
    <form action="/search" method="get">
      <label for="q">Search</label>
      <input id="q" name="q" type="search" maxlength="{rng.choice((40, 80))}">
      <button type="submit">Go</button>
    </form>
  </main>
  <footer><p>Last changed on <time datetime="{_day(rng)}">{_day(rng):%d %B %Y}</time></p></footer>
</body>
</html>"""


def html_table(rng: random.Random) -> str:
    rows = "\n".join(
        f'    <tr class="{rng.choice(("odd", "even"))}"><td>{good.title()}</td><td>{rng.choice(COLOURS)}</td>'
        f'<td align="right">{rng.randrange(1, 90)}</td><td align="right">&euro;{rng.randrange(300, 9000) / 100:.2f}</td></tr>'
        for good in rng.sample(GOODS, rng.randint(6, 11))
    )
    return (
        f"<table>\n  <caption>Stock on {_day(rng):%d %B %Y}</caption>\n  <thead>\n    <tr><th>Item</th><th>Colour</th>"
        f"<th>Left</th><th>Price</th></tr>\n  </thead>\n  <tbody>\n{rows}\n  </tbody>\n</table>"
    )


def feed(rng: random.Random) -> str:
    entries = "\n".join(
        f"  <item>\n    <title>{_sentence(rng)}</title>\n    <link>https://news.example/{rng.randrange(10_000)}</link>\n"
        f"    <pubDate>{_day(rng):%a, %d %b %Y} {rng.randrange(24):02}:00:00 GMT</pubDate>\n"
        f"    <description><![CDATA[{_sentence(rng)} {_sentence(rng)}]]></description>\n  </item>"
        for _ in range(5)
    )
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<rss version="2.0">\n<channel>\n  <title>{rng.choice(PLACES)} news</title>'
        f"\n  <language>en</language>\n{entries}\n</channel>\n</rss>"
    )


def xml_records(rng: random.Random) -> str:
    root = rng.choice(("catalogue", "inventory", "survey"))
    records = "\n".join(
        f'  <record id="{rng.randrange(1000)}" checked="{rng.choice(("true", "false"))}">\n    <name>{good}</name>\n'
        f'    <size unit="cm">{rng.randrange(5, 200)}</size>\n    <place>{rng.choice(PLACES)}</place>\n'
        f"    <keeper>{_name(rng)}</keeper>\n  </record>"
        for good in rng.sample(GOODS, 8)
    )
    return f'<?xml version="1.0"?>\n<!-- exported on {_day(rng)} -->\n<{root}>\n{records}\n</{root}>'


def svg(rng: random.Random) -> str:
    values = [rng.randrange(10, 100) for _ in range(9)]
    bars = "\n".join(
        f'  <rect x="{20 + 30 * at}" y="{120 - value}" width="22" height="{value}" fill="{rng.choice(COLOURS)}"/>\n'
        f'  <text x="{31 + 30 * at}" y="{115 - value}" text-anchor="middle" font-size="9">{value}</text>'
        for at, value in enumerate(values)
    )
    line = " ".join(f"{31 + 30 * at},{120 - value}" for at, value in enumerate(values))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 300 140" role="img">\n  <title>Visitors a day</title>\n{bars}\n'
        f'  <polyline points="{line}" fill="none" stroke="black"/>\n  <line x1="10" y1="120" x2="290" y2="120"/>\n</svg>'
    )


def markdown_table(rng: random.Random) -> str:
    columns = rng.sample(WORDS, rng.randint(3, 5))
    rows = [[rng.choice(GOODS), *(rng.choice((f"{rng.uniform(0, 90):.1f}", str(rng.randrange(999)), "yes", "no", "–"))
                                  for _ in columns)] for _ in range(rng.randint(7, 13))]  # fmt: skip
    table = "\n".join(f"| {' | '.join(row)} |" for row in [["item", *columns], ["---"] * (len(columns) + 1), *rows])
    return (
        f"## {rng.choice(WORDS).title()} {rng.choice(WORDS)}s, {_day(rng):%B %Y}\n\n{_sentence(rng)} {_sentence(rng)}\n\n{table}\n\n"
        f"1. {_sentence(rng)}\n2. {_sentence(rng)}\n   - {_sentence(rng)}\n   - **{_sentence(rng)}**\n\n> {_sentence(rng)}\n\n"
        f"```sh\n{rng.choice(WORDS)} --{rng.choice(WORDS)} {rng.randrange(99)} {rng.choice(WORDS)}.csv\n```"
    )


def access_log(rng: random.Random) -> str:
    now = datetime(2023, 1, 1) + timedelta(minutes=rng.randrange(700_000))
    lines = []
    for _ in range(rng.randint(13, 20)):
        now += timedelta(seconds=rng.randrange(40))
        lines.append(
            f"10.{rng.randrange(256)}.{rng.randrange(256)}.{rng.randrange(1, 255)} - - [{now:%d/%b/%Y:%H:%M:%S} +0000] "
            f'"{rng.choice(("GET", "GET", "GET", "POST", "PUT"))} /{rng.choice(WORDS)}s/{rng.randrange(900)} HTTP/1.1" '
            f"{rng.choice((200, 200, 200, 201, 304, 404, 500))} {rng.randrange(90, 40_000)} {rng.expovariate(0.02):.1f}"
        )
    return "\n".join(lines)


def service_log(rng: random.Random) -> str:
    now = datetime(2024, 3, 1) + timedelta(minutes=rng.randrange(300_000))
    lines = []
    for _ in range(rng.randint(12, 20)):
        now += timedelta(milliseconds=rng.randrange(9000))
        service, word = rng.choice(SERVICES), rng.choice(WORDS)
        level, text = rng.choice((
            ("INFO", f"request {rng.randrange(10**6):06x} took {rng.randrange(2, 900)} ms"),
            ("INFO", f"connected to {word} on port {rng.randrange(1024, 9999)}"),
            ("DEBUG", f"cache {word}: {rng.randrange(900)} hits, {rng.randrange(90)} misses"),
            ("WARNING", f"queue {word} holds {rng.randrange(1000, 9000)} jobs; workers: {rng.randint(1, 8)}"),
            ("ERROR", f"cannot read /var/lib/{service}/{word}.db: no such file or directory"),
            ("ERROR", f"retry {rng.randint(1, 5)} of 5 after {2 ** rng.randint(0, 5)} s: connection refused"),
        ))  # fmt: skip
        lines.append(f"{now:%Y-%m-%dT%H:%M:%S}.{now.microsecond // 1000:03} {level:<7} [{service}] {text}")
    return "\n".join(lines)


def fixed_width(rng: random.Random) -> str:
    lines = [f"{'station':<14}{'opened':>12}{'depth m':>10}{'flow':>9}  state", "-" * 54]
    total = 0.0
    for _ in range(rng.randint(15, 24)):
        flow = round(rng.uniform(0.1, 60), 2)
        total += flow
        place = f"{rng.choice(WORDS)} {rng.randrange(1, 20)}"
        lines.append(
            f"{place:<14}{_day(rng)!s:>12}{rng.uniform(1, 300):>10.1f}{flow:>9.2f}  {rng.choice(('ok', 'dry', 'off'))}"
        )
    return "\n".join([*lines, "-" * 54, f"{'all':<14}{'':>22}{total:>9.2f}"])


def recipe_json(rng: random.Random) -> str:
    foods = rng.sample(
        ("flour", "butter", "milk", "eggs", "sugar", "salt", "yeast", "oil", "rice", "lentils", "onions"), 6
    )
    return _dump({
        "@type": "Recipe", "name": f"{foods[0].title()} with {foods[1]}", "serves": rng.randint(1, 8),
        "minutes": {"preparing": rng.randrange(5, 40), "cooking": rng.randrange(10, 120)},
        "ingredients": [{"food": food, "amount": rng.randrange(1, 60) * 10, "unit": rng.choice(("g", "ml"))} for food in foods],
        "steps": [f"Mix the {a} with the {b}." for a, b in pairwise(foods)], "tags": rng.sample(COLOURS, 2),
    }, rng)  # fmt: skip


def calendar(rng: random.Random) -> str:
    lines = ["BEGIN:VCALENDAR", "VERSION:2.0", "PRODID:-//example//calendar//EN"]
    for number in range(rng.randint(4, 7)):
        day, hour = _day(rng), rng.randrange(8, 18)
        lines += ["BEGIN:VEVENT", f"UID:{number}-{rng.randrange(10**6)}", f"DTSTART:{day:%Y%m%d}T{hour:02}0000Z",
                  f"DTEND:{day:%Y%m%d}T{hour + 1:02}0000Z", f"SUMMARY:{_sentence(rng)}", f"LOCATION:{rng.choice(PLACES)}",
                  "END:VEVENT"]  # fmt: skip
    return "\n".join([*lines, "END:VCALENDAR"])


def changelog(rng: random.Random) -> str:
    major, minor, parts = rng.randrange(5), rng.randrange(9, 20), ["# Changelog"]
    for back in range(4):
        parts.append(f"## {major}.{minor - back}.0 – {_day(rng)}")
        for title in rng.sample(("Added", "Changed", "Fixed", "Removed"), 2):
            a, b, c = rng.sample(WORDS, 3)
            parts.append(f"### {title}\n\n- `{a}` takes `--{b}` with a {c}.\n- The {b} no longer ends when a {a} is empty "
                         f"(#{rng.randrange(999)}).")  # fmt: skip
    return "\n\n".join(parts)


def diff(rng: random.Random) -> str:
    a, b, c, d = rng.sample(WORDS, 4)
    old, new = rng.randrange(2, 40), rng.randrange(41, 90)
    at = rng.randrange(10, 300)
    return f"""diff --git a/src/{a}.py b/src/{a}.py
--- a/src/{a}.py
+++ b/src/{a}.py
@@ -{at},9 +{at},11 @@ class {a.title()}:
     def {b}(self, {c}: int) -> int:
-        if {c} > {old}:
-            return self.{d} - {c}
+        if {c} > LIMIT:
+            raise ValueError(f"{c} must be at most {{LIMIT}}, not {{{c}}}")
         self.{d} += {c}
         return self.{d}

+    def reset(self) -> None:
+        self.{d} = 0
+
     def close(self) -> None:
-        self.file.close()
+        if self.file is not None:
+            self.file.close()
diff --git a/tests/test_{a}.py b/tests/test_{a}.py
--- a/tests/test_{a}.py
+++ b/tests/test_{a}.py
@@ -1,4 +1,12 @@
+import pytest
 from {a} import {a.title()}

 def test_{b}():
     assert {a.title()}().{b}({old}) == {old}
+
+
+def test_{b}_refuses_too_much():
+    with pytest.raises(ValueError, match="at most"):
+        {a.title()}().{b}({new})"""
