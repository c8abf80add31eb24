"""`uptrain prepare`: every format gives the same cache, whatever the workers, machines and interruptions."""

import gzip
import json
import lzma
import os
import random
import re
import shutil
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
from tiny_tokenizers import SENTENCES, make_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from convert.calibration_text.tokenizer import open_fast_tokenizer
from model.checkpoint import open_checkpoint
from model.common.errors import InputError
from model.tokenizer import open_tokenizer
from uptrain.data.prepare import work_units
from uptrain.data.prepare.prepare import PrepareOptions, prepare
from uptrain.data.prepare.tokenizer import Encoder, load_tokenizer
from uptrain.data.token_cache import CacheManifest, TokenCache


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """Several units from a few kilobytes."""
    monkeypatch.setattr(work_units, "UNIT_BYTES", 4000)


def make_texts(n=60, seed=0):
    rng = random.Random(seed)
    return [" ".join(rng.choices(SENTENCES, k=rng.randint(1, 6))) for _ in range(n)]


TEXTS = make_texts()


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")
    return path


@pytest.fixture
def source(tmp_path):
    return write_jsonl(tmp_path / "source.jsonl", [{"text": text} for text in TEXTS])


@pytest.fixture
def make(uptrain, tmp_path, tokenizer):
    """Prepare a cache from sources and options; return it open."""

    def run(*data, out="out", options=(), seq_len=32, tokenizer=tokenizer, tokens="all"):
        arguments = [word for path in data for word in ("--data", path)]
        arguments += ["--tokenizer", tokenizer] if tokenizer else []
        arguments += ["--seq-len", seq_len, "--tokens", tokens, "--out", tmp_path / out, *options]
        uptrain("prepare", *arguments, "--json").succeeded()
        return TokenCache.open(tmp_path / out)

    return run


def documents_of(cache):
    """Return the ids of all documents, from the files themselves."""
    documents = []
    for shard in cache.manifest.shards:
        tokens = np.fromfile(cache.folder / shard.tokens, cache.manifest.dtype)
        starts = np.fromfile(cache.folder / shard.documents, "int64")
        assert starts[0] == 0
        documents += [ids.tolist() for ids in np.split(tokens, starts[1:])]
    return documents


