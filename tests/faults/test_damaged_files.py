"""Files whose content is not what was written: none is trained on, converted, published, or called complete."""

import json
import os
import shutil
from importlib import import_module

import numpy as np
import pytest
import tiny
from caches import write_cache
from commands import MEAN
from gguf_files import write_gguf
from torch_files import META_SHAPE, write_bin, write_dcp, write_meta

from convert.layer_tensors.converted_layer import ConvertedLayer
from convert.layer_tensors.layer_file import FINISHED, load_layer, save_layer
from model.common.errors import InputError, RunError
from uptrain.data.token_cache import TokenCache


def zero_second_half(path):
    """Change a file's content, but not its size, as a disk that was full or a broken copy leaves it."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))


@pytest.mark.parametrize("name", ["tokens-00001.bin", "documents-00000.bin"])
def test_a_token_cache_of_other_content_is_refused(tmp_path, name):
    cache = TokenCache.open(write_cache(tmp_path / "K", [[[1, 2, 3], [4, 5, 6]], [[7, 8, 9, 10]]], seq_len=4))
    counted = []
    cache.verify(counted.append)
    assert sum(counted) == cache.nbytes == sum(path.stat().st_size for path in (tmp_path / "K").glob("*.bin"))
    if name == "documents-00000.bin":
        (tmp_path / "K" / name).write_bytes(np.array([0, 2], "<i8").tobytes())  # in order, as the documents were
    else:
        zero_second_half(tmp_path / "K" / name)
    with pytest.raises(InputError, match=f"{name} has changed since the cache was made"):
        TokenCache.open(tmp_path / "K").verify()


def test_a_run_checks_both_caches_once(tmp_path, monkeypatch):
    from uptrain.data.checks import check_caches

    cache = TokenCache.open(write_cache(tmp_path / "K", [[[1, 2, 3, 4]]], seq_len=4))
    verified = []
    monkeypatch.setattr(TokenCache, "verify", lambda self: verified.append(self.folder))
    check_caches([cache, cache], 300)
    assert verified == [tmp_path / "K"]


def test_prepare_does_not_publish_a_changed_unit(uptrain, ids, tmp_path, monkeypatch):
    """A killed command finished the unit; its bytes have changed since."""
    from uptrain.data.prepare import prepare

    arguments = ("prepare", "--data", ids, "--vocab-size", 300, "--seq-len", 4, "--workers", 1)
    uptrain(*arguments, "--out", tmp_path / "whole").succeeded()

    def fail(*given):
        raise OSError("a full disk")

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "publish", fail)
        assert uptrain(*arguments, "--out", tmp_path / "K").code == 1
    zero_second_half(tmp_path / ".K.groupwise/folder/tokens-00000.bin")
    uptrain(*arguments, "--out", tmp_path / "K").succeeded()
    TokenCache.open(tmp_path / "K").verify()
    assert (tmp_path / "K/manifest.json").read_bytes() == (tmp_path / "whole/manifest.json").read_bytes()


def test_prepare_does_not_call_a_damaged_cache_complete(uptrain, ids, tmp_path):
    arguments = ("prepare", "--data", ids, "--vocab-size", 300, "--seq-len", 4, "--out", tmp_path / "K")
    uptrain(*arguments, "--workers", 1).succeeded()
    os.truncate(tmp_path / "K/tokens-00000.bin", 2)
    uptrain(*arguments).refused("exists, but is damaged; remove it", "has 2 bytes")


def test_a_conversion_writes_a_truncated_shard_again(convert, source, tmp_path, monkeypatch):
    import convert.conversion as conversion

    def fail(*given, **options):
        raise OSError("a full disk")

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_write_side_files", fail)
        assert convert("mha-to-gqa", source, tmp_path / "out", *MEAN).code == 1
    shard = min((tmp_path / ".out.groupwise/folder").glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size // 2)
    convert("mha-to-gqa", source, tmp_path / "out", *MEAN).succeeded()
    convert("verify", source, tmp_path / "out").succeeded()


def test_a_source_replaced_after_it_was_opened_is_noticed(convert, source, tmp_path, monkeypatch):
    """Its header was parsed, and the file is another before the first tensor is read."""
    import convert.conversion as conversion

    check = conversion.check_disk_space
    other = tiny.save(tiny.build(seed=1), tmp_path / "other", "bfloat16", max_shard_size="40KB")

    def replaced(*given):
        for path in other.glob("*.safetensors"):
            shutil.copy(path, source / path.name)
        return check(*given)

    monkeypatch.setattr(conversion, "check_disk_space", replaced)
    convert("mha-to-gqa", source, tmp_path / "out", *MEAN).refused("changed while it was read")
    assert not (tmp_path / "out").exists()


LATE = {  # what a reader calls after it has read
    "gguf.reader": "build_config",
    "pytorch_bin": "without_tied_lm_head",
    "meta_llama.reader": "ParallelLayout",
    "dcp.reader": "without_tied_lm_head",
}


@pytest.mark.parametrize("name", LATE)
def test_a_source_replaced_while_its_reader_works_is_noticed(convert, tmp_path, monkeypatch, name):
    """Its header was parsed, the file mapped, and the name is another file's before the reader has finished."""
    model, place = tiny.build(**META_SHAPE), tmp_path / "source"
    place.mkdir()
    source, pattern = {
        "gguf.reader": lambda: (write_gguf(place / "model.gguf", model), "*.gguf"),
        "pytorch_bin": lambda: (write_bin(place, model), "*.bin"),
        "meta_llama.reader": lambda: (write_meta(place / "meta", model), "meta/*.pth"),
        "dcp.reader": lambda: (write_dcp(place, {f"model.{n}": t for n, t in model.state_dict().items()}), "*.distcp"),
    }[name]()
    if name == "dcp.reader":
        (place / "config.json").write_text(json.dumps(model.config.to_dict()))
    reader = import_module(f"model.checkpoint.formats.{name}")
    real, files = getattr(reader, LATE[name]), sorted(place.glob(pattern))
    assert files

    def replaced(*given):
        for file in files:
            shutil.copy(file, place / "another")
            (place / "another").replace(file)
        return real(*given)

    monkeypatch.setattr(reader, LATE[name], replaced)
    convert("mha-to-gqa", source, tmp_path / "out", *MEAN).refused("changed while it was read")
    assert not (tmp_path / "out").exists()


