"""Records of a made-up schema, written out in several programming languages."""

# ruff: noqa: E501  (templates keep the lines of their text)
import random
from collections.abc import Callable, Iterator

THINGS = (
    ("Booking", ("guest:text", "room:int", "nights:int", "price:money", "paid:bool", "arrives:date")),
    ("Vehicle", ("plate:text", "wheels:int", "weight:float", "electric:bool", "built:date")),
    ("Invoice", ("number:text", "customer:text", "total:money", "issued:date", "settled:bool")),
    ("Sensor", ("label:text", "channel:int", "offset:float", "active:bool", "calibrated:date")),
    ("Employee", ("surname:text", "team:text", "salary:money", "manager:bool", "started:date")),
    ("Recipe", ("title:text", "serves:int", "minutes:int", "vegan:bool")),
    ("Parcel", ("destination:text", "grams:int", "fragile:bool", "fee:money", "posted:date")),
    ("Lesson", ("subject:text", "level:int", "hours:float", "online:bool")),
    ("Flight", ("origin:text", "destination:text", "seats:int", "fare:money", "direct:bool", "departs:date")),
    ("Patient", ("surname:text", "ward:int", "temperature:float", "fasting:bool", "admitted:date")),
    ("Ticket", ("summary:text", "priority:int", "open:bool", "opened:date")),
    ("Plant", ("species:text", "height:float", "waterings:int", "indoor:bool", "planted:date")),
)
Fields = list[tuple[str, str]]


def documents() -> Iterator[str]:
    """Yield each thing in some of the languages."""
    makers: tuple[Callable[[str, Fields], str], ...] = (
        sql,
        typescript,
        java,
        go,
        rust,
        c,
        cpp,
        shell,
        javascript,
        ruby,
    )
    for number, (name, texts) in enumerate(THINGS):
        fields = [(field, kind) for field, _, kind in (text.partition(":") for text in texts)]
        rng = random.Random(name)
        for make in rng.sample(makers, 5) if number else makers:
            yield make(name, fields)


def _types(kinds: str) -> dict[str, str]:
    return dict(zip(("text", "int", "float", "money", "bool", "date"), kinds.split("|"), strict=True))


def _first(fields: Fields, *kinds: str) -> str:
    return next(name for name, kind in fields if kind in kinds)


def sql(name: str, fields: Fields) -> str:
    types = _types(
        "varchar(80) NOT NULL|integer NOT NULL DEFAULT 0|double precision|numeric(10, 2) NOT NULL|boolean NOT NULL DEFAULT false|date"
    )
    table, key, number = name.lower(), _first(fields, "text"), _first(fields, "int", "money", "float")
    columns = "".join(f",\n    {field:<12} {types[kind]}" for field, kind in fields)
    return f"""-- {name}s, and the questions that are asked of them most.
CREATE TABLE IF NOT EXISTS {table} (
    {"id":<12} bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY{columns},
    CHECK ({number} >= 0)
);

CREATE INDEX {table}_{key} ON {table} (lower({key}));

-- The largest first, with a running total.
SELECT {key}, {number}, sum({number}) OVER (ORDER BY {number} DESC, id) AS running
FROM {table}
WHERE {number} > (SELECT avg({number}) FROM {table})
ORDER BY {number} DESC
LIMIT 25;

-- Which {key}s occur more than once?
SELECT lower({key}) AS {key}, count(*) AS times, min({number}) AS least, max({number}) AS most
FROM {table}
GROUP BY lower({key})
HAVING count(*) > 1
ORDER BY times DESC;

UPDATE {table} SET {number} = {number} + 1 WHERE id = $1 RETURNING *;
DELETE FROM {table} WHERE {key} = '' AND {number} = 0;"""


def typescript(name: str, fields: Fields) -> str:
    types, var = _types("string|number|number|number|boolean|string"), name.lower()
    key, number = _first(fields, "text"), _first(fields, "int", "money", "float")
    members = "\n".join(f"  readonly {field}: {types[kind]};" for field, kind in fields)
    checks = "\n".join(
        f'  if (typeof {var}.{field} !== "{types[kind]}") throw new TypeError("{field} must be a {types[kind]}");'
        for field, kind in fields
    )
    return f"""export interface {name} {{
  readonly id: number;
{members}
}}

export type New{name} = Omit<{name}, "id">;

export function parse{name}(text: string): {name} {{
  const {var} = JSON.parse(text) as {name};
{checks}
  return {var};
}}

export class {name}Store {{
  private readonly byId = new Map<number, {name}>();
  private last = 0;

  add(values: New{name}): {name} {{
    const {var}: {name} = {{ id: ++this.last, ...values }};
    this.byId.set({var}.id, {var});
    return {var};
  }}

  update(id: number, changes: Partial<New{name}>): {name} {{
    const old = this.byId.get(id);
    if (old === undefined) throw new RangeError(`no {var} ${{id}}`);
    const changed = {{ ...old, ...changes }};
    this.byId.set(id, changed);
    return changed;
  }}

  search(words: string): {name}[] {{
    const wanted = words.toLowerCase();
    return [...this.byId.values()]
      .filter(({var}) => {var}.{key}.toLowerCase().includes(wanted))
      .sort((a, b) => b.{number} - a.{number});
  }}
}}"""