def expected_documents(folder, texts=TEXTS):
    """Return the ids that transformers gives, and the end of each document."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    documents = []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        eos = tokenizer.eos_token_id
        documents.append(ids if eos is None or ids[-1] == eos else [*ids, eos])
    return documents


# The ids


@pytest.mark.parametrize(("bos", "eos"), [(True, True), (False, True), (True, False), (False, False)])
def test_ids_are_those_of_transformers(make, source, tmp_path, bos, eos):
    folder = make_tokenizer(tmp_path / "tokenizer", 290, bos=bos, eos=eos)
    cache = make(source, tokenizer=folder)
    assert documents_of(cache) == expected_documents(folder)
    assert cache.manifest.vocab_size == len(AutoTokenizer.from_pretrained(folder))
    assert cache.manifest.tokenizer_sha256 == load_tokenizer(folder).sha256
    assert len(cache.manifest.shards) > 3


def test_special_tokens_written_out_in_a_text(tokenizer):
    texts = ["a </s>", "</s>", "<s> b", " "]
    expected = expected_documents(tokenizer, texts)
    assert expected[2][0] == expected[2][1]
    del expected[2][0]  # a beginning of text that the text already has
    assert Encoder(load_tokenizer(tokenizer)).ids(texts) == expected


@pytest.mark.parametrize("bos", [True, False])
def test_what_a_chat_template_has_written_is_not_added_again(tmp_path, bos):
    """By `apply_chat_template(tokenize=False)`: a beginning of text, and the line break after the end of a turn."""
    tokenizer = AutoTokenizer.from_pretrained(make_tokenizer(tmp_path, bos=bos))
    texts = [("<s>" * bos + text) for text in ("one</s>\n", "one</s> \n", "one</s>\ntwo", "</s>\n\n\n\n", "one")]
    end = tokenizer.eos_token_id
    alone = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert all(ids[0] == tokenizer.bos_token_id for ids in alone if bos)
    more = [ids if i < 2 else [*ids, end] for i, ids in enumerate(alone)]
    assert Encoder(load_tokenizer(tmp_path)).ids(texts) == more


def test_a_tokenizer_that_ends_texts_itself(tmp_path):
    """It does so once, also for a text whose end a chat template has written."""
    plain = make_tokenizer(tmp_path / "plain", bos=False)
    backend = Backend.from_file(str(plain / "tokenizer.json"))
    end = backend.token_to_id("</s>")
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", end)])
    shutil.copytree(plain, tmp_path / "ends")
    backend.save(str(tmp_path / "ends/tokenizer.json"))
    texts = ["one</s>", "one</s>\n", "one", "</s>", "one</s> two"]
    ours, theirs = (Encoder(load_tokenizer(tmp_path / name)).ids(texts) for name in ("ends", "plain"))
    assert ours == theirs
    assert [ids.count(end) for ids in ours] == [1, 1, 1, 1, 2]


def test_large_vocabulary_is_32_bit(make, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [0, 65_536]}])
    cache = make(tmp_path / "a.jsonl", tokenizer=None, options=("--vocab-size", 65_537))
    assert cache.manifest.dtype == "uint32"
    assert documents_of(cache) == [[0, 65_536]]


def test_fingerprint_of_a_tokenizer(tokenizer, tmp_path):
    """It follows from what determines ids, not from how the files are written."""
    fingerprint = load_tokenizer(tokenizer).sha256
    copy = tmp_path / "copy"
    shutil.copytree(tokenizer, copy)
    (copy / "model.safetensors").write_text("another model")
    assert load_tokenizer(copy).sha256 == fingerprint
    config = json.loads((copy / "tokenizer_config.json").read_text())
    for changes, same in (
        ({"chat_template": "x", "model_max_length": 7}, True),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, True),
        ({"split_special_tokens": True}, False),
        ({"eos_token": "<s>"}, False),
    ):
        (copy / "tokenizer_config.json").write_text(json.dumps(config | changes))
        assert (load_tokenizer(copy).sha256 == fingerprint) == same, changes
    shutil.copy(tokenizer / "tokenizer_config.json", copy)
    content = json.loads((copy / "tokenizer.json").read_text())
    for changes, same in (
        ({}, True),
        ({"truncation": {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}}, True),
        ({"post_processor": None}, False),
        ({"model": content["model"] | {"merges": content["model"]["merges"][:-1]}}, False),
    ):
        (copy / "tokenizer.json").write_text(json.dumps(content | changes, indent=1))
        assert (load_tokenizer(copy).sha256 == fingerprint) == same, changes


SPLITS = {
    "digits": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "words": [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=False)],
}


def test_a_beginning_of_text_that_only_the_settings_name(tokenizer, tmp_path):
    """As in DeepSeek-LLM, where transformers 5 adds none."""
    folder = Path(shutil.copytree(tokenizer, tmp_path / "model"))
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    texts, begun = ["One.", "", "\n"], []
    for adds in (True, False):
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": adds, "bos_token": "</s>"}))
        begun.append(Encoder(load_tokenizer(folder)).ids(texts))
    end = backend.token_to_id("</s>")
    plain = [encoding.ids for encoding in backend.encode_batch(texts)]
    assert begun[0] == [[end, *plain[0], end], [end], [end, *plain[2], end]]
    assert begun[1] == [[*plain[0], end], [end], [*plain[2], end]]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    ("model_type", "tokenizer_class"),
    [
        ("llama", "GPT2Tokenizer"), ("phi", "CodeGenTokenizer"), ("olmo", "GPTNeoXTokenizer"),
        ("llama", "LlamaTokenizer"), ("qwen2", "Qwen2Tokenizer"), ("qwen2", None),
        ("mistral", "PreTrainedTokenizerFast"),
    ],
)  # fmt: skip
def test_tokenizer_json_decides_on_ids(tokenizer, tmp_path, split, model_type, tokenizer_class):
    """Some classes of transformers 5 bring a normaliser and a pre-tokenizer of their own."""
    folder = tmp_path / "model"
    shutil.copytree(tokenizer, folder)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.normalizer = normalizers.NFD()
    backend.pre_tokenizer = pre_tokenizers.Sequence(SPLITS[split])
    backend.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("tokenizer_class", None)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | ({"tokenizer_class": tokenizer_class} if tokenizer_class else {}))
    )
    texts = ["\u00fcber  123\n    x = 1.\n\n", "it's  l'eau"]
    expected = [encoding.ids for encoding in backend.encode_batch(texts, add_special_tokens=False)]
    opened = open_tokenizer(folder)
    assert [opened(text, add_special_tokens=False).input_ids for text in texts] == expected
    loaded = load_tokenizer(folder)
    added = [opened(text).input_ids for text in texts]
    assert [ids[: len(more)] for ids, more in zip(Encoder(loaded).ids(texts), added, strict=True)] == added


# Formats


def as_dataset(records):
    return datasets.Dataset.from_list(records)


def write_txt_folder(path, records):
    path.mkdir()
    for i, record in enumerate(records):
        (path / f"{i:03}.txt").write_text(record["text"], "utf-8", newline="")
    return path


def write_opened(opener):
    def write(path, records):
        with opener(path, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        return path

    return write


def write_folder(path, records):
    path.mkdir()
    write_jsonl(path / "a.jsonl", records[:20])
    (path / "b").mkdir()
    write_opened(gzip.open)(path / "b/a.jsonl.gz", records[20:])
    (path / ".hidden.txt").write_text("")
    return path


def write_parquet(path, records):
    as_dataset(records).to_parquet(path, batch_size=7)
    return path


def write_arrow(path, records):
    as_dataset(records).save_to_disk(path, num_shards=3)
    return path


def write_split(path, records):
    datasets.DatasetDict({"train": as_dataset(records), "test": as_dataset(records[:1])}).save_to_disk(path)
    return path / "train"


def write_hub(path, records):
    path.mkdir()
    write_jsonl(path / "train.jsonl", records)
    return f"hub:{path}"


WRITERS = {
    "a.jsonl.gz": write_opened(gzip.open),
    "a.jsonl.xz": write_opened(lzma.open),
    "folder of jsonl": write_folder,
    "a.parquet": write_parquet,
    "arrow": write_arrow,
    "split": write_split,
    "hub": write_hub,
    "folder of txt": write_txt_folder,
}


@pytest.fixture(scope="module")
def expected(tokenizer):
    return expected_documents(tokenizer)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub cache")
    datasets.disable_progress_bars()


@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_gives_the_same_documents(make, tmp_path, expected, hub_cache, kind):
    path = WRITERS[kind](tmp_path / kind, [{"id": i, "text": text} for i, text in enumerate(TEXTS)])
    assert documents_of(make(path)) == expected


@pytest.mark.parametrize("kind", [kind for kind in WRITERS if "txt" not in kind])
def test_every_format_with_token_ids(make, tmp_path, expected, tokenizer, hub_cache, kind):
    path = WRITERS[kind](tmp_path / kind, [{"input_ids": ids} for ids in expected])
    cache = make(path, tokenizer=None, options=("--vocab-size", 300))
    assert documents_of(cache) == expected
    assert cache.manifest.tokenizer_sha256 == ""
    assert make(path, out="named").manifest.tokenizer_sha256 == load_tokenizer(tokenizer).sha256


def test_text_column(make, tmp_path, expected):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": 1, "body": text} for text in TEXTS])
    assert documents_of(make(path, options=("--text-column", "body"))) == expected


# The same bytes


def snapshot(cache):
    return tiny.snapshot(cache.folder)


def test_any_number_of_workers_gives_the_same_bytes(make, source):
    first = snapshot(make(source, out="one", options=("--workers", 1)))
    assert snapshot(make(source, out="three", options=("--workers", 3))) == first
    assert snapshot(make(source, out="default")) == first


@pytest.mark.parametrize("tokens", ["all", 5000])
def test_shards_of_several_machines_join(make, source, tmp_path, tokens):
    alone = snapshot(make(source, out="alone", tokens=tokens))
    done = [run_shard(make, source, tmp_path, tokens, shard) for shard in ("2/3", "3/3")]
    assert not (tmp_path / "out").exists()
    inodes = {path.stat().st_ino for path in tmp_path.glob(".out.shard-*/folder/tokens*")}
    assert len(inodes) == sum(shard["units"] for shard in done) > 0
    joined = make(source, tokens=tokens)
    assert snapshot(joined) == alone
    made_here = {path.stat().st_ino for path in joined.folder.glob("tokens*")}
    assert made_here & inodes
    assert not list(tmp_path.glob(".out*"))


def test_shards_join_through_a_link(make, source, tmp_path):
    """OUT is a link to a folder that does not exist yet, as on another disk."""
    alone = snapshot(make(source, out="alone"))
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk/cache")
    with pytest.raises(InputError, match="not a token cache"):
        make(source, options=("--shard", "1/1"))
    (inode,) = {path.stat().st_ino for path in (tmp_path / "disk").glob(".cache.shard-*/folder/tokens-00000.bin")}
    joined = make(source)
    assert snapshot(joined) == alone
    assert (joined.folder / "tokens-00000.bin").stat().st_ino == inode
    assert not list((tmp_path / "disk").glob(".*")) and not list(tmp_path.glob(".*"))


def test_shards_of_other_files_do_not_join(make, source, tmp_path):
    """They would be tokenised again here, and the work of the other machine removed."""
    run_shard(make, source, tmp_path, "all", "2/3")
    file = next(source.glob("*.jsonl")) if source.is_dir() else source
    os.utime(file, ns=(0, 0))
    with pytest.raises(
        AssertionError, match=r"\.out\.shard-2-of-3\.groupwise are of other files than now: path, size or"
    ):
        make(source)
    assert list(tmp_path.glob(".out.shard-2-of-3.groupwise/folder/tokens*"))


def run_shard(make, source, tmp_path, tokens, shard):
    with pytest.raises(InputError, match="not a token cache"):
        make(source, tokens=tokens, options=("--shard", shard))
    (root,) = tmp_path.glob(f".out.shard-{shard.replace('/', '-of-')}.groupwise")
    return {"units": len(list((root / "folder").glob("tokens*")))}


# How much


@pytest.mark.parametrize("tokens", [1, 33, 1000, "2.5K", 4321])
def test_first_tokens(make, source, tokens):
    every = [token for ids in documents_of(make(source, out="every")) for token in ids]
    n = 2500 if tokens == "2.5K" else tokens
    cache = make(source, tokens=tokens)
    assert cache.manifest.n_tokens == n
    assert [token for ids in documents_of(cache) for token in ids] == every[:n]
    assert cache.n_windows == -(-n // 32)


def test_all_tokens_by_number(make, source):
    n = make(source, out="every").manifest.n_tokens
    assert make(source, tokens=n).manifest.n_tokens == n


def test_sources_follow_each_other(make, tmp_path):
    paths = [write_jsonl(tmp_path / f"{i}.jsonl", [{"text": t} for t in make_texts(9, i)]) for i in range(3)]
    apart = [documents_of(make(path, out=path.stem)) for path in paths]
    together = make(paths[2], paths[0], paths[1])
    assert documents_of(together) == [*apart[2], *apart[0], *apart[1]]
    assert [source["documents"] for source in together.manifest.sources] == [9, 9, 9]


def test_files_that_are_not_read_are_told_of(uptrain, tmp_path, tokenizer):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for seed, name in enumerate("abc"):
        write_jsonl(folder / f"{name}.jsonl", [{"text": text} for text in make_texts(seed=seed)])
    fixed = ("prepare", "--data", folder, "--tokenizer", tokenizer, "--seq-len", 32)
    some = uptrain(*fixed, "--tokens", 500, "--out", tmp_path / "some", "--json").succeeded()
    assert some.err.startswith(f"Warning: {folder}: the first 1 of 3 files hold the tokens asked for, and the others")
    assert some.err.count("\n") == 1
    assert json.loads(some.out)["sources"][0]["files"] == 1
    assert not uptrain(*fixed, "--out", tmp_path / "all", "--json").succeeded().err


def test_files_of_one_unit_that_are_not_read_are_told_of(uptrain, tmp_path, tokenizer, monkeypatch):
    """A folder of small files, of which only the first have given tokens."""
    monkeypatch.setattr(work_units, "UNIT_BYTES", 1 << 20)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for seed, name in enumerate("abc"):
        write_jsonl(folder / f"{name}.jsonl", [{"text": text} for text in make_texts(9, seed)])
    fixed = ("prepare", "--data", folder, "--tokenizer", tokenizer, "--seq-len", 16, "--json")
    whole = json.loads(uptrain(*fixed, "--out", tmp_path / "whole").succeeded().out)["sources"][0]
    assert whole["files"] == 3
    for tokens, n_files in ((20, 1), (whole["tokens"] - 1, 3)):
        result = uptrain(*fixed, "--tokens", tokens, "--out", tmp_path / f"{tokens}").succeeded()
        (source,) = json.loads(result.out)["sources"]
        paths = [folder / f"{name}.jsonl" for name in "abc"[:n_files]]
        assert (source["files"], source["bytes"]) == (n_files, sum(path.stat().st_size for path in paths))
        assert ("the first 1 of 3 files" in result.err) == (n_files == 1)


def test_empty_files_are_not_told_of(uptrain, tmp_path, tokenizer):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, texts in (("a", TEXTS[:5]), ("b", []), ("c", TEXTS[5:])):
        as_dataset([{"text": text} for text in texts]).to_parquet(folder / f"{name}.parquet")
    pq.ParquetWriter(folder / "d.parquet", pa.schema([("text", pa.string())])).close()
    fixed = ("prepare", "--data", folder, "--tokenizer", tokenizer, "--seq-len", 16, "--json")
    assert not uptrain(*fixed, "--out", tmp_path / "out").succeeded().err


def test_the_same_text_twice(uptrain, tmp_path, tokenizer):
    """Under two names, hard links too, and compressed, it is refused; copies are only warned of."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    file = write_jsonl(folder / "a.jsonl", [{"text": text} for text in TEXTS])
    fixed = (
        "prepare",
        "--data",
        folder,
        "--tokenizer",
        tokenizer,
        "--seq-len",
        16,
        "--out",
        tmp_path / "out",
        "--json",
    )
    (folder / "b.jsonl").hardlink_to(file)
    uptrain(*fixed).refused(f"{folder}/b.jsonl and {file} are one file")
    (folder / "b.jsonl").unlink()
    (tmp_path / "b.jsonl").hardlink_to(file)
    uptrain(*fixed, "--data", tmp_path / "b.jsonl").refused("both hold")
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(file.read_bytes()))
    uptrain(*fixed).refused(f"{folder}/a.jsonl.gz and {file} seem to be one text, of which one is compressed")
    (folder / "a.jsonl.gz").unlink()
    shutil.copyfile(file, folder / "copy.jsonl")
    for name in ("empty", "empty too"):
        (folder / f"{name}.jsonl").write_text("")
    warned = uptrain(*fixed).succeeded().err
    assert warned == f"Warning: {folder}/copy.jsonl has the same content as {file}, so it is trained on twice.\n"


