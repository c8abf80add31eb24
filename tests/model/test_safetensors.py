"""Our header reader and writer against the safetensors library."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from model.checkpoint import Shard, TensorInfo
from model.checkpoint.formats.safetensors import SafetensorsFolder, read_header
from model.checkpoint.safetensors_writer import ShardFile, divide, header_bytes, index_bytes, name_shards
from model.common.errors import CheckpointError

DTYPES = {
    "F64": "f8",
    "F32": "f4",
    "F16": "f2",
    "I64": "i8",
    "I32": "i4",
    "I16": "i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}


def test_threads_that_begin_at_once_open_a_file_once(tmp_path, monkeypatch):
    folder = tiny.save(tiny.build(), tmp_path / "model")
    opened, real = [], os.open

    def open_slowly(path, *arguments):
        opened.append(path)
        time.sleep(0.05)
        return real(path, *arguments)

    with SafetensorsFolder(folder) as checkpoint, ThreadPoolExecutor(8) as pool:
        monkeypatch.setattr(os, "open", open_slowly)
        names = list(checkpoint.tensors)[:8]
        assert len(list(pool.map(lambda name: checkpoint.rows(name, 0, 1), names))) == 8
    assert len(opened) == 1


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
tables = st.dictionaries(st.text(min_size=1, max_size=8), st.tuples(st.sampled_from(list(DTYPES)), shapes), max_size=6)


@settings(max_examples=60)
@given(table=tables.filter(lambda t: "__metadata__" not in t))
def test_headers_of_the_library_are_read(tmp_path_factory, table):
    path = tmp_path_factory.mktemp("h") / "x.safetensors"
    save_file({name: np.zeros(shape, DTYPES[dtype]) for name, (dtype, shape) in table.items()}, path)
    header = read_header(path)
    assert {t.name: (t.dtype, t.shape) for t in header.tensors.values()} == table


@settings(max_examples=60)
@given(table=tables.filter(lambda t: "__metadata__" not in t), seed=st.integers(0, 100))
def test_the_library_reads_what_we_write(tmp_path_factory, table, seed):
    path, rng = tmp_path_factory.mktemp("w") / "x.safetensors", np.random.default_rng(seed)
    values = {n: rng.integers(0, 2, size=shape).astype(DTYPES[dtype]) for n, (dtype, shape) in table.items()}
    # The library wants tensors aligned, as it sorts them itself: largest dtype first.
    tensors = sorted((TensorInfo(n, *table[n]) for n in table), key=lambda t: -np.dtype(DTYPES[t.dtype]).itemsize)
    file = ShardFile(path, tensors, {"note": "é"})
    for tensor in reversed(tensors):
        rows = np.atleast_1d(values[tensor.name])
        for row in range(len(rows)):
            file.write_rows(tensor.name, row, rows[row : row + 1])
    file.finish()
    read = load_file(path)
    assert read.keys() == values.keys()
    assert all(read[n].tobytes() == values[n].tobytes() and read[n].shape == values[n].shape for n in values)
    with safe_open(path, "np") as opened:
        assert opened.metadata() == {"note": "é", "format": "pt"}


@settings(max_examples=300)
@given(data=st.binary(max_size=200), length=st.integers(0, 200))
def test_garbage_is_refused_in_words(tmp_path_factory, data, length):
    path = tmp_path_factory.mktemp("g") / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + data)
    try:
        header = read_header(path)
    except CheckpointError as error:
        assert str(path) in str(error)
    else:
        assert sum(t.nbytes for t in header.tensors.values()) + 8 + length == path.stat().st_size


keys = st.sampled_from(["dtype", "shape", "data_offsets", "a"])
leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
json_values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=8
)


@settings(max_examples=300)
@given(header=st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), json_values, max_size=3))
def test_any_json_is_read_or_refused(tmp_path_factory, header):
    path = tmp_path_factory.mktemp("j") / "x.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    try:
        read_header(path)
    except CheckpointError as error:
        assert "damaged" in str(error) or "truncated" in str(error)


def test_header_is_padded_to_eight_bytes():
    for n in range(1, 20):
        assert len(header_bytes([TensorInfo("a" * n, "F32", (3,))], {})) % 8 == 0


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=30), limit=st.integers(1, 60))
def test_shards_hold_everything_in_order_within_the_limit(sizes, limit):
    tensors = [TensorInfo(str(i), "U8", (n,)) for i, n in enumerate(sizes)]
    groups = divide(tensors, limit)
    assert [t for group in groups for t in group] == tensors
    for group in groups:
        assert sum(t.nbytes for t in group) <= limit or len([t for t in group if t.nbytes]) == 1
    named = name_shards(groups, {})
    assert len({shard.name for shard in named}) == len(groups)


def test_a_single_file_has_no_index():
    tensors = {"a": TensorInfo("a", "F32", (2,))}
    assert index_bytes([Shard("model.safetensors", ("a",))], tensors) is None
    index = json.loads(index_bytes([Shard("model-00001-of-00001.safetensors", ("a",))], tensors) or b"")
    assert index == {"metadata": {"total_size": 8}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