def java(name: str, fields: Fields) -> str:
    types, var = _types("String|int|double|BigDecimal|boolean|LocalDate"), name.lower()
    key = _first(fields, "text")
    members = ", ".join(f"{types[kind]} {field}" for field, kind in fields)
    imports = "".join(
        f"import {module};\n" for module, kind in (("java.math.BigDecimal", "money"), ("java.time.LocalDate", "date"))
        if any(kind == other for _, other in fields)
    )  # fmt: skip
    flag = _first(fields, "bool")
    return f"""package com.example.records;

{imports}import java.util.Collection;
import java.util.Map;
import java.util.stream.Collectors;

/** A {var} as it is stored. */
public record {name}(long id, {members}) {{

    public {name} {{
        if ({key} == null || {key}.isBlank()) {{
            throw new IllegalArgumentException("a {var} needs a {key}");
        }}
    }}

    /** Returns how many there are of each {key}. */
    public static Map<String, Long> countBy{key.title()}(Collection<{name}> all) {{
        return all.stream().collect(Collectors.groupingBy({name}::{key}, Collectors.counting()));
    }}

    /** Splits into those that are {flag} and those that are not. */
    public static Map<Boolean, java.util.List<{name}>> by{flag.title()}(Collection<{name}> all) {{
        return all.stream().collect(Collectors.partitioningBy({name}::{flag}));
    }}

    @Override
    public String toString() {{
        return "{name} #" + id + " (" + {key} + ")";
    }}
}}"""


def go(name: str, fields: Fields) -> str:
    types, var = _types("string|int|float64|int64|bool|time.Time"), name[0].lower()
    key = _first(fields, "text")
    members = "\n".join(f'\t{field.title()} {types[kind]} `json:"{field}"`' for field, kind in fields)
    return f"""package records

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sort"
	"strconv"
	"sync"
{chr(9) + '"time"' + chr(10) if any(kind == "date" for _, kind in fields) else ""})

// {name} is one record. Amounts of money are in cents.
type {name} struct {{
	ID int64 `json:"id"`
{members}
}}

// Validate returns what is wrong with the record, or nil.
func ({var} {name}) Validate() error {{
	if {var}.{key.title()} == "" {{
		return errors.New("{key} is empty")
	}}
	return nil
}}

// {name}s serves records over HTTP.
type {name}s struct {{
	mu   sync.RWMutex
	byID map[int64]{name}
}}

func (s *{name}s) ServeHTTP(w http.ResponseWriter, r *http.Request) {{
	switch r.Method {{
	case http.MethodGet:
		s.mu.RLock()
		defer s.mu.RUnlock()
		all := make([]{name}, 0, len(s.byID))
		for _, {var} := range s.byID {{
			all = append(all, {var})
		}}
		sort.Slice(all, func(i, j int) bool {{ return all[i].ID < all[j].ID }})
		json.NewEncoder(w).Encode(all)
	case http.MethodPut:
		id, err := strconv.ParseInt(r.URL.Query().Get("id"), 10, 64)
		if err != nil {{
			http.Error(w, "id is not a number", http.StatusBadRequest)
			return
		}}
		var {var} {name}
		if err := json.NewDecoder(r.Body).Decode(&{var}); err != nil {{
			http.Error(w, fmt.Sprintf("not a {name.lower()}: %v", err), http.StatusBadRequest)
			return
		}}
		if err := {var}.Validate(); err != nil {{
			http.Error(w, err.Error(), http.StatusUnprocessableEntity)
			return
		}}
		{var}.ID = id
		s.mu.Lock()
		s.byID[id] = {var}
		s.mu.Unlock()
		w.WriteHeader(http.StatusNoContent)
	default:
		http.Error(w, "method not allowed", http.StatusMethodNotAllowed)
	}}
}}"""


