"""Conversions that are calibrated on a text: what is recorded, verified, and refused."""

import gzip
import hashlib
import json
import lzma
import os
import subprocess
import sys
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import tiny
import torch
import zstandard
from safetensors.torch import save_file
from tiny_tokenizers import make_tokenizer
from tokenizers import Tokenizer

TEXT = "The folder is the interface, and heads are merged into groups. Ein Dokument endet, ein anderes beginnt. " * 60
FIT = ("--method", "fit", "--calibration-tokens", 1024)
TOKENS = "groupwise_calibration.xz"


@pytest.fixture
def source(tmp_path):
    folder = tiny.save(tiny.build(vocab_size=300), tmp_path / "source", "bfloat16", max_shard_size="20KB")
    return make_tokenizer(folder, 300)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def record(folder):
    return json.loads((folder / "groupwise.json").read_text())


def test_record_and_verify(convert, source, tmp_path, text):
    out = tmp_path / "out"
    result = convert("mha-to-gqa", source, out, "--groups", 2, *FIT, "--refit", "--calibration", text, "--json")
    assert result.code == 0, result.err
    planned = json.loads(result.out)
    expected = {"method": "fit", "renorm": "spread", "refit": True, "grouping": "contiguous"}
    for report in (planned, record(out)):
        assert {key: report[key] for key in expected} == expected
        assert report["calibration"]["text"] == str(text)
        assert (report["calibration"]["windows"], report["calibration"]["window"]) == (16, 64)
    text.unlink()
    report = json.loads(convert("verify", source, out, "--json").out)
    assert (report["ok"], report["unchecked"], report["rounded"]) == (True, [], {})
    assert "calibrated on 1,024 tokens (text.txt)" in (out / "README.md").read_text()


@pytest.mark.parametrize("workers", [1, 3])
def test_the_same_bytes_again(convert, source, tmp_path, workers):
    for name in ("one", "two"):
        assert convert("mha-to-gqa", source, tmp_path / name, "--groups", 2, *FIT, "--workers", workers).code == 0
    assert tiny.snapshot(tmp_path / "one") == tiny.snapshot(tmp_path / "two")


def test_out_keeps_its_tokens(convert, source, tmp_path, text):
    """They are what the tokenizer makes of the text, window by window."""
    from transformers import AutoTokenizer

    assert convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, *FIT, "--calibration", text).code == 0
    ids = np.frombuffer(lzma.decompress((tmp_path / "out" / TOKENS).read_bytes()), "<u2").reshape(16, 64)
    tokenizer = AutoTokenizer.from_pretrained(source)
    expected = tokenizer(TEXT, add_special_tokens=False).input_ids
    assert (ids[:, 0] == tokenizer.bos_token_id).all()
    assert ids[:, 1:].flatten().tolist() == expected[: 16 * 63]


def lost(path):
    path.unlink()


def damaged(path):
    path.write_bytes(path.read_bytes()[:-9])


def of_another_text(path):
    path.write_bytes(lzma.compress(np.arange(1024, dtype="<u2").tobytes()))


def endless(path):
    path.write_bytes(lzma.compress(bytes(1 << 26)))


@pytest.mark.parametrize("harm", [lost, damaged, of_another_text, endless])
def test_verify_lists_unchecked_parts(convert, source, tmp_path, text, harm):
    out = tmp_path / "out"
    assert convert("mha-to-gqa", source, out, "--groups", 2, *FIT, "--calibration", text).code == 0
    harm(out / TOKENS)
    result = convert("verify", source, out)
    assert (result.code, "NOT CHECKED: the merged layers, since" in result.err) == (4, True)
    assert "all agree" not in result.out
    report = json.loads(convert("verify", source, out, "--json").out)
    assert (report["ok"], report["n_regrouped"], len(report["unchecked"])) == (False, 0, 1)
    tensors = tiny.tensors(out)  # all the rest is checked nevertheless
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] += 1
    for file in out.glob("*.safetensors"):
        file.unlink()
    (out / "model.safetensors.index.json").unlink()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    result = convert("verify", source, out)
    assert (result.code, "mlp.up_proj.weight differs" in result.err) == (3, True)


