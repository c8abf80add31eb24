"""Every family against transformers' own classes: which tensors depend on K/V heads, and what merging them computes."""

import copy
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from rounding import ROUNDING
from safetensors.torch import save_file
from stock_families import CASES, SIZE, difference, open_folder
from transformers import AutoConfig

from convert.merging.merge_recipe import MergeRecipe
from convert.planning.merge_plan import make_merge_plan
from model import load_model
from model.checkpoint import TensorInfo, open_checkpoint
from model.common.errors import CheckpointError
from model.families import FAMILIES, NATIVE_FAMILIES, find_family
from model.geometry import read_geometry

# The keys of all heads are normalised together.
FLAT_NORMS = ("flex_olmo", "olmo2", "olmo3", "olmoe")
N_HEADS = tiny.N_HEADS
WITHOUT_DEFAULT_HEAD_DIM = {"hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"}
"""The families whose class stops without `head_dim`."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a maker of folders, each made once: a random model of a family with so many K/V heads."""
    folders: dict[str, Path] = {}

    def save(family: str, changes: dict, n_kv_heads: int = N_HEADS, **size: int) -> Path:
        key = json.dumps([family, changes, n_kv_heads, size])
        if key not in folders:
            needs_head_dim = "head_dim" in tiny.SETTINGS.get(tiny.inner(family), {})
            settings = {**size, **({"head_dim": 16} if size and needs_head_dim else {})}
            model = tiny.build(family, num_key_value_heads=n_kv_heads, **{**settings, **changes})
            folders[key] = tiny.save(model, tmp_path_factory.mktemp(family) / "source", max_shard_size="100KB")
        return folders[key]

    return save


# Which tensors depend on the number of K/V heads


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_shape_probe(saved, family, changes):
    """The stock class with fewer K/V heads saves exactly the tensors and shapes that we plan to write."""
    for n_kv_heads, groups in ((8, 4), (8, 2), (8, 1), (4, 2), (4, 1), (2, 1)):
        folders = saved(family, changes, n_kv_heads), saved(family, changes, groups)
        with open_checkpoint(folders[0]) as source, open_checkpoint(folders[1]) as theirs:
            plan = make_merge_plan(source, groups, MergeRecipe("mean"), None)
            assert plan.tensors == theirs.tensors
            changed = {name for name, tensor in source.tensors.items() if tensor != theirs.tensors.get(name)}
            sources = [merge.source.tensor_names for output in plan.computed.values() for merge in output.merges]
            read = {name for names in sources for name in names}
            per_head = {name for names in sources if len(names) > 1 for name in names}
            assert changed <= read <= changed | per_head
            assert len(sources) >= 4


# What merging computes


def kv_heads(family: str, tensors: dict[str, torch.Tensor], n_kv_heads: int) -> dict[str, torch.Tensor]:
    """Return all K and V heads by name, [n_kv_heads, …], without our tables; the shape probe vouches for it."""
    heads: dict[str, torch.Tensor] = {}
    listed: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        part = name.rpartition("self_attn.")[2]
        if part == name or re.search("vision|tower|connector", name):
            continue
        if part.startswith(("k_proj", "v_proj")) or (part == "k_norm.weight" and family in ("cohere", *FLAT_NORMS)):
            heads[name] = tensor.view(n_kv_heads, -1)
        elif part == "qkv_proj.weight":
            head_dim = len(tensor) // (N_HEADS + 2 * n_kv_heads)
            _, k, v = tensor.split([N_HEADS * head_dim, n_kv_heads * head_dim, n_kv_heads * head_dim])
            heads |= {f"{name} k": k.reshape(n_kv_heads, -1), f"{name} v": v.reshape(n_kv_heads, -1)}
        elif part.startswith("k_layernorm.norms."):
            listed.setdefault(name.rpartition(".norms.")[0], []).append(tensor)
    return heads | {name: torch.stack(tensors) for name, tensors in listed.items()}