def rust(name: str, fields: Fields) -> str:
    types, var = _types("String|i64|f64|i64|bool|String"), name.lower()
    key, number = _first(fields, "text"), _first(fields, "int", "money", "float")
    members = "\n".join(f"    pub {field}: {types[kind]}," for field, kind in fields)
    reads = "\n".join(
        f"            {field}: field({at})?"
        + (".to_string()," if types[kind] == "String" else f'.parse().map_err(|_| bad("{field}"))?,')
        for at, (field, kind) in enumerate(fields)
    )
    return f"""use std::collections::BTreeMap;
use std::str::FromStr;

/// A {var}, as a line of a tab-separated file holds it.
#[derive(Debug, Clone, PartialEq)]
pub struct {name} {{
{members}
}}

#[derive(Debug, PartialEq)]
pub struct ParseError(pub String);

impl FromStr for {name} {{
    type Err = ParseError;

    fn from_str(line: &str) -> Result<Self, Self::Err> {{
        let columns: Vec<&str> = line.split('\\t').collect();
        let field = |at: usize| {{
            columns.get(at).copied().ok_or_else(|| ParseError(format!("column {{}} is missing", at + 1)))
        }};
        let bad = |name: &str| ParseError(format!("{{name}} cannot be read"));
        Ok({name} {{
{reads}
        }})
    }}
}}

/// Group by {key}, ignoring case; each group has its largest {number} first.
pub fn group(all: &[{name}]) -> BTreeMap<String, Vec<&{name}>> {{
    let mut groups: BTreeMap<String, Vec<&{name}>> = BTreeMap::new();
    for {var} in all {{
        groups.entry({var}.{key}.to_lowercase()).or_default().push({var});
    }}
    for group in groups.values_mut() {{
        group.sort_by(|a, b| b.{number}.partial_cmp(&a.{number}).unwrap_or(std::cmp::Ordering::Equal));
    }}
    groups
}}"""


def c(name: str, fields: Fields) -> str:
    types, var = _types("char *|long |double |long |bool |long "), name.lower()
    key, number = _first(fields, "text"), _first(fields, "int", "money", "float")
    members = "\n".join(f"    {types[kind]}{field};" for field, kind in fields)
    return f"""#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct {var} {{
{members}
    struct {var} *next;
}};

/* Compare by {number}, then by {key}. */
static int {var}_compare(const struct {var} *a, const struct {var} *b)
{{
    if (a->{number} != b->{number})
        return a->{number} < b->{number} ? -1 : 1;
    return strcmp(a->{key}, b->{key});
}}

/* Merge two sorted lists. */
static struct {var} *{var}_merge(struct {var} *a, struct {var} *b)
{{
    struct {var} head = {{0}}, *tail = &head;
    while (a && b) {{
        struct {var} **from = {var}_compare(a, b) <= 0 ? &a : &b;
        tail->next = *from;
        tail = *from;
        *from = (*from)->next;
    }}
    tail->next = a ? a : b;
    return head.next;
}}

struct {var} *{var}_sort(struct {var} *list)
{{
    if (!list || !list->next)
        return list;
    struct {var} *slow = list, *fast = list->next;
    while (fast && fast->next) {{
        slow = slow->next;
        fast = fast->next->next;
    }}
    struct {var} *second = slow->next;
    slow->next = NULL;
    return {var}_merge({var}_sort(list), {var}_sort(second));
}}

void {var}_free(struct {var} *list)
{{
    while (list) {{
        struct {var} *next = list->next;
        free(list->{key});
        free(list);
        list = next;
    }}
}}"""


def cpp(name: str, fields: Fields) -> str:
    types, var = _types("std::string|int|double|long|bool|std::string"), name.lower()
    key, number, flag = _first(fields, "text"), _first(fields, "int", "money", "float"), _first(fields, "bool")
    members = "\n".join(f"    {types[kind]} {field}{{}};" for field, kind in fields)
    return f"""#include <algorithm>
#include <iostream>
#include <numeric>
#include <ranges>
#include <string>
#include <unordered_map>
#include <vector>

struct {name} {{
{members}

    friend std::ostream& operator<<(std::ostream& out, const {name}& {var}) {{
        return out << "{name}(" << {var}.{key} << ", " << {var}.{number} << ')';
    }}
}};

class {name}Index {{
public:
    void add({name} {var}) {{
        places_[{var}.{key}].push_back(all_.size());
        all_.push_back(std::move({var}));
    }}

    std::vector<const {name}*> find(const std::string& {key}) const {{
        std::vector<const {name}*> found;
        if (auto it = places_.find({key}); it != places_.end())
            for (std::size_t place : it->second) found.push_back(&all_[place]);
        return found;
    }}

    auto sum_of_{number}() const {{
        return std::accumulate(all_.begin(), all_.end(), 0.0,
                               [](double sum, const {name}& {var}) {{ return sum + {var}.{number}; }});
    }}

    std::size_t count_{flag}() const {{
        return std::ranges::count_if(all_, &{name}::{flag});
    }}

private:
    std::vector<{name}> all_;
    std::unordered_map<std::string, std::vector<std::size_t>> places_;
}};"""


