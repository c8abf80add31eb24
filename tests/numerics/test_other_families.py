"""The families whose stock class cannot hold any number of K/V heads: what is merged, and what opens the result."""

import json

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, FalconConfig

from convert.plan import make_plan
from model.checkpoint import open_checkpoint

N_HEADS, HEAD_DIM = 8, 16
HIDDEN = N_HEADS * HEAD_DIM


def randomised(model):
    """Let biases be random too, which classes begin with zeros."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def falcon(multi_query: bool = False, **changes):
    torch.manual_seed(0)
    config = FalconConfig(
        vocab_size=67, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=N_HEADS, multi_query=multi_query,
        new_decoder_architecture=False, **{"alibi": True, "bias": True, "parallel_attn": False, **changes},
    )  # fmt: skip
    return randomised(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


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


# Falcon-RW


@pytest.mark.parametrize("changes", [{}, {"bias": False}, {"alibi": False, "parallel_attn": True}])
def test_falcon_becomes_multi_query(convert, tmp_path, changes):
    source = tiny.save(falcon(**changes), tmp_path / "source")
    assert convert("mha-to-mqa", source, tmp_path / "out").code == 0
    before, after = tiny.tensors(source), tiny.tensors(tmp_path / "out")
    for name, tensor in before.items():
        expected = mean_by_group(tensor, 1) if "query_key_value" in name else tensor
        assert torch.equal(after[name], expected), name
    config = json.loads((source / "config.json").read_text())
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written == {**config, "multi_query": True, "num_kv_heads": 1}

    child = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    parent = falcon(**changes)
    repeated = {n: repeat_by_head(t, 1) if "query_key_value" in n else t for n, t in child.state_dict().items()}
    parent.load_state_dict(repeated)
    assert torch.equal(logits(parent), logits(child))
    assert convert("verify", source, tmp_path / "out").code == 0


def test_falcon_shape_probe(tmp_path):
    folders = [tiny.save(falcon(multi), tmp_path / str(multi)) for multi in (False, True)]
    with open_checkpoint(folders[0]) as source, open_checkpoint(folders[1]) as theirs:
        plan = make_plan(source, 1, "mean", 0, None)
        assert plan.tensors == theirs.tensors
        assert plan.regrouped.keys() == {n for n, t in source.tensors.items() if t != theirs.tensors[n]}


def test_falcon_knows_nothing_between(convert, tmp_path):
    source = tiny.save(falcon(), tmp_path / "source")
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2).refused(
        "--groups 2 is not possible: the class of falcon holds a K/V head for each query head, or one; choose one of 1,"
    )
    found = json.loads(convert("inspect", source, "--json").out)
    assert [row["groups"] for row in found["groups"]] == [8, 1]
    assert found["repeats"] == []
    assert convert("to-hf", source, tmp_path / "same").code == 0
    assert (tmp_path / "same/config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"new_decoder_architecture": True}, "falcon-40b or 180b, which is grouped already"),
        (
            {"multi_query": True},
            "multi_query = true, but the weights hold 8 K/V heads; set multi_query to what is",
        ),
        ({"multi_query": ...}, "no multi_query, but the weights hold 8 K/V heads; set multi_query to what is"),
        ({"multi_query": "no"}, 'multi_query = "no"; it can be true, false'),
    ],
)
def test_falcon_configs_that_say_otherwise(convert, tmp_path, settings, words):
    source = tiny.save(falcon(), tmp_path / "source")
    tiny.edit_config(source, **settings)
    convert("mha-to-mqa", source, tmp_path / "out").refused(words)


def test_falcon_7b_is_multi_query_already(convert, tmp_path):
    source = tiny.save(falcon(multi_query=True), tmp_path / "source")
    found = json.loads(convert("inspect", source, "--json").out)
    assert (found["attention"], len(found["groups"])) == ("MQA", 1)
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2).refused("the model has 1 K/V heads")
    convert("repeat-kv", source, tmp_path / "out", "--kv-heads", 8).refused(
        "the class of falcon cannot hold another number of them"
    )
