"""`convert mha-to-gqa` and `mha-to-mqa` on whole folders: which bytes change, and what is written beside them."""

import json
import os
import re
import stat
from pathlib import Path

import pytest
import tiny
import torch
import torch_files
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from model.common.model_card import of_derived_model
from model.files.staging import Staging

LAYOUTS = {
    "plain": {},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "head_dim": {"head_dim": 6},
}


def float64_mean(w: torch.Tensor, groups: int, n_heads: int = tiny.N_HEADS) -> torch.Tensor:
    """Pool as the paper says, straight from the formula."""
    heads = w.double().view(groups, n_heads // groups, w.shape[0] // n_heads, -1)
    return heads.mean(dim=1).reshape(-1, *w.shape[1:]).to(w.dtype)


@pytest.mark.parametrize("shards", ["single", "several"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "mixed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_kv_heads_change_and_they_are_the_mean(convert, tmp_path, layout, dtype, shards):
    model = tiny.build(**LAYOUTS[layout])
    source = tiny.save(model, tmp_path / "source", dtype, "8KB" if shards == "several" else "1GB")
    assert len(list(source.glob("*.safetensors"))) > 3 or shards == "single"
    before = tiny.tensors(source)
    for groups in (8, 4, 2, 1):
        out = tmp_path / f"out{groups}"
        convert("mha-to-gqa", "--method", "mean", source, out, "--groups", groups).succeeded()
        after = tiny.tensors(out)
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            expected = float64_mean(tensor, groups) if tiny.is_kv(name) else tensor
            assert after[name].dtype == tensor.dtype
            assert torch.equal(after[name], expected), name
        assert {f.name for f in out.glob("*.safetensors")} == {f.name for f in source.glob("*.safetensors")}


@pytest.mark.parametrize("shards", ["1GB", "20KB"])
def test_same_number_of_groups_is_the_identity(convert, tmp_path, shards):
    source = tiny.save(tiny.build(), tmp_path / "source", "bfloat16", shards)
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 8).succeeded()
    before, after = tiny.snapshot(source), tiny.snapshot(tmp_path / "out")
    assert set(after) - set(before) == {"groupwise.json"}
    for name, content in before.items():
        if name.endswith(".safetensors"):
            assert (
                content[8 + int.from_bytes(content[:8], "little") :]
                == after[name][8 + int.from_bytes(after[name][:8], "little") :]
            )
        elif name not in ("README.md", "model.safetensors.index.json"):
            assert after[name] == content, name


def test_gqa_to_mha_by_repeating_and_back_is_exact(convert, tmp_path):
    gqa = tiny.build(num_key_value_heads=2)
    mha = tiny.build()
    state = gqa.state_dict()
    mha.load_state_dict(
        {
            n: t.view(2, -1, t.shape[1]).repeat_interleave(4, 0).flatten(0, 1) if tiny.is_kv(n) else t
            for n, t in state.items()
        }
    )
    expected = gqa.to(torch.bfloat16).state_dict()
    for method in ("mean", "first"):
        source, out = tmp_path / f"mha-{method}", tmp_path / f"gqa-{method}"
        tiny.save(mha, source, "bfloat16")
        convert("mha-to-gqa", source, out, "--groups", 2, "--method", method).succeeded()
        back = tiny.tensors(out)
        for name, tensor in expected.items():
            assert torch.equal(back[name], tensor), name


def test_gqa_source_can_be_merged_further(convert, tmp_path):
    source = tiny.save(tiny.build(num_key_value_heads=4), tmp_path / "source", "bfloat16")
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2).succeeded()
    before, after = tiny.tensors(source), tiny.tensors(tmp_path / "out")
    name = "model.layers.1.self_attn.v_proj.weight"
    assert torch.equal(after[name], float64_mean(before[name], 2, n_heads=4))
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out3", "--groups", 3).refused(
        "4 K/V heads", "choose one of 1, 2, 4"
    )


