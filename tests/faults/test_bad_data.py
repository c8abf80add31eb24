"""Bad data gets one clear line with its place, or is skipped and counted."""

import gzip
import json
import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
from tiny_tokenizers import make_tokenizer
from torch_files import LFS_POINTER

from model.common.errors import InputError
from uptrain.data.prepare import build, work_units
from uptrain.data.prepare.sources import find_sources
from uptrain.data.token_cache import TokenCache


def line(text="good"):
    return json.dumps({"text": text}).encode() + b"\n"


# Bad records, with their places

BAD = {
    "corrupt": (b'{"text": "a\n', "not valid JSON (Unterminated string starting at at column 10)"),
    "NUL": (b'{"text": "a\0"}\n', "not valid JSON: the line holds NUL bytes, the first at byte 12"),
    "UTF-8": (b'{"text": "\xe9t\xe9"}\n', "not valid UTF-8 at byte 11 of the line"),
    "no object": (b"[1, 2]\n", "a list instead of an object"),
    "no column": (
        b'{"body": "a"}\n',
        "no field 'text' among 'body'; rename the field of the text to 'text', or name it with `uptrain prepare "
        "--text-column`",
    ),
    "type": (b'{"text": 5}\n', "field 'text' is a number, not a string"),
    "id too high": (
        b'{"input_ids": [1, 299, 300]}\n', "token id 300 at position 2 of 'input_ids', outside the vocabulary of 300",
    ),
    "id negative": (
        b'{"input_ids": [-1]}\n', "token id -1 at position 0 of 'input_ids', outside the vocabulary of 300",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("unit_bytes", [64, 1 << 20])
def test_bad_line_in_the_middle(prepare, tmp_path, monkeypatch, kind, unit_bytes):
    monkeypatch.setattr(work_units, "UNIT_BYTES", unit_bytes)
    bad, reason = BAD[kind]
    path = tmp_path / "a.jsonl"
    path.write_bytes(line() * 16 + bad + line() * 16)
    result = prepare(path)
    hint = "correct it, or skip such records with `uptrain prepare --on-bad-record skip`."
    result.refused(f"Error: {path}:17: {reason}; {hint}")
    assert not (tmp_path / "out").exists()
    assert (tmp_path / ".out.groupwise").exists() == (unit_bytes == 64) == ("(Finished work is kept" in result.err)


def test_bad_last_line(prepare, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(line() * 3 + b'{"text": "cut of')
    prepare(path).refused(f"{path}:4: not valid JSON: the last line is cut off (Unterminated string")


def test_utf16_file(prepare, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes((line() * 3).decode().encode("utf-16"))
    prepare(path).refused(f"{path}:1: not valid UTF-8 at byte 1 of the line")


def test_good_in_spite_of_bom_crlf_length_and_a_missing_newline(prepare, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + line("a")[:-1] + b"\r\n" + line("ab" * 1_500_000) + line("b")[:-1])
    prepare(path).succeeded()
    assert TokenCache.open(tmp_path / "out").manifest.n_documents == 3


def test_place_in_other_formats(prepare, tmp_path):
    pq.write_table(pa.table({"input_ids": [[1], [2], [300]]}), tmp_path / "a.parquet", row_group_size=1)
    prepare(tmp_path / "a.parquet", ids=True).refused(f"{tmp_path}/a.parquet:row 3: token id 300 at position 0")
    (tmp_path / "a.txt").write_bytes(b"a\xff")
    prepare(tmp_path / "a.txt").refused(f"{tmp_path}/a.txt: not valid UTF-8 at byte 2")


def test_text_without_a_tokenizer(prepare, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(line())
    prepare(tmp_path / "a.jsonl", ids=True).refused("a.jsonl:1: a text, but no --tokenizer to tokenise it with")


def test_damaged_file_is_refused_even_when_skipping(prepare, tmp_path):
    pq.write_table(pa.table({"text": ["a"] * 1000}), tmp_path / "a.parquet")
    os.truncate(tmp_path / "a.parquet", 100)
    prepare(tmp_path / "a.parquet", options=("--on-bad-record", "skip")).refused("a.parquet is damaged or cut off")
    (tmp_path / "a.jsonl.gz").write_bytes(b"\x1f\x8b\x08")
    prepare(tmp_path / "a.jsonl.gz", options=("--on-bad-record", "skip")).refused(
        "a.jsonl.gz:1: the compressed data is cut off"
    )


# Skipping them

SKIP = ("--on-bad-record", "skip")


def test_skipped_records_are_counted(prepare, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(line() * 500 + b"{\n" + line() * 1499)
    result = prepare(path, options=SKIP).succeeded()
    assert "1 bad" in result.out
    manifest = TokenCache.open(tmp_path / "out").manifest
    assert manifest.n_documents == 1999
    assert manifest.sources[0]["skipped"] == 1


@pytest.mark.parametrize("unit_bytes", [1000, 1 << 20])
def test_more_than_a_thousandth_is_too_many(prepare, tmp_path, monkeypatch, unit_bytes):
    monkeypatch.setattr(work_units, "UNIT_BYTES", unit_bytes)
    path = tmp_path / "a.jsonl"
    path.write_bytes(line() * 500 + b"{\n" + line() * 1000 + b"3\n" + line() * 497)
    prepare(path, options=SKIP).refused(
        "2 of 1,999 records are bad, more than the 0.1% that may be skipped; "
        f"the first is {path}:501: not valid JSON (Expecting property name enclosed in double quotes at column 2)."
    )


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_a_file_of_nothing_but_bad_records(prepare, tmp_path, monkeypatch, names):
    """Its place among the files does not matter, though a unit at the end without tokens adds nothing to the cache."""
    monkeypatch.setattr(work_units, "UNIT_BYTES", 1000)
    good, bad = (tmp_path / f"texts/{name}.jsonl" for name in names)
    good.parent.mkdir()
    good.write_bytes(line() * 80)
    bad.write_bytes(b"{\n" * 80)
    prepare(good.parent, options=SKIP).refused("80 of 160 records are bad, more than the 0.1%")


def test_a_file_without_documents_is_listed(prepare, tmp_path, monkeypatch):
    monkeypatch.setattr(work_units, "UNIT_BYTES", 1000)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.jsonl").write_bytes(line() * 80)
    (tmp_path / "texts/b.jsonl").write_bytes(b'{"text": null}\n' * 200)
    result = prepare(tmp_path / "texts").succeeded()
    assert "200 null" in result.out
    (source,) = TokenCache.open(tmp_path / "out").manifest.sources
    assert (source["files"], source["documents"]) == (2, 80)


def test_too_many_bad_records_stop_before_the_end(prepare, tmp_path, monkeypatch):
    monkeypatch.setattr(work_units, "UNIT_BYTES", 1000)
    monkeypatch.setattr(build, "SKIPPED_RECORDS", 200)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{\n" * 2 + line() * 5000)
    prepare(path, options=SKIP).refused("2 of 2", "records are bad", f"the first is {path}:1: ")
    (staging,) = tmp_path.glob(".out.groupwise")
    assert 0 < len(list((staging / "folder").glob("tokens*.bin"))) < 10


def test_a_corrected_file_is_all_that_is_done_anew(prepare, tmp_path):
    for name, content in (("a", line("a") * 9), ("b", line("b") * 9 + b"{\n"), ("c", line("c") * 9)):
        (tmp_path / f"{name}.jsonl").write_bytes(content)
    sources = [tmp_path / f"{name}.jsonl" for name in "abc"]
    prepare(*sources).refused("b.jsonl:10", "(Finished work is kept", ".out.groupwise")
    kept = tmp_path / ".out.groupwise/folder/tokens-00000.bin"
    inode = kept.stat().st_ino
    sources[1].write_bytes(line("b") * 9)
    prepare(*sources).succeeded()
    assert (tmp_path / "out" / kept.name).stat().st_ino == inode
    assert TokenCache.open(tmp_path / "out").manifest.n_documents == 27


def test_units_with_skipped_records_are_not_taken_over_by_a_strict_build(prepare, tmp_path, monkeypatch):
    monkeypatch.setattr(work_units, "UNIT_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    path.write_bytes(line() * 20 + b"{\n" + line() * 500)
    prepare(path, options=SKIP).refused("1 of 521 records are bad")
    prepare(path).refused(f"{path}:21: not valid JSON", "--on-bad-record skip")


def test_bad_record_behind_the_wanted_tokens(prepare, tmp_path, monkeypatch):
    """It is never an error, however many workers read ahead."""
    monkeypatch.setattr(work_units, "UNIT_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    path.write_bytes(line() * 100 + b"{\n" + line() * 100)
    prepare(path, options=("--tokens", 200, "--workers", 3)).succeeded()


# Sources


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("nowhere", ["no such file or folder"]),
        ("nowhere=0.5", ["no such file or folder"]),
        ("nowhere=much", ["no such file, and 'much' is no weight such as 0.7"]),
        ("a.jsonl=0", ["a weight must be above 0"]),
        ("a.jsonl=-1", ["a weight must be above 0"]),
        ("a.jsonl=1/0", ["'1/0' is no weight"]),
        (
            "a.csv",
            ["a.csv: not a known format; known are .jsonl, .ndjson, .json, .parquet, .txt", "also with .gz, .xz, .zst"],
        ),
        ("empty", ["no file of a known format"]),
        ("json beside txt", ["files of several formats: 1 jsonl (e.g. ", "a.json), 1 txt"]),
        ("array beside lines", ["array beside lines/a.json is a JSON array; write one object per line: jq -c '.[]' "]),
        (
            "config alone",
            ["no file of a known format", "config.json is JSON, but not two or more lines of one object each"],
        ),
        (
            "info alone",
            ["no file of a known format", "dataset_info.json is JSON, but not two or more lines of one object each"],
        ),
        ("mixed", ["files of several formats: 1 jsonl (e.g. ", "1 txt", "of one format, with one --data each"]),
        ("dict", ["a DatasetDict of 2 splits; name one", "--data ", "dict/train or --data ", "dict/test"]),
        ("torn", ["state.json is damaged"]),
        ("deep", ["state.json is damaged (ValueError('nested too deeply')"]),
        ("deep dict", ["dataset_dict.json is damaged (ValueError('nested too deeply')"]),
        ("no names", ["dataset_dict.json is damaged (splits)"]),
        ("no splits", ["dataset_dict.json is damaged (splits)"]),
        ("missing", ["missing/data.arrow cannot be read: it is missing"]),
        ("clone", ["clone/a.txt is a git-lfs pointer, not the text itself; run `git lfs pull`"]),
    ],
)
def test_ambiguous_sources(prepare, tmp_path, data, words):
    (tmp_path / "a.jsonl").write_bytes(line())
    (tmp_path / "a.csv").write_text("text\na\n")
    for name, files in {
        "empty": {"README.md": ""},
        "mixed": {"a.jsonl": "", "b.txt": ""},
        "json beside txt": {"a.json": line().decode() * 2, "b.txt": ""},
        "array beside lines": {"a.json": '[\n {"text": "a"}\n]', "b.jsonl": line().decode()},
        "config alone": {"config.json": '{\n  "a": 1\n}'},
        "info alone": {"dataset_info.json": '{"description": ""}'},
        "dict": {"dataset_dict.json": '{"splits": ["train", "test"]}'},
        "torn": {"state.json": "{"},
        "deep": {"state.json": "[" * 100_000},
        "deep dict": {"dataset_dict.json": "[" * 100_000},
        "no names": {"dataset_dict.json": '{"splits": [5]}'},
        "no splits": {"dataset_dict.json": '{"splits": []}'},
        "missing": {"state.json": '{"_data_files": [{"filename": "data.arrow"}]}'},
        "clone": {"a.txt": LFS_POINTER},
    }.items():
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_text(content)
    prepare(tmp_path / data).refused(str(tmp_path / data).split("=")[0], *words)
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("content", "form", "query"),
    [
        ('[{"text": "a"}]', "a JSON array", "'.[]'"),
        ('\ufeff\n [\n {"text": "a"},\n {"text": "b"}]', "a JSON array", "'.[]'"),
        ('{\n  "text": "a",\n  "id": 1\n}\n', "JSON with an object over several lines", "'.'"),
        ('{\r\n "text": "a"}', "JSON with an object over several lines", "'.'"),
        ('{"text": "a", "ids": [\n 1, 2]}', "JSON with an object over several lines", "'.'"),
        ('{"rows": [\n {"text": "a"}]}', "JSON with an object over several lines", "'.'"),
    ],
)
def test_json_of_another_form(prepare, tmp_path, packed, content, form, query):
    path = tmp_path / ("a b.json.gz" if packed else "a b.json")
    path.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    quoted = f"gzip -dc '{path}' | jq -c {query}" if packed else f"jq -c {query} '{path}'"
    prepare(path).refused(f"Error: {path} is {form}; write one object per line: {quoted}")
    assert not list(tmp_path.glob(".out*"))


def test_json_that_is_no_text_beside_texts(prepare, tmp_path):
    """It is left out, and reported: configs and tokenizers, and what `datasets` writes beside its files."""
    folder = tmp_path / "texts"
    folder.mkdir()
    others = {
        "config.json": '{\n  "a": 1\n}', "dataset_info.json": '{"text": "no text"}', "labels.json": '["a", "b"]',
        "empty.json": "", "state.of.json": "3",
    }  # fmt: skip
    for name, content in {**others, "x.json": line().decode() * 2, "y.ndjson": line().decode()}.items():
        (folder / name).write_text(content)
    (folder / "z.json.gz").write_bytes(gzip.compress(line()))
    result = prepare(folder, options=("--json",)).succeeded()
    summary = json.loads(result.out)
    assert summary["ignored"] == [str(folder / name) for name in sorted(others)]
    assert summary["documents"] == 4
    assert "JSON, but not two or more lines of one object each" in " ".join(prepare(folder).succeeded().out.split())


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("org/name", "no such file or folder. (A dataset of the hub is hub:org/name.)\n"),
        ("./name", "no such file or folder.\n"),
        ("b.jsonl", "no such file or folder.\n"),
        ("texts/*.jsonl", "no such file or folder. Patterns are not expanded; give the folder, or the option once for"),
        ("~/texts", "~/texts begins with ~, which was not replaced; write the whole path"),
    ],
)
def test_what_a_missing_text_may_have_meant(prepare, data, words):
    prepare(data).refused(f"--data {data}: " if "~" not in data else "--data", words)


def test_a_pattern_that_the_shell_has_replaced(prepare, uptrain, tmp_path):
    prepare("a.txt", options=("b.txt",)).refused("unexpected extra argument (b.txt). Repeat --data for each file, or")
    uptrain("status", tmp_path, "b.txt").refused("unexpected extra argument (b.txt)\n")


def test_a_folder_of_texts_with_links(prepare, tmp_path):
    """Texts behind links are read; what cannot be is refused, never left out."""
    folder, store = tmp_path / "texts", tmp_path / "store"
    for path, n in ((folder, 1), (store / "deep", 9)):
        path.mkdir(parents=True)
        (path / "a.jsonl").write_bytes(line() * n)
    (folder / "part").symlink_to("../store")
    prepare(folder).succeeded()
    assert json.loads((tmp_path / "out/manifest.json").read_text())["n_documents"] == 10
    for name, make, words in (
        ("b.jsonl", lambda path: path.symlink_to("/nowhere"), "b.jsonl cannot be read: it is missing"),
        ("c.jsonl", lambda path: path.symlink_to("a.jsonl"), f"{folder}/c.jsonl and {folder}/a.jsonl are one file"),
        ("loop", lambda path: path.symlink_to("."), f"{folder}/loop and {folder} are one folder; remove the link"),
        ("twice", lambda path: path.symlink_to("part"), f"{folder}/twice and {folder}/part are one folder"),
    ):
        make(folder / name)
        prepare(folder).refused(words)
        (folder / name).unlink()


def test_folders_within_folders(prepare, tmp_path):
    folder = tmp_path / "texts"
    (folder / "/".join("a" * 64)).mkdir(parents=True)
    (folder / "/".join("a" * 64) / "a.jsonl").write_bytes(line())
    prepare(folder).succeeded()
    (folder / "/".join("a" * 65)).mkdir()
    prepare(folder).refused(f"{folder} holds folders more than 64 levels deep; move them elsewhere")


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_name_that_pyarrow_does_not_take(prepare, tmp_path, suffix):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / os.fsdecode(b"caf\xe9." + suffix.encode())).write_bytes(b"PAR1")
    prepare(folder).refused(r"caf\xe9." + suffix, "has a name that is not UTF-8; rename it")


def test_out_that_cannot_be_read(prepare, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(line())
    (tmp_path / "out").symlink_to("out")
    prepare(tmp_path / "a.jsonl").refused(f"OUT ({tmp_path}/out) is not a usable path: Symlink loop")
    (tmp_path / "out").unlink()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/inputs.sha256").write_bytes(b"\xff")
    prepare(tmp_path / "a.jsonl").refused("out exists, and is no token cache")


def test_a_share_of_less_than_a_token(prepare, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(line() * 9)
    data = f"{tmp_path}/a.jsonl=99", "--data", f"{tmp_path}/b.jsonl=1"
    prepare(data[0], options=(*data[1:], "--tokens", 10)).refused("its share of 10 tokens is less than one token")
    (tmp_path / "empty.jsonl").write_bytes(b"")
    empty = f"{tmp_path}/a.jsonl=1", "--data", f"{tmp_path}/empty.jsonl=1"
    prepare(empty[0], options=empty[1:]).refused("empty.jsonl: no tokens; there are no records.")
    tiny_share = f"{tmp_path}/a.jsonl=0.9999", "--data", f"{tmp_path}/b.jsonl=0.0001"
    prepare(tiny_share[0], options=tiny_share[1:]).refused("b.jsonl: its share of ", "raise its weight, or --tokens")


def test_some_sources_weighted_and_some_not(prepare, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(line())
    (tmp_path / "b.jsonl").write_bytes(line())
    prepare(f"{tmp_path}/a.jsonl=1", tmp_path / "b.jsonl").refused("b.jsonl has no weight, but others have")


def test_hub_without_network(prepare):
    prepare("hub:nobody/nothing:train").refused(
        "hub:nobody/nothing:train cannot be loaded (", "hf download --repo-type dataset nobody/nothing"
    )
    for name in ("hub:a:b:train[:1%]", "hub:a:train[10:20]", "hub:a:train[:1%]+test"):
        prepare(name).refused(f"{name}: a part of a split cannot be named; leave out [", "--tokens N` takes its first")
    prepare("hub:a:b:c:d").refused("hub:a:b:c:d is not hub:NAME, hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT")


def test_too_few_tokens(prepare, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"input_ids": [1, 2, 3]}\n' * 10)
    (tmp_path / "b.jsonl").write_bytes(b'{"input_ids": [1, 2, 3]}\n' * 100)
    paths = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    prepare(*paths, ids=True, options=("--tokens", 331)).refused(
        "the sources have 330 tokens, fewer than --tokens 331; add --data or lower --tokens"
    )
    weighted = [f"{path}=0.5" for path in paths]
    prepare(*weighted, ids=True, options=("--tokens", 100)).refused(
        f"--data {paths[0]} has 30 tokens, fewer than its 0.5 of --tokens 100, which is 50; "
        "lower --tokens to 60 or less"
    )
    prepare(*weighted, ids=True, options=("--tokens", 60)).succeeded()
    assert not list(tmp_path.glob(".out*"))
    (tmp_path / "c.jsonl").write_bytes(b'{"input_ids": [1, 2, 3]}\n')
    shutil.rmtree(tmp_path / "out")
    prepare(*weighted, f"{tmp_path / 'c.jsonl'}=0.5", ids=True, options=("--tokens", 300)).refused(
        f"--data {paths[0]} has 30 tokens",
        "lower --tokens to 9 or less",  # of the smallest source, which is another
    )


def test_no_tokens_at_all(prepare, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": null}\n')
    prepare(tmp_path / "a.jsonl").refused("no tokens; none of 1 records gave a document (1 null)")
    (tmp_path / "a.jsonl").write_bytes(b"")
    prepare(tmp_path / "a.jsonl").refused("no tokens; there are no records")
    (tmp_path / "a.jsonl").write_bytes(b"{\n{\n")
    result = prepare(tmp_path / "a.jsonl", options=("--on-bad-record", "skip"))
    result.refused("none of 2 records gave a document (2 bad; the first bad one is ", "a.jsonl:1")
    assert not list(tmp_path.glob(".out*"))


# Options


def test_options(prepare, uptrain, tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_bytes(line())
    data = ("--data", tmp_path / "a.jsonl", "--seq-len", 8, "--out", tmp_path / "out")
    uptrain("prepare", *data).refused("give either --tokenizer FOLDER, or --vocab-size")
    uptrain("prepare", *data, "--vocab-size", 9, "--tokenizer", tokenizer).refused("either --tokenizer")
    prepare(tmp_path / "a.jsonl", options=("--tokens", "some")).refused("'some' is not a count")
    for share in ("0/2", "3/2", "1", "a/b"):
        prepare(tmp_path / "a.jsonl", options=("--shard", share)).refused("--shard", share, "1/4")
    (tmp_path / "out").mkdir()
    prepare(tmp_path / "a.jsonl").refused("out exists, and is no token cache; choose another --out")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("tokenizer_config.json", "vocab"), ("tokenizer_config.json", "merges"), ("special_tokens_map.json", "vocab"),
        ("special_tokens_map.json", "merges_file"), ("tokenizer_config.json", "init_inputs"),
        ("tokenizer_config.json", "sp_model_kwargs"),
    ],
)  # fmt: skip
def test_settings_of_a_tokenizer_that_are_paths(uptrain, tmp_path, name, key):
    """Their class would open them, and wait for a FIFO."""
    folder, texts = tmp_path / "model", tmp_path / "texts.jsonl"
    folder.mkdir()
    os.mkfifo(tmp_path / "fifo")
    texts.write_text('{"text": "one"}\n')
    (folder / "vocab.json").write_text('{"a": 0}')
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    path = folder / name
    settings = json.loads(path.read_text()) if path.exists() else {}
    fifo = str(tmp_path / "fifo")
    path.write_text(json.dumps({**settings, key: {"model_file": fifo} if key == "sp_model_kwargs" else fifo}))
    prepare = ("prepare", "--data", texts, "--seq-len", 8, "--out", tmp_path / "cache", "--tokenizer", folder)
    uptrain(*prepare).refused(f"{path} has {key}", "; remove it.")


def test_invalid_tokenizer(uptrain, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(line())
    folder = tmp_path / "tokenizer"
    arguments = ("prepare", "--data", tmp_path / "a.jsonl", "--seq-len", 8, "--out", tmp_path / "out", "--tokenizer")
    uptrain(*arguments, folder).refused(f"{folder}: no such file or folder; give a model's folder, or its name")
    folder.mkdir()
    uptrain(*arguments, folder).refused(f"{folder} holds no tokenizer (tokenizer.json or tokenizer.model)")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("[]")
    uptrain(*arguments, folder).refused("tokenizer_config.json is not a JSON object")
    (folder / "tokenizer_config.json").write_text('{"fast_tokenizer_files": ["../other/tokenizer.1.0.json"]}')
    uptrain(*arguments, folder).refused("fast_tokenizer_files must list names of files in its folder")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    uptrain(*arguments, folder).refused(f"transformers cannot load the tokenizer of {folder}")
    (folder / "tokenizer_config.json").write_text("{}", encoding="utf-8-sig")
    uptrain(*arguments, folder).refused("tokenizer_config.json begins with a byte-order mark", "save it as UTF-8")
    assert not list(tmp_path.glob(".out*"))
    for path in folder.iterdir():
        path.unlink()
    (folder / "tokenizer.model").write_bytes(b"of sentencepiece")
    uptrain(*arguments, folder).refused("no tokenizer.json", "tokenizer.model is damaged")


# Changing sources


def test_source_that_changes_while_it_is_read(prepare, tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_bytes(line() * 10)
    run = build.CacheBuild.run

    def run_and_touch(self, quiet):
        run(self, quiet)
        os.utime(path, ns=(1, 1))

    monkeypatch.setattr(build.CacheBuild, "run", run_and_touch)
    prepare(path).refused(f"{path} changed while it was read; run the same command when nothing writes to it")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    prepare(path).succeeded()


def test_source_that_changes_under_a_worker(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(line() * 10)
    (unit,) = work_units.make_units(find_sources((str(path),)))
    before = unit.fingerprint()
    work_units.check_unchanged(unit, before)
    path.write_bytes(line() * 11)
    with pytest.raises(InputError, match="changed while it was read"):
        work_units.check_unchanged(unit, before)
    path.unlink()
    with pytest.raises(InputError, match="changed while it was read"):
        work_units.check_unchanged(unit, before)


def test_a_tokenizer_that_ends_no_text(uptrain, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(line())
    for eos, warned in ((True, False), (False, True)):
        folder = make_tokenizer(tmp_path / f"tokenizer-{eos}", 290, eos=eos)
        fixed = ("--tokenizer", folder, "--seq-len", 8, "--out", tmp_path / f"out-{eos}", "--workers", 1)
        result = uptrain("prepare", "--data", tmp_path / "a.jsonl", *fixed)
        assert (result.code, "has no end-of-text token" in result.err) == (0, warned)


def test_a_tokenizer_without_tokens(uptrain, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(line())
    folder = make_tokenizer(tmp_path / "tokenizer", 290)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"] |= {"vocab": {}, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps({**content, "added_tokens": [], "post_processor": None}))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    fixed = ("--tokenizer", folder, "--seq-len", 8, "--out", tmp_path / "out")
    uptrain("prepare", "--data", tmp_path / "a.jsonl", *fixed).refused("has an empty vocabulary")


def test_a_shard_of_very_many(prepare, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(line())
    for shard in ("1/" + "9" * 5000, "5/" + "9" * 21):
        prepare(tmp_path / "a.jsonl", options=("--shard", shard)).refused("is not I/N with I from 1 to N")
    assert not list(tmp_path.glob(".out*"))


# A tokenizer that gives up


@pytest.fixture
def giving_up(tmp_path):
    """Return a tokenizer whose regular expression takes too many steps on HOPELESS, where its library panics."""
    folder = make_tokenizer(tmp_path / "tokenizer-of-many-steps")
    content = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": r"(?:\w+\w+)+(?:;|,)"}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, content["pre_tokenizer"]]}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


HOPELESS = "a" * 42 + " ,"


def test_text_on_which_the_tokenizer_gives_up(uptrain, tmp_path, giving_up):
    path = tmp_path / "a.jsonl"
    path.write_bytes(line() * 800 + line(HOPELESS) + line() * 1200)
    arguments = ("prepare", "--data", path, "--tokenizer", giving_up, "--seq-len", 8, "--out", tmp_path / "out")
    reason = "the tokenizer cannot encode the text (Onig: Regex search error: retry-limit-in-match over)"
    uptrain(*arguments).refused(f"Error: {path}:801: {reason}; correct it, or skip such records")
    uptrain(*arguments, *SKIP).succeeded()
    manifest = TokenCache.open(tmp_path / "out").manifest
    assert (manifest.n_documents, manifest.sources[0]["skipped"]) == (2000, 1)


def test_calibration_text_on_which_the_tokenizer_gives_up(convert, tmp_path, giving_up):
    folder = tiny.save(tiny.build(vocab_size=302), tmp_path / "source")
    (folder / "tokenizer.json").write_bytes((giving_up / "tokenizer.json").read_bytes())
    (tmp_path / "a.jsonl").write_bytes(line(HOPELESS))
    fixed = ("--groups", 2, "--method", "fit", "--calibration", tmp_path / "a.jsonl", "--calibration-tokens", 1024)
    convert("mha-to-gqa", folder, tmp_path / "out", *fixed).refused(
        f"the tokenizer of {folder} cannot read the calibration text (Onig: Regex search error"
    )
    assert not list(tmp_path.glob("*out*"))
