"""The families whose stock class cannot hold any number of K/V heads: what is merged, and what opens the result."""

import errno
import json
import re
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from families_without_gqa import HEAD_DIM, HIDDEN, MPT, N_HEADS, STOCK_CLASSES, falcon, gpt_neox, mpt, mt5, t5
from rounding import ROUNDING
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    MT5Config,
    MT5ForConditionalGeneration,
    T5Config,
)

from convert.merging.merge_recipe import MergeRecipe
from convert.planning.merge_plan import make_merge_plan
from model.checkpoint import open_checkpoint
from model.common.errors import CheckpointError
from model.decoder.loading import load_model
from model.decoder.transformers_classes import refusing
from model.families.t5 import MT5_FAMILY
from model.remote_code.modeling_gpt_neox_gqa import GPTNeoXGQAForCausalLM
from model.remote_code.modeling_t5_gqa import T5GQAForConditionalGeneration

ROOT = Path(__file__).parents[2]


def repeat_by_head(fused: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the rows [queries of a group | key | value] of grouped heads as [query | key | value] of each head."""
    per_group = N_HEADS // groups
    grouped = fused.view(groups, per_group + 2, HEAD_DIM, *fused.shape[1:])
    q = grouped[:, :per_group].flatten(0, 1)
    k, v = (grouped[:, i].repeat_interleave(per_group, 0) for i in (-2, -1))
    return torch.stack([q, k, v], 1).flatten(0, 2)


def mean_by_group(fused: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the rows [query | key | value] of each head, with mean keys and values, as grouped heads have them."""
    heads = fused.view(N_HEADS, 3, HEAD_DIM, *fused.shape[1:])
    q = heads[:, 0].unflatten(0, (groups, N_HEADS // groups))
    kv = heads[:, 1:].double().unflatten(0, (groups, N_HEADS // groups)).mean(1).float()
    return torch.cat([q, kv], 1).flatten(0, 2)


def logits(model, **more) -> torch.Tensor:
    ids = torch.randint(0, 66, (3, 17), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return model(input_ids=ids, **more).logits


def assert_equal(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, atol=ROUNDING, rtol=0)


# Falcon-RW


@pytest.mark.parametrize("changes", [{}, {"bias": False}, {"alibi": False, "parallel_attn": True}])
def test_falcon_becomes_multi_query(convert, tmp_path, changes):
    source = tiny.save(falcon(**changes), tmp_path / "source")
    convert("mha-to-mqa", "--method", "mean", source, tmp_path / "out").succeeded()
    before, after = tiny.tensors(source), tiny.tensors(tmp_path / "out")
    for name, tensor in before.items():
        expected = mean_by_group(tensor, 1) if "query_key_value" in name else tensor
        assert torch.equal(after[name], expected), name
    config = json.loads((source / "config.json").read_text())
    written = json.loads((tmp_path / "out/config.json").read_text())
    theta = {"rope_theta": config["rope_parameters"]["rope_theta"]}  # as transformers 4 has it
    assert written == {**config, "multi_query": True, "num_kv_heads": 1, **theta}

    child = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    parent = falcon(**changes)
    repeated = {n: repeat_by_head(t, 1) if "query_key_value" in n else t for n, t in child.state_dict().items()}
    parent.load_state_dict(repeated)
    assert_equal(logits(parent), logits(child))
    convert("verify", source, tmp_path / "out").succeeded()


def test_falcon_shape_probe(tmp_path):
    folders = [tiny.save(falcon(multi), tmp_path / str(multi)) for multi in (False, True)]
    with open_checkpoint(folders[0]) as source, open_checkpoint(folders[1]) as theirs:
        plan = make_merge_plan(source, 1, MergeRecipe("mean"), None)
        assert plan.tensors == theirs.tensors
        assert plan.computed.keys() == {n for n, t in source.tensors.items() if t != theirs.tensors[n]}


def test_falcon_merges_to_one_group_only(convert, tmp_path):
    source = tiny.save(falcon(), tmp_path / "source")
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2).refused(
        "--groups 2 is not possible: the class of falcon holds a K/V head for each query head, or one; choose one of 1,"
    )
    summary = json.loads(convert("inspect", source, "--json").out)
    assert [row["groups"] for row in summary["groups"]] == [8, 1]
    assert summary["repeats"] == []
    convert("to-hf", source, tmp_path / "same").succeeded()
    assert (tmp_path / "same/config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"new_decoder_architecture": True}, "falcon-40b or 180b, which is grouped already"),
        (
            {"multi_query": True},
            "multi_query = true, but the weights hold 8 K/V heads; set multi_query to the true number",
        ),
        ({"multi_query": ...}, "no multi_query, but the weights hold 8 K/V heads; set multi_query to the true number"),
        ({"multi_query": "no"}, 'multi_query = "no"; it can be true, false'),
    ],
)
def test_falcon_configs_that_contradict_the_weights(convert, tmp_path, settings, words):
    source = tiny.save(falcon(), tmp_path / "source")
    tiny.edit_config(source, **settings)
    convert("mha-to-mqa", "--method", "mean", source, tmp_path / "out").refused(words)


def test_falcon_7b_is_multi_query_already(convert, tmp_path):
    source = tiny.save(falcon(multi_query=True), tmp_path / "source")
    summary = json.loads(convert("inspect", source, "--json").out)
    assert (summary["attention"], len(summary["groups"])) == ("MQA", 1)
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2).refused(
        "the model has 1 K/V head, and groups"
    )
    convert("repeat-kv", source, tmp_path / "out", "--groups", 8).refused(
        "the model has 1 K/V head, and the class of falcon supports one K/V head, or one for each query head"
    )


# GPT-NeoX and T5, with code of ours


CASES = [
    *((gpt_neox, changes) for changes in ({}, {"attention_bias": False}, {"use_parallel_residual": False})),
    *((t5, changes) for changes in ({}, {"d_kv": 24, "num_decoder_layers": 3})),
    (t5, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    *((mt5, changes) for changes in ({}, {"d_kv": 24, "num_decoder_layers": 3})),
]
DECODER = {"decoder_input_ids": torch.arange(21).view(3, 7)}


def opened(folder, model_class):
    """Open a folder and check that every tensor found its place."""
    model, loading = model_class.from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
    assert not any(loading.values()), loading
    return model.eval()


def is_grouped(name: str) -> bool:
    """Say whether a tensor holds K/V heads that are merged: not those of T5's encoder."""
    return "query_key_value" in name or re.search(r"decoder\..*Attention\.[kv]\.", name) is not None


def merged(name: str, tensor: torch.Tensor, groups: int) -> torch.Tensor:
    if "query_key_value" in name:
        return mean_by_group(tensor, groups)
    heads = tensor.double().unflatten(0, (groups, N_HEADS // groups, -1))
    return heads.mean(1).float().flatten(0, 1)


def repeated(name: str, tensor: torch.Tensor, groups: int) -> torch.Tensor:
    if "query_key_value" in name:
        return repeat_by_head(tensor, groups)
    return tensor.unflatten(0, (groups, -1)).repeat_interleave(N_HEADS // groups, 0).flatten(0, 1)


OURS = {gpt_neox: GPTNeoXGQAForCausalLM, t5: T5GQAForConditionalGeneration, mt5: T5GQAForConditionalGeneration}


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize(("make", "changes"), CASES)
def test_replicated_heads_oracle(convert, tmp_path, make, changes, groups):
    """Merged heads are the mean; the model we write the code for is the stock one with those repeated."""
    source = tiny.save(make(**changes), tmp_path / "source", max_shard_size="100KB")
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", groups).succeeded()
    before, after = tiny.tensors(source), tiny.tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], merged(name, tensor, groups) if is_grouped(name) else tensor), name

    (tmp_path / "again").mkdir()
    full = {name: repeated(name, t, groups) if is_grouped(name) else t for name, t in after.items()}
    save_file(full, tmp_path / "again/model.safetensors", metadata={"format": "pt"})
    (tmp_path / "again/config.json").write_bytes((source / "config.json").read_bytes())
    parent, child = opened(tmp_path / "again", STOCK_CLASSES[make]), opened(tmp_path / "out", OURS[make])
    more = {} if make is gpt_neox else DECODER
    assert_equal(logits(parent, **more), logits(child, **more))

    convert("verify", source, tmp_path / "out").succeeded()
    convert("mha-to-gqa", "--method", "mean", tmp_path / "again", tmp_path / "back", "--groups", groups).succeeded()
    assert all(torch.equal(t, after[name]) for name, t in tiny.tensors(tmp_path / "back").items())


@pytest.mark.parametrize("make", OURS)
def test_shape_probe_of_our_classes(convert, tmp_path, make):
    """Our class with fewer K/V heads saves exactly the tensors and shapes that we plan to write."""
    source = tiny.save(make(), tmp_path / "source")
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 4).succeeded()
    for groups in (2, 1):
        tiny.edit_config(tmp_path / "out", num_key_value_heads=groups)
        torch.manual_seed(0)
        config = OURS[make].config_class.from_pretrained(tmp_path / "out")
        tiny.save(OURS[make](config), tmp_path / f"theirs-{groups}")
        with open_checkpoint(source) as checkpoint, open_checkpoint(tmp_path / f"theirs-{groups}") as theirs:
            plan = make_merge_plan(checkpoint, groups, MergeRecipe("mean"), None)
            assert plan.tensors == theirs.tensors
            assert plan.computed.keys() == {n for n, t in checkpoint.tensors.items() if t != theirs.tensors[n]}


@pytest.mark.parametrize("make", OURS)
def test_what_we_wrote_is_read_again(convert, tmp_path, make):
    """Merging in two steps is merging in one, up to rounding; repeating gives the same model; heads may stay."""
    source = tiny.save(make(), tmp_path / "source")
    first, second, direct, wide = (tmp_path / name for name in ("first", "second", "direct", "wide"))
    convert("mha-to-gqa", "--method", "mean", source, first, "--groups", 4).succeeded()
    convert("mha-to-gqa", "--method", "mean", first, second, "--groups", 2).succeeded()
    convert("mha-to-gqa", "--method", "mean", source, direct, "--groups", 2).succeeded()
    for name, tensor in tiny.tensors(direct).items():
        assert torch.allclose(tiny.tensors(second)[name], tensor, atol=1e-7)
    assert (second / "config.json").read_bytes() == (direct / "config.json").read_bytes()
    for code in OURS[make].__module__, OURS[make].config_class.__module__:
        file = f"{code.rpartition('.')[2]}.py"
        assert (second / file).read_bytes() == (ROOT / "model/remote_code" / file).read_bytes()

    convert("repeat-kv", direct, wide, "--groups", 8).succeeded()
    more = {} if make is gpt_neox else DECODER
    assert_equal(logits(opened(direct, OURS[make]), **more), logits(opened(wide, OURS[make]), **more))
    convert("verify", direct, wide).succeeded()

    convert("to-hf", source, tmp_path / "same").succeeded()
    assert (tmp_path / "same/config.json").read_bytes() == (source / "config.json").read_bytes()
    assert not list((tmp_path / "same").glob("modeling_*_gqa.py"))


@pytest.mark.parametrize("make", OURS)
def test_config_card_and_record_name_the_code(convert, tmp_path, make):
    source = tiny.save(make(), tmp_path / "source")
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2).succeeded()
    config, before = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", source))
    name = {gpt_neox: "gpt_neox_gqa"}.get(make, "t5_gqa")
    assert config["model_type"] == name
    assert config["num_key_value_heads"] == 2
    assert config["architectures"] == [OURS[make].__name__]
    assert config["auto_map"]["AutoConfig"] == f"configuration_{name}.{OURS[make].config_class.__name__}"
    for auto_class, where in config["auto_map"].items():
        module, _, ours = where.rpartition(".")
        assert f"class {ours}(" in (tmp_path / f"out/{module}.py").read_text(), auto_class
    changed = {"model_type", "num_key_value_heads", "architectures", "auto_map", "rotary_emb_base", "rotary_pct"}
    changed |= {"scale_decoder_outputs"} if make is mt5 else set()
    assert {k: v for k, v in config.items() if k not in changed} == {
        k: v for k, v in before.items() if k not in changed
    }
    card = (tmp_path / "out/README.md").read_text()
    assert f"`modeling_{name}.py`" in card and "trust_remote_code=True" in card
    assert json.loads((tmp_path / "out/groupwise.json").read_text())["geometry"]["model_type"] == name


@pytest.mark.parametrize("tie", [True, False, ...])
@pytest.mark.parametrize("has_lm_head", [True, False])
def test_logits_of_mt5_are_not_scaled(convert, tmp_path, has_lm_head, tie):
    """T5's class would scale them if config.json has the tie_word_embeddings that transformers 5 writes for mT5."""
    source = tiny.save(mt5(), tmp_path / "source")
    tiny.edit_config(source, tie_word_embeddings=tie)
    tensors = tiny.tensors(source)
    for name in [name for name in tensors if is_grouped(name)]:
        tensors[name] = repeated(name, merged(name, tensors[name], 2), 2)
    tensors |= {"lm_head.weight": torch.randn_like(tensors["shared.weight"])} if has_lm_head else {}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2).succeeded()
    assert_equal(
        logits(opened(source, MT5ForConditionalGeneration), **DECODER),
        logits(opened(tmp_path / "out", T5GQAForConditionalGeneration), **DECODER),
    )


def test_settings_of_mt5_that_are_left_out(convert, tmp_path):
    """They are mT5's defaults, which the class of the output does not have."""
    config = MT5Config(vocab_size=96, d_model=48, d_kv=8)
    source = tiny.save(AutoModelForSeq2SeqLM.from_config(config), tmp_path / "source")
    left_out = ("num_heads", "num_layers", "num_decoder_layers", "d_ff", "feed_forward_proj", "decoder_start_token_id")
    tiny.edit_config(source, **dict.fromkeys((*left_out, "is_gated_act", "dense_act_fn"), ...))
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2).succeeded()
    child = opened(tmp_path / "out", T5GQAForConditionalGeneration).config
    assert {name: getattr(child, name) for name in left_out} == {name: getattr(config, name) for name in left_out}


def test_the_defaults_of_mt5_are_its_class_s():
    defaults = MT5_FAMILY.custom_code.defaults
    ours, theirs = MT5Config().to_dict(), T5Config().to_dict()
    follow = {"model_type", "num_decoder_layers", "is_gated_act", "dense_act_fn"}
    assert defaults == {key: value for key, value in ours.items() if theirs.get(key) != value and key not in follow}


@pytest.mark.parametrize("architectures", [["GPTNeoXForTokenClassification"], [], ..., "GPTNeoXForCausalLM"])
def test_classes_without_remote_code(convert, tmp_path, architectures):
    source = tiny.save(gpt_neox(), tmp_path / "source")
    tiny.edit_config(source, architectures=architectures)
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2).refused(
        f"architectures = {None if architectures is ... else architectures}", "GPTNeoXForCausalLM, GPTNeoXModel"
    )
    convert("to-hf", source, tmp_path / "out").succeeded()


