"""Bad pytorch_model.bin: one clear line, exit code 2, nothing left behind, and nothing run."""

import json
import pickle
import sys
import zipfile

import pytest
import tiny
import torch
from damage import edit_index
from limits import bounded
from torch_files import LFS_POINTER, save_bins, write_bin

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.fixture
def folder(tmp_path):
    return write_bin(tmp_path / "source", tiny.build())


@pytest.fixture
def sharded(tmp_path):
    return write_bin(tmp_path / "source", tiny.build(), n_shards=3)


def test_bin_is_a_git_lfs_pointer(refuse_path, folder):
    (folder / "pytorch_model.bin").write_text(LFS_POINTER)
    refuse_path(folder, "pytorch_model.bin", "git-lfs pointer", "git lfs pull")


@pytest.mark.parametrize("keep", [0, 3, 4, 100, 5000, 0.5, -1, -30])
def test_bin_is_truncated(refuse_path, folder, keep):
    path = folder / "pytorch_model.bin"
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    refuse_path(folder, "pytorch_model.bin", "damaged")


def zipped(path, entries, **options):
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


@pytest.mark.parametrize("how", ["text", "other zip", "compressed", "no version", "two models", "twice"])
def test_bin_is_not_what_torch_writes(refuse_path, folder, how):
    path = folder / "pytorch_model.bin"
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    if how == "text":
        path.write_text("no weights at all")
    elif how == "other zip":
        zipped(path, {"readme.txt": "hello"})
    elif how == "compressed":
        zipped(path, entries, compression=zipfile.ZIP_DEFLATED)
    elif how == "no version":
        zipped(path, {name: content for name, content in entries.items() if not name.endswith("version")})
    elif how == "two models":
        zipped(path, {**entries, "other/data.pkl": b""})
    else:
        with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr(next(name for name in entries if name.endswith("data/0")), b"")
    refuse_path(folder, "pytorch_model.bin", "damaged")


def test_bin_whose_directory_is_said_to_lie_further_on(refuse_path, folder):
    """Its files would begin before the archive: zipfile subtracts what the directory's place is off by."""
    path = folder / "pytorch_model.bin"
    content = bytearray(path.read_bytes())
    place = slice(start := content.rindex(b"PK\x06\x06") + 48, start + 8)  # of the directory's offset, APPNOTE 4.3.14
    content[place] = (int.from_bytes(content[place], "little") + 10**7).to_bytes(8, "little")
    path.write_bytes(content)
    refuse_path(folder, "pytorch_model.bin", "damaged")


def test_bin_of_the_other_byte_order(refuse_path, folder):
    path = folder / "pytorch_model.bin"
    content = path.read_bytes()
    assert content.count(b"little") == 1
    path.write_bytes(content.replace(b"little", b"big   "))
    refuse_path(folder, "other byte order")


def test_bin_of_old_torch(refuse_path, folder):
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    refuse_path(folder, "torch before 1.6", "save it there again")


def nested(tensors):
    return {"state_dict": tensors, "epoch": 3}


def hiding(tensor):
    """Return a parameter with attributes in the place of its methods. They are saved with it."""
    parameter = torch.nn.Parameter(tensor)
    parameter.is_neg, parameter.numel = True, 3
    return parameter