def with_repeated_heads(
    family: str, few: dict[str, torch.Tensor], many: dict[str, torch.Tensor], groups: int, n_kv_heads: int
) -> dict[str, torch.Tensor]:
    """Return the tensors of the model `few`, each K/V head repeated so that they fit where `many` fit."""
    full = {name: t.clone() for name, t in many.items()}
    for name, tensor in few.items():
        if full[name].shape == tensor.shape:
            full[name].copy_(tensor)
    merged = kv_heads(family, few, groups)
    for name, target in kv_heads(family, full, n_kv_heads).items():  # views of `full`
        target.copy_(merged[name].repeat_interleave(n_kv_heads // groups, 0))
        for i, row in enumerate(target if f"{name}.norms.0.weight" in full else ()):  # stacked, hence no view
            full[f"{name}.norms.{i}.weight"].copy_(row)
    return full


def check_mean(
    family: str, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], groups: int, n_kv_heads: int
) -> None:
    heads, merged = kv_heads(family, before, n_kv_heads), kv_heads(family, after, groups)
    assert heads.keys() == merged.keys()
    for name, tensor in heads.items():
        mean = tensor.double().view(groups, n_kv_heads // groups, -1).mean(dim=1).float()
        assert torch.equal(merged[name], mean), name
    for name, tensor in after.items():
        if tensor.shape == before[name].shape and "k_layernorm" not in name:
            assert torch.equal(tensor, before[name]), name
        elif "qkv_proj" in name:
            n_query_rows = len(tensor) * N_HEADS // (N_HEADS + 2 * groups)
            assert torch.equal(tensor[:n_query_rows], before[name][:n_query_rows])


def replace_norm(name: str, module: torch.nn.Module) -> bool:
    """Let a norm of the keys compute in float64."""

    def forward(k_BTF: torch.Tensor) -> torch.Tensor:
        exact = k_BTF.double()
        scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + module.variance_epsilon)
        return (module.weight * exact * scale).float()

    if name.endswith("self_attn.k_norm"):
        module.forward = forward
        return True
    return False


@pytest.mark.parametrize(
    ("n_kv_heads", "groups"),
    [(8, 2), (8, 1), pytest.param(8, 4, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(("family", "changes"), CASES)
def test_replicated_heads_oracle(convert, saved, tmp_path, family, changes, n_kv_heads, groups):
    """Merged heads are the mean; repeated again, they give the same logits, and merged again, the same heads.

    Repeating is exact: query head h reads the same numbers in either model, so the logits may not differ at all. Where
    the keys are normalised over all heads together, that holds for numbers, not for float32: every square stands in the
    mean equally often, but the sum of more squares is rounded otherwise. There we let that norm compute in float64,
    which leaves nothing of it after rounding, and ask the class as it is for the last digits only.
    """
    source = saved(family, changes, n_kv_heads, **SIZE)
    out, again, back = (tmp_path / name for name in ("out", "again", "back"))
    convert("mha-to-gqa", "--method", "mean", source, out, "--groups", groups).succeeded()
    before, after = tiny.tensors(source), tiny.tensors(out)
    check_mean(family, before, after, groups, n_kv_heads)
    repeated = with_repeated_heads(family, after, before, groups, n_kv_heads)
    again.mkdir()
    save_file(repeated, again / "model.safetensors", metadata={"format": "pt"})
    (again / "config.json").write_bytes((source / "config.json").read_bytes())

    parent, child = open_folder(family, again), open_folder(family, out)
    assert child.config.get_text_config().num_key_value_heads == groups
    if family in FLAT_NORMS:
        assert difference(parent, child) < 1e-6
        for model in (parent, child):
            assert sum(replace_norm(name, module) for name, module in model.named_modules()) == tiny.N_LAYERS
    assert difference(parent, child) <= ROUNDING

    convert("mha-to-gqa", "--method", "mean", again, back, "--groups", groups).succeeded()
    merged_again = tiny.tensors(back)
    assert merged_again.keys() == after.keys()
    assert all(torch.equal(merged_again[name], tensor) for name, tensor in after.items())


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_verify_and_inspect(convert, saved, tmp_path, family, changes):
    source, out = saved(family, changes), tmp_path / "out"
    row = json.loads(convert("inspect", source, "--json").out)["groups"][2]
    convert("mha-to-gqa", source, out, "--groups", 2, "--method", "random").succeeded()
    assert row["groups"] == 2
    assert row["tensor_bytes"] == sum(t.nbytes for t in tiny.tensors(out).values())
    result = convert("verify", source, out, "--json")
    verified = json.loads(result.out)
    assert (result.code, verified["ok"], verified["differences"]) == (0, True, [])
    report = json.loads((out / "groupwise.json").read_text())["merge_report"]
    assert {entry["heads"] for entry in report} == {"k", "v"}
    for entry in report[:: len(report) - 1]:
        tensors = tiny.tensors(out)
        tensors[entry["tensor"]].view(-1)[-1] += 1
        changed = next(f for f in out.glob("*.safetensors") if entry["tensor"] in f.read_bytes().decode("latin-1"))
        content = changed.read_bytes()
        save_file({n: t for n, t in tensors.items() if n.encode() in content}, changed, metadata={"format": "pt"})
        assert f"{entry['tensor']} differs from the one recomputed" in convert("verify", source, out).err
        changed.write_bytes(content)


@pytest.mark.parametrize("family", sorted(set(tiny.STOCK) - set(NATIVE_FAMILIES) - set(tiny.WRAPPERS)))
def test_load_model_opens_it(saved, family):
    folder, ids = saved(family, {}, 2), torch.arange(12).view(2, 6)
    with torch.inference_mode():
        difference = load_model(folder)(ids) - open_folder(family, folder)(input_ids=ids).logits
    assert difference.abs().max() < 1e-6


# What the classes make of a config that does not say everything


def class_outcome(family: str, config: dict, folder: Path) -> SimpleNamespace | None:
    """Return a checkpoint without numbers, as the class would have it by this config; None if the class stops."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        with torch.device("meta"):
            model = tiny.model_class(family).from_config(AutoConfig.from_pretrained(folder))
    except (TypeError, StrictDataclassFieldValidationError):
        return None
    tensors = {name: TensorInfo(name, "F32", tuple(t.shape)) for name, t in model.state_dict().items()}
    return SimpleNamespace(config=config, tensors=tensors, config_folder="source")


def full_config(family: str, **changes) -> dict:
    """Return `config.json` as a dict; of a wrapper, `changes` are the language model's."""
    config = json.loads(tiny.make_config(family, **changes).to_json_string(use_diff=False))
    return {"model_type": family, **config}


@pytest.mark.parametrize("how", ["absent", "null"])
@pytest.mark.parametrize("family", tiny.STOCK)
def test_absent_n_kv_heads(tmp_path, family, how):
    """Where the class takes it as a number, so do we; where it stops, we refuse in one line."""
    assumed = AutoConfig.for_model(tiny.inner(family)).num_key_value_heads or N_HEADS
    config = full_config(
        family, num_attention_heads=assumed, hidden_size=4 * assumed, head_dim=4, num_key_value_heads=1
    )
    text = config.get("text_config", config)
    complete = class_outcome(family, config, tmp_path)
    assert complete is not None
    if how == "null":
        text["num_key_value_heads"] = None
    else:
        del text["num_key_value_heads"]
    theirs = class_outcome(family, config, tmp_path)
    if theirs is not None:
        geometry = read_geometry(theirs)
        assert geometry.n_kv_heads > 1
        words = f"takes as {geometry.n_kv_heads}, but the weights hold 1 K/V heads; set num_key_value_heads"
    else:
        words = "refuses; the weights hold 1 K/V heads, so set num_key_value_heads to 1"
    with pytest.raises(CheckpointError, match=words):
        read_geometry(SimpleNamespace(config=config, tensors=complete.tensors, config_folder="source"))


@pytest.mark.parametrize("family", sorted(set(tiny.STOCK) - WITHOUT_DEFAULT_HEAD_DIM))
def test_absent_head_dim(tmp_path, family):
    wide = {"hidden_size": 128 * N_HEADS} if family == "helium" else {}  # its output projection is always square
    config = full_config(family, **wide)
    config.get("text_config", config).pop("head_dim", None)
    theirs = class_outcome(family, config, tmp_path)
    assert theirs is not None
    output = next(t for n, t in theirs.tensors.items() if re.search(r"layers\.0\.self_attn\.(o_proj|dense)\.weight", n))
    assert read_geometry(theirs).head_dim == output.shape[1] // N_HEADS


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in tiny.WRAPPERS])
def test_absent_sizes(family):
    theirs = AutoConfig.for_model(family.removesuffix("_gqa"))
    sizes = find_family({"model_type": family}).family.default_sizes
    assert sizes == {key: getattr(theirs, key) for key in sizes}


@pytest.mark.parametrize("family", tiny.WRAPPERS)
@pytest.mark.parametrize("named", [False, True])
def test_wrapped_configs_with_absent_sizes(tmp_path, family, named):
    """As the first LLaVA checkpoints have them: what equals the language model's defaults is not there."""
    text_config = {"model_type": tiny.inner(family)} if named else {}
    config = {"model_type": family, **tiny.WRAPPERS[family][1], "text_config": text_config}
    theirs = class_outcome(family, copy.deepcopy(config), tmp_path)
    assert theirs is not None
    geometry = read_geometry(SimpleNamespace(config=config, tensors=theirs.tensors, config_folder="source"))
    text = AutoConfig.from_pretrained(tmp_path).text_config
    assert geometry.n_layers == text.num_hidden_layers
    assert (geometry.n_heads, geometry.n_kv_heads) == (text.num_attention_heads, text.num_key_value_heads)
    assert geometry.head_dim == (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


# Language models inside others


@pytest.mark.parametrize("spelling", ["language_model.model.", "model.language_model.", "language_model."])
def test_only_the_wrapped_language_model_changes(convert, saved, tmp_path, spelling):
    source = tmp_path / "source"
    shutil.copytree(saved("llava", {}), source)
    tensors = {n.replace("language_model.model.", spelling): t for n, t in tiny.tensors(source).items()}
    for file in [*source.glob("*.safetensors"), source / "model.safetensors.index.json"]:
        file.unlink()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2).succeeded()
    after = tiny.tensors(tmp_path / "out")
    changed = {name for name, tensor in after.items() if tensor.shape != tensors[name].shape}
    assert changed == {f"{spelling}layers.{i}.self_attn.{kind}_proj.weight" for i in (0, 1) for kind in "kv"}
    assert sum("vision_tower" in name and "k_proj" in name for name in after) == 4
    assert all(torch.equal(tensor, after[name]) for name, tensor in tensors.items() if name not in changed)
    config = json.loads((source / "config.json").read_text())
    text = config["text_config"]
    text |= {"num_key_value_heads": 2, "rope_theta": text["rope_parameters"]["rope_theta"]}
    assert json.loads((tmp_path / "out/config.json").read_text()) == config


@pytest.mark.parametrize("spelling", ["version 4", "version 5", "without a base"])
def test_qwens_three_positions_of_a_token_are_one_on_text(tmp_path, spelling):
    """The language model inside a Qwen3-VL is measured as a Qwen 3."""
    sections = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    model = tiny.build("qwen3_vl", hidden_size=64, head_dim=8, initializer_range=0.2)
    folder = tiny.save(model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    text = {key: value for key, value in config["text_config"].items() if key != "rope_parameters"}
    text |= {
        "version 4": {"rope_theta": 5e6, "rope_scaling": sections},
        "version 5": {"rope_parameters": {"rope_theta": 5e6, **sections}},
        "without a base": {"rope_scaling": sections},
    }[spelling]
    tiny.edit_config(folder, text_config=text)
    ids = torch.arange(24).view(2, 12)
    with torch.inference_mode():
        theirs = open_folder("qwen3_vl", folder)(input_ids=ids).logits
        assert float((load_model(folder)(ids) - theirs).abs().max()) <= 1e-6 * float(theirs.abs().max())


# Where each head has a tensor of its own


def test_shards_that_lose_all_their_tensors_are_gone(convert, tmp_path):
    model = tiny.build("stablelm", qk_layernorm=True)
    source = tiny.save(model, tmp_path / "source")
    tensors = tiny.tensors(source)
    names = {name: f"model-{i:05d}.safetensors" for i, name in enumerate(sorted(tensors))}
    (source / "model.safetensors").unlink()
    for name, file in names.items():
        save_file({name: tensors[name]}, source / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": names}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2).succeeded()
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(names) - 2 * 6
    convert("verify", source, tmp_path / "out").succeeded()
    open_folder("stablelm", tmp_path / "out")


def test_merges_are_shown_by_kind_and_layer(convert, tmp_path):
    for family, changes, kinds in (
        ("stablelm", {"qk_layernorm": True}, ("k_proj", "v_proj", "k_layernorm.norms")),
        ("phi3", {}, ("qkv_proj, k", "qkv_proj, v")),
    ):
        source = tiny.save(tiny.build(family, **changes), tmp_path / family)
        lines = convert(
            "mha-to-gqa", "--method", "mean", source, tmp_path / f"{family}-out", "--groups", 4
        ).out.splitlines()
        for kind in kinds:
            (line,) = [line for line in lines if kind in line]
            assert set(re.findall(r"\((\d+)\)", line)) <= {"0", "1"}
