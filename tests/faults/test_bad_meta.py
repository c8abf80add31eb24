"""Bad Meta checkpoints: one clear line, exit code 2, nothing left behind, and nothing run."""

import json
import shutil

import pytest
import tiny
import torch
from torch_files import LFS_POINTER, META_SHAPE, write_meta

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.fixture
def meta(tmp_path):
    return write_meta(tmp_path / "meta", tiny.build(**META_SHAPE), 4, llama3=True)


def edit_params(folder, **changes):
    values = {**json.loads((folder / "params.json").read_text()), **changes}
    (folder / "params.json").write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


def test_two_files_of_one_number(refuse_path, meta):
    shutil.copy(meta / "consolidated.00.pth", meta / "consolidated.0.pth")
    refuse_path(meta, "consolidated.0.pth", "consolidated.00.pth", "same number; remove the outdated one")


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
        ({"n_layers": 3}, ("lacks the tensor for model.layers.2.",)),
        ({"n_layers": 1}, ("model.layers.1.", "mean none", "do not match")),
        ({"n_layers": 10**12}, ("n_layers = 1000000000000", "fewer tensors")),
        ({"dim": 128}, ("split for 8", "dim = 128")),
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
def test_params_that_do_not_fit(refuse_path, meta, changes, words):
    edit_params(meta, **changes)
    refuse_path(meta, "params.json", *words)


@pytest.mark.parametrize(
    ("text", "word"), [("{", "not valid JSON"), ("[1]", "holds a list"), ("[" * 10**5, "not valid")]
)
def test_params_that_are_damaged(refuse_path, meta, text, word):
    (meta / "params.json").write_text(text)
    refuse_path(meta, "params.json", word)


def test_no_params(refuse_path, meta):
    (meta / "params.json").unlink()
    refuse_path(meta, "no params.json")


def test_meta_file_in_the_middle_is_missing(refuse_path, meta):
    (meta / "consolidated.02.pth").unlink()
    refuse_path(meta, "lacks consolidated.02.pth of 4 files")


def test_meta_last_file_is_missing(refuse_path, meta):
    (meta / "consolidated.03.pth").unlink()
    refuse_path(meta, "has 3 file(s)", "split for 4")


def test_meta_one_file_too_many(refuse_path, meta):
    shutil.copy(meta / "consolidated.03.pth", meta / "consolidated.04.pth")
    refuse_path(meta, "has 5 file(s)", "split for 4")


def test_meta_file_without_a_number(refuse_path, meta):
    (meta / "consolidated.03.pth").rename(meta / "consolidated.last.pth")
    refuse_path(meta, "consolidated.last.pth", "no number")


def edit_part(folder, number, change):
    path = folder / f"consolidated.{number:02d}.pth"
    tensors = torch.load(path, weights_only=True)
    change(tensors)
    torch.save(tensors, path)


def edit_parts(folder, change):
    for number in range(len(list(folder.glob("*.pth")))):
        edit_part(folder, number, change)


def test_meta_files_of_two_models(refuse_path, meta):
    edit_part(meta, 3, lambda t: t["norm.weight"].mul_(2))
    refuse_path(meta, "consolidated.03.pth", "do not agree on norm.weight")


@pytest.mark.parametrize("change", ["less", "more", "other shape", "other dtype"])
def test_meta_files_that_differ(refuse_path, meta, change):
    name = "layers.1.feed_forward.w2.weight"

    def edit(tensors):
        if change == "less":
            del tensors[name]
        elif change == "more":
            tensors["layers.9.feed_forward.w2.weight"] = tensors[name]
        else:
            tensors[name] = tensors[name][:-1] if change == "other shape" else tensors[name].half()

    edit_part(meta, 2, edit)
    refuse_path(
        meta,
        "consolidated.02.pth",
        "feed_forward.w2.weight",
        "do not match" if "other" in change else "only one",
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
def test_meta_tensors_that_no_llama_has(refuse_path, meta, name, shape):
    edit_parts(meta, lambda tensors: tensors.update({name: torch.ones(shape)}))
    refuse_path(meta, name, "no Llama has; refused")


@pytest.mark.parametrize("name", ["layers.1.ffn_norm.weight", "output.weight", "layers.0.attention.wv.weight"])
def test_meta_tensor_is_missing(refuse_path, meta, name):
    edit_parts(meta, lambda tensors: tensors.pop(name))
    refuse_path(meta, "lacks the tensor for")


@pytest.mark.parametrize("name", ["tok_embeddings", "layers.0.attention.wo", "layers.0.feed_forward.w1"])
def test_meta_matrix_that_sizes_come_from_is_missing(refuse_path, meta, name):
    edit_parts(meta, lambda tensors: tensors.pop(f"{name}.weight"))
    refuse_path(meta, f"holds no matrix {name}.weight")


def test_meta_fused_rows_that_are_none(refuse_path, tmp_path):
    folder = write_meta(tmp_path / "meta", tiny.build(**META_SHAPE), 2, fused=True)
    name = "layers.0.attention.wqkv.weight"
    edit_parts(folder, lambda tensors: tensors.update({name: tensors[name][:-1]}))
    refuse_path(folder, "wqkv", "cannot be split into Q, K and V")


@pytest.mark.parametrize("part", ["wk", "wv"])
def test_meta_copies_of_a_head_that_differ(refuse_path, tmp_path, part):
    folder = write_meta(tmp_path / "meta", tiny.build(**{**META_SHAPE, "num_key_value_heads": 4}), 8, llama3=True)
    edit_part(folder, 5, lambda tensors: tensors[f"layers.1.attention.{part}.weight"].add_(1))
    refuse_path(folder, f"model.layers.1.self_attn.{part[1]}_proj.weight", "more than once, with different values")


def test_meta_git_lfs_pointer(refuse_path, meta):
    (meta / "consolidated.01.pth").write_text(LFS_POINTER)
    refuse_path(meta, "consolidated.01.pth", "git-lfs pointer")


def test_meta_dangling_link(refuse_path, meta):
    (meta / "consolidated.01.pth").unlink()
    (meta / "consolidated.01.pth").symlink_to(meta / "gone")
    refuse_path(meta, "consolidated.01.pth", "dangling symlink")


def test_meta_truncated(refuse_path, meta):
    path = meta / "consolidated.01.pth"
    path.write_bytes(path.read_bytes()[:-100])
    refuse_path(meta, "consolidated.01.pth", "truncated or damaged")


def test_meta_with_code_in_it_does_not_run(refuse_path, meta, payload):
    edit_part(meta, 1, lambda tensors: tensors.update(x=payload))
    refuse_path(meta, "consolidated.01.pth", "mkdir", "no code was run")


def test_meta_inside_a_hugging_face_folder(refuse_path, tmp_path):
    folder = tmp_path / "model"
    write_meta(folder / "original", tiny.build(**META_SHAPE))
    refuse_path(folder, "itself holds no weights", f"name its folder: {folder / 'original'}")