def test_datasets_below_the_folder(uptrain, tmp_path, tokenizer):
    """As in the folder itself: only their own files, and no splits together."""
    folder = tmp_path / "corpora"
    write_arrow(folder / "one", [{"text": text} for text in TEXTS])
    stale = next((folder / "one").glob("*.arrow"))
    shutil.copyfile(stale, stale.with_name("cache-0123456789abcdef.arrow"))  # as `map` leaves it
    fixed = ("prepare", "--data", folder, "--tokenizer", tokenizer, "--seq-len", 16, "--json")
    as_dataset([]).save_to_disk(folder / "empty")
    result = json.loads(uptrain(*fixed, "--out", tmp_path / "out").succeeded().out)
    assert (result["documents"], result["ignored"]) == (len(TEXTS), [])
    alone = ("prepare", "--data", folder / "empty", "--tokenizer", tokenizer, "--seq-len", 16, "--out", tmp_path / "no")
    uptrain(*alone).refused("a dataset of no records")
    write_split(folder / "two", [{"text": text} for text in TEXTS])
    uptrain(*fixed, "--out", tmp_path / "both").refused(f"--data {folder}/two: a DatasetDict of 2 splits; name one")


@pytest.mark.parametrize(("tokens", "n"), [(1000, 1000), (1001, 1001), ("all", None)])
def test_mixture(make, tmp_path, tokens, n):
    paths = [write_jsonl(tmp_path / f"{i}.jsonl", [{"text": t} for t in make_texts(20 + 20 * i, i)]) for i in range(3)]
    weights = (0.5, 0.3, 0.2)
    totals = [make(path, out=path.stem).manifest.n_tokens for path in paths]
    cache = make(*(f"{path}={weight}" for path, weight in zip(paths, weights, strict=True)), tokens=tokens)
    n = n or min(int(count / weight) for count, weight in zip(totals, weights, strict=True))
    assert cache.manifest.n_tokens == n
    got = [source["tokens"] for source in cache.manifest.sources]
    assert all(abs(count - n * weight) < 1 for count, weight in zip(got, weights, strict=True))
    assert [source["weight"] for source in cache.manifest.sources] == list(weights)