@pytest.mark.parametrize(("windows", "window"), [(1 << 40, 64), (0, 64), (-1, -1024), (1 << 60, 1 << 60)])
def test_verify_of_an_impossible_calibration(convert, source, tmp_path, text, windows, window):
    out = tmp_path / "out"
    assert convert("mha-to-gqa", source, out, "--groups", 2, *FIT, "--calibration", text).code == 0
    named = record(out)
    named["calibration"] |= {"windows": windows, "window": window}
    (out / "groupwise.json").write_text(json.dumps(named))
    result = convert("verify", source, out)
    assert (result.code in (3, 4), "records a calibration of" in result.err) == (True, True)


def test_tokens_that_the_model_does_not_know(convert, source, tmp_path, text):
    out = tmp_path / "out"
    assert convert("mha-to-gqa", source, out, "--groups", 2, *FIT, "--calibration", text).code == 0
    ids = np.full(1024, 60_000, dtype="<u2")
    (out / TOKENS).write_bytes(lzma.compress(ids.tobytes()))
    named = record(out)
    named["calibration"]["sha256_of_ids"] = hashlib.sha256(ids.astype(np.int64).tobytes()).hexdigest()
    (out / "groupwise.json").write_text(json.dumps(named))
    result = convert("verify", source, out)
    assert (result.code, "has the token id 60000" in result.err) == (4, True)


def test_tokens_are_not_copied_into_the_next_conversion(convert, source, tmp_path, text):
    assert convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, *FIT, "--calibration", text).code == 0
    assert convert("mha-to-gqa", tmp_path / "out", tmp_path / "next", "--groups", 1, "--method", "mean").code == 0
    assert not (tmp_path / "next" / TOKENS).exists()
    assert convert("verify", tmp_path / "out", tmp_path / "next").code == 0


def as_if_written_so(out, name):
    """As on another machine, whose sums come out a little different."""
    written = record(out)
    values = tiny.tensors(out)[name]
    written["sha256"][name] = hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()
    (out / "groupwise.json").write_text(json.dumps(written))


@pytest.mark.parametrize("change", [0.03, -0.5, float("nan")])
def test_verify_sees_a_changed_merge_and_forgives_rounding(convert, source, tmp_path, change):
    out = tmp_path / "out"
    assert convert("mha-to-gqa", source, out, "--groups", 2, *FIT, "--max-shard-size", "1GB").code == 0
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors = tiny.tensors(out)
    bits = tensors[name].view(torch.int16)
    bits[0, 0] += 1  # the next bfloat16
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    result = convert("verify", source, out)
    assert (result.code, f"{name} has SHA-256" in result.err, "differs" in result.err) == (3, True, False)
    as_if_written_so(out, name)
    report = json.loads(convert("verify", source, out, "--json").out)
    assert (report["ok"], list(report["rounded"])) == (True, [name])
    assert report["rounded"][name] < 1e-5
    tensors[name][2, 1] += change
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    as_if_written_so(out, name)
    result = convert("verify", source, out)
    assert (result.code, f"{name} differs" in result.err, "has SHA-256" in result.err) == (3, True, False)


@pytest.mark.parametrize("name", ["hub:evil/data", "text.txt", "../text.txt"])
def test_verify_opens_no_text_that_only_out_names(convert, source, tmp_path, text, name, monkeypatch):
    """It may come from anybody."""
    import convert.calibration.text as sample

    out, opened = tmp_path / "out", []
    assert convert("mha-to-gqa", source, out, "--groups", 2, *FIT, "--calibration", text).code == 0
    named = record(out)
    named["calibration"]["text"] = str(tmp_path / name) if name == "text.txt" else name
    (out / "groupwise.json").write_text(json.dumps(named))
    monkeypatch.setattr(sample, "find_files", lambda *given: opened.append(given))
    monkeypatch.setattr(sample, "find_reader", lambda *given: opened.append(given))
    result = convert("verify", source, out)
    assert (result.code, opened) == (3 if "hub" in name else 0, [])  # 3: the card names the text, too


