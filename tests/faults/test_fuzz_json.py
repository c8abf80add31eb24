"""Any JSON value at any key that is read: used, or refused in one line with exit code 2; never a traceback.

Every test prints how many inputs it threw (pytest -rP). The slow ones throw all values at all keys, and random ones;
the readers of a file take turns.
"""

import contextlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import written_runs
from json_fuzzing import accepted, amounts, throw
from tiny_tokenizers import make_tokenizer

from model import load_model
from model.checkpoint import open_checkpoint
from model.common.errors import InputError
from model.decoder.loading import stop_ids
from uptrain.data.prepare.tokenizer import load_tokenizer

VOCAB = 302
NOT_TRAINED = ("gpt_neox", "t5")
"""Families, of those here, that `uptrain plan` refuses."""


# config.json

COMMON = [
    "model_type", "architectures", "quantization_config", "per_layer_config", "hidden_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size",
    "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rms_norm_eps",
    "attention_bias", "mlp_bias", "tie_word_embeddings", "hidden_act", "sliding_window", "use_sliding_window",
    "max_window_layers", "layer_types", "pretraining_tp", "auto_map", "initializer_range", "eos_token_id", "dtype",
    "torch_dtype",
]  # fmt: skip
OWN = {
    "gpt_neox": ["rotary_pct", "rotary_emb_base"],
    "falcon": ["multi_query", "new_decoder_architecture", "n_layer", "n_head", "num_kv_heads"],
    "smollm3": ["no_rope_layers", "no_rope_layer_interval"],
    "t5": ["num_decoder_layers", "num_layers", "num_heads", "d_model", "d_kv"],
    "mpt": ["n_layers", "n_heads", "d_model", "attn_config"],
    "llava": ["text_config", "vision_config"],
}
ROPE = [("rope_parameters", key) for key in ("rope_type", "type", "rope_theta", "factor", "partial_rotary_factor")] + [
    ("rope_scaling", key) for key in ("type", "factor", "original_max_position_embeddings", "beta_fast", "mscale")
]
IN_OWN_DECODER = ("llama", "mistral", "qwen2", "llava")
OTHERS = ("phi", "smollm3", "gpt_neox", "falcon", "t5", "stablelm", "olmo2", "gemma3", "gemma3_text")


def places(family: str) -> list[tuple[str, ...]]:
    keys = [(key,) for key in (*COMMON, *OWN.get(family, ()))]
    inner = [("text_config", *key) for key in keys] if family in tiny.WRAPPERS else []
    return [(), *keys, *inner, *ROPE]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives a fresh copy of a tiny model with a tokenizer, of each family."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(family) / "source"
            made[family] = make_tokenizer(tiny.save(build(family), folder), 300)
        return made[family]

    return get


def build(family: str) -> Any:
    own = {
        "gpt_neox": {"num_key_value_heads": ...},
        "falcon": {"multi_query": False, "num_key_value_heads": ..., "new_decoder_architecture": False},
        "t5": {"num_key_value_heads": ...},
    }
    if family not in own:
        return tiny.build(family, vocab_size=VOCAB, **({"hidden_size": 64} if family == "stablelm" else {}))
    if family == "t5":
        from transformers import T5Config, T5ForConditionalGeneration

        return T5ForConditionalGeneration(T5Config(
            vocab_size=VOCAB, d_model=32, d_kv=4, d_ff=40, num_layers=2, num_heads=8, is_decoder=False,
            decoder_start_token_id=0,
        ))  # fmt: skip
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 8, **{key: value for key, value in own[family].items() if value is not ...},
    }  # fmt: skip
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))


def run_model(folder: Path) -> None:
    with contextlib.suppress(InputError), torch.inference_mode():
        model = load_model(folder)
        assert model(torch.tensor([[1, 2, 3]])).shape == (1, 3, VOCAB)


@pytest.mark.parametrize("family", (*IN_OWN_DECODER, *OTHERS))
@amounts(20)
def test_config(models, convert, uptrain, tmp_path, family, n):
    """With `all`, the quick commands read each edit, and one of the others in turn."""
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(models(family), source)
    calibration = ("--calibration", "shipped", "--calibration-tokens", 4096)
    budget = ("--steps", 10, "--lr", 1e-3, "--global-batch-tokens", 2**20)
    quick: list[Callable[[], object]] = [
        lambda: accepted(convert("mha-to-mqa", source, out, *calibration, "--dry-run")),
        lambda: accepted(uptrain("plan", source, *budget, "--json")),
    ]
    others: list[Callable[[], object]] = [
        lambda: accepted(convert("inspect", source)),
        lambda: accepted(convert("mha-to-mqa", source, out, "--method", "mean")) and shutil.rmtree(out),
        *([lambda: run_model(source)] if family in IN_OWN_DECODER else []),
    ]

    def alone(*commands: Callable[[], object]) -> None:
        for command in commands:
            command()
            assert {path.name for path in tmp_path.iterdir()} == {"source"}

    undamaged = [run() for run in (*quick, *others)]
    assert undamaged == [True, family not in NOT_TRAINED, True, None, *([None] if family in IN_OWN_DECODER else [])]
    checks = [partial(alone, command) for command in (*quick, *others)]
    if n is None:
        checks = [partial(alone, *quick, command) for command in others]
    count = throw(source / "config.json", places(family), n, seed=len(family), checks=checks)
    print(count, "inputs")
    assert count >= (n or 2000)