def test_tokens_that_weights_leave_out(uptrain, tokenizer, tmp_path):
    few, many = (write_jsonl(tmp_path / f"{i}.jsonl", [{"text": t} for t in make_texts(20 * i, i)]) for i in (1, 9))
    fixed = ("prepare", "--tokenizer", tokenizer, "--seq-len", 16, "--out")
    result = uptrain(*fixed, tmp_path / "mixed", "--data", f"{few}=1", "--data", f"{many}=1", "--json").succeeded()
    left, available = (
        int(number.replace(",", "")) for number in re.findall(r"([\d,]+) (?:of all|are left)", result.err)
    )
    both = json.loads(uptrain(*fixed, tmp_path / "both", "--data", few, "--data", many, "--json").succeeded().out)
    assert available == both["tokens"] and left == available - json.loads(result.out)["tokens"] > 0
    assert result.err.startswith(f"Warning: all tokens of --data {few} are taken, and ")
    some = uptrain(*fixed, tmp_path / "some", "--data", f"{few}=1", "--data", f"{many}=1", "--tokens", 99, "--json")
    assert not some.succeeded().err


def test_a_file_that_is_named_twice(uptrain, tokenizer, tmp_path):
    (tmp_path / "texts").mkdir()
    file = write_jsonl(tmp_path / "texts/a.jsonl", [{"text": "one"}])
    (tmp_path / "link.jsonl").symlink_to(file)
    fixed = ("prepare", "--tokenizer", tokenizer, "--seq-len", 16, "--out", tmp_path / "out", "--data", file)
    for other in (file, file.parent, tmp_path / "link.jsonl"):
        uptrain(*fixed, "--data", other).refused(f"--data {file} and --data {other} both hold {file}; name each file")