class Conversion:
    file, tensor_names = "layer.npz", ("k",)


@pytest.mark.parametrize("damage", ["empty", "half", "zeros", "missing"])
def test_a_damaged_layer_file_is_computed_again(tmp_path, damage):
    """It would block every later run of the same command otherwise."""
    path = tmp_path / Conversion.file
    save_layer(ConvertedLayer({"k": np.ones((2, 3), np.float32)}, {"k": []}), Conversion(), tmp_path)
    (tmp_path / FINISHED).touch()
    (tmp_path / "states-0002.npy").touch()  # a kill may have left the last states; with them no layer is computed
    assert load_layer(Conversion(), tmp_path).tensors["k"].tolist() == [[1, 1, 1], [1, 1, 1]]
    if damage == "missing":
        path.unlink()
    elif damage == "zeros":
        zero_second_half(path)
    else:
        os.truncate(path, 0 if damage == "empty" else path.stat().st_size // 2)
    with pytest.raises(RunError, match=r"layer.npz is damaged .*the same command computes it again"):
        load_layer(Conversion(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_a_file_is_no_interrupt():
    import click

    from model.common.console import _explain

    aborted = click.Abort()
    aborted.__cause__ = EOFError("a bug")
    with pytest.raises(EOFError):
        _explain(aborted)
    assert _explain(click.Abort())[0].startswith("interrupted")