CONTENTS = {
    "a list": (lambda t: [t], "holds a list"),
    "a tensor": (lambda t: t["lm_head.weight"], "holds a Tensor"),
    "nested": (nested, "'state_dict', which is a dict"),
    "a number": (lambda t: {**t, "step": 3}, "'step', which is a int"),
    "a number's name": (lambda t: {**t, 7: torch.ones(2)}, "holds 7, which cannot be the name"),
    "a reserved name": (lambda t: {**t, "__metadata__": torch.ones(2)}, "'__metadata__', which cannot be"),
    "half a letter": (lambda t: {**t, "\ud800": torch.ones(2)}, "cannot be the name"),
    "sparse": (lambda t: {**t, "x": torch.eye(3).to_sparse()}, "sparse_coo"),
    "complex": (lambda t: {**t, "x": torch.ones(3, dtype=torch.complex64)}, "complex64"),
    "without data": (lambda t: {**t, "x": torch.ones(3, device="meta")}, "on meta"),
    "a module": (lambda t: torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
    "an array": (lambda t: {**t, "x": t["lm_head.weight"].numpy()}, "bytes or a numpy array"),
    "with attributes": (lambda t: {**t, "x": hiding(t["lm_head.weight"])}, "with attributes (['is_neg', 'numel'])"),
    "of several sizes": (lambda t: {**t, "x": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, "nested"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", CONTENTS)
def test_bin_holds_something_else(refuse_path, folder, kind):
    change, words = CONTENTS[kind]
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    torch.save(change(tensors), folder / "pytorch_model.bin")
    refuse_path(folder, "pytorch_model.bin", words)


def deep(levels):
    """Return a tuple whose hash and text take time that is exponential in its depth."""
    value = (1,)
    for _ in range(levels):
        value = (value, value)
    return value


GREEDY = {
    "a bytearray of a terabyte": (
        b"\x80\x02cbuiltins\nbytearray\n\x8a\x06" + (1 << 40).to_bytes(6, "little") + b"\x85R.",
        "bytearray",
    ),
    "a far index": (b"\x80\x02}r" + (2**32 - 1).to_bytes(4, "little") + b".", "stores an object at 4294967295"),
    "a deep tuple": (pickle.dumps({"a": deep(60)}, protocol=2), "a tuple of more than 10,000 parts"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", GREEDY)
def test_bin_whose_pickle_would_take_all_memory_or_time(refuse_path, folder, kind):
    content, words = GREEDY[kind]
    path = folder / "pytorch_model.bin"
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    zipped(path, {name: content if name.endswith("data.pkl") else old for name, old in entries.items()})
    with bounded(200):
        refuse_path(folder, "pytorch_model.bin", "damaged", words)


def test_bin_whose_pickle_would_take_quadratic_time(refuse_path, folder):
    content = b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x08\x00\x00\x00punycode\x86R."
    path = folder / "pytorch_model.bin"
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    zipped(path, {name: content if name.endswith("data.pkl") else old for name, old in entries.items()})
    refuse_path(folder, "pytorch_model.bin", "damaged", "bytes or a numpy array")


@pytest.mark.parametrize(
    ("name", "size"), [("data/0", (1 << 32) - 2), ("data.pkl", 1 << 30), ("byteorder", 17), ("version", 1 << 30)]
)
def test_bin_whose_directory_gives_sizes_beyond_the_file(refuse_path, folder, name, size):
    path = folder / "pytorch_model.bin"
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02")
    while not content[entry + 46 :].startswith(f"pytorch_model/{name}".encode()):
        entry = content.index(b"PK\x01\x02", entry + 4)
    content[entry + 24 : entry + 28] = size.to_bytes(4, "little")  # APPNOTE 4.3.12
    path.write_bytes(content)
    with bounded(50):
        refuse_path(folder, "pytorch_model.bin", "damaged", f"gives 'pytorch_model/{name}' {size:,} bytes")


@pytest.mark.parametrize("form", ["zip", "old zip-less", "bare pickle"])
def test_bin_with_code_in_it_does_not_run(refuse_path, folder, payload, form):
    path = folder / "pytorch_model.bin"
    content = {**torch.load(path, weights_only=True), "x": payload}
    if form == "bare pickle":
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=form == "zip")
    refuse_path(folder, *(["mkdir", "no code was run"] if form == "zip" else ["torch before 1.6"]))


def edit_weight_map(folder, change):
    edit_index(folder, lambda index: change(index["weight_map"]), "pytorch_model.bin.index.json")


@pytest.mark.parametrize(
    "name", ["../stolen.bin", "/etc/passwd", "sub/x.bin", "..", "pytorch_model.safetensors", "x.pt"]
)
def test_bin_index_names_another_file(refuse_path, sharded, name):
    edit_weight_map(sharded, lambda table: table.update({"model.norm.weight": name}))
    refuse_path(sharded, name, "inside the folder" if "/" in name or name == ".." else "not a .bin file")


def test_bin_index_names_a_missing_shard(refuse_path, sharded):
    (sharded / "pytorch_model-00002-of-00003.bin").unlink()
    refuse_path(sharded, "names the shard pytorch_model-00002-of-00003.bin, which is missing")


def test_bin_index_is_stale(refuse_path, sharded):
    edit_weight_map(sharded, lambda table: table.update({"model.extra.weight": next(iter(table.values()))}))
    refuse_path(sharded, "model.extra.weight", "does not hold it")
    edit_weight_map(sharded, lambda table: [table.pop(name) for name in ("model.extra.weight", "model.norm.weight")])
    refuse_path(sharded, "model.norm.weight", "does not name")


def test_bin_tensor_in_two_shards(refuse_path, sharded):
    path = sharded / "pytorch_model-00002-of-00003.bin"
    first = torch.load(sharded / "pytorch_model-00001-of-00003.bin", weights_only=True)
    torch.save(torch.load(path, weights_only=True) | dict(list(first.items())[:1]), path)
    refuse_path(sharded, "is in two shards")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}'])
def test_bin_index_is_damaged(refuse_path, sharded, text):
    (sharded / "pytorch_model.bin.index.json").write_text(text)
    refuse_path(sharded, "is not a shard index")


def test_bin_both_a_single_file_and_an_index(refuse_path, sharded):
    save_bins(sharded, tiny.build().state_dict())
    refuse_path(sharded, "holds both", "remove the outdated one")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_bin_is_a_dangling_link(refuse_path, folder, name):
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(folder / "gone")
    refuse_path(folder, name, "dangling symlink")


def test_bin_beside_a_stale_safetensors_index(refuse_path, folder):
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse_path(folder, "model-00001-of-00001.safetensors", "missing")


def test_bin_of_an_adapter(refuse_path, folder):
    (folder / "adapter_model.bin").write_bytes(b"")
    refuse_path(folder, "adapter", "merge it into its base model")


def test_bin_without_config(refuse_path, folder):
    (folder / "config.json").unlink()
    refuse_path(folder, "no config.json")


def test_variants_are_not_taken_for_the_model(refuse_path, folder):
    (folder / "pytorch_model.bin").rename(folder / "pytorch_model.fp16.bin")
    refuse_path(folder, "only pytorch_model.fp16.bin")


def test_bin_quantised(refuse_path, folder):
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    save_bins(folder, {**tensors, "model.layers.0.self_attn.k_proj.weight": torch.ones(32, 32, dtype=torch.uint8)})
    refuse_path(folder, "U8", "quantised or packed")


def test_bin_not_finite(refuse_path, folder):
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    tensors["model.layers.1.self_attn.v_proj.weight"][-1, -1] = float("nan")
    save_bins(folder, tensors)
    refuse_path(folder, "v_proj.weight", "NaN or infinite")


def test_without_torch(refuse_path, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    refuse_path(folder, "with torch only", "pip install torch")
