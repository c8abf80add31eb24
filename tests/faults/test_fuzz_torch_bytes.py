"""Any bytes of what torch.save wrote changed: read, or refused in one line."""

import json
import shutil

import pytest
import tiny
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch_files import META_SHAPE, write_bin, write_dcp, write_meta

from convert.cli import cli


@pytest.fixture(scope="module")
def small_files(tmp_path_factory):
    """Return small folders of each format, and their files."""
    place = tmp_path_factory.mktemp("small")
    model = tiny.build(num_hidden_layers=1)
    write_bin(place / "bin", model, n_shards=2)
    write_meta(place / "meta", tiny.build(**META_SHAPE, num_hidden_layers=1), 2, fused=True)
    write_dcp(place / "dcp", model.state_dict(), 2)
    (place / "dcp/config.json").write_text(json.dumps(model.config.to_dict()))
    return place


@pytest.fixture(scope="module")
def small_outputs(small_files, tmp_path_factory):
    """Return the tensors of the undamaged files' conversions."""
    folder, tensors = tmp_path_factory.mktemp("outputs"), {}
    for kind in ("bin", "meta", "dcp"):
        command = ["mha-to-mqa", "--method", "mean", str(small_files / kind), str(folder / kind)]
        assert CliRunner().invoke(cli, command).exit_code == 0
        tensors[kind] = tiny.tensors(folder / kind)
    return tensors


KINDS = {
    "bin": "pytorch_model-00001-of-00002.bin",
    "meta": "consolidated.01.pth",
    "dcp": "__0_0.distcp",
    "dcp ": ".metadata",
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_bytes_changed_are_read_or_refused(convert, small_files, small_outputs, tmp_path, kind, data):
    """A changed byte of a weight is no error; a changed byte of anything else is a refusal in one line."""
    source, name = tmp_path / "source", KINDS[kind]
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(small_files / kind.strip(), source)
    content = bytearray((source / name).read_bytes())
    edges = st.integers(0, min(2000, len(content) - 1)) | st.integers(max(0, len(content) - 3000), len(content) - 1)
    for _ in range(data.draw(st.integers(1, 4))):
        place, length = data.draw(edges | st.integers(0, len(content) - 1)), data.draw(st.integers(1, 8))
        content[place : place + length] = data.draw(st.binary(max_size=8))
    (source / name).write_bytes(content)
    before = tiny.snapshot(tmp_path)
    result = convert("mha-to-mqa", "--method", "mean", source, tmp_path / "out")
    if result.code:
        result.refused(str(source))
    else:
        convert("verify", source, tmp_path / "out").succeeded()
        shapes = {name: tensor.shape for name, tensor in tiny.tensors(tmp_path / "out").items()}
        assert shapes == {name: tensor.shape for name, tensor in small_outputs[kind.strip()].items()}
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert tiny.snapshot(tmp_path) == before


def test_the_undamaged_ones_are_read(convert, small_files, tmp_path):
    for kind in ("bin", "meta", "dcp"):
        convert("mha-to-mqa", "--method", "mean", small_files / kind, tmp_path / kind).succeeded()


@pytest.mark.parametrize("damage", ["is attention in a layout", "holds NaN or infinite values"])
def test_a_damaged_tensor_is_named_with_its_source(convert, tmp_path, damage):
    source = tiny.save(tiny.build(), tmp_path / "source")
    tensors, name = load_file(source / "model.safetensors"), "model.layers.0.self_attn.v_proj.weight"
    if "NaN" in damage:
        tensors[name][0, 0] = float("nan")
    else:
        tensors[name.removeprefix("m")] = tensors.pop(name)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    result = convert("mha-to-mqa", "--method", "mean", source, tmp_path / "out")
    result.refused(str(source), "layers.0.self_attn.v_proj.weight", damage)
