"""Every reader on its own: the same records whatever the pieces, and bad ones where they are."""

import gzip
import json
import lzma
import sys
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.common.errors import InputError
from model.texts import READERS, Problem, columns, find_reader, format_of, jsonl, parquet
from model.texts.columns import documents, refusing_damage
from model.texts.jsonl import parse
from model.texts.record import BLANK, EMPTY, NULL, OtherLabels, token_ids

TEXTS = ["one", "two\r\nlines", "", "drei 🙂", "x" * 5000, "\u2028 \x85 \x0b", "end"]


def read_all(name, path, piece_bytes=1 << 20):
    """Return (place, document) of all records, with Problems for what is none."""
    reader = find_reader(name)
    documents = []
    for piece in reader.split(str(path), piece_bytes):
        last = 0
        for row, bytes_read, document in reader.read(piece, "text"):
            assert last <= bytes_read
            last = bytes_read
            documents.append(
                (reader.place(piece, row), document.tolist() if isinstance(document, np.ndarray) else document)
            )
        assert last <= piece.nbytes or name == "jsonl"  # a line belongs to the piece in which it begins
    return documents


def write_jsonl(path, records, opener=open):
    with opener(path, "wb") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
    return path


def test_registry():
    assert [format_of(f"a{find_reader(name).SUFFIXES[0]}") for name in READERS] == list(READERS)
    assert format_of("a.jsonl.gz") == format_of("a.jsonl.zst") == "jsonl"
    assert format_of("c4.json.gz") == format_of("a.JSON") == format_of("a.ndjson.xz") == "jsonl"
    assert format_of("README.md") is format_of("jsonl") is None


# JSON Lines


@pytest.mark.parametrize("piece_bytes", [1, 3, 20, 100, 1 << 20])
def test_jsonl_pieces_are_the_whole(tmp_path, piece_bytes):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    documents = read_all("jsonl", path, piece_bytes)
    assert documents == [(f"{path}:{i}", text or EMPTY) for i, text in enumerate(TEXTS, 1)]


@given(
    st.lists(st.text(max_size=20)), st.integers(1, 60), st.sampled_from([b"\n", b"\r\n"]), st.booleans(), st.booleans()
)
def test_jsonl_any_text(tmp_path_factory, texts, piece_bytes, newline, bom, ends):
    path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    content = newline.join(json.dumps({"text": text}).encode() for text in texts)
    path.write_bytes(b"\xef\xbb\xbf" * bom + content + newline * (ends and bool(texts)))
    documents = [document for _, document in read_all("jsonl", path, piece_bytes)]
    if bom and not texts:
        assert documents == [BLANK]
    else:
        assert documents == [text or EMPTY for text in texts]


@pytest.mark.parametrize(("suffix", "opener"), [(".gz", gzip.open), (".xz", lzma.open)])
def test_jsonl_compressed(tmp_path, suffix, opener):
    path = write_jsonl(tmp_path / f"a.jsonl{suffix}", [{"text": text} for text in TEXTS], opener)
    expected = [(f"{path}:{i}", text or EMPTY) for i, text in enumerate(TEXTS, 1)]
    assert read_all("jsonl", path) == expected
    path.write_bytes(path.read_bytes() * 2)  # two members
    assert read_all("jsonl", path) == expected + [(f"{path}:{i + 7}", t or EMPTY) for i, t in enumerate(TEXTS, 1)]


@pytest.mark.parametrize("opener", [open, gzip.open])
def test_long_first_lines_are_records(tmp_path, opener):
    """A book or a paper may be longer than what is usually read of a file."""
    path = tmp_path / f"a.json{'.gz' if opener is gzip.open else ''}"
    write_jsonl(path, [{"text": "x" * 80_000}] * 2, opener)
    assert jsonl.holds_records(str(path))
    for n in range(jsonl.HEAD_BYTES - 16, jsonl.HEAD_BYTES + 2):  # at the end of what is usually read
        write_jsonl(path, [{"text": "x" * n}] * 2, opener)
        assert jsonl.holds_records(str(path)), n
    write_jsonl(path, [{"model": {"vocab": "x" * 80_000}}], opener)
    assert not jsonl.holds_records(str(path))


