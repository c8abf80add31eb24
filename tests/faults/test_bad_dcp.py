"""Bad torch.distributed.checkpoint folders: one clear line, exit code 2, nothing left behind, and nothing run."""

import io
import json
import pickle

import pytest
import tiny
import torch
from torch_files import LFS_POINTER, write_dcp

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

PROTOCOL = pickle.PROTO + b"\x02"
"""How a pickle of protocol 2 begins."""


@pytest.fixture
def dcp(tmp_path):
    model = tiny.build()
    folder = write_dcp(tmp_path / "dcp", {f"model.{n}": t for n, t in model.state_dict().items()}, 2)
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    return folder


def edit_metadata(folder, change):
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def test_dcp_without_metadata(refuse_path, dcp):
    (dcp / ".metadata").unlink()
    refuse_path(dcp, "no .metadata", "incomplete")


@pytest.mark.parametrize(
    "content", [b"", b"no pickle", b"\x80\x04.", "half", pickle.dumps([1]), pickle.dumps({"a": 1})]
)
def test_dcp_metadata_is_damaged(refuse_path, dcp, content):
    whole = (dcp / ".metadata").read_bytes()
    (dcp / ".metadata").write_bytes(whole[: len(whole) // 2] if content == "half" else content)
    refuse_path(dcp, ".metadata", "damaged, or not a torch.distributed.checkpoint's")


@pytest.mark.parametrize("size", [8, 1 << 40, 1 << 62])
def test_dcp_metadata_with_a_bytearray(refuse_path, dcp, size):
    """Where the memory does not hold it, Python prints an error of its own."""
    content = [pickle.PROTO, b"\x05", pickle.BYTEARRAY8, size.to_bytes(8, "little"), b"8 bytes.", pickle.STOP]
    (dcp / ".metadata").write_bytes(b"".join(content))
    refuse_path(dcp, ".metadata", "damaged, or not a torch.distributed.checkpoint's: ValueError")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["index", "tuple", "size"])
def test_dcp_metadata_that_would_take_all_memory_or_time(refuse_path, dcp, kind):
    """An index of the memo for which Python makes a table, and keys of a dictionary that take years to hash."""
    deep = ((),)
    for _ in range(60):
        deep = (deep, deep)
    size = b"torch\nSize\n"
    last, keep = pickle.GET + b"1\n", pickle.PUT + b"1\n"
    first = [pickle.GLOBAL, size, pickle.EMPTY_TUPLE, pickle.REDUCE, keep]  # Size(), kept as 1
    twice = [pickle.GLOBAL, size, pickle.MARK, last, last, pickle.LIST, pickle.TUPLE1, pickle.REDUCE, keep]
    set_item = [pickle.BININT1, b"\x01", pickle.SETITEM]
    program = {
        "index": [pickle.LONG_BINPUT, b"\xff\xff\xff\xff"],
        "tuple": [pickle.dumps(deep, protocol=2).removeprefix(PROTOCOL).removesuffix(pickle.STOP), *set_item],
        "size": [*first, *twice * 60, *set_item],
    }
    content = b"".join([PROTOCOL, pickle.EMPTY_DICT, *program[kind], pickle.STOP])
    (dcp / ".metadata").write_bytes(content)
    refuse_path(dcp, ".metadata", "damaged, or not a torch.distributed.checkpoint's: ValueError")


def test_dcp_metadata_that_names_lists_of_lists_as_a_file(refuse_path, dcp):
    """The message does not show them: there may be more than fit into memory."""
    files = []
    for _ in range(40):
        files = [files, files]
    edit_metadata(dcp, lambda m: [setattr(place, "relative_path", files) for place in m.storage_data.values()])
    refuse_path(dcp, ".metadata", "damaged, or not a torch.distributed.checkpoint's: TypeError")


def test_dcp_metadata_beyond_any_size(refuse_path, dcp):
    """It is read whole."""
    with (dcp / ".metadata").open("wb") as file:
        file.truncate(50 << 30)
    refuse_path(dcp, ".metadata has 53,687,091,200 bytes", "at most 1,073,741,824 are allowed")


def test_dcp_metadata_with_code_in_it_does_not_run(refuse_path, dcp, payload):
    edit_metadata(dcp, lambda metadata: setattr(metadata, "planner_data", payload))
    refuse_path(dcp, ".metadata", "posix.mkdir", "no code was run")


@pytest.mark.parametrize(
    "name", ["builtins eval", "builtins setattr", "torch load", "torch.serialization load", "pickle loads", "os system"]
)
def test_dcp_metadata_can_name_nothing_that_runs(refuse_path, dcp, name):
    (dcp / ".metadata").write_bytes(b"c" + name.replace(" ", "\n").encode() + b"\n(S'1'\ntR.")
    refuse_path(dcp, ".metadata", name.replace(" ", "."), "no code was run")


def test_dcp_piece_with_code_in_it_does_not_run(refuse_path, dcp, payload):
    buffer = io.BytesIO()
    torch.save({"x": payload}, buffer)
    path = dcp / "__0_0.distcp"
    end = path.stat().st_size
    path.write_bytes(path.read_bytes() + buffer.getvalue())

    def lead_there(metadata):
        place = next(p for i, p in metadata.storage_data.items() if i.fqn == "model.model.norm.weight")
        place.relative_path, place.offset, place.length = path.name, end, len(buffer.getvalue())

    edit_metadata(dcp, lead_there)
    refuse_path(dcp, "__0_0.distcp", "mkdir", "no code was run")


def test_dcp_file_is_missing(refuse_path, dcp):
    (dcp / "__1_0.distcp").unlink()
    refuse_path(dcp, "names the file __1_0.distcp, which is missing")


@pytest.mark.parametrize("keep", [0, 10, -1, -2000])
def test_dcp_file_is_truncated(refuse_path, dcp, keep):
    path = dcp / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:keep])
    refuse_path(dcp, "__1_0.distcp", "empty" if keep == 0 else "ends before byte")