@pytest.mark.parametrize("command", ["mha-to-gqa", "to-hf"])
def test_the_lm_head_of_neox_under_its_name_in_memory(convert, tmp_path, command):
    """State dicts of transformers 5 hold it. Other programs, and the code for fewer K/V heads, know the files' name."""
    source, usual = tmp_path / "source", tiny.save(gpt_neox(), tmp_path / "usual")
    tensors = {name.replace("embed_out", "lm_head"): tensor for name, tensor in tiny.tensors(usual).items()}
    shutil.copytree(usual, source)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert "lm_head.weight" in tensors
    options = ("--groups", 2, "--method", "mean") if command == "mha-to-gqa" else ()
    for folder in (usual, source):
        convert(command, folder, tmp_path / f"{folder.name}-out", *options).succeeded()
        convert("verify", folder, tmp_path / f"{folder.name}-out").succeeded()
    ours, theirs = (tiny.tensors(tmp_path / f"{name}-out") for name in ("source", "usual"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    save_file({**tensors, "embed_out.weight": tensors["lm_head.weight"] + 1}, source / "model.safetensors")
    convert(command, source, tmp_path / "both", *options).refused("embed_out.weight and lm_head.weight", "remove one")


def test_pythias_old_buffers_stay(convert, tmp_path):
    """Released Pythia checkpoints hold the causal mask and the rotary frequencies of every layer."""
    source = tiny.save(gpt_neox(), tmp_path / "source")
    buffers = {}
    for layer in (0, 1):
        stem = f"gpt_neox.layers.{layer}.attention"
        buffers[f"{stem}.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.bool).tril()
        buffers[f"{stem}.masked_bias"] = torch.tensor(-1e9)
        buffers[f"{stem}.rotary_emb.inv_freq"] = torch.ones(2)
    save_file({**tiny.tensors(source), **buffers}, source / "model.safetensors", metadata={"format": "pt"})
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2).succeeded()
    after = tiny.tensors(tmp_path / "out")
    assert all(torch.equal(after[name], tensor) for name, tensor in buffers.items())
    _, loading = GPTNeoXGQAForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not loading["missing_keys"]


def test_merges_of_t5_are_shown_by_kind(convert, tmp_path):
    source = tiny.save(t5(), tmp_path / "source")
    lines = convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 4).out.splitlines()
    for kind in ("SelfAttention.k", "SelfAttention.v", "EncDecAttention.k", "EncDecAttention.v"):
        assert len([line for line in lines if kind in line]) == 1


# MPT, with the code that its checkpoints bring


@pytest.mark.parametrize("norms", [False, True])
def test_mpt(convert, tmp_path, norms):
    """[q | k | v], and the code is told of groups (llm-foundry 0.22, `GroupedQueryAttention`)."""
    source = mpt(tmp_path / "source", norms=norms)
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2).succeeded()
    before, after = tiny.tensors(source), tiny.tensors(tmp_path / "out")
    for name, tensor in before.items():
        expected = tensor
        if "Wqkv" in name or "k_ln" in name:
            heads = tensor.double().view(-1, 4, HEAD_DIM, *tensor.shape[1:])  # four neighbours become one
            expected = heads.mean(1).float().flatten(0, 1)
        if "Wqkv" in name:
            expected = torch.cat([tensor[:HIDDEN], expected[2 * HEAD_DIM :]])  # but for the queries
        assert torch.equal(after[name], expected), name
    assert (
        "open the result with the checkpoint's own code: trust_remote_code=True"
        in (tmp_path / "out/README.md").read_text()
    )
    attention = {"attn_type": "grouped_query_attention", "alibi": True, "kv_n_heads": 2}
    assert json.loads((tmp_path / "out/config.json").read_text()) == {**MPT, "attn_config": attention}
    convert("verify", source, tmp_path / "out").succeeded()
    assert json.loads(convert("inspect", tmp_path / "out", "--json").out)["attention"] == "GQA-2"
    with pytest.raises(CheckpointError, match="class of 'mpt' cannot open merged heads"):
        load_model(tmp_path / "out")
    convert("repeat-kv", tmp_path / "out", tmp_path / "wide", "--groups", 4).succeeded()
    convert("mha-to-gqa", "--method", "mean", tmp_path / "out", tmp_path / "one", "--groups", 1)
    assert json.loads((tmp_path / "one/config.json").read_text())["attn_config"]["kv_n_heads"] == 1


