"""`scripts/study/lm_eval_tasks.py` and `on_tasks.py`: passages of local texts, tasks that ask for them, and results."""

import json

import pytest
from click.testing import CliRunner

from scripts.study import lm_eval_tasks as tasks
from scripts.study import on_tasks

SENTENCE = "It was a long way to the river, and none of them knew who had walked it before."


def test_passages_are_whole_sentences_without_their_last_word():
    passages = list(tasks.split("\n".join([SENTENCE] * 18)))
    assert len(passages) == 3
    for row in passages:
        assert f"{row['before']} {row['word']}." == " ".join([SENTENCE] * 6)


def test_sentences_without_a_last_word_are_joined():
    text = f"{' '.join([SENTENCE] * 6)[:-1]} (1854). {SENTENCE}"
    (row,) = tasks.split(text)
    assert (row["word"], row["before"].count("(1854)")) == ("before", 1)


def test_too_long_sentences_are_left_out():
    assert not list(tasks.split("word " * 300 + "end."))


def test_tasks(tmp_path):
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": " ".join([SENTENCE] * 20)}) + "\n")
    result = CliRunner().invoke(tasks.main, [str(tmp_path / "texts.jsonl"), str(tmp_path / "out"), "--passages", "3"])
    assert (result.exit_code, result.output.startswith("3 passages")) == (0, True)
    assert len((tmp_path / "out/passages.jsonl").read_text().splitlines()) == 3
    for name in tasks.TASKS:
        written = (tmp_path / f"out/{name}.yaml").read_text()
        assert f"task: {name}\n" in written
        assert f"test: {json.dumps(str(tmp_path / 'out/passages.jsonl'))}\n" in written


HARNESS = """#!/bin/sh
for word; do last="$word"; done
[ -e "$(dirname "$last")/tasks/last_word.yaml" ] || exit 3
mkdir -p "$last/model"
cat > "$last/model/results_now.json" <<'END'
{"results": {
    "last_word": {"alias": "last_word", "acc,none": 0.5, "acc_stderr,none": 0.1, "perplexity_stderr,none": "N/A"},
    "prose": {"bits_per_byte,none": 1.25}
}}
END
"""
"""A stand-in for lm_eval, which looks for the tasks and answers like it."""


@pytest.fixture
def on_tasks_with(tmp_path):
    def start(program):
        (tmp_path / "texts.jsonl").write_text(json.dumps({"text": " ".join([SENTENCE] * 20)}) + "\n")
        words = [tmp_path, "--texts", tmp_path / "texts.jsonl", "--program", program]
        return CliRunner().invoke(on_tasks.main, list(map(str, words)))

    return start


def test_results_of_tasks(tmp_path, on_tasks_with):
    program = tmp_path / "lm_eval"
    program.write_text(HARNESS)
    program.chmod(0o755)
    assert json.loads(on_tasks_with(program).output) == {
        "last_word": {"acc": 0.5, "acc_stderr": 0.1}, "prose": {"bits_per_byte": 1.25},
    }  # fmt: skip


def test_a_harness_that_is_missing_or_fails(tmp_path, on_tasks_with):
    missing = on_tasks_with(tmp_path / "none")
    assert (missing.exit_code, "is not a program in PATH" in missing.output) == (1, True)
    program = tmp_path / "lm_eval"
    program.write_text("#!/bin/sh\necho out of memory >&2; exit 1\n")
    program.chmod(0o755)
    failed = on_tasks_with(program)
    assert (failed.exit_code, "out of memory" in failed.output) == (1, True)
