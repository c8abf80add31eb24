"""Bad .bin, Meta and distributed checkpoints: one clear line, exit code 2, nothing left behind, and nothing run."""

import io
import json
import os
import pickle
import shutil
import sys
import zipfile

import pytest
import tiny
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch_files import meta_parts, save_bins, write_bin, write_dcp, write_meta

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
SHAPE = {"hidden_size": 64, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 64}


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path):
    yield
    left = {p.name for p in tmp_path.iterdir()}
    assert not {name for name in left if name in ("out", "pwned") or name.endswith(".groupwise")}, left


@pytest.fixture
def refuse(convert, tmp_path):
    def run(path, *words):
        convert("mha-to-gqa", path, tmp_path / "out", "--groups", 2).refused(*words)

    return run


class Payload:
    """Something whose unpickling makes a file, unless it is refused."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def payload(tmp_path):
    """Return an object whose pickle runs code; that it does is checked first."""
    found = Payload(tmp_path / "pwned")
    pickle.loads(pickle.dumps(found))
    (tmp_path / "pwned").rmdir()
    return found


# pytorch_model.bin


@pytest.fixture
def folder(tmp_path):
    return write_bin(tmp_path / "source", tiny.build())


@pytest.fixture
def sharded(tmp_path):
    return write_bin(tmp_path / "source", tiny.build(), n_shards=3)


def test_bin_is_a_git_lfs_pointer(refuse, folder):
    (folder / "pytorch_model.bin").write_text(LFS_POINTER)
    refuse(folder, "pytorch_model.bin", "git-lfs pointer", "git lfs pull")


@pytest.mark.parametrize("keep", [0, 3, 4, 100, 5000, 0.5, -1, -30])
def test_bin_is_truncated(refuse, folder, keep):
    path = folder / "pytorch_model.bin"
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    refuse(folder, "pytorch_model.bin", "damaged")


def zipped(path, entries, **options):
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


@pytest.mark.parametrize("how", ["text", "other zip", "compressed", "no version", "two models", "twice"])
def test_bin_is_not_what_torch_writes(refuse, folder, how):
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
    refuse(folder, "pytorch_model.bin", "damaged")


def test_bin_of_the_other_byte_order(refuse, folder):
    path = folder / "pytorch_model.bin"
    content = path.read_bytes()
    assert content.count(b"little") == 1
    path.write_bytes(content.replace(b"little", b"big   "))
    refuse(folder, "other byte order")


def test_bin_of_old_torch(refuse, folder):
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    refuse(folder, "torch before 1.6", "save it anew")


def nested(tensors):
    return {"state_dict": tensors, "epoch": 3}


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
    "an array": (lambda t: {**t, "x": t["lm_head.weight"].numpy()}, "not a tensor; nothing of it was run"),
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_bin_holds_something_else(refuse, folder, kind):
    change, words = CONTENTS[kind]
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    torch.save(change(tensors), folder / "pytorch_model.bin")
    refuse(folder, "pytorch_model.bin", words)


@pytest.mark.parametrize("form", ["zip", "old zip-less", "bare pickle"])
def test_bin_with_code_in_it_does_not_run(refuse, folder, payload, form):
    path = folder / "pytorch_model.bin"
    content = {**torch.load(path, weights_only=True), "x": payload}
    if form == "bare pickle":
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=form == "zip")
    refuse(folder, *(["mkdir", "nothing of it was run"] if form == "zip" else ["torch before 1.6"]))


def edit_index(folder, change):
    path = folder / "pytorch_model.bin.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "name", ["../stolen.bin", "/etc/passwd", "sub/x.bin", "..", "pytorch_model.safetensors", "x.pt"]
)
def test_bin_index_names_another_file(refuse, sharded, name):
    edit_index(sharded, lambda table: table.update({"model.norm.weight": name}))
    refuse(sharded, name, "outside the folder" if "/" in name or name == ".." else "not a .bin file")


def test_bin_index_names_a_missing_shard(refuse, sharded):
    (sharded / "pytorch_model-00002-of-00003.bin").unlink()
    refuse(sharded, "names the shard pytorch_model-00002-of-00003.bin, which is missing")


def test_bin_index_is_stale(refuse, sharded):
    edit_index(sharded, lambda table: table.update({"model.extra.weight": next(iter(table.values()))}))
    refuse(sharded, "model.extra.weight", "does not hold it")
    edit_index(sharded, lambda table: [table.pop(name) for name in ("model.extra.weight", "model.norm.weight")])
    refuse(sharded, "model.norm.weight", "does not name")


def test_bin_tensor_in_two_shards(refuse, sharded):
    path = sharded / "pytorch_model-00002-of-00003.bin"
    first = torch.load(sharded / "pytorch_model-00001-of-00003.bin", weights_only=True)
    torch.save(torch.load(path, weights_only=True) | dict(list(first.items())[:1]), path)
    refuse(sharded, "stands in two shards")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}'])
def test_bin_index_is_damaged(refuse, sharded, text):
    (sharded / "pytorch_model.bin.index.json").write_text(text)
    refuse(sharded, "is not a shard index")


def test_bin_both_a_single_file_and_an_index(refuse, sharded):
    save_bins(sharded, tiny.build().state_dict())
    refuse(sharded, "holds both", "remove the one that is stale")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_bin_is_a_dangling_link(refuse, folder, name):
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(folder / "gone")
    refuse(folder, name, "dangling symlink")


def test_bin_beside_a_stale_safetensors_index(refuse, folder):
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse(folder, "model-00001-of-00001.safetensors", "missing")


def test_bin_of_an_adapter(refuse, folder):
    (folder / "adapter_model.bin").write_bytes(b"")
    refuse(folder, "adapter", "merge it into its base model")


def test_bin_without_config(refuse, folder):
    (folder / "config.json").unlink()
    refuse(folder, "no config.json")


def test_variants_are_not_taken_for_the_model(refuse, folder):
    (folder / "pytorch_model.bin").rename(folder / "pytorch_model.fp16.bin")
    refuse(folder, "only pytorch_model.fp16.bin")


def test_bin_quantised(refuse, folder):
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    save_bins(folder, {**tensors, "model.layers.0.self_attn.k_proj.weight": torch.ones(32, 32, dtype=torch.uint8)})
    refuse(folder, "U8", "quantised or packed")


def test_bin_not_finite(refuse, folder):
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    tensors["model.layers.1.self_attn.v_proj.weight"][-1, -1] = float("nan")
    save_bins(folder, tensors)
    refuse(folder, "v_proj.weight", "NaN or infinite")


def test_without_torch(refuse, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    refuse(folder, "with torch only", "pip install torch")


# Meta


@pytest.fixture
def meta(tmp_path):
    return write_meta(tmp_path / "meta", tiny.build(**SHAPE), 4, llama3=True)


def edit_params(folder, **changes):
    values = {**json.loads((folder / "params.json").read_text()), **changes}
    (folder / "params.json").write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sliding_window": 4096}, ("sliding_window = 4096", "not supported")),
        ({"moe": {"num_experts": 8}}, ("moe", "not supported")),
        ({"quantization_args": None}, ("quantization_args", "not supported")),
        ({"dim": ...}, ("lacks dim",)),
        ({"n_layers": ...}, ("lacks n_layers",)),
        ({"n_heads": None}, ("lacks n_heads",)),
        ({"norm_eps": ...}, ("lacks norm_eps",)),
        ({"dim": "64"}, ("dim = '64'", "positive whole number")),
        ({"n_heads": 0}, ("n_heads = 0", "positive whole number")),
        ({"n_heads": 5}, ("n_heads = 5", "equal heads")),
        ({"n_heads": 64}, ("n_heads = 64", "even size")),
        ({"n_kv_heads": 3}, ("n_kv_heads = 3", "equal heads")),
        ({"n_kv_heads": 32}, ("n_kv_heads = 32", "equal heads")),
        ({"n_kv_heads": 4}, ("k_proj", "n_kv_heads = 4", "correct params.json")),
        ({"n_heads": 8, "n_kv_heads": 2}, ("k_proj", "n_kv_heads = 2 heads of 8 rows")),
        ({"n_layers": 3}, ("lacks what becomes model.layers.2.",)),
        ({"n_layers": 1}, ("model.layers.1.", "mean none", "do not belong together")),
        ({"n_layers": 10**12}, ("n_layers = 1000000000000", "fewer tensors")),
        ({"dim": 128}, ("cut for 8", "dim = 128")),
        ({"vocab_size": 65}, ("vocab_size = 65", "has 64 rows")),
        ({"vocab_size": "64"}, ("vocab_size = '64'",)),
        ({"norm_eps": "small"}, ("norm_eps = 'small'", "positive number")),
        ({"norm_eps": 10**400}, ("norm_eps", "positive number")),
        ({"rope_theta": -1}, ("rope_theta = -1", "positive number")),
        ({"max_seq_len": 0}, ("max_seq_len = 0", "positive whole number")),
        ({"use_scaled_rope": "yes"}, ("use_scaled_rope = 'yes'", "true or false")),
        ({"use_scaled_rope": True}, ("lacks rope_scaling_factor",)),
    ],
)
def test_params_that_do_not_fit(refuse, meta, changes, words):
    edit_params(meta, **changes)
    refuse(meta, "params.json", *words)


@pytest.mark.parametrize(
    ("text", "word"), [("{", "not valid JSON"), ("[1]", "holds a list"), ("[" * 10**5, "not valid")]
)
def test_params_that_are_damaged(refuse, meta, text, word):
    (meta / "params.json").write_text(text)
    refuse(meta, "params.json", word)


def test_no_params(refuse, meta):
    (meta / "params.json").unlink()
    refuse(meta, "no params.json")


def test_meta_file_in_the_middle_is_missing(refuse, meta):
    (meta / "consolidated.02.pth").unlink()
    refuse(meta, "lacks consolidated.02.pth of 4 files")


def test_meta_last_file_is_missing(refuse, meta):
    (meta / "consolidated.03.pth").unlink()
    refuse(meta, "has 3 file(s)", "cut for 4")


def test_meta_one_file_too_many(refuse, meta):
    shutil.copy(meta / "consolidated.03.pth", meta / "consolidated.04.pth")
    refuse(meta, "has 5 file(s)", "cut for 4")


def test_meta_file_without_a_number(refuse, meta):
    (meta / "consolidated.03.pth").rename(meta / "consolidated.last.pth")
    refuse(meta, "consolidated.last.pth", "no number")


def edit_part(folder, number, change):
    path = folder / f"consolidated.{number:02d}.pth"
    tensors = torch.load(path, weights_only=True)
    change(tensors)
    torch.save(tensors, path)


def edit_parts(folder, change):
    for number in range(len(list(folder.glob("*.pth")))):
        edit_part(folder, number, change)


def test_meta_files_of_two_models(refuse, meta):
    edit_part(meta, 3, lambda t: t["norm.weight"].mul_(2))
    refuse(meta, "consolidated.03.pth", "do not agree on norm.weight")


@pytest.mark.parametrize("change", ["less", "more", "other shape", "other dtype"])
def test_meta_files_that_differ(refuse, meta, change):
    name = "layers.1.feed_forward.w2.weight"

    def edit(tensors):
        if change == "less":
            del tensors[name]
        elif change == "more":
            tensors["layers.9.feed_forward.w2.weight"] = tensors[name]
        else:
            tensors[name] = tensors[name][:-1] if change == "other shape" else tensors[name].half()

    edit_part(meta, 2, edit)
    refuse(
        meta,
        "consolidated.02.pth",
        "feed_forward.w2.weight",
        "do not belong together" if "other" in change else "only one",
    )


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("vision_model.class_embedding", (4,)),
        ("layers.0.attention.wq.bias", (4,)),
        ("layers.0.feed_forward.experts.w1.weight", (4, 4)),
        ("layers.0.attention.wq.weight.extra", (4, 4)),
        ("layers.00.attention.wq.weight", (4, 4)),
        ("layers.0.attention.wk.weight", (4,)),
        ("output.weight", ()),
        ("norm.weight", (4, 4)),
    ],
)
def test_meta_tensors_that_no_llama_has(refuse, meta, name, shape):
    edit_parts(meta, lambda tensors: tensors.update({name: torch.ones(shape)}))
    refuse(meta, name, "no Llama has; refused")


@pytest.mark.parametrize("name", ["layers.1.ffn_norm.weight", "output.weight", "layers.0.attention.wv.weight"])
def test_meta_tensor_is_missing(refuse, meta, name):
    edit_parts(meta, lambda tensors: tensors.pop(name))
    refuse(meta, "lacks what becomes")


@pytest.mark.parametrize("name", ["tok_embeddings", "layers.0.attention.wo", "layers.0.feed_forward.w1"])
def test_meta_matrix_that_sizes_come_from_is_missing(refuse, meta, name):
    edit_parts(meta, lambda tensors: tensors.pop(f"{name}.weight"))
    refuse(meta, f"holds no matrix {name}.weight")


def test_meta_fused_rows_that_are_none(refuse, tmp_path):
    folder = write_meta(tmp_path / "meta", tiny.build(**SHAPE), 2, fused=True)
    name = "layers.0.attention.wqkv.weight"
    edit_parts(folder, lambda tensors: tensors.update({name: tensors[name][:-1]}))
    refuse(folder, "wqkv", "no Q, K and V")


@pytest.mark.parametrize("part", ["wk", "wv"])
def test_meta_copies_of_a_head_that_differ(refuse, tmp_path, part):
    folder = write_meta(tmp_path / "meta", tiny.build(**{**SHAPE, "num_key_value_heads": 4}), 8, llama3=True)
    edit_part(folder, 5, lambda tensors: tensors[f"layers.1.attention.{part}.weight"].add_(1))
    refuse(folder, f"model.layers.1.self_attn.{part[1]}_proj.weight", "more than once, but not the same")


def test_meta_git_lfs_pointer(refuse, meta):
    (meta / "consolidated.01.pth").write_text(LFS_POINTER)
    refuse(meta, "consolidated.01.pth", "git-lfs pointer")


def test_meta_dangling_link(refuse, meta):
    (meta / "consolidated.01.pth").unlink()
    (meta / "consolidated.01.pth").symlink_to(meta / "gone")
    refuse(meta, "consolidated.01.pth", "dangling symlink")


def test_meta_truncated(refuse, meta):
    path = meta / "consolidated.01.pth"
    path.write_bytes(path.read_bytes()[:-100])
    refuse(meta, "consolidated.01.pth", "truncated or damaged")


def test_meta_with_code_in_it_does_not_run(refuse, meta, payload):
    edit_part(meta, 1, lambda tensors: tensors.update(x=payload))
    refuse(meta, "consolidated.01.pth", "mkdir", "nothing of it was run")


def test_meta_inside_a_hugging_face_folder(refuse, tmp_path):
    folder = tmp_path / "model"
    write_meta(folder / "original", tiny.build(**SHAPE))
    refuse(folder, "itself holds no weights", f"name its folder: {folder / 'original'}")


# torch.distributed.checkpoint


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


def test_dcp_without_metadata(refuse, dcp):
    (dcp / ".metadata").unlink()
    refuse(dcp, "no .metadata", "incomplete")


@pytest.mark.parametrize(
    "content", [b"", b"no pickle", b"\x80\x04.", "half", pickle.dumps([1]), pickle.dumps({"a": 1})]
)
def test_dcp_metadata_is_damaged(refuse, dcp, content):
    whole = (dcp / ".metadata").read_bytes()
    (dcp / ".metadata").write_bytes(whole[: len(whole) // 2] if content == "half" else content)
    refuse(dcp, ".metadata", "damaged, or not a torch.distributed.checkpoint's")


def test_dcp_metadata_with_code_in_it_does_not_run(refuse, dcp, payload):
    edit_metadata(dcp, lambda metadata: setattr(metadata, "planner_data", payload))
    refuse(dcp, ".metadata", "posix.mkdir", "nothing of it was run")


@pytest.mark.parametrize(
    "name", ["builtins eval", "builtins getattr", "torch load", "torch.serialization load", "pickle loads", "os system"]
)
def test_dcp_metadata_can_name_nothing_that_runs(refuse, dcp, name):
    (dcp / ".metadata").write_bytes(b"c" + name.replace(" ", "\n").encode() + b"\n(S'1'\ntR.")
    refuse(dcp, ".metadata", name.replace(" ", "."), "nothing of it was run")


def test_dcp_piece_with_code_in_it_does_not_run(refuse, dcp, payload):
    buffer = io.BytesIO()
    torch.save({"x": payload}, buffer)
    path = dcp / "__0_0.distcp"
    end = path.stat().st_size
    path.write_bytes(path.read_bytes() + buffer.getvalue())

    def lead_there(metadata):
        place = next(p for i, p in metadata.storage_data.items() if i.fqn == "model.model.norm.weight")
        place.relative_path, place.offset, place.length = path.name, end, len(buffer.getvalue())

    edit_metadata(dcp, lead_there)
    refuse(dcp, "__0_0.distcp", "mkdir", "nothing of it was run")


def test_dcp_file_is_missing(refuse, dcp):
    (dcp / "__1_0.distcp").unlink()
    refuse(dcp, "names the file __1_0.distcp, which is missing")


@pytest.mark.parametrize("keep", [0, 10, -1, -2000])
def test_dcp_file_is_truncated(refuse, dcp, keep):
    path = dcp / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:keep])
    refuse(dcp, "__1_0.distcp", "empty" if keep == 0 else "ends before byte")


def test_dcp_git_lfs_pointer(refuse, dcp):
    (dcp / "__1_0.distcp").write_text(LFS_POINTER)
    refuse(dcp, "__1_0.distcp", "git-lfs pointer")


@pytest.mark.parametrize("name", ["../stolen.distcp", "/etc/passwd", "sub/x.distcp", ".."])
def test_dcp_names_a_path_outside_the_folder(refuse, dcp, name):
    edit_metadata(dcp, lambda m: [setattr(place, "relative_path", name) for place in m.storage_data.values()])
    refuse(dcp, ".metadata", name, "outside the folder")


@pytest.mark.parametrize("number", [-1, "5", 2.5, None])
def test_dcp_places_that_are_no_numbers(refuse, dcp, number):
    edit_metadata(dcp, lambda m: [setattr(place, "offset", number) for place in m.storage_data.values()])
    refuse(dcp, ".metadata", "damaged")


def test_dcp_places_that_are_another_tensor_s(refuse, dcp):
    def swap(metadata):
        by_name = {index.fqn: place for index, place in metadata.storage_data.items()}
        a, b = by_name["model.model.norm.weight"], by_name["model.lm_head.weight"]
        vars(a).update(dict(vars(b)))

    edit_metadata(dcp, swap)
    refuse(dcp, "model.norm.weight", "do not belong together")


@pytest.mark.parametrize("how", ["hole", "overlap", "outside", "less axes"])
def test_dcp_pieces_that_do_not_fit(refuse, dcp, how):
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
    refuse(dcp, "lm_head.weight", "do not make up its shape")


def test_dcp_compressed(refuse, dcp):
    edit_metadata(dcp, lambda m: [setattr(p, "transform_descriptors", ["zstd"]) for p in m.storage_data.values()])
    refuse(dcp, "compressed", "zstd")


def test_dcp_out_is_where_its_config_is(convert, tmp_path):
    model = tiny.build()
    run = tmp_path / "run"
    tensors = {f"model.student.{n}": t for n, t in model.state_dict().items()}
    path = write_dcp(run / "checkpoints/step-00000001/tensors", tensors)
    tiny.save(model, run / "model")
    before = tiny.snapshot(run)
    convert("mha-to-mqa", path, run / "model", "--overwrite").refused("holds files of SOURCE")
    assert tiny.snapshot(run) == before


def test_dcp_without_config(refuse, dcp):
    (dcp / "config.json").unlink()
    refuse(dcp, "needs the model's config.json", "none of", "copy it")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (lambda n: [f"model.{n}", f"ema.{n}"], ("here are 2", "'model.'", "'ema.'")),
        (lambda n: [n.replace("embed_tokens", "tok_embeddings")], ("here are 0", "Hugging Face names")),
        (
            lambda n: [f"model.{n}", f"reward.{n}"] if "norm" in n else [f"model.{n}"],
            ("reward.", "refused rather than"),
        ),
    ],
)
def test_dcp_names_that_are_not_one_model_s(refuse, tmp_path, names, words):
    tensors = {new: t for n, t in tiny.build().state_dict().items() for new in names(n)}
    folder = write_dcp(tmp_path / "dcp", tensors)
    (folder / "config.json").write_text("{}")
    refuse(folder, *words)


def test_dcp_complex_tensor_in_the_model(refuse, tmp_path):
    tensors = {**tiny.build().state_dict(), "freqs": torch.ones(3, dtype=torch.complex64)}
    folder = write_dcp(tmp_path / "dcp", tensors)
    (folder / "config.json").write_text("{}")
    refuse(folder, "freqs (complex64)")


# Names of the hub


@pytest.mark.parametrize(
    ("name", "fetch"),
    [("org/name", "hf download org/name."), ("org/name@v1.0", "hf download org/name --revision v1.0.")],
)
def test_hub_names_that_are_not_in_the_cache(refuse, tmp_path, monkeypatch, name, fetch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    refuse(name, "no such file or folder", "not in the cache", fetch)


def test_hub_names_without_the_package(refuse, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refuse("org/name", "no such file or folder", "pip install huggingface_hub", "hf download org/name")


@pytest.mark.parametrize("name", ["nowhere", "a/b/c", "org/name@", "@/x", "org/", "../x/y", "org/na me"])
def test_what_cannot_be_a_hub_name(refuse, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    refuse(name, "no such file or folder; SOURCE is")


# Any damage at all


@pytest.fixture(scope="module")
def small_files(tmp_path_factory):
    """Return small folders of each format, and their files."""
    place = tmp_path_factory.mktemp("small")
    model = tiny.build(num_hidden_layers=1)
    write_bin(place / "bin", model, n_shards=2)
    write_meta(place / "meta", tiny.build(**SHAPE, num_hidden_layers=1), 2, fused=True)
    write_dcp(place / "dcp", model.state_dict(), 2)
    (place / "dcp/config.json").write_text(json.dumps(model.config.to_dict()))
    return place


KINDS = {
    "bin": "pytorch_model-00001-of-00002.bin",
    "meta": "consolidated.01.pth",
    "dcp": "__0_0.distcp",
    "dcp ": ".metadata",
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_bytes_changed_are_read_or_refused(convert, small_files, tmp_path, kind, data):
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
    result = convert("mha-to-mqa", source, tmp_path / "out")
    if result.code:
        result.refused(str(source))
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert tiny.snapshot(tmp_path) == before


def test_the_undamaged_ones_are_read(convert, small_files, tmp_path):
    for kind in ("bin", "meta", "dcp"):
        assert convert("mha-to-mqa", small_files / kind, tmp_path / kind).code == 0
    assert meta_parts(tiny.build(**SHAPE), 2, "float32", llama3=True, fused=False)[1].keys()