# What a run's folder holds

RECORDS = [
    written_runs.event(0, "started"),
    written_runs.with_teacher(0, 5.0),
    written_runs.step(1),
    written_runs.step(2, None, skipped=True),
    written_runs.event(2, "not saved", why="no room"),
    written_runs.with_teacher(2, 4.0),
    written_runs.event(2, "resumed", rejected=["x"]),
    written_runs.step(3),
    written_runs.evaluation(3, 3.5),
]
STATE = {"status": "preempted", "step": 3, "reason": "SIGTERM", "pid": 12345}


def inner_places(parsed: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the place of everything in an object, and of a key that it does not have."""
    yield path
    if isinstance(parsed, dict):
        yield (*path, "unknown")
        for key, value in parsed.items():
            yield from inner_places(value, (*path, key))


def throw_at_lines(path: Path, n: int | None, checks: list[Callable[[], object]]) -> int:
    """Do as `throw` with each line of a file of JSON lines."""
    lines, count = path.read_text().splitlines(), 0
    part = path.with_name("line.json")
    for i, line in enumerate(lines):

        def write(i: int = i) -> None:
            path.write_text("\n".join([*lines[:i], part.read_text(), *lines[i + 1 :], ""]))

        part.write_text(line)
        # All of one edit's readers see the file with the edited line.
        with_line = [partial(_both, write, check) for check in checks]
        count += throw(part, list(inner_places(json.loads(line))), n, seed=i, checks=with_line, turn=count)
    part.unlink()
    path.write_text("\n".join([*lines, ""]))
    return count


def _both(first: Callable[[], None], second: Callable[[], object]) -> None:
    first()
    second()


@amounts(45)
def test_a_run_s_files(uptrain, tmp_path, n):
    parent = {"run": "/runs/parent", "step": 1}
    run = written_runs.write_run(tmp_path / "run", RECORDS, STATE, parent, teacher="/models/mha")
    for step in (1, 2, 3):
        written_runs.write_checkpoint(run, step)
    out = tmp_path / "out"
    status: list[Callable[[], object]] = [
        lambda: accepted(uptrain("status", run)),
        lambda: accepted(uptrain("status", run, "--json")),
    ]
    drawn: list[Callable[[], object]] = [lambda: accepted(uptrain("report", run, "--out", tmp_path / "page.html"))]
    others: list[Callable[[], object]] = [
        lambda: accepted(uptrain("export", run, out)),
        lambda: accepted(uptrain("extend", run, "--out", out, "--steps", 100)),
        lambda: accepted(uptrain("resume", run)),
    ]
    for reader in (*status, *drawn):
        reader()
    readers = [*status, *others] * 4 + drawn  # a drawing takes a second
    parsed = json.loads((run / "run.json").read_text())
    count = throw(run / "run.json", list(inner_places(parsed)), n, seed=0, checks=readers)
    count += throw(run / "run_state.json", list(inner_places(STATE)), n, seed=1, checks=[*status * 15, *drawn])
    few = None if n is None else n // 5
    count += throw_at_lines(run / "metrics.jsonl", few, [*status * 10, *drawn])
    print(count, "inputs")
    assert not out.exists()
    assert count >= 3 * (n or 100)


@amounts(60)
def test_a_token_cache_s_manifest(uptrain, models, tmp_path, n):
    text = tmp_path / "a.txt"
    text.write_text("The checkpoint folder is the interface. " * 40)
    cache, made = tmp_path / "cache", ("--tokenizer", models("llama"), "--seq-len", 16)
    prepare = ("prepare", "--data", text, *made, "--out", cache, "--workers", 1)
    assert accepted(uptrain(*prepare))
    budget = ("--steps", 10, "--lr", 1e-3, "--global-batch-tokens", 2**20)
    readers: list[Callable[[], object]] = [
        lambda: accepted(uptrain("plan", models("llama"), *budget, "--data", cache)),
        lambda: accepted(uptrain(*prepare)),
        lambda: accepted(uptrain("evaluate", models("llama"), "--data", cache)),
    ]
    parsed = json.loads((cache / "manifest.json").read_text())
    shard, source = (list(inner_places(parsed[key][0])) for key in ("shards", "sources"))
    count = throw(cache / "manifest.json", list(inner_places(parsed)), n, seed=0, checks=readers)
    for key, inside in (("shards", shard), ("sources", source)):
        part = tmp_path / "part.json"
        part.write_text(json.dumps(parsed[key][0]))

        def write(key: str = key, part: Path = part) -> None:
            changed = {**parsed, key: [json.loads(part.read_text())]}
            (cache / "manifest.json").write_text(json.dumps(changed))

        count += throw(part, inside, n, seed=1, checks=[partial(_both, write, reader) for reader in readers[:2]])
    print(count, "inputs")
    assert count >= 3 * (n or 100)


# A TOML file of options

TOML_VALUES = (
    "0", "1", "-1", "3", "1.5", "nan", "inf", "-inf", "1e308", "9223372036854775807", "9" * 400, "true", "false",
    '""', '"x"', '"8"', '"2T"', '"nan"', '"\\u0000"', '"../x"', "[]", '["a"]', "[1]", "[[1]]", "[{}]", "{}", "{a = 1}",
    "1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", '["tensorboard", "x"]',
)  # fmt: skip


@amounts(200)
def test_a_file_of_options(models, uptrain, tmp_path, monkeypatch, n):
    """Up to where training would begin."""
    import caches

    from uptrain.commands.run import command
    from uptrain.runs import launch

    watched: list[object] = []
    monkeypatch.setattr(launch, "start", lambda *given: watched.append(given))
    monkeypatch.setattr(launch, "_end", lambda *given: None)
    cache = caches.write_cache(tmp_path / "cache", [[[5] * 40] * 9], 32, VOCAB)
    path = tmp_path / "run.toml"
    required = {
        "model": str(models("llama")), "data": str(cache), "steps": "10", "lr": "1e-3", "out": str(tmp_path / "run"),
        "global-batch-tokens": "256",
    }  # fmt: skip
    names = [name.lstrip("-") for option in command.params for name in option.opts]
    pairs = [(name, value) for name in (*names, "unknown", "a.b") for value in TOML_VALUES]
    chosen = pairs if n is None else random.Random(0).sample(pairs, n)
    for name, value in chosen:
        lines = [f"{key} = '{said}'" for key, said in required.items() if key != name]
        path.write_text("\n".join([*lines, f"{name} = {value}", ""]))
        try:
            accepted(uptrain("run", "--config", path))
        except AssertionError as error:
            raise AssertionError(f"{name} = {value[:200]}") from error
    for content in (
        b"\xff = 1",
        b"steps = ",
        b"steps = 1\nsteps = 2",
        b"x = " + b"[" * 5000,
        b"\x00",
        b"[steps]\nx = 1",
    ):
        path.write_bytes(content)
        uptrain("run", "--config", path, models("llama"), "--data", cache, "--out", tmp_path / "run").refused()
    print(len(chosen) + 6, "inputs")
    assert watched
    assert not (tmp_path / "run").exists()


# What lies beside config.json

TOKENIZER = [
    "tokenizer_class", "bos_token", "eos_token", "unk_token", "add_bos_token", "add_eos_token", "add_prefix_space",
    "legacy", "split_special_tokens", "added_tokens_decoder", "additional_special_tokens", "extra_special_tokens",
    "model_max_length", "auto_map", "chat_template", "clean_up_tokenization_spaces", "padding_side",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@amounts(80)
def test_a_tokenizer_s_settings(models, tmp_path, n):
    folder = shutil.copytree(models("llama"), tmp_path / "source")

    def load() -> None:
        with contextlib.suppress(InputError):
            load_tokenizer(folder)

    load_tokenizer(folder)
    places = [(), *((key,) for key in TOKENIZER)]
    print(throw(folder / "tokenizer_config.json", places, n, seed=0, checks=[load]), "inputs")


@amounts(60)
def test_the_end_of_texts(models, tmp_path, n):
    folder = shutil.copytree(models("llama"), tmp_path / "source")
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')

    def read() -> None:
        with contextlib.suppress(InputError), open_checkpoint(folder) as checkpoint:
            assert all(type(token) is int for token in stop_ids(checkpoint))

    places = [(), ("eos_token_id",)]
    print(throw(folder / "generation_config.json", places, n, seed=0, checks=[read]), "inputs")


@amounts(60)
def test_a_record_of_a_conversion(models, convert, uptrain, tmp_path, n):
    source, out, more = models("llama"), tmp_path / "out", tmp_path / "more"
    assert accepted(convert("mha-to-gqa", source, out, "--groups", 2, "--method", "pca", "--calibration", "none"))
    parsed = json.loads((out / "groupwise.json").read_text())
    places = [*inner_places(parsed), *(("calibration", key) for key in ("text", "sha256_of_ids", "windows", "window"))]
    budget = ("--steps", 10, "--lr", 1e-3, "--global-batch-tokens", 2**20)
    readers: list[Callable[[], object]] = [
        lambda: accepted_or_different(convert("verify", source, out)),
        lambda: accepted(uptrain("plan", out, *budget)),
        lambda: accepted(convert("mha-to-mqa", out, more, "--method", "mean")) and shutil.rmtree(more),
    ]
    for reader in readers:
        reader()
    print(throw(out / "groupwise.json", places, n, seed=0, checks=readers), "inputs")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def accepted_or_different(result: Any) -> None:
    """Check a verification, which may find a difference (3), or something that it cannot compare (4)."""
    if result.code not in (3, 4):
        accepted(result)
    else:
        assert all(line.startswith(("DIFFERENT: ", "NOT CHECKED: ")) for line in result.err.splitlines())
