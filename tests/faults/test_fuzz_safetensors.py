"""Any safetensors header and any index: read, or refused in one line; nothing is ever written but OUT."""

import json
import shutil

import pytest
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

names = st.sampled_from(
    [
        "model.layers.0.self_attn.k_proj.weight", "model.layers.1.self_attn.v_proj.weight", "lm_head.weight",
        "model.layers.00.self_attn.k_proj.weight", "model.layers.9.self_attn.q_proj.bias", "__metadata__", "", "../x",
        "/etc/passwd", "a\0b", "é" * 300, "\ud800",
    ]
) | st.text(max_size=6)  # fmt: skip
numbers = st.integers(-2, 70) | st.integers(-(2**70), 2**70) | st.floats() | st.booleans() | st.none()
values = st.recursive(
    numbers | names | st.sampled_from(["F32", "BF16", "I8", "F4", "Q9"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["dtype", "shape", "x"]), inner),
    max_leaves=6,
)
files = st.sampled_from(
    [
        "../model-00001-of-00002.safetensors", "/tmp/x.safetensors", "..", ".", "", "config.json", "x.safetensors",
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "sub/../x.safetensors",
        "..\\x.safetensors", ".safetensors", "a\0.safetensors", "é" * 300 + ".safetensors", "\ud800.safetensors",
    ]
) | values  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return tiny.save(tiny.build(), tmp_path_factory.mktemp("whole") / "source", "bfloat16", max_shard_size="40KB")


def convert_and_compare(convert, place):
    """Convert; nothing beside OUT may have changed, and a refusal is one line."""
    before = tiny.snapshot(place)
    result = convert("mha-to-gqa", place / "source", place / "out", "--groups", 2)
    if result.code:
        result.refused()
        assert {p.name for p in place.iterdir()} == {"source"}
    else:
        assert convert("verify", place / "source", place / "out").code == 0
        shutil.rmtree(place / "out")
    assert tiny.snapshot(place) == before
    return result.code


def fresh_copy(whole, place):
    shutil.rmtree(place / "source", ignore_errors=True)
    shutil.copytree(whole, place / "source")
    return place / "source"


def change_header(data, header):
    """Change a header at random, keeping most of it."""
    name = data.draw(st.sampled_from(sorted(header)))
    action = data.draw(st.sampled_from(["remove", "rename", "replace", "edit", "swap", "reorder"]))
    if action == "remove":
        del header[name]
    elif action == "rename":
        header[data.draw(names)] = header.pop(name)
    elif action == "replace":
        header[name] = data.draw(values)
    elif action == "edit" and isinstance(header[name], dict):
        header[name][data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "more"]))] = data.draw(values)
    elif action == "swap":
        other = data.draw(st.sampled_from(sorted(header)))
        header[name], header[other] = header[other], header[name]
    else:
        header[name] = header.pop(name)


@FUZZ
@given(data=st.data())
def test_any_header(convert, whole, tmp_path, data):
    shard = next(fresh_copy(whole, tmp_path).glob("model-00001*"))
    content = shard.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    for _ in range(data.draw(st.integers(1, 3))):
        if header:
            change_header(data, header)
    text = json.dumps(header).encode()
    length = data.draw(st.just(len(text)) | st.integers(0, 2**64 - 1))
    shard.write_bytes(length.to_bytes(8, "little") + text + content[end:])
    convert_and_compare(convert, tmp_path)


@FUZZ
@given(data=st.data())
def test_any_index(convert, whole, tmp_path, data):
    path = fresh_copy(whole, tmp_path) / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        table = index.get("weight_map") if isinstance(index, dict) else None
        action = data.draw(st.sampled_from(["point", "add", "remove", "table", "all"]))
        if action == "all":
            index = data.draw(values)
        elif action == "table" and isinstance(index, dict):
            index["weight_map"] = data.draw(values)
        elif isinstance(table, dict) and table:
            name = data.draw(st.sampled_from(sorted(table)))
            if action == "remove":
                del table[name]
            else:
                table[name if action == "point" else data.draw(names)] = data.draw(files)
    path.write_text(json.dumps(index))
    convert_and_compare(convert, tmp_path)


def test_the_undamaged_folder_is_read(convert, whole, tmp_path):
    fresh_copy(whole, tmp_path)
    assert convert_and_compare(convert, tmp_path) == 0