@pytest.mark.parametrize("settings", [None, ...])
def test_mpt_without_settings_of_attention(convert, tmp_path, settings):
    source = mpt(tmp_path / "source")
    tiny.edit_config(source, attn_config=settings)
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2).succeeded()
    written = json.loads((tmp_path / "out/config.json").read_text())["attn_config"]
    assert written == {"attn_type": "grouped_query_attention", "kv_n_heads": 2}


@pytest.mark.parametrize(
    ("code", "changes", "words"),
    [
        ("", {}, "own code (modeling_mpt.py) does not know kv_n_heads either"),
        ("kv_n_heads", {"auto_map": ...}, "brings no code of its own, so nothing could open it"),
        ("kv_n_heads", {"auto_map": {"AutoModel": "a/b--c.D"}}, "own code is elsewhere (a/b--c.D); put those"),
        ("kv_n_heads", {"attn_config": {"attn_type": "multiquery_attention"}},
         'attn_config.attn_type = "multiquery_attention", but the weights hold 8 K/V heads'),
        ("kv_n_heads", {"attn_config": {"attn_type": "new"}}, 'attn_config.attn_type = "new"; it can be "multihead'),
    ],
)  # fmt: skip
def test_mpt_code_that_cannot_open_the_output(convert, tmp_path, code, changes, words):
    source = mpt(tmp_path / "source", code)
    tiny.edit_config(source, **changes)
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2).refused(words)
    assert not (tmp_path / "out").exists()
    if "own code" in words:  # `inspect` says the same
        assert any(words in note for note in json.loads(convert("inspect", source, "--json").out)["notes"])