def test_mqa_is_one_group(convert, source, tmp_path):
    convert("mha-to-mqa", "--method", "mean", source, tmp_path / "mqa").succeeded()
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "gqa", "--groups", 1).succeeded()
    assert tiny.snapshot(tmp_path / "mqa") == tiny.snapshot(tmp_path / "gqa")


def test_config_keeps_every_other_key_and_its_order(convert, source, tmp_path):
    tiny.edit_config(source, ünknown={"kept": [1, None, 1e-05]}, torch_dtype="bfloat16", rope_theta=10000.0)
    convert("mha-to-mqa", "--method", "mean", source, tmp_path / "out").succeeded()
    before = json.loads((source / "config.json").read_text())
    after = json.loads((tmp_path / "out/config.json").read_text())
    assert list(after) == list(before)
    assert after == {**before, "num_key_value_heads": 1}


@pytest.mark.parametrize("value", [..., None])
def test_absent_or_null_key_becomes_explicit(convert, source, tmp_path, value):
    tiny.edit_config(source, num_key_value_heads=value)
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2).succeeded()
    assert json.loads((tmp_path / "out/config.json").read_text())["num_key_value_heads"] == 2


def test_a_staging_area_or_a_young_run_in_the_source_is_not_copied(convert, source, tmp_path):
    """They name files of this machine, and hold tokens of texts that may be private."""
    for name in (".run.data.groupwise/folder/tokens-00000.bin.partial", ".run.data.groupwise/lock", "run/run.json"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("private")
    (source / "run/model").mkdir()
    result = json.loads(convert("mha-to-mqa", "--method", "mean", source, tmp_path / "out", "--json").out)
    assert result["skipped_files"] == [".run.data.groupwise/", "run/ (a training run, its data, or logits)"]
    (tmp_path / "out/.x.groupwise").mkdir()
    again = convert("mha-to-mqa", "--method", "mean", source, tmp_path / "out", "--overwrite")
    again.refused("(here: .x.groupwise), so --overwrite will not replace it")


def test_side_files_are_copied_and_stale_ones_are_not(convert, source, tmp_path):
    for name in (
        "pytorch_model.bin",
        "optimizer.pt",
        "trainer_state.json",
        "original/params.json",
        ".cache/x",
        "a.gguf",
    ):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("stale")
    (source / "original/NOTICE").write_text("linked licence")
    (source / "NOTICE").symlink_to("original/NOTICE")
    result = convert("mha-to-mqa", "--method", "mean", source, tmp_path / "out", "--json")
    after = tiny.snapshot(tmp_path / "out")
    for name, text in tiny.SIDE_FILES.items():
        assert name == "README.md" or after[name] == text.encode()
    assert after["NOTICE"] == b"linked licence"
    assert not (tmp_path / "out/NOTICE").is_symlink()
    weights = {f.name for f in source.glob("model-*.safetensors")}
    own = {"config.json", "groupwise.json", "NOTICE", "generation_config.json", "model.safetensors.index.json"}
    assert after.keys() == tiny.SIDE_FILES.keys() | weights | own
    assert "pytorch_model.bin" in json.loads(result.out)["skipped_files"]


def test_card_includes_the_source_card(convert, source, tmp_path):
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2)
    card = (tmp_path / "out/README.md").read_bytes().decode()
    note = "> The text below describes the base model. What was changed is [at the end](#conversion-by-groupwise)."
    front, text = tiny.SIDE_FILES["README.md"].split("\n\n")
    assert card.startswith(f"{front}\n\n{note}\n\n{text.strip()}\n\n<!-- groupwise: begin -->")
    assert re.search(r"Base model \| source \|", card)
    assert "8 → 2" in card
    assert convert("mha-to-mqa", "--method", "mean", tmp_path / "out", tmp_path / "again").code == 0
    assert (tmp_path / "again/README.md").read_text().count(note) == 1