def test_terminated_verify_leaves_no_scratch(convert, source, tmp_path):
    out, scratch = tmp_path / "out", tmp_path / "tmp"
    scratch.mkdir()
    assert convert("mha-to-gqa", source, out, "--groups", 2, *FIT).code == 0
    code = "import os, signal, convert.verify as v\n"
    code += "v.calibrate = lambda *a: os.kill(os.getpid(), signal.SIGTERM)\nfrom convert.cli import main\nmain()"
    command = [sys.executable, "-c", code, "verify", str(source), str(out)]
    result = subprocess.run(
        command, env=os.environ | {"TMPDIR": str(scratch)}, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr.strip().count("\n")) == (1, 0), result.stderr
    assert list(scratch.iterdir()) == []


def test_verify_on_another_kind_of_processor(convert, source, tmp_path):
    """There, some keys are drawn differently that calibrating looks at."""
    out = tmp_path / "out"
    assert convert("mha-to-gqa", source, out, "--groups", 2, *FIT, "--refit").code == 0
    command = [sys.executable, "-m", "convert", "verify", source, out, "--json"]
    other = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    report = json.loads(subprocess.run(command, env=other, check=True, capture_output=True).stdout)
    assert report["ok"]


def test_verify_without_torch_or_room(convert, source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert convert("mha-to-gqa", source, out, "--groups", 2, *FIT).code == 0
    with monkeypatch.context() as patch:
        patch.setattr("convert.verify.shutil.disk_usage", lambda path: SimpleNamespace(free=1))
        convert("verify", source, out).refused("0.00 GB free", "set TMPDIR")
    monkeypatch.setattr("convert.verify.find_spec", lambda name: None)
    result = convert("verify", source, out)
    assert (result.code, "needs torch" in result.err) == (4, True)


def test_verify_where_the_source_lies_elsewhere(convert, source, tmp_path):
    out = tmp_path / "out"
    (source / "README.md").unlink()
    assert convert("mha-to-gqa", source, out, "--groups", 2, "--method", "mean").code == 0
    result = convert("verify", source.rename(tmp_path / "moved"), out)
    assert result.code == 0, result.err


@pytest.mark.parametrize(
    "kind", ["txt.gz", "txt.xz", "jsonl", "jsonl.xz", "jsonl.zst", "parquet", "arrow", "ids", "folder", "hub"]
)
def test_every_kind_of_text_gives_the_same(convert, source, tmp_path, text, kind):
    """What `uptrain` trains on, conversions are calibrated on."""
    plain = TEXT.encode()
    lines = (json.dumps({"text": TEXT[:3000]}) + "\n" + json.dumps({"text": TEXT[3000:]}) + "\n").encode()
    path = tmp_path / f"other.{kind}"
    if kind == "folder":
        (path / "not a file.txt").mkdir(parents=True)
        (path / "1.txt").write_text(TEXT)
        (path / "notes.md").write_text("not a text")
    elif kind == "hub":
        path.mkdir()
        (path / "train.jsonl").write_bytes(lines)
    elif kind == "parquet":
        datasets.Dataset.from_list([json.loads(line) for line in lines.splitlines()]).to_parquet(path)
    elif kind == "arrow":
        datasets.Dataset.from_list([json.loads(line) for line in lines.splitlines()]).save_to_disk(path)
    elif kind == "ids":
        path = path.with_suffix(".jsonl")
        tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
        path.write_text(json.dumps({"input_ids": tokenizer.encode(TEXT, add_special_tokens=False).ids}))
    else:
        pack = {"gz": gzip.compress, "xz": lzma.compress, "zst": zstandard.compress}.get(kind.rpartition(".")[2], bytes)
        path.write_bytes(pack(lines if "jsonl" in kind else plain))
    for name, given in (("one", text), ("two", f"hub:{path}" if kind == "hub" else path)):
        options = ("--groups", 2, "--method", "pca", "--calibration-tokens", 512, "--calibration", given)
        assert convert("mha-to-gqa", source, tmp_path / name, *options).code == 0
    assert (
        record(tmp_path / "one")["calibration"]["sha256_of_ids"]
        == record(tmp_path / "two")["calibration"]["sha256_of_ids"]
    )


def test_verify_needs_no_dataset(convert, source, tmp_path):
    out, dataset = tmp_path / "out", tmp_path / "texts"
    dataset.mkdir()
    (dataset / "train.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    assert convert("mha-to-gqa", source, out, "--groups", 2, *FIT, "--calibration", f"hub:{dataset}").code == 0
    dataset.rename(tmp_path / "elsewhere")
    assert convert("verify", source, out).code == 0


def test_dataset_without_texts(convert, source, tmp_path):
    (tmp_path / "numbers").mkdir()
    (tmp_path / "numbers/train.jsonl").write_text('{"text": 1, "title": "a"}\n')
    options = ("--method", "pca", "--calibration", f"hub:{tmp_path / 'numbers'}")
    result = convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, *options)
    assert (result.code, "column 'text' is int64, not text" in result.err) == (2, True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--method", "fit", "--calibration", "none"), "--method fit needs a calibration text"),
        (("--method", "pca", "--calibration", "none", "--refit"), "--refit needs a calibration text"),
        (
            ("--method", "pca", "--calibration", "none", "--calibration-tokens", "999"),
            "but --calibration none was given",
        ),
        (
            ("--method", "mean", "--calibration-tokens", "999"),
            "--calibration-tokens cannot be combined with --method mean",
        ),
        (("--method", "mean", "--refit"), "--refit needs a calibration text"),
        (
            ("--method", "mean", "--renorm", "spread"),
            "--renorm spread scales queries, which --method mean leaves as they are",
        ),
        (
            ("--method", "mean", "--group-heads", "similar"),
            "--group-heads similar moves queries, which --method mean leaves",
        ),
        (("--method", "pca", "--calibration", "/nowhere/text.txt"), "/nowhere/text.txt: no such file or folder. ("),
        (("--method", "pca", "--calibration", "SOURCE"), "no file of a known format; known are .jsonl, "),
        (("--method", "pca", "--calibration", "hub:nobody/nothing"), "hub:nobody/nothing cannot be loaded ("),
        (("--method", "pca", "--calibration-tokens", "100"), "is too few; give at least 256"),
        (("--method", "pca", "--calibration-tokens", "16777217"), "is too many; give at most 16777216"),
        (("--method", "pca", "--calibration", "TEXT", "--calibration-tokens", "999999"), "give a longer one"),
    ],
)
def test_refused(convert, source, tmp_path, text, options, words):
    named = {"TEXT": str(text), "SOURCE": str(source)}
    given = [named.get(option, option) for option in options]
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, *given).refused(words)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "text.txt"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("bad.txt.xz", b"no xz", "bad.txt.xz: the compressed data is damaged"),
        ("bad.txt", b"\xff\xfe\x00", "bad.txt: not valid UTF-8 at byte 1."),
        ("bad.jsonl", b'{"text": "a"}\n{"texts": 1}\n', "bad.jsonl:2: no field 'text' among 'texts'"),
        ("bad.jsonl", b"[1", "bad.jsonl:1: not valid JSON"),
        ("bad.jsonl", b'{"text": null}\n', "has only 0 tokens"),
        ("bad.jsonl", b'{"text": "\\ud800"}\n', "bad.jsonl:1: half of a surrogate pair"),
        ("bad.txt.gz", gzip.compress(b"words" * 99, mtime=0)[:-9], "bad.txt.gz: the compressed data is cut off"),
        (
            "bad.jsonl",
            b'{"input_ids": [300' + b", 1" * 99999 + b"]}",
            "has the token id 300, but the model has 300 tokens",
        ),
        (
            "bad.jsonl",
            b'{"input_ids": [-1' + b", 1" * 99999 + b"]}",
            "has the token id -1, but the model has 300 tokens",
        ),
        ("bad.md", b"words", "bad.md: not a known format; known are .jsonl, "),
        ("bad.md", b"words", "--calibration also takes self, shipped and none."),
    ],
)
def test_calibration_texts_that_cannot_be_read(convert, source, tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    options = ("--method", "pca", "--calibration", tmp_path / name)
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, *options).refused(words)