def shell(name: str, fields: Fields) -> str:
    var, key, number = name.lower(), _first(fields, "text"), _first(fields, "int", "money", "float")
    at = [field for field, _ in fields].index(number) + 1
    return f"""#!/bin/sh
# {var}s.sh: keep {var}s in a tab-separated file. Columns: {", ".join(field for field, _ in fields)}.
set -eu
file=${{{name.upper()}S:-$HOME/.{var}s.tsv}}

case ${{1:-list}} in
    add)
        shift
        [ $# -eq {len(fields)} ] || {{ echo "add takes {len(fields)} values" >&2; exit 2; }}
        printf '%s' "$1" >>"$file"
        shift
        for value; do printf '\\t%s' "$value" >>"$file"; done
        echo >>"$file"
        ;;
    list)
        sort -t "$(printf '\\t')" -k {at},{at}nr "$file" | column -t -s "$(printf '\\t')"
        ;;
    total)
        awk -F '\\t' '{{ sum += ${at} }} END {{ print NR " {var}s, {number} in all: " sum }}' "$file"
        ;;
    find)
        grep -i -- "${{2:?find takes a {key}}}" "$file"
        ;;
    *)
        echo "usage: $0 [add VALUES | list | total | find {key.upper()}]" >&2
        exit 2
        ;;
esac"""


def javascript(name: str, fields: Fields) -> str:
    var, key, number, flag = (
        name.lower(),
        _first(fields, "text"),
        _first(fields, "int", "money", "float"),
        _first(fields, "bool"),
    )
    shown = {field: f'{var}.{field} ? "✓" : "–"' if kind == "bool" else f"{var}.{field}" for field, kind in fields}
    cells = "\n".join(f"    cell({value})," for value in shown.values())
    return f"""// Shows {var}s in a table that is sorted by a click on its head.
const state = {{ {var}s: [], sortBy: "{number}", descending: true, only{flag.title()}: false }};

async function load() {{
  const response = await fetch("/api/{var}s");
  if (!response.ok) throw new Error(`cannot load {var}s: ${{response.status}}`);
  state.{var}s = await response.json();
  render();
}}

function cell(text) {{
  const td = document.createElement("td");
  td.textContent = text;
  return td;
}}

function row({var}) {{
  const tr = document.createElement("tr");
  tr.dataset.id = {var}.id;
  tr.append(
{cells}
  );
  return tr;
}}

function visible() {{
  const sign = state.descending ? -1 : 1;
  return state.{var}s
    .filter(({var}) => !state.only{flag.title()} || {var}.{flag})
    .toSorted((a, b) => sign * (a[state.sortBy] > b[state.sortBy] ? 1 : a[state.sortBy] < b[state.sortBy] ? -1 : 0));
}}

function render() {{
  document.querySelector("#{var}s tbody").replaceChildren(...visible().map(row));
  const sum = visible().reduce((all, {{ {number} }}) => all + {number}, 0);
  document.querySelector("#total").textContent = `${{visible().length}} {var}s, {number} ${{sum}}`;
}}

document.querySelector("#{var}s thead").addEventListener("click", ({{ target }}) => {{
  const column = target.dataset.column ?? "{key}";
  state.descending = column === state.sortBy ? !state.descending : true;
  state.sortBy = column;
  render();
}});

load().catch((error) => console.error(error));"""


def ruby(name: str, fields: Fields) -> str:
    var, key, number, flag = (
        name.lower(),
        _first(fields, "text"),
        _first(fields, "int", "money", "float"),
        _first(fields, "bool"),
    )
    symbols = ", ".join(f":{field}" for field, _ in fields)
    return f"""# frozen_string_literal: true

require "json"

{name} = Struct.new({symbols}, keyword_init: true) do
  def {flag}?
    {flag}
  end

  def <=>(other)
    [{number}, {key}] <=> [other.{number}, other.{key}]
  end
  include Comparable
end

RSpec.describe {name} do
  let(:{var}s) do
    JSON.parse(File.read("spec/{var}s.json"), symbolize_names: true).map {{ |values| {name}.new(**values) }}
  end

  it "is ordered by {number}" do
    expect({var}s.sort.map(&:{number})).to eq({var}s.map(&:{number}).sort)
  end

  it "knows which are {flag}" do
    {flag}, others = {var}s.partition(&:{flag}?)
    expect({flag}.size + others.size).to eq({var}s.size)
  end

  it "has a {key} each" do
    expect({var}s.map(&:{key})).to all(match(/\\S/))
  end
end"""