def test_the_card_of_a_model_of_the_hub(convert, source, tmp_path):
    """It names its parent, and not its parent's parent and measurements."""
    front = "license: mit\nbase_model:\n- some/parent\nmodel-index:\n- name: x\n  results:\n  - 1\n\ntags: [a]\n"
    (source / "README.md").write_text(f"---\n{front}---\n# Its card\n---\nmodel-index: this stays\n")
    snapshot = tmp_path / "models--owner--name/snapshots" / ("a" * 40)
    snapshot.parent.mkdir(parents=True)
    source.rename(snapshot)
    for groups, expected in ((2, "base_model: owner/name\nlicense: mit\ntags: [a]\n"), (8, front)):
        out = tmp_path / f"out{groups}"
        assert convert("mha-to-gqa", "--method", "mean", snapshot, out, "--groups", groups).code == 0
        card = (out / "README.md").read_text()
        assert card.startswith(f"---\n{expected}---\n")
        assert "# Its card\n---\nmodel-index: this stays\n" in card


def test_front_matter_of_spaces_takes_no_time():
    """A hostile card of 1 MB took hours."""
    card = b"---\n" + b" " * 1_000_000 + b"x\n---\ntext\n"
    assert of_derived_model(card, "owner/name")[1] == card


@pytest.mark.parametrize(
    "entries",
    [
        "base_model: [\n  some/parent\n]\nmodel-index: [\n{name: x},\n]\n",
        "# of the base\nbase_model: some/parent\n# its numbers\nmodel-index:\n- name: x\n# more\n  results: []\n",
        "'base_model': some/parent\n\"model-index\" : []\n",
        "base_model : >-\n  some/parent\n\nmodel-index:\n\n- name: x\n",
    ],
)
@pytest.mark.parametrize("before", ["", "\n", "\ufeff\n"])
def test_front_matter_of_any_form_stays_yaml(entries, before):
    card = f"{before}---\nlicense: mit\n{entries}tags: [a]\nlibrary_name: transformers\n---\n# Its card\n"
    front, text = of_derived_model(card.encode(), "owner/name")
    expected = {"base_model": "owner/name", "license": "mit", "tags": ["a"], "library_name": "transformers"}
    assert yaml.safe_load(front.decode().replace("---", "")) == expected
    assert text == b"# Its card\n"


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ("---\n# see the guide: https://huggingface.co/docs\n{}\n---\n# Card\n", "# Card\n"),
        ("---\n{license: mit}\n---\n# Card\n", "---\n{license: mit}\n---\n# Card\n"),
        ("---\nSome text.\n---\nMore.\n", "---\nSome text.\n---\nMore.\n"),
        ("# Card\n", "# Card\n"),
    ],
)
def test_front_matter_without_entries(card, expected):
    front, text = of_derived_model(card.encode(), "owner/name")
    assert (front, text) == (b"---\nbase_model: owner/name\n---\n\n", expected.encode())
    assert of_derived_model(card.encode(), None) == (b"", expected.encode())


def test_keys_after_a_removed_one_stay():
    kept = "$key: 1\nünicode: 2\nx/y: 3\n'q k': 4\nempty:\n"
    front, _ = of_derived_model(f"---\nbase_model: a/b\n{kept}model-index:\n- a: 1\n{kept}---\n".encode(), "o/n")
    assert front.decode() == f"---\nbase_model: o/n\n{kept}{kept}---\n\n"


def test_index_has_the_true_size(convert, source, tmp_path):
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    tensors = tiny.tensors(tmp_path / "out")
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()


