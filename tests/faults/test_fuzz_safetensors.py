"""Any safetensors header and any index: read, or refused in one line; nothing is ever written but OUT."""

import json

import pytest
import tiny
from hypothesis import strategies as st
from watched_conversions import Writes, change_index, convert_and_compare, file_names, fresh_copy, fuzz, names, values

files = file_names(".safetensors", *(f"model-0000{i}-of-00002.safetensors" for i in (1, 2)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return tiny.save(tiny.build(), tmp_path_factory.mktemp("whole") / "source", "bfloat16", max_shard_size="40KB")


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


def any_header(convert, whole, tmp_path, data):
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


def any_index(convert, whole, tmp_path, data):
    path = fresh_copy(whole, tmp_path) / "model.safetensors.index.json"
    path.write_text(json.dumps(change_index(data, json.loads(path.read_text()), files)))
    convert_and_compare(convert, tmp_path)


test_any_header, test_any_header_at_length = fuzz(any_header, 60)
test_any_index, test_any_index_at_length = fuzz(any_index, 60)


def test_the_undamaged_folder_is_read(convert, whole, tmp_path):
    fresh_copy(whole, tmp_path)
    assert convert_and_compare(convert, tmp_path) == 0


def test_writes_are_seen(tmp_path):
    with Writes() as writes:
        (tmp_path / "a").mkdir()
        (tmp_path / "a/b").write_text("b")
        (tmp_path / "a/b").rename(tmp_path / "c")
        (tmp_path / "c").read_text()
        (tmp_path / "c").unlink()
    seen = [path.removeprefix(str(tmp_path)) for path in writes.paths]
    assert seen == ["/a", "/a/b", "/a/b", "/c", "/c"]
    (tmp_path / "d").mkdir()
    assert len(writes.paths) == 5
