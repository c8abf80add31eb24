"""What `uptrain prepare` does that `datasets.map` with grouping does not: the reasons for a token cache of our own.

docs/architecture.md has the argument. If a test of `datasets` fails here, a part of it no longer holds.
"""

import json
import os
import signal
from itertools import chain
from multiprocessing import get_context

import datasets
import forks
import pytest
from self_kill import start_self_killing
from tiny_tokenizers import SENTENCES
from transformers import AutoTokenizer

from model.common.errors import InputError
from uptrain.data.prepare import work_units
from uptrain.data.prepare.prepare import PrepareOptions, prepare
from uptrain.data.token_cache import TokenCache

SEQ_LEN, N_DOCUMENTS = 32, 400
BATCH = 50


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.jsonl"
    path.write_text("".join(json.dumps({"text": SENTENCES[n % len(SENTENCES)]}) + "\n" for n in range(N_DOCUMENTS)))
    return path


def ours(source, tokenizer, out, workers=1):
    prepare(PrepareOptions((str(source),), out, SEQ_LEN, tokenizer, workers=workers))
    return TokenCache.open(out)


def theirs(source, tokenizer, out, n_processes=1, seen=lambda n: None):
    """Build windows as transformers' example for causal language models does.

    `seen` is told the number of documents of each batch before it is tokenised.
    """
    datasets.disable_progress_bars()
    loaded = AutoTokenizer.from_pretrained(tokenizer)

    def tokenised(batch):
        seen(len(batch["text"]))
        return {"input_ids": [[*ids, loaded.eos_token_id] for ids in loaded(batch["text"])["input_ids"]]}

    def grouped(batch):
        flat = list(chain.from_iterable(batch["input_ids"]))
        return {"input_ids": [flat[i : i + SEQ_LEN] for i in range(0, len(flat), SEQ_LEN)]}

    data = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(out))
    how = {"batched": True, "batch_size": BATCH, "num_proc": n_processes if n_processes > 1 else None}
    documents = data.map(
        tokenised,
        remove_columns="text",
        new_fingerprint="tokenised",
        cache_file_name=str(out / "documents.arrow"),
        **how,
    )
    return documents.map(grouped, new_fingerprint="grouped", cache_file_name=str(out / "windows.arrow"), **how)


def sizes(windows):
    return [len(ids) for ids in windows["input_ids"]]


def test_windows_do_not_depend_on_the_processes(source, tokenizer, tmp_path, monkeypatch):
    """Ours are whole but for the last. Theirs end where a batch or a process ends."""
    monkeypatch.setattr(work_units, "UNIT_BYTES", 4000)
    one, three = (ours(source, tokenizer, tmp_path / f"ours-{n}", n) for n in (1, 3))
    assert one.manifest.shards == three.manifest.shards
    assert len(one.manifest.shards) > 3
    assert [len(one.window(n)[0]) for n in range(one.n_windows - 1)] == [SEQ_LEN] * (one.n_windows - 1)
    windows = {n: theirs(source, tokenizer, tmp_path / f"theirs-{n}", n) for n in (1, 3)}
    assert sum(sizes(windows[1])) == sum(sizes(windows[3])) == one.manifest.n_tokens
    assert sizes(windows[1]) != sizes(windows[3])
    assert sum(size < SEQ_LEN for size in sizes(windows[1])[:-1]) > 3


def test_killed_theirs(source, tokenizer, tmp_path):
    """A map that is killed after half of its documents tokenises all of them again."""
    log, context = tmp_path / "seen", get_context("fork")
    log.touch()

    def seen():
        return sum(map(int, log.read_text().split()))

    def count(n):
        with log.open("a") as file:
            file.write(f"{n}\n")

    def count_and_die(n):
        if seen() >= N_DOCUMENTS // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        count(n)

    codes = []
    for what in (count_and_die, count):
        process = context.Process(target=theirs, args=(source, tokenizer, tmp_path / "theirs"), kwargs={"seen": what})
        process.start()
        process.join()
        codes.append(process.exitcode)
    assert codes == [-signal.SIGKILL, 0]
    assert seen() == N_DOCUMENTS // 2 + N_DOCUMENTS


def test_killed_ours(uptrain, source, tokenizer, tmp_path, monkeypatch):
    """The finished parts are taken over as they are: they are the same files, but for the one in progress."""
    monkeypatch.setattr(work_units, "UNIT_BYTES", 4000)
    arguments = ("prepare", "--data", source, "--tokenizer", tokenizer, "--seq-len", SEQ_LEN, "--tokens", "all")
    arguments += ("--workers", 1, "--out", tmp_path / "ours")
    small = "from uptrain.data.prepare import work_units; work_units.UNIT_BYTES = 4000"
    process = start_self_killing(12, "uptrain", *arguments, output=tmp_path / "output", before=small)
    (result,) = forks.finish([process], [tmp_path / "output"])
    assert result.code == -signal.SIGKILL
    written = {file.name: file.stat().st_ino for file in (tmp_path / ".ours.groupwise").rglob("*.bin")}
    assert len(written) > 4
    uptrain(*arguments).succeeded()
    shards = {file.name: file.stat().st_ino for file in (tmp_path / "ours").glob("*.bin")}
    assert len(shards) > len(written)
    assert len(written.items() - shards.items()) <= 2, "tokens and documents of the unit in progress"


def test_a_line_that_is_not_json(source, tokenizer, tmp_path):
    """Both stop, and say where."""
    lines = source.read_text().splitlines()
    lines[123] = '{"text": "cut'
    source.write_text("\n".join(lines) + "\n")
    with pytest.raises(InputError, match=rf"{source}:124: not valid JSON"):
        ours(source, tokenizer, tmp_path / "ours")
    with pytest.raises(datasets.exceptions.DatasetGenerationError) as error:
        theirs(source, tokenizer, tmp_path / "theirs")
    assert "row 123" in str(error.value.__cause__)


def test_bytes_on_the_disk(source, tokenizer, tmp_path):
    """Theirs keeps the texts, the documents and the windows, with four bytes a token."""
    n_tokens = ours(source, tokenizer, tmp_path / "ours").manifest.n_tokens
    theirs(source, tokenizer, tmp_path / "theirs")

    def per_token(folder):
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / n_tokens

    assert per_token(tmp_path / "ours") < 2.5 < 8 < per_token(tmp_path / "theirs")