def test_shards_can_be_divided_anew(convert, source, tmp_path):
    convert("mha-to-mqa", "--method", "mean", source, tmp_path / "one", "--max-shard-size", "1GB").succeeded()
    assert (tmp_path / "one/model.safetensors").exists()
    assert not (tmp_path / "one/model.safetensors.index.json").exists()
    convert("mha-to-mqa", "--method", "mean", source, tmp_path / "many", "--max-shard-size", "10KB").succeeded()
    files = list((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3
    assert all(re.fullmatch(rf"model-\d{{5}}-of-{len(files):05d}\.safetensors", f.name) for f in files)
    one, many = tiny.tensors(tmp_path / "one"), tiny.tensors(tmp_path / "many")
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    convert("mha-to-mqa", "--method", "mean", source, tmp_path / "x", "--max-shard-size", "big").refused(
        "'big' is not a size", "24GB"
    )
    convert("mha-to-mqa", "--method", "mean", source, tmp_path / "x", "--max-shard-size", "5").refused(
        "'5' is less than 10,000 bytes; give a unit, for example 24GB"
    )


def test_provenance_holds_digests_and_the_merge_report(convert, source, tmp_path):
    import hashlib

    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2)
    record = json.loads((tmp_path / "out/groupwise.json").read_text())
    assert (record["method"], record["groups"], record["source"]["n_kv_heads"]) == ("mean", 2, 8)
    for file in record["source"]["files"]:
        assert file["sha256"] == hashlib.sha256((source / file["name"]).read_bytes()).hexdigest()
    assert [e["tensor"] for e in record["merge_report"]] == [
        f"model.layers.{layer}.self_attn.{kind}_proj.weight" for layer in (0, 1) for kind in "kv"
    ]
    before, after = tiny.tensors(source), tiny.tensors(tmp_path / "out")
    for entry in record["merge_report"]:
        heads = before[entry["tensor"]].double().view(2, 4, -1)
        merged = after[entry["tensor"]].double().view(2, -1)
        ratio = (merged.norm(dim=1) / heads.norm(dim=2).mean(dim=1)).mean().item()
        unit = heads / heads.norm(dim=2, keepdim=True)
        cosine = ((unit @ unit.mT).sum(dim=(1, 2)) - 4).div(12).mean().item()
        assert entry["norm_ratio"] == pytest.approx(ratio, abs=2e-6)
        assert entry["mean_cosine"] == pytest.approx(cosine, abs=2e-6)


def test_second_conversion_remembers_the_first(convert, source, tmp_path):
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "four", "--groups", 4)
    convert("mha-to-gqa", "--method", "mean", tmp_path / "four", tmp_path / "two", "--groups", 2)
    record = json.loads((tmp_path / "two/groupwise.json").read_text())
    assert record["source"]["groupwise"]["groups"] == 4
    convert("verify", tmp_path / "four", tmp_path / "two").succeeded()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--groups", 2, "--method", "mean", "--seed", 7), "--seed has no effect here: nothing is drawn at random."),
        (("--groups", 8, "--method", "pca"), "--method has no effect: the model has 8 K/V heads already."),
    ],
)
def test_options_without_an_effect(convert, source, tmp_path, options, words):
    """They are not recorded either, so that the same output has the same record."""
    result = convert("mha-to-gqa", source, tmp_path / "out", *options).succeeded()
    assert result.err == f"Warning: {words}\n"
    record = json.loads((tmp_path / "out/groupwise.json").read_text())
    assert (record["method"], record["seed"]) == ("mean", 0)
    (tmp_path / "out/groupwise.json").write_text(json.dumps({**record, "seed": 7}))
    result = convert("verify", source, tmp_path / "out")
    assert (result.code, result.err) == (3, "DIFFERENT: groupwise.json has seed = 7; it should be 0\n")


def test_dry_run_sees_the_finished_work_of_another_command(convert, source, tmp_path):
    out = tmp_path / "out"
    staging = Staging(out)
    with staging:
        staging.open({"--method": "pca"})
        staging.record("a piece", 1)
    before = tiny.snapshot(tmp_path)
    for dry in ((), ("--dry-run",)):
        convert("mha-to-gqa", source, out, "--groups", 2, "--method", "mean", *dry).refused(
            f"{staging.root} holds the finished work of a command with another --method", "or remove that folder"
        )
        assert tiny.snapshot(tmp_path) == before


