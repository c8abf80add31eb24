"""`convert inspect` tells the geometry and what each number of groups would bring."""

import json

import tiny


def test_json(convert, source):
    summary = json.loads(convert("inspect", source, "--json").out)
    assert (summary["model_type"], summary["attention"], summary["format"]) == ("llama", "MHA", "safetensors")
    assert (summary["n_layers"], summary["n_heads"], summary["n_kv_heads"], summary["head_dim"]) == (2, 8, 8, 4)
    assert [row["groups"] for row in summary["groups"]] == [8, 4, 2, 1]
    assert [row["kv_cache_bytes_per_token"] for row in summary["groups"]] == [256, 128, 64, 32]
    assert summary["tensor_bytes"] == sum(t.nbytes for t in tiny.tensors(source).values())
    four = summary["groups"][1]
    assert four["tensor_parallel_split"] == [1, 2, 4]
    assert four["tensor_parallel_replicated"] == [8]


def test_heads_under_a_norm_over_all_of_them_cannot_be_copied(convert, tmp_path):
    """A copy would count twice in the norm."""
    source = tiny.save(tiny.build("olmo2"), tmp_path / "source")
    rows = json.loads(convert("inspect", source, "--json").out)["groups"]
    assert [row["tensor_parallel_split"] for row in rows] == [[1, 2, 4, 8], [1, 2, 4], [1, 2], [1]]
    assert not any(row["tensor_parallel_replicated"] for row in rows)


def test_sizes_are_those_of_the_outputs(convert, source, tmp_path):
    rows = json.loads(convert("inspect", source, "--json").out)["groups"]
    for row in rows:
        out = tmp_path / f"out{row['groups']}"
        convert("mha-to-gqa", "--method", "mean", source, out, "--groups", row["groups"])
        assert row["tensor_bytes"] == sum(t.nbytes for t in tiny.tensors(out).values())
        after = json.loads(convert("inspect", out, "--json").out)
        assert after["attention"] == row["attention"]
        assert after["heads_per_group"] == 8 // row["groups"]


def test_table(convert, source):
    text = convert("inspect", source).out
    assert "MHA: 8 query heads, 8 K/V heads" in text
    for word in ("GQA-4", "GQA-2", "MQA", "12.5%"):
        assert word in text


def test_an_output_with_latent_attention(convert, source, tmp_path):
    out = tmp_path / "out"
    options = ("--latent", 16, "--rope", 8, "--calibration", "none", "--json")
    made = json.loads(convert("mha-to-mla", source, out, *options).succeeded().out)
    summary = json.loads(convert("inspect", out, "--json").succeeded().out)
    before = json.loads(convert("inspect", source, "--json").out)
    assert summary.keys() == before.keys()
    same = ("n_layers", "n_heads", "head_dim", "hidden_size")
    assert [summary[key] for key in same] == [before[key] for key in same]
    (sizes,) = summary["latent"]
    expected = next(row for row in before["latent"] if (row["latent"], row["rope"]) == (8, 8))
    assert (sizes["latent"], sizes["rope"], sizes["as_groups"]) == (16, 8, expected["as_groups"] * 1.5)
    assert sizes["kv_cache_bytes_per_token"] == made["kv_cache_bytes_per_token"]["after"]
    assert (summary["attention"], summary["groups"], summary["repeats"]) == ("MLA", [], [])
    shown = " ".join(convert("inspect", out).out.split())
    assert "MLA: 8 query heads, a latent of 16 and a rotated key of 8 dimensions" in shown
    assert "96 B a token, as 3 groups (all layers, 16 bits a value)" in shown
    convert("inspect", out, "--heads").refused("an output of convert mha-to-mla", "no K/V heads to merge")
    tiny.edit_config(out, v_head_dim="4")
    convert("inspect", out).refused(f"{out}: config.json has v_head_dim = '4'")


def test_sizes_of_latent_attention(convert, source, tmp_path):
    rows = json.loads(convert("inspect", source, "--json").out)["latent"]
    assert [(row["latent"], row["rope"], row["as_groups"]) for row in rows] == [(16, 16, 4), (8, 8, 2), (4, 4, 1)]
    assert [row["kv_cache_bytes_per_token"] for row in rows] == [128, 64, 32]
    assert not any(row["vllm_kernel"] for row in rows)
    assert "mha-to-mla" in convert("inspect", source).out
    other = tiny.save(tiny.build("qwen3"), tmp_path / "qwen3")
    assert json.loads(convert("inspect", other, "--json").out)["latent"] == []
    biased = tiny.save(tiny.build(attention_bias=True), tmp_path / "biased")
    without_lm_head = tiny.save(tiny.build(), tmp_path / "reward")
    tiny.edit_config(without_lm_head, architectures=["LlamaForSequenceClassification"])
    for folder in (biased, without_lm_head):
        assert json.loads(convert("inspect", folder, "--json").out)["latent"] == []
        convert("mha-to-mla", folder, tmp_path / "out", "--latent", 8, "--rope", 8).refused()
    assert "mha-to-mla" not in convert("inspect", other).out
    wide = tiny.save(tiny.build(hidden_size=512), tmp_path / "wide")
    rows = json.loads(convert("inspect", wide, "--json").out)["latent"]
    assert [(row["latent"], row["rope"]) for row in rows if row["vllm_kernel"]] == [(512, 64), (256, 64)]
    kernels = {tuple(line.split()[:2]): line for line in convert("inspect", wide).out.splitlines() if " 64 " in line}
    assert kernels["512", "64"].split()[-1] == "yes"
    assert kernels["256", "64"].rstrip().endswith("on some GPUs")
    assert (rows[0]["latent"], rows[0]["rope"]) == (512, 64)  # the default for heads of 64, too
    for row in rows[:1]:
        options = ("--latent", row["latent"], "--rope", row["rope"], "--calibration", "none", "--dry-run", "--json")
        plan = json.loads(convert("mha-to-mla", wide, tmp_path / "out", *options).out)
        assert plan["kv_cache_bytes_per_token"]["after"] == row["kv_cache_bytes_per_token"]


def test_sizes_of_a_float16_model_need_another_dtype(convert, tmp_path):
    """Or another norm: float16 cannot hold what the default norm needs."""
    half, full = (tiny.save(tiny.build(), tmp_path / dtype, dtype) for dtype in ("float16", "bfloat16"))
    advice = "The weights are float16: add --dtype bfloat16, or --latent-norm bias."
    shown = [" ".join(convert("inspect", folder).out.split()) for folder in (half, full)]
    assert [advice in each for each in shown] == [True, False]
    sizes = ("--latent", 8, "--rope", 8, "--calibration", "none", "--dry-run")
    convert("mha-to-mla", half, tmp_path / "out", *sizes).refused("give --dtype bfloat16")
    convert("mha-to-mla", half, tmp_path / "out", *sizes, "--dtype", "bfloat16").succeeded()