def test_paths_with_equals_signs(make, tmp_path, expected):
    path = write_jsonl(tmp_path / "a=0.5.jsonl", [{"text": text} for text in TEXTS])
    (tmp_path / "b=0.5").mkdir()
    shutil.copy(path, tmp_path / "b=0.5/a.jsonl")
    assert documents_of(make(path, tmp_path / "b=0.5")) == expected * 2


# What it says


def test_dropped_records_are_counted(make, tmp_path):
    records = [{"text": "a"}, {"text": ""}, {"text": None}, {"text": "b"}, {"text": None}]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    with path.open("a") as file:
        file.write("\n \n")
    cache = make(path)
    assert cache.manifest.n_documents == 2
    (entry,) = cache.manifest.sources
    assert entry["dropped"] == {"empty": 1, "null": 2, "blank lines": 2}
    assert (entry["documents"], entry["skipped"], entry["files"]) == (2, 0, 1)


def test_padding_is_left_out_and_labels_are_warned_of(uptrain, tmp_path):
    record = {"input_ids": [5, 6, 1, 1], "attention_mask": [1, 1, 0, 0], "labels": [-100, 6, -100, -100]}
    path = write_jsonl(tmp_path / "a.jsonl", [record] * 3)
    result = uptrain("prepare", "--data", path, "--vocab-size", 9, "--seq-len", 8, "--out", tmp_path / "out")
    assert "Warning: 3 documents have labels other than their input_ids" in result.succeeded().err
    assert documents_of(TokenCache.open(tmp_path / "out")) == [[5, 6]] * 3