def test_a_card_that_is_not_utf_8(convert, source, tmp_path):
    (source / "README.md").write_bytes("# Größe".encode("utf-16"))
    result = convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", "mean").succeeded()
    assert "README.md is not UTF-8, so that of the output does not contain it" in " ".join(result.out.split())
    assert (tmp_path / "out/README.md").read_text().startswith("---\n")
    convert("verify", source, tmp_path / "out").succeeded()


def test_random_depends_on_the_seed_only(convert, source, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        convert("mha-to-gqa", source, tmp_path / name, "--groups", 2, "--method", "random", "--seed", seed)
    a, b, c = (tiny.snapshot(tmp_path / name) for name in "abc")
    assert a == b
    weights = [name for name in a if name.endswith(".safetensors")]
    assert any(a[name] != c[name] for name in weights)


@pytest.mark.parametrize("method", ["mean", "first", "random"])
def test_runs_and_workers_give_the_same_bytes(convert, source, tmp_path, method):
    for name, workers in (("a", 1), ("b", 4), ("c", 4)):
        convert("mha-to-gqa", source, tmp_path / name, "--groups", 2, "--method", method, "--workers", workers)
    assert tiny.snapshot(tmp_path / "a") == tiny.snapshot(tmp_path / "b") == tiny.snapshot(tmp_path / "c")


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="not Linux")
@pytest.mark.parametrize("available", [0, 10**12])
def test_output_leaves_the_page_cache_if_it_does_not_fit_beside_the_source(
    convert, source, tmp_path, monkeypatch, available
):
    advise, dropped = os.posix_fadvise, []

    def record(descriptor, *arguments):
        dropped.append((Path(f"/proc/self/fd/{descriptor}").readlink().stem, arguments))
        advise(descriptor, *arguments)

    monkeypatch.setattr(os, "posix_fadvise", record)
    monkeypatch.setattr("convert.output.write_shards.available_memory", lambda: available)
    convert("mha-to-mqa", "--method", "mean", source, tmp_path / "out", "--max-shard-size", "10KB").succeeded()
    numbers = {str(number) for number in range(len(list((tmp_path / "out").glob("*.safetensors"))))}
    assert {name for name, _ in dropped} == (set() if available else numbers)
    assert {arguments for _, arguments in dropped} <= {(0, 0, os.POSIX_FADV_DONTNEED)}
    convert("verify", source, tmp_path / "out").succeeded()


def test_permissions_follow_the_umask(convert, source, tmp_path):
    (source / "tokenizer.json").chmod(0o600)
    old = os.umask(0o027)
    try:
        convert("mha-to-mqa", "--method", "mean", source, tmp_path / "out")
    finally:
        os.umask(old)
    for path in [tmp_path / "out", *(tmp_path / "out").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o750 if path.is_dir() else 0o640), path


def test_dry_run_prints_the_plan_and_writes_nothing(convert, source, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    result = convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2, "--dry-run", "--json")
    assert sorted(tmp_path.rglob("*")) == before
    plan = json.loads(result.out)
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2)
    written = sum(f.stat().st_size for f in (tmp_path / "out").glob("*.safetensors"))
    assert plan["output_bytes"] == written
    assert plan["n_computed"] == 4
    assert plan["kv_cache_bytes_per_token"] == {"before": 2 * 2 * 8 * 4 * 2, "after": 2 * 2 * 2 * 4 * 2}
    text = convert("mha-to-gqa", "--method", "mean", source, tmp_path / "other", "--groups", 2, "--dry-run").out
    assert "8 → 2" in text
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2, "--dry-run").refused("exists")


def test_overwrite_replaces_a_checkpoint(convert, source, tmp_path):
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 4)
    (tmp_path / "out/left-over.txt").write_text("of the old model")
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2, "--overwrite").succeeded()
    convert("verify", source, tmp_path / "out").succeeded()
    assert not (tmp_path / "out/left-over.txt").exists()
    assert {p.name for p in tmp_path.iterdir()} == {"source", "out"}


