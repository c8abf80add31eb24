"""Any index of .bin files, any params.json, any .metadata or config.json: read, or refused in one line."""

import json
import pickle
from pathlib import Path

import frameworks
import pytest
import tiny
import torch
from hypothesis import strategies as st
from torch_files import write_bin, write_dcp, write_meta
from watched_conversions import change_index, convert_and_compare, file_names, fresh_copy, fuzz, names, numbers, values

bins = file_names(".bin", "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")
pieces = file_names(".distcp", "__0_0.distcp", "__1_0.distcp")
SHAPE = {"hidden_size": 64, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 64}


@pytest.fixture(scope="module")
def wholes(tmp_path_factory):
    """Return a folder with a small checkpoint of each kind."""
    place = tmp_path_factory.mktemp("wholes")
    model, olmo = tiny.build(num_hidden_layers=1), tiny.build("olmo2", num_hidden_layers=1)
    write_bin(place / "bin", model, n_shards=2)
    write_meta(place / "meta", tiny.build(**SHAPE, num_hidden_layers=1), 2, n_kv_heads=16, rope_theta=10000.0)
    write_dcp(place / "dcp", {f"model.{n}": t for n, t in model.state_dict().items()}, 2)
    (place / "dcp/config.json").write_text(json.dumps(model.config.to_dict()))
    write_dcp(place / "torchtitan", frameworks.titan_tensors(model), 2)
    (place / "torchtitan/config.json").write_text(json.dumps(model.config.to_dict()))
    write_dcp(place / "olmo", {f"model.{n}": t for n, t in frameworks.olmo_tensors(olmo).items()}, 2)
    (place / "olmo/config.json").write_text(json.dumps(frameworks.olmo_run(olmo)))
    return place


def any_bin_index(convert, wholes, tmp_path, data):
    path = fresh_copy(wholes / "bin", tmp_path) / "pytorch_model.bin.index.json"
    path.write_text(json.dumps(change_index(data, json.loads(path.read_text()), bins)))
    convert_and_compare(convert, tmp_path)


def any_params(convert, wholes, tmp_path, data):
    path = fresh_copy(wholes / "meta", tmp_path) / "params.json"
    change_json(data, path)
    convert_and_compare(convert, tmp_path)


def any_config(convert, wholes, tmp_path, data):
    """Both of Hugging Face's and of OLMo-core's, where every tensor is held against it."""
    change_json(data, fresh_copy(wholes / data.draw(st.sampled_from(["torchtitan", "olmo"])), tmp_path) / "config.json")
    convert_and_compare(convert, tmp_path)


def any_metadata(convert, wholes, tmp_path, data):
    path = fresh_copy(wholes / data.draw(st.sampled_from(["dcp", "torchtitan"])), tmp_path) / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        change_metadata(data, metadata)
    if data.draw(st.integers(0, 6)) == 0:
        key = data.draw(st.sampled_from(["state_dict_metadata", "storage_data", "planner_data", "storage_meta"]))
        setattr(metadata, key, data.draw(values | st.just(Path("x"))))
    path.write_bytes(pickle.dumps(metadata))
    convert_and_compare(convert, tmp_path)


def change_json(data, path):
    """Change a few values at any depth, or the whole."""
    content = json.loads(path.read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        part = content
        while isinstance(part, dict) and part:
            key = data.draw(st.sampled_from(sorted(part)))
            if not isinstance(part[key], dict) or data.draw(st.integers(0, 3)) == 0:
                action = data.draw(st.sampled_from(["remove", "replace", "number", "add", "text"]))
                if action == "remove":
                    del part[key]
                else:
                    new = {"replace": values, "number": numbers, "add": values, "text": names}[action]
                    part[data.draw(names) if action == "add" else key] = data.draw(new)
                break
            part = part[key]
    if data.draw(st.integers(0, 20)) == 0:
        content = data.draw(values)
    path.write_text(json.dumps(content))


def change_metadata(data, metadata):
    """Change what is said of one tensor or of one piece of a file, in torch's own objects."""
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    name = data.draw(st.sampled_from(sorted(name for name in entries if isinstance(name, str))))
    entry = entries[name]
    place = places[data.draw(st.sampled_from(sorted(places, key=str)))]
    chunks = getattr(entry, "chunks", None)
    has_chunks = isinstance(chunks, list) and chunks != [] and all(hasattr(chunk, "offsets") for chunk in chunks)
    counts = st.integers(-1, 70) | numbers
    action = data.draw(st.sampled_from(["remove", "rename", "size", "dtype", "chunk", "no chunk", "place"]))
    if action == "remove" and len(entries) > 1:
        del entries[name]
    elif action == "rename":
        entries[data.draw(names | numbers.filter(lambda n: n == n))] = entries.pop(name)
    elif action == "size" and hasattr(entry, "size"):
        entry.size = data.draw(st.lists(st.integers(0, 70), max_size=3).map(torch.Size) | st.lists(counts) | values)
    elif action == "dtype" and hasattr(entry, "properties"):
        entry.properties.dtype = data.draw(st.sampled_from([torch.int8, torch.bfloat16, torch.complex64]) | values)
    elif action == "chunk" and has_chunks:
        setattr(chunks[-1], data.draw(st.sampled_from(["offsets", "sizes"])), data.draw(st.lists(counts, max_size=3)))
    elif action == "no chunk" and has_chunks:
        entry.chunks = data.draw(st.sampled_from([[], chunks[:1], chunks * 2]) | values)
    else:
        key = data.draw(st.sampled_from(["relative_path", "offset", "length", "transform_descriptors"]))
        setattr(place, key, data.draw(pieces if key == "relative_path" else counts | values))


test_any_bin_index, test_any_bin_index_at_length = fuzz(any_bin_index, 40)
test_any_params, test_any_params_at_length = fuzz(any_params, 40)
test_any_config, test_any_config_at_length = fuzz(any_config, 50)
test_any_metadata, test_any_metadata_at_length = fuzz(any_metadata, 60)


@pytest.mark.parametrize("kind", ["bin", "meta", "dcp", "torchtitan", "olmo"])
def test_the_undamaged_ones_are_read(convert, wholes, tmp_path, kind):
    fresh_copy(wholes / kind, tmp_path)
    assert convert_and_compare(convert, tmp_path) == 0