@pytest.mark.parametrize(
    "content",
    [
        b'{\n{"text": "a"}\n', b'{"text": "a,\n{"text": "b"}\n', b'{"text": "a"}\n[1]\n', b"", b"\n", b"3\n",
        b'{"text": "' + b"[" * 100_000 + b'"}\n', b'{"text": "a"}\n\n  {"text": "b"}', b"{}\n" * 2, b"{",
    ],
)  # fmt: skip
def test_jsonl_is_not_taken_for_other_json(tmp_path, content):
    """A bad line is a bad record, whose place is told."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    documents = read_all("jsonl", path)
    assert len(documents) == len(content.splitlines())


def test_jsonl_zst(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "a.jsonl.zst"
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    member = zstandard.compress((tmp_path / "a.jsonl").read_bytes())
    path.write_bytes(member * 2)
    assert [document for _, document in read_all("jsonl", path)] == [text or EMPTY for text in TEXTS] * 2
    path.write_bytes(member[:-3])
    with pytest.raises(InputError, match=r"the compressed data is cut off"):
        read_all("jsonl", path)


def test_jsonl_zst_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"")
    with pytest.raises(InputError, match=r"needs the zstandard package: pip install zstandard"):
        read_all("jsonl", tmp_path / "a.jsonl.zst")


@pytest.mark.parametrize(("suffix", "opener"), [(".gz", gzip.open), (".xz", lzma.open)])
@pytest.mark.parametrize("damage", ["cut", "flipped", "garbage after", "empty"])
def test_jsonl_damaged_compression(tmp_path, suffix, opener, damage):
    path = write_jsonl(tmp_path / f"a.jsonl{suffix}", [{"text": f"{i}"} for i in range(100)], opener)
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 0xFF
    content = {"cut": content[:-9], "garbage after": content + b"garbage", "empty": b""}.get(damage, content)
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"a\.jsonl\.[gx]z:\d+: the compressed data is (cut off|damaged)"):
        read_all("jsonl", path)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"", BLANK),
        (b" \r\n", BLANK),
        (b'{"text": null}\n', NULL),
        (b'{"text": ""}\n', EMPTY),
        (b'{"input_ids": []}\n', EMPTY),
        (b'{"input_ids": null}\n', NULL),
        (b"[1]\n", "a list instead of an object"),
        (b"null\n", "null instead of an object"),
        (b'"text"\n', "a string instead of an object"),
        (b"3\n", "a number instead of an object"),
        (b'{"text": 3}\n', "field 'text' is a number, not a string"),
        (b'{"text": true}\n', "field 'text' is true or false, not a string"),
        (b'{"text": ["a"]}\n', "field 'text' is a list, not a string"),
        (b'{"text": {}}\n', "field 'text' is an object, not a string"),
        (
            b'{"text": [{"role": "user"}]}\n',
            "field 'text' is a list, not a string; a chat must become text first",
        ),
        (
            b'{"messages": [{"role": "user"}]}\n',
            "no field 'text' among 'messages'; a chat must become text first",
        ),
        (
            b"{}\n",
            "no field 'text' among no fields; rename the field of the text to 'text', or name it with `",
        ),
        (
            b'{"id": 1, "content": "a"}\n',
            "no field 'text' among 'id', 'content'; rename the field of the text to 'text', or name it with `",
        ),
        (b'{"text": "a"\n', "not valid JSON (Expecting ',' delimiter at column 13)"),
        (b'{"text": "a", "b"', "not valid JSON: the last line is cut off (Expecting ':' delimiter at column 18)"),
        (b'{"text": "a\0b"}\n', "not valid JSON: the line holds NUL bytes, the first at byte 12"),
        (b"\0\0\0\0", "not valid JSON: the line holds NUL bytes, the first at byte 1"),
        (b'{"text": "\xff"}\n', "not valid UTF-8 at byte 11 of the line"),
        ('{"text": "a"}\n'.encode("utf-16"), "not valid UTF-8 at byte 1 of the line"),
        (b'{"text": "\\ud83d"}\n', "half of a surrogate pair in field 'text' at character 1"),
        (b"[" * 100_000 + b"\n", "not valid JSON: nested too deeply"),
        (b'{"n": ' + b"9" * 5000 + b"}\n", "not valid JSON (Exceeds the limit"),
        (b'{"text": "a"} {"text": "b"}\n', "not valid JSON (Extra data at column 15)"),
        (b'{"input_ids": "a"}\n', "field 'input_ids' is not a list of whole numbers"),
        (b'{"input_ids": [1.5]}\n', "field 'input_ids' is not a list of whole numbers"),
        (b'{"text": "a"}\r{"text": "b"}\r', "not valid JSON: lines end with a carriage return alone; end them with"),
        (b'{"input_ids": [[1]]}\n', "field 'input_ids' is not a list of whole numbers"),
        (b'{"input_ids": [[1], 2]}\n', "field 'input_ids' is not a list of whole numbers"),
        (b'{"input_ids": [1, null]}\n', "field 'input_ids' is not a list of whole numbers"),
        (b'{"input_ids": [99999999999999999999]}\n', "field 'input_ids' is not a list of whole numbers"),
    ],
)
def test_jsonl_line_that_is_no_document(line, problem):
    parsed = parse(line, "text")
    if isinstance(problem, str):
        assert isinstance(parsed, Problem)
        assert parsed.bad
        assert parsed.reason.startswith(problem)
    else:
        assert parsed == problem


def test_jsonl_line_of_very_many_objects(monkeypatch):
    """Each takes thirty times as much memory as text. Brackets in strings are no objects."""
    monkeypatch.setattr(jsonl, "MAX_CONTAINERS", 100)
    reason = "more than 100 objects and lists in one record"
    for many in (b"{}," * 100 + b"{}", b"[" * 101 + b"]" * 101, b'"' + b"{" * 101):
        assert parse(b'{"a": [' + many + b'], "text": "x"}\n', "text").bad
    assert parse(b'{"a": [' + b"{}," * 100 + b'{}], "text": "x"}', "text") == (reason, True)
    assert parse(b'{"a": [' + b"[]," * 97 + b'{}], "text": "x"}', "text") == "x"
    text = '{["\\' * 101
    assert parse(json.dumps({"text": text}).encode(), "text") == text


def test_a_repeated_value_of_parquet_is_held_once(tmp_path, monkeypatch):
    """200 rows of one text of 1 MB are 50 kB on the disk."""
    pq.write_table(pa.table({"text": ["x" * 1_000_000] * 200}), tmp_path / "a.parquet")
    sizes = []
    documents = columns.documents
    monkeypatch.setattr(columns, "documents", lambda column: [sizes.append(column.nbytes), *documents(column)][1:])
    (piece,) = parquet.split(str(tmp_path / "a.parquet"), 1 << 30)
    assert [len(record.content) for record in parquet.read(piece, "text")] == [1_000_000] * 200
    assert max(sizes) < 1.1e6


@pytest.mark.parametrize("kind", ["dictionary", "string_view"])
def test_a_value_that_many_rows_share_is_held_once(kind):
    """Arrow counts it once, so a batch of any number of rows may be a small one."""
    text = "x" * 1_000_000
    if kind == "dictionary":
        column = pa.DictionaryArray.from_arrays(pa.array([0, None] * 100, pa.int32()), pa.array([text]))
    else:
        view = pa.array([text], pa.string_view()).buffers()
        column = pa.Array.from_buffers(pa.string_view(), 200, [None, pa.py_buffer(bytes(view[1]) * 200), *view[2:]])
    tracemalloc.start()
    lengths = [len(document) for document in documents(column) if document is not NULL]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert lengths == [1_000_000] * (100 if kind == "dictionary" else 200)
    assert peak < 10e6


def test_jsonl_fields_of_very_long_names():
    problem = parse(json.dumps({"a" * 5_000_000: 1, "b": 2}).encode(), "text")
    assert len(problem.reason) < 200
    assert problem.reason.startswith(f"no field 'text' among '{'a' * 59}…, 'b'; rename the field")


def test_jsonl_line_that_is_a_document():
    assert parse(b'\t{"text": "\\ud83d\\ude42 \\u0000"}\r\n', "text") == "🙂 \0"
    assert parse(b'{"text": 1, "body": "b"}\n', "body") == "b"
    assert parse(b'{"input_ids": [3, 4], "text": "text first"}\n', "text") == "text first"
    assert parse(b'{"input_ids": [3, 4]}\n', "text").tolist() == [3, 4]


MASKED = [
    ({"attention_mask": [1, 1, 0, 0]}, [5, 6]),
    ({"attention_mask": [0, 1, 1, 0]}, [6, 7]),
    ({"attention_mask": [1, 1, 1, 1]}, [5, 6, 7, 8]),
    ({"attention_mask": [0, 0, 0, 0]}, EMPTY),
    ({"attention_mask": None}, [5, 6, 7, 8]),
    ({"attention_mask": [1, 0, 0, 1]}, "'attention_mask' is 0 at position 1, between ones"),
    ({"attention_mask": [0, 1, 0, 1]}, "'attention_mask' is 0 at position 2, between ones"),
    ({"attention_mask": [1, 1]}, "'attention_mask' has 2 numbers, and 'input_ids' has 4"),
    ({"attention_mask": []}, "'attention_mask' has 0 numbers, and 'input_ids' has 4"),
    ({"attention_mask": [1, 1, 2, 2]}, "'attention_mask' holds other numbers than 0 and 1"),
    ({"attention_mask": [True, True, True, False]}, [5, 6, 7]),
    ({"attention_mask": [1, 1, 0, 0], "labels": [5, 6, -100, -100]}, [5, 6]),
    ({"attention_mask": [1, 1, 0, 0], "labels": [-100, 6, -100, -100]}, [5, 6]),
    ({"labels": [5, 6, 7, 8]}, [5, 6, 7, 8]),
    ({"labels": [9]}, [5, 6, 7, 8]),
    ({"labels": 1}, [5, 6, 7, 8]),
]


@pytest.mark.parametrize("name", ["jsonl", "parquet", "arrow"])
@pytest.mark.parametrize(("beside", "expected"), MASKED)
def test_padding_and_labels(tmp_path, name, beside, expected):
    path, record = tmp_path / f"a.{name}", {"input_ids": [5, 6, 7, 8], **beside}
    if name == "jsonl":
        write_jsonl(path, [record])
    else:
        lists = {key: pa.array([value], pa.list_(pa.int64())) for key, value in record.items() if value in (None, [])}
        columns_of(path, [pa.table({key: [value] for key, value in record.items()} | lists)], name)
    reader = find_reader(name)
    (document,) = (each.content for piece in reader.split(str(path), 1000) for each in reader.read(piece, "text"))
    if isinstance(expected, str):
        assert document.bad
        assert document.reason.startswith(expected)
    elif expected == EMPTY:
        assert document == EMPTY
    else:
        assert document.tolist() == expected
        assert isinstance(document, OtherLabels) == (beside.get("labels") in ([-100, 6, -100, -100], [9]))


def test_texts_have_no_masks():
    assert parse(b'{"text": "a", "attention_mask": [7], "labels": [1]}\n', "text") == "a"
    assert (
        parse(b'{"input_ids": [1], "attention_mask": "1"}', "text").reason
        == "field 'attention_mask' is not a list of 0 and 1"
    )


def test_jsonl_bom_is_accepted_only_at_the_beginning(tmp_path):
    line = b'{"text": "a"}\n'
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + line + b"\xef\xbb\xbf" + line)
    (_, first), (place, second) = read_all("jsonl", path, 16)
    assert first == "a"
    assert place == f"{path}:2"
    assert second.reason.startswith("not valid JSON (Unexpected UTF-8 BOM")


# Columns


def columns_of(path, tables, name):
    """Write tables as row groups of a parquet file, or as batches of an Arrow stream."""
    if name == "parquet":
        with pq.ParquetWriter(path, tables[0].schema) as writer:
            for table in tables:
                writer.write_table(table)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, tables[0].schema) as writer:
            for table in tables:
                writer.write_table(table)
    return path


COLUMNAR = pytest.mark.parametrize("name", ["parquet", "arrow"])


@COLUMNAR
@pytest.mark.parametrize("piece_bytes", [1, 60, 1 << 20])
@pytest.mark.parametrize("type_", [pa.string(), pa.large_string()])
def test_columns_of_texts(tmp_path, name, piece_bytes, type_):
    texts = ["a", None, "", "b" * 50, "c", "🙂", "d"]
    tables = [pa.table({"id": [i], "text": pa.array([text], type_)}) for i, text in enumerate(texts)]
    path = columns_of(tmp_path / f"a.{name}", tables, name)
    expected = [NULL if text is None else text or EMPTY for text in texts]
    assert read_all(name, path, piece_bytes) == [(f"{path}:row {i}", text) for i, text in enumerate(expected, 1)]


@pytest.mark.parametrize("offset", [2_000_000_000, -5, 2])
@pytest.mark.parametrize("type_", [pa.string(), pa.list_(pa.int32())])
def test_arrow_offsets_that_lead_out_of_the_file(tmp_path, offset, type_):
    """Arrow believes them: the process would end by a signal."""
    buffers = [None, pa.py_buffer(np.array([0, offset, 3, 4], np.int32))]
    if type_ == pa.string():
        column = pa.Array.from_buffers(type_, 3, [*buffers, pa.py_buffer(b"abcd")])
    else:
        column = pa.Array.from_buffers(type_, 3, buffers, children=[pa.array([1, 2, 3, 4], pa.int32())])
    table = pa.table({"text" if type_ == pa.string() else "input_ids": column})
    path = columns_of(tmp_path / "a.arrow", [table], "arrow")
    if offset == 2:
        assert len(read_all("arrow", path)) == 3
        return
    with pytest.raises(InputError, match=r"a\.arrow is damaged or cut off"):
        read_all("arrow", path)


def test_arrow_indices_beyond_the_dictionary(tmp_path):
    column = pa.DictionaryArray.from_arrays(pa.array([0, 9]), pa.array(["a", "b"]), safe=False)
    path = columns_of(tmp_path / "a.arrow", [pa.table({"text": column})], "arrow")
    with pytest.raises(InputError, match="damaged or cut off"):
        read_all("arrow", path)


@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
def test_arrows_file_format_and_categories(tmp_path, piece_bytes):
    """As polars and Feather 2 write files, and pandas columns of few values."""
    texts = ["a", None, "", "a", "🙂"]
    path = tmp_path / "a.arrow"
    tables = [pa.table({"text": pa.array([text], pa.string()).dictionary_encode()}) for text in texts]
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_file(sink, tables[0].schema, options=pa.ipc.IpcWriteOptions(unify_dictionaries=True)) as writer,
    ):
        writer.write_table(pa.concat_tables(tables).unify_dictionaries())
    expected = [NULL if text is None else text or EMPTY for text in texts]
    assert read_all("arrow", path, piece_bytes) == [(f"{path}:row {i}", text) for i, text in enumerate(expected, 1)]
    pq.write_table(pa.concat_tables(tables).unify_dictionaries(), tmp_path / "a.parquet")
    assert [document for _, document in read_all("parquet", tmp_path / "a.parquet")] == expected


@COLUMNAR
@pytest.mark.parametrize("type_", [pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.uint16()), "fixed"])
def test_columns_of_token_ids(tmp_path, name, type_):
    lists = [[1, 2], None, [3, 65_535]] if type_ == "fixed" else [[1, 2, 3], None, [], [65_535]]
    type_ = pa.list_(pa.int64(), 2) if type_ == "fixed" else type_
    table = pa.table({"input_ids": pa.array(lists, type_)})
    path = columns_of(tmp_path / f"a.{name}", [table, table.slice(1)], name)
    expected = [NULL if ids is None else ids or EMPTY for ids in (*lists, *lists[1:])]
    assert [document for _, document in read_all(name, path)] == expected


@COLUMNAR
def test_columns_with_bad_values(tmp_path, name):
    texts = pa.StringArray.from_buffers(3, *pa.array([b"a", b"b\xff", b"c"]).buffers()[1:])
    path = columns_of(tmp_path / f"a.{name}", [pa.table({"text": texts})], name)
    assert read_all(name, path)[1:] == [
        (f"{path}:row 2", Problem("not valid UTF-8 at byte 2 of the text")), (f"{path}:row 3", "c"),
    ]  # fmt: skip
    path = columns_of(tmp_path / f"b.{name}", [pa.table({"input_ids": [[1, None], [2]]})], name)
    assert read_all(name, path) == [
        (f"{path}:row 1", Problem("nulls among the numbers of 'input_ids'")), (f"{path}:row 2", [2]),
    ]  # fmt: skip


@COLUMNAR
@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        (
            "text",
            [1, 2],
            "column 'text' is int64, not text; save it as strings, or name another column",
        ),
        (
            "content",
            ["a"],
            "no column 'text' among 'content'; rename the column of the text to it",
        ),
        ("input_ids", ["a"], "column 'input_ids' is string, not lists of whole numbers"),
        ("input_ids", [[0.5]], "column 'input_ids' is list<(item|element): double>, not lists of whole numbers"),
    ],
)
def test_columns_of_other_types(tmp_path, name, column, values, message):
    path = columns_of(tmp_path / f"a.{name}", [pa.table({column: values})], name)
    with pytest.raises(InputError, match=message):
        read_all(name, path)


@pytest.mark.parametrize("is_file", [False, True])
def test_arrow_unpacks_no_other_column(tmp_path, is_file):
    """A file of 30 KB can hold columns of a gigabyte."""
    path, table = tmp_path / "a.arrow", pa.table({"zeros": pa.array([bytes(1 << 26)] * 2), "text": ["a", "b"]})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    new = pa.ipc.new_file if is_file else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=1)
    assert path.stat().st_size < 100_000
    whole, counted = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(counted)
    try:
        reader = find_reader("arrow")
        read = [each.content for piece in reader.split(str(path), 1) for each in reader.read(piece, "text")]
    finally:
        pa.set_memory_pool(whole)
    assert read == ["a", "b"]
    assert counted.max_memory() < 1 << 20


@COLUMNAR
def test_columns_whose_names_are_not_utf_8(tmp_path, name):
    path = columns_of(tmp_path / f"a.{name}", [pa.table({"naive": [1], "text": ["a"]})], name)
    path.write_bytes(path.read_bytes().replace(b"naive", b"na\xefve"))
    with pytest.raises(InputError, match=rf"a\.{name} is damaged or cut off"):
        read_all(name, path)


@pytest.mark.parametrize("column", ["text", "input_ids"])
def test_two_columns_of_one_name(tmp_path, column):
    values = pa.array([[1]] if column == "input_ids" else ["a"])
    table = pa.Table.from_arrays([values, values], names=[column, column])
    path = columns_of(tmp_path / "a.arrow", [table], "arrow")
    with pytest.raises(InputError, match=f"2 columns '{column}'; rename all but one"):
        read_all("arrow", path)


def test_numbers_that_are_no_token_ids(tmp_path):
    """Beyond 64 bits with a sign, and truth values, which numpy takes for numbers."""
    ids = pa.array([[1, 2**63]], pa.list_(pa.uint64()))
    path = columns_of(tmp_path / "a.arrow", [pa.table({"input_ids": ids})], "arrow")
    ((_, problem),) = read_all("arrow", path)
    assert "the number 9223372036854775808" in problem.reason
    assert token_ids([1, True, 3]).reason == "field 'input_ids' is not a list of whole numbers"


@COLUMNAR
@pytest.mark.parametrize("keep", [0, 3, 0.5, 0.9])
def test_columns_cut_off(tmp_path, name, keep):
    path = columns_of(tmp_path / f"a.{name}", [pa.table({"text": ["a" * 50] * 50})] * 3, name)
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if keep < 1 else keep])
    with pytest.raises(InputError, match=rf"a\.{name} is damaged or cut off"):
        read_all(name, path)


def test_parquet_without_rows(tmp_path):
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    assert read_all("parquet", tmp_path / "a.parquet") == []


# Plain text


def test_txt(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    assert read_all("txt", path) == [(str(path), "one\r\ntwo\n")]
    path.write_bytes(b"one \xff")
    assert read_all("txt", path) == [(str(path), Problem("not valid UTF-8 at byte 5; convert it with iconv"))]
    path.write_bytes(b"")
    assert read_all("txt", path) == [(str(path), EMPTY)]


def test_ids_among_long_texts_take_no_memory():
    """As an array, each would be as wide as the longest."""
    tracemalloc.start()
    assert isinstance(token_ids(["a" * 500_000, *[""] * 1000]), Problem)
    assert tracemalloc.get_traced_memory()[1] < 10**7
    tracemalloc.stop()


def test_a_table_of_long_texts_is_read_in_parts():
    column = pa.array(["x" * 200_000] * 200)  # 40 MB
    tracemalloc.start()
    try:
        assert sum(len(text) for text in documents(column)) == 40_000_000
        assert tracemalloc.get_traced_memory()[1] < 10**7
    finally:
        tracemalloc.stop()


def test_rows_of_a_table_in_any_parts(monkeypatch):
    monkeypatch.setattr("model.texts.columns._SLICE_BYTES", 100)
    texts = [*TEXTS, None, "last"]
    assert list(documents(pa.array(texts))) == [NULL if text is None else text or EMPTY for text in texts]
    assert list(documents(pa.array([], pa.string()))) == []


@pytest.mark.parametrize(("error", "passes"), [
    (pa.ArrowMemoryError("malloc of size 4294967296 failed"), True), (OSError(116, "Stale file handle"), True),
    (pa.ArrowInvalid("magic bytes"), False), (OSError("Truncated file"), False),
])  # fmt: skip
def test_only_damage_is_called_damage(error, passes):
    with pytest.raises(type(error) if passes else InputError), refusing_damage("a.parquet"):
        raise error