def test_missing_format_metadata_is_added(convert, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    source = tiny.save(tiny.build(), tmp_path / "source")
    save_file(tiny.tensors(source), source / "model.safetensors", metadata={"note": "kept"})
    convert("mha-to-mqa", "--method", "mean", source, tmp_path / "out").succeeded()
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "kept"}


@pytest.mark.parametrize("name", ["x[bold]", "dir[/v2]", ":smile:"])
def test_names_are_printed_as_they_are(convert, source, tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    folder = source.rename(tmp_path / name)
    for arguments in (("inspect", folder), ("mha-to-gqa", "--method", "mean", folder, tmp_path / "out", "--groups", 2)):
        result = convert(*arguments).succeeded()
        assert name in "".join(result.out.split("\n"))


def test_the_spelling_of_transformers_4_replaces_null(convert, tmp_path):
    source = tiny.save(tiny.build(), tmp_path / "source")
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    tiny.edit_config(source, rope_scaling=None, rope_theta=None, rope_parameters=rope)
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2).succeeded()
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["rope_theta"], config["rope_scaling"]) == (500.0, {"rope_type": "linear", "factor": 2.0})


@pytest.mark.parametrize("scaling", [{"rope_type": "yarn", "factor": 4.0}, {"rope_type": "default"}])
def test_rope_scaling_beside_the_spelling_of_transformers_5(convert, tmp_path, scaling):
    """Version 5 then takes the class's own base. An added `rope_theta` would be another."""
    source = tiny.save(tiny.build(), tmp_path / "source")
    rope = {"rope_type": "default", "rope_theta": 1e6}
    tiny.edit_config(source, rope_scaling=scaling, rope_theta=..., rope_parameters=rope)
    convert("repeat-kv", convert_to(convert, source, tmp_path / "two"), tmp_path / "out", "--groups", 8).succeeded()
    theirs = AutoConfig.from_pretrained(source).rope_parameters
    assert [AutoConfig.from_pretrained(tmp_path / name).rope_parameters for name in ("two", "out")] == [theirs] * 2


def convert_to(convert, source, out):
    convert("mha-to-gqa", "--method", "mean", source, out, "--groups", 2).succeeded()
    return out


def test_the_summary_of_a_conversion(convert, source, tmp_path):
    """It says what was done, and the next commands."""

    def shown(*command):
        return [" ".join(line.split()) for line in convert(*command).out.splitlines()]

    out, copy, repeated = (tmp_path / name for name in ("out", "copy", "repeated"))
    merge = ("mha-to-gqa", source, out, "--groups", 2, "--method", "mean")
    merged, others = "4 tensors, 2.048 kB in the output", "17 tensors, 32.45 kB"
    planned, done = shown(*merge, "--dry-run"), shown(*merge)
    assert {f"to merge {merged}", f"to copy {others}", "output 36.65 kB in 2 files"} <= set(planned)
    assert {f"merged {merged}", f"copied {others}", "output 36.65 kB in 2 files"} <= set(done)
    assert "Merged heads compared with SOURCE's" in done
    assert not any(line.startswith(("not copied", "to ")) for line in done)
    for command in ("evaluate", "run"):
        assert any(line.startswith(f"uptrain {command} {out} --teacher {source} --data ") for line in done)
    assert "--tokens 50M --global-batch-tokens 131072 --lr 5e-5)" in done, "for a model that uptrain does not know"
    copied = "\n".join(shown("to-hf", source, copy, "--max-shard-size", "1GB"))
    assert "The number of K/V heads is unchanged." in copied and "in 1 file\n" in copied
    assert "merged" not in copied and "uptrain" not in copied
    again = "\n".join(shown("repeat-kv", out, repeated, "--groups", 4))
    assert "repeated 4 tensors, " in again and "uptrain" not in again