@pytest.mark.parametrize("wrong", [300, -1])
def test_token_ids_of_another_model(convert, source, tmp_path, wrong):
    (tmp_path / "ids.jsonl").write_text(json.dumps({"input_ids": [wrong, *([1] * 1023)]}))
    options = ("--method", "pca", "--calibration-tokens", 1024, "--calibration", tmp_path / "ids.jsonl")
    words = f"has the token id {wrong}, but the model has 300 tokens"
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, *options).refused(words)


def test_no_tokenizer_or_a_damaged_one(convert, source, tmp_path):
    (source / "tokenizer.json").write_text("{}")
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, *FIT).refused("tokenizer.json is damaged")
    (source / "tokenizer.json").unlink()
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, *FIT).refused("has no tokenizer.json")


def test_a_tokenizer_that_cannot_read_the_text(convert, source, tmp_path):
    model = {"type": "WordLevel", "vocab": {"nothing": 0}, "unk_token": "[UNK]"}
    (source / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, *FIT).refused("cannot read the calibration text")
    result = convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--json")
    assert (result.code, record(tmp_path / "out")["method"]) == (0, "mean")
    assert "cannot read the calibration text" in json.loads(result.out)["notes"][0]


def test_sizes_that_the_config_leaves_to_the_class(convert, tmp_path):
    model = tiny.build(vocab_size=300, hidden_size=64, num_attention_heads=32, num_key_value_heads=32)
    folder = make_tokenizer(tiny.save(model, tmp_path / "source"), 300)
    config = json.loads((folder / "config.json").read_text())
    del config["num_attention_heads"]
    (folder / "config.json").write_text(json.dumps(config))
    result = convert("mha-to-gqa", folder, tmp_path / "out", "--groups", 2, *FIT)
    assert result.code == 0, result.err