def test_source_checksum_is_that_of_the_file(make, source):
    import hashlib

    (entry,) = make(source).manifest.sources
    assert entry["sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert entry["bytes"] == source.stat().st_size


def test_table_and_second_call(uptrain, source, tokenizer, tmp_path):
    (tmp_path / "data").mkdir()
    source.rename(tmp_path / "data/a.jsonl")
    (tmp_path / "data/README.md").write_text("hello")
    arguments = ("prepare", "--data", tmp_path / "data", "--tokenizer", tokenizer, "--seq-len", 32)
    result = uptrain(*arguments, "--out", tmp_path / "out")
    assert (result.code, result.err) == (0, "")
    printed = "".join(result.out.split())  # a long path is broken anywhere
    for words in ("documents", "60", "windows", "of 32 tokens", "dropped", "none", "README.md: not a known format"):
        assert words.replace(" ", "") in printed
    before = tiny.snapshot(tmp_path / "out")
    again = uptrain(*arguments, "--out", tmp_path / "out").succeeded()
    assert "was complete already, with the same data and options" in again.out
    assert tiny.snapshot(tmp_path / "out") == before
    changed = (
        "out exists, and is a cache of texts that have changed since, or with another --tokens",
        "choose another",
    )
    for options, words in (
        (("--tokens", 500), changed), (("--seq-len", 16), ["is a cache of windows of 32 tokens;"]),
    ):  # fmt: skip
        uptrain(*arguments, "--out", tmp_path / "out", *options).refused(*words)
    of_file = ("prepare", "--data", tmp_path / "data/a.jsonl", *arguments[3:], "--out", tmp_path / "out")
    uptrain(*of_file, "--seq-len", 16).refused("is a cache of windows of 32 tokens and other --data;")
    os.utime(tmp_path / "data/a.jsonl", ns=(1, 1))
    uptrain(*arguments, "--out", tmp_path / "out").refused(*changed)
    (tmp_path / "out/manifest.json").write_text("{}")
    uptrain(*arguments, "--out", tmp_path / "out", "--seq-len", 16).refused(
        "out exists, and is a cache of other data or options; choose another --out, or remove it."
    )


def test_share_says_what_comes_next(uptrain, source, tokenizer, tmp_path):
    result = uptrain("prepare", "--data", source, "--tokenizer", tokenizer, "--seq-len", 32,
                     "--out", tmp_path / "out", "--shard", "1/2")  # fmt: skip
    result.succeeded()
    assert re.match(r"Shard 1/2 is done: [\d,]+ documents, [\d,]+ tokens\. ", result.out)
    words = " ".join(result.out.split())
    assert words.endswith("When all 2 shards are done, run the command without --shard to join them.")


def test_as_a_function(source, tokenizer, tmp_path):
    result = prepare(PrepareOptions((str(source),), tmp_path / "out", 32, tokenizer))
    assert result["tokens"] == CacheManifest.parse(tmp_path / "out").n_tokens
    assert isinstance(result["out"], str)
    assert Path(result["out"]) == tmp_path / "out"


def test_ignored_files_are_named_up_to_a_number(uptrain, tmp_path, tokenizer):
    folder = tmp_path / "texts"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", [{"text": text} for text in TEXTS])
    for i in range(12):
        (folder / f"{i:02}.csv").write_text("")
    command = ("prepare", "--data", folder, "--tokenizer", tokenizer, "--seq-len", 32, "--out", tmp_path / "out")
    result = uptrain(*command).succeeded()
    assert [f"{i:02}.csv: not a known format" in result.out for i in range(12)] == [True] * 10 + [False] * 2
    assert "and 2 more" in result.out
    uptrain(*command, "--tokens", "many").refused("--tokens", "'many' is not a count")


def test_merges_are_never_left_out_at_random(tmp_path):
    """As a tokenizer.json with `dropout` says, for training: other tokens of a text each time."""
    folder = make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "model"), 300)
    expected = open_tokenizer(folder).encode(SENTENCES[0])
    with open_checkpoint(folder) as checkpoint:
        assert open_fast_tokenizer(checkpoint).encode(SENTENCES[0]).ids == expected
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["dropout"] = 0.9
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert Backend.from_file(str(folder / "tokenizer.json")).encode(SENTENCES[0]).ids != expected
    assert open_tokenizer(folder).encode(SENTENCES[0]) == expected
    with open_checkpoint(folder) as checkpoint:
        assert open_fast_tokenizer(checkpoint).encode(SENTENCES[0]).ids == expected