def test_the_next_commands_are_possible(convert, tmp_path):
    """Of Meta's format, make a parent that uptrain reads. Exact outputs need no training."""
    torch_files.write_meta(tmp_path / "meta", tiny.build(**torch_files.META_SHAPE))
    text = convert("mha-to-mqa", tmp_path / "meta", tmp_path / "out", "--method", "mean").out
    assert f"\n  convert to-hf {tmp_path}/meta PARENT\n  uptrain evaluate {tmp_path}/out --teacher PARENT " in text
    paligemma = tiny.save(tiny.build("paligemma"), tmp_path / "paligemma")
    text = convert("mha-to-mqa", paligemma, tmp_path / "paligemma-mqa", "--method", "mean").out
    refusal = "It has a language model that cannot be used alone, so uptrain does not measure or train it."
    assert refusal in " ".join(text.split())
    assert "uptrain evaluate" not in text and "uptrain run" not in text
    for family in ("llava", "mixtral"):
        source = tiny.save(tiny.build(family), tmp_path / family)
        text = convert("mha-to-mqa", source, tmp_path / f"{family}-mqa", "--method", "mean").out
        assert "uptrain evaluate" in text and "uptrain run" in text
    head_dim = torch_files.META_SHAPE["hidden_size"] // torch_files.META_SHAPE["num_attention_heads"]
    exact = ("--latent", head_dim, "--rope", head_dim)
    text = convert("mha-to-mla", tmp_path / "out", tmp_path / "latent", *exact).out
    assert "convert verify" in text and "uptrain" not in text


def test_longrope_as_transformers_4_reads_it(convert, tmp_path):
    """Phi 3's class there wants these three keys in rope_scaling, and no others."""
    factors = {"short_factor": [1.0, 1.0], "long_factor": [2.0, 4.0]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, **factors}
    folder = tiny.save(tiny.build("phi3", max_position_embeddings=64), tmp_path / "source")
    tiny.edit_config(folder, rope_parameters=rope, original_max_position_embeddings=32)
    convert("mha-to-gqa", folder, tmp_path / "out", "--groups", 2, "--method", "mean").succeeded()
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["rope_scaling"] == {"type": "longrope", **factors}
    assert config["original_max_position_embeddings"] == 32
    assert config["rope_parameters"] == rope


@pytest.mark.parametrize("setting", ["attention_factor", "factor"])
def test_longrope_that_transformers_4_cannot_read(convert, tmp_path, setting):
    """Version 5 would read `rope_scaling` in place of the whole settings, without this one."""
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
        "partial_rotary_factor": 1.0, "short_factor": [1.0, 1.1], "long_factor": [2.0, 3.0], setting: 1.7,
    }  # fmt: skip
    model = tiny.build("phi3", num_key_value_heads=4, original_max_position_embeddings=16, rope_parameters=rope)
    folder, out = tiny.save(model, tmp_path / "source"), tmp_path / "out"
    result = convert("repeat-kv", folder, out, "--groups", 8, "--json")
    assert any(f"version 4 has no keys for {setting}, " in note for note in json.loads(result.out)["notes"])
    config = AutoConfig.from_pretrained(out)
    assert config.rope_parameters == AutoConfig.from_pretrained(folder).rope_parameters
    ids = torch.arange(48)[None]
    with torch.inference_mode():
        ours, theirs = (AutoModelForCausalLM.from_pretrained(each)(ids).logits for each in (out, folder))
    assert (ours - theirs).abs().max() <= 1e-5


def test_a_shard_of_the_longest_name(convert, tmp_path):
    source = tiny.save(tiny.build(), tmp_path / "source")
    name = f"{'x' * 243}.safetensors"
    (source / "model.safetensors").rename(source / name)
    index = {"weight_map": dict.fromkeys(tiny.tensors(source), name)}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", "mean").succeeded()
    assert (tmp_path / "out" / name).is_file()
    assert not list((tmp_path / "out").glob("*.partial"))