def test_mean_rescaled_to_the_norm(convert, source, tmp_path):
    """For every method and family: no text is needed."""
    out = tmp_path / "out"
    assert convert("mha-to-gqa", source, out, "--groups", 2, "--method", "mean", "--renorm", "norm").code == 0
    assert all(entry["norm_ratio"] == pytest.approx(1, abs=2e-3) for entry in record(out)["merge_report"])
    heads = tiny.tensors(source)["model.layers.0.self_attn.k_proj.weight"].double().view(2, 4, -1)
    mean = heads.mean(1)
    wanted = mean * (heads.norm(dim=2).mean(1) / mean.norm(dim=1))[:, None]
    merged = tiny.tensors(out)["model.layers.0.self_attn.k_proj.weight"]
    assert torch.equal(merged.view(2, -1), wanted.to(torch.bfloat16))
    assert json.loads(convert("verify", source, out, "--json").out)["ok"]


def test_auto_chooses_the_lowest_loss(convert, source, tmp_path):
    out = tmp_path / "out"
    options = ("--groups", 2, "--method", "auto", "--calibration-tokens", 2048)
    result = convert("mha-to-gqa", source, out, *options, "--json")
    assert result.code == 0, result.err
    plan = json.loads(result.out)
    assert set(plan["auto"]) == {"aligned", "pca", "fit", "fit, similar heads grouped"}
    best, _, grouped = min(plan["auto"], key=plan["auto"].__getitem__).partition(", ")
    for made in (plan, record(out)):
        assert (made["method"], made["grouping"]) == (best, "similar" if grouped else "contiguous")
        assert made["refit"] == (best == "fit")
        assert made["calibration"]["windows"] == 32
    assert json.loads(convert("verify", source, out, "--json").out)["ok"]
    plain = ["--groups", 2, "--method", best, "--group-heads", record(out)["grouping"], "--calibration-tokens", 2048]
    plain += ["--refit"] * (best == "fit")
    assert convert("mha-to-gqa", source, tmp_path / "plain", *plain).code == 0
    assert tiny.snapshot(tmp_path / "plain") == tiny.snapshot(out)


