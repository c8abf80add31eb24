"""`scripts/study/lm_eval_tasks.py`: passages of local texts, and tasks that ask for them."""

import json

from click.testing import CliRunner

from scripts.study import lm_eval_tasks as tasks

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