def test_dcp_git_lfs_pointer(refuse_path, dcp):
    (dcp / "__1_0.distcp").write_text(LFS_POINTER)
    refuse_path(dcp, "__1_0.distcp", "git-lfs pointer")


@pytest.mark.parametrize("name", ["../stolen.distcp", "/etc/passwd", "sub/x.distcp", ".."])
def test_dcp_names_a_path_outside_the_folder(refuse_path, dcp, name):
    edit_metadata(dcp, lambda m: [setattr(place, "relative_path", name) for place in m.storage_data.values()])
    refuse_path(dcp, ".metadata", name, "inside the folder")


@pytest.mark.parametrize("number", [-1, "5", 2.5, None])
def test_dcp_places_that_are_no_numbers(refuse_path, dcp, number):
    edit_metadata(dcp, lambda m: [setattr(place, "offset", number) for place in m.storage_data.values()])
    refuse_path(dcp, ".metadata", "damaged")


def test_dcp_places_that_are_another_tensor_s(refuse_path, dcp):
    def swap(metadata):
        by_name = {index.fqn: place for index, place in metadata.storage_data.items()}
        a, b = by_name["model.model.norm.weight"], by_name["model.lm_head.weight"]
        vars(a).update(dict(vars(b)))

    edit_metadata(dcp, swap)
    refuse_path(dcp, "model.norm.weight", "do not match")


@pytest.mark.parametrize("how", ["hole", "overlap", "outside", "less axes"])
def test_dcp_pieces_that_do_not_fit(refuse_path, dcp, how):
    def edit(metadata):
        entry = metadata.state_dict_metadata["model.lm_head.weight"]
        if how == "hole":
            entry.chunks.pop()
        elif how == "overlap":
            entry.chunks[1] = entry.chunks[0]
        elif how == "outside":
            entry.size = torch.Size((60, 32))
        else:
            entry.size = torch.Size((67 * 32,))

    edit_metadata(dcp, edit)
    refuse_path(dcp, "lm_head.weight", "do not make up its shape")


def test_dcp_compressed(refuse_path, dcp):
    edit_metadata(dcp, lambda m: [setattr(p, "transform_descriptors", ["zstd"]) for p in m.storage_data.values()])
    refuse_path(dcp, "compressed", "zstd")


def test_dcp_out_is_where_its_config_is(convert, tmp_path):
    model = tiny.build()
    home = tiny.save(model, tmp_path / "home")
    path = write_dcp(home / "step-1", model.state_dict())
    before = tiny.snapshot(home)
    convert("mha-to-mqa", "--method", "mean", path, home, "--overwrite").refused("holds files of SOURCE")
    assert tiny.snapshot(home) == before


@pytest.mark.timeout(60)
def test_dcp_dtype_whose_text_would_take_years(refuse_path, dcp):
    deep = []
    for _ in range(60):
        deep = [deep, deep]

    def edit(metadata):
        metadata.state_dict_metadata["model.lm_head.weight"].properties.dtype = deep

    edit_metadata(dcp, edit)
    refuse_path(dcp, ".metadata", "damaged, or not a torch.distributed.checkpoint's: TypeError")


def test_dcp_without_config(refuse_path, dcp):
    (dcp / "config.json").unlink()
    refuse_path(dcp, "needs the model's config.json", "neither there nor in", "copy it")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (lambda n: [f"model.{n}", f"ema.{n}"], ("found 2", "'model.'", "'ema.'")),
        (lambda n: [n.replace("embed_tokens", "tok_embeddings")], ("found 0", "Hugging Face names")),
        (
            lambda n: [f"model.{n}", f"reward.{n}"] if "norm" in n else [f"model.{n}"],
            ("reward.", "optimizer; refused"),
        ),
    ],
)
def test_dcp_names_that_are_not_one_model_s(refuse_path, tmp_path, names, words):
    tensors = {new: t for n, t in tiny.build().state_dict().items() for new in names(n)}
    folder = write_dcp(tmp_path / "dcp", tensors)
    (folder / "config.json").write_text("{}")
    refuse_path(folder, *words)


def test_dcp_complex_tensor_in_the_model(refuse_path, tmp_path):
    tensors = {**tiny.build().state_dict(), "freqs": torch.ones(3, dtype=torch.complex64)}
    folder = write_dcp(tmp_path / "dcp", tensors)
    (folder / "config.json").write_text("{}")
    refuse_path(folder, "freqs (complex64)")