def test_what_opens_the_output_is_said_before(convert, tmp_path):
    source = tiny.save(tiny.build("gpt_neox"), tmp_path / "source")
    (note,) = json.loads(convert("inspect", source, "--json").out)["notes"]
    assert "transformers opens the result with trust_remote_code=True" in note
    shown = convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2, "--dry-run", "--json")
    assert note in json.loads(shown.out)["notes"]


def test_what_uptrain_does_not_measure_is_said(convert, tmp_path):
    source = tiny.save(falcon(alibi=True), tmp_path / "source")
    shown = convert("mha-to-mqa", "--method", "mean", source, tmp_path / "out").out
    assert "It has ALiBi biases, so uptrain does not measure or train it." in shown


def test_the_checkpoints_own_code_is_read_and_not_run(convert, tmp_path):
    trap = f"open({str(tmp_path / 'ran')!r}, 'w')  # kv_n_heads"
    source = mpt(tmp_path / "source", trap)
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2).succeeded()
    assert (tmp_path / "out/modeling_mpt.py").read_text() == trap
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(errno.EIO, "Input/output error"), ValueError("of transformers")]
)
def test_what_is_not_the_checkpoints_fault_is_not_called_so(error):
    """While a model runs. The command then ends with exit code 1, and keeps the finished layers."""
    expected = CheckpointError if isinstance(error, ValueError) else type(error)
    with pytest.raises(expected), refusing("transformers cannot run the model", running=True):
        raise error
    with pytest.raises(CheckpointError), refusing("transformers can build no model"):
        raise error