def test_the_score_is_the_models_loss(convert, source, tmp_path, text, monkeypatch):
    """What `auto` says of a merge is what transformers measures on the windows held out."""
    from transformers import AutoModelForCausalLM

    from convert.calibration import auto
    from convert.calibration.text import read_calibration_text
    from model.checkpoint import open_checkpoint

    given = ("--groups", 1, "--calibration-tokens", 1024, "--calibration", text)
    result = convert("mha-to-gqa", source, tmp_path / "auto", "--method", "auto", *given, "--json")
    with open_checkpoint(source) as checkpoint:
        fitting, scoring = auto.divided(read_calibration_text(checkpoint, str(text), 1024))
    monkeypatch.setattr("convert.planning.resolve.read_calibration_text", lambda *rest: fitting)
    assert convert("mha-to-gqa", source, tmp_path / "pca", "--method", "pca", *given).code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "pca", dtype=torch.float32).eval()
    ids = torch.from_numpy(scoring.ids_NT)
    with torch.inference_mode():
        loss = float(model(ids, labels=ids).loss)
    assert json.loads(result.out)["auto"]["pca"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("method", ["auto", "fit", "pca"])
def test_text_is_ignored_if_nothing_is_merged(convert, source, tmp_path, text, method):
    options = ("--groups", 8, "--method", method, "--calibration", text, "--calibration-tokens", 1024)
    result = convert("mha-to-gqa", source, tmp_path / "out", *options, "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["n_regrouped"] == 0
    assert record(tmp_path / "out")["calibration"] is None
    text.unlink()
    assert convert("verify", source, tmp_path / "out").code == 0


def test_auto_resumes(convert, source, tmp_path, monkeypatch):
    """Interrupted while it chooses, and again while it converts."""
    from convert import conversion
    from convert.calibration import auto

    scored, score, execute = [], auto.score, conversion.execute

    def until_interrupted(checkpoint, merges, merged, *rest):
        scored.append(merged.parent.name)
        if len(scored) == 2:
            raise KeyboardInterrupt
        return score(checkpoint, merges, merged, *rest)

    def interrupted(*rest):
        raise KeyboardInterrupt

    monkeypatch.setattr(auto, "score", until_interrupted)
    options = ("--groups", 2, "--method", "auto", "--calibration-tokens", 1024)
    before = {path.name for path in tmp_path.iterdir()}
    result = convert("mha-to-gqa", source, tmp_path / "out", *options)
    assert (result.code, "the same command continues" in result.err) == (1, True)
    assert {path.name for path in tmp_path.iterdir()} - before == {".out.groupwise"}
    monkeypatch.setattr(conversion, "execute", interrupted)
    assert convert("mha-to-gqa", source, tmp_path / "out", *options).code == 1
    monkeypatch.setattr(conversion, "execute", execute)
    monkeypatch.setattr("convert.calibration.solve._merge", lambda *rest: pytest.fail("merged again"))
    result = convert("mha-to-gqa", source, tmp_path / "out", *options)
    assert result.code == 0, result.err
    assert scored == ["aligned", "pca", "pca", "fit", "fit, similar heads grouped"]
    assert {path.name for path in tmp_path.iterdir()} - before == {"out"}


def test_a_dry_run_does_not_choose(convert, source, tmp_path, monkeypatch):
    monkeypatch.setattr("convert.conversion.choose_recipe", lambda *rest, **more: pytest.fail("chose"))
    before = tiny.snapshot(tmp_path)
    options = ("--groups", 2, "--method", "auto", "--calibration-tokens", 1024, "--dry-run", "--json")
    plan = json.loads(convert("mha-to-gqa", source, tmp_path / "out", *options).out)
    assert (plan["method"], plan["calibration_seconds"] >= 0, "auto" in plan) == ("auto", True, False)
    assert tiny.snapshot(tmp_path) == before


def test_auto_needs_windows_to_compare_by(convert, source, tmp_path):
    options = ("--groups", 2, "--method", "auto", "--calibration-tokens", 256)
    convert("mha-to-gqa", source, tmp_path / "out", *options).refused("needs 5 windows of 64", "tokens 320 or more")


def test_auto_needs_a_head(convert, tmp_path):
    bare = tiny.build(vocab_size=300).model
    folder = make_tokenizer(tiny.save(bare, tmp_path / "bare"), 300)
    options = ("--groups", 2, "--calibration-tokens", 1024)
    convert("mha-to-gqa", folder, tmp_path / "out", "--method", "auto", *options).refused(
        "lacks the tensor lm_head.weight"
    )
    assert convert("mha-to-gqa", folder, tmp_path / "out", "--method", "fit", *options).code == 0


def test_out_is_checked_before_the_work(convert, source, tmp_path, monkeypatch):
    monkeypatch.setattr("convert.conversion.choose_recipe", lambda *rest, **more: pytest.fail("chose"))
    (tmp_path / "out").mkdir()
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", "auto").refused("exists")


@pytest.mark.parametrize("stated", [100, 300])
@pytest.mark.parametrize("option", ["--overwrite", "--dry-run"])
def test_a_tokenizer_of_another_model(convert, tmp_path, stated, option):
    """Whatever the config says: the embedding's rows count."""
    folder = make_tokenizer(tiny.save(tiny.build(vocab_size=100), tmp_path / "source"), 300)
    tiny.edit_config(folder, vocab_size=stated)
    words = "the model has 100 tokens; tokenizer.json, or a text of token ids, belongs to another model"
    convert("mha-to-gqa", folder, tmp_path / "out", "--groups", 2, *FIT, option).refused(words)


def test_the_memory_estimate_counts_the_embedding(convert, tmp_path):
    """It is read before the layers; and `auto` holds the head in float32 too."""
    folder = make_tokenizer(tiny.save(tiny.build(vocab_size=1_000_000), tmp_path / "source"), 300)
    embedding = 4 * 1_000_000 * tiny.HIDDEN
    estimates = []
    for method in ("mean", "fit", "auto"):
        options = () if method == "mean" else ("--calibration-tokens", 1024)
        result = convert(
            "mha-to-gqa", folder, tmp_path / "out", "--groups", 2, "--method", method, *options, "--dry-run", "--json"
        )
        estimates.append(json.loads(result.out)["peak_memory_bytes"])
    assert embedding < estimates[1] < estimates[2] - embedding // 2


def test_short_records_without_a_beginning_token(convert, tmp_path):
    folder = tiny.save(tiny.build(vocab_size=300), tmp_path / "source")
    make_tokenizer(folder, 300, bos=False)
    text = tmp_path / "short.jsonl"
    text.write_text("".join(json.dumps({"text": "A folder."}) + "\n" for _ in range(3000)))
    options = ("--groups", 2, "--method", "pca", "--calibration", text, "--calibration-tokens", 8192)
    assert convert("mha-to-gqa", folder, tmp_path / "out", *options).code == 0


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model.layers.1.mlp.up_proj.weight", float("nan"), "layer 1 makes NaN or infinite values"),
        ("model.layers.1.input_layernorm.weight", float("nan"), "layer 1 makes NaN or infinite values"),
        ("model.layers.0.mlp.down_proj.weight", None, "lacks the tensor model.layers.0.mlp.down_proj.weight"),
    ],
)
def test_damage_outside_of_attention(convert, tmp_path, name, value, words):
    folder = make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "source"), 300)
    tensors = tiny.tensors(folder)
    if value is None:
        del tensors[name]
    else:
        tensors[name].view(-1)[0] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    convert("mha-to-gqa", folder, tmp_path / "out", "--groups", 2, *FIT, "--refit").refused(words)


@pytest.mark.parametrize("part", ["v_proj", "k_proj", "q_proj", "o_proj"])
def test_heads_of_zeros(convert, tmp_path, part):
    folder = make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "source"), 300)
    tensors = tiny.tensors(folder)
    tensors[f"model.layers.0.self_attn.{part}.weight"].zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    options = ("--refit", "--group-heads", "similar")
    result = convert("mha-to-gqa", folder, tmp_path / "out", "--groups", 2, *FIT, *options)
    assert result.code == 0, result.err
    assert all(tensor.isfinite().all() for tensor in tiny.tensors(tmp_path / "out").values())


def test_a_text_for_a_method_that_needs_none(convert, source, tmp_path, text):
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", "mean", "--calibration", text).refused(
        "--calibration cannot be combined with --method mean"
    )
