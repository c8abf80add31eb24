"""What reaches terminals: no name of a file or tensor raw, nor as Markdown or HTML; and readers that leave."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from calls import named_calls
from safetensors.torch import save_file

from model.common.printable import first_sentence, markdown, markdown_code, printable, printable_json

ROOT = Path(__file__).parents[2]
EVIL = "a\x1b]0;pwned\x07\x1b[2J\x9b31m\x7f\u202egnp.\u2066z"
SPELT = r"a\x1b]0;pwned\x07\x1b[2J\x9b31m\x7f\u202egnp.\u2066z"
RAW = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff\U000e0041]"
)


def test_what_is_printable():
    assert printable(EVIL) == SPELT
    assert printable("tab\tand\nnewline, é 日本 🙂") == "tab\tand\nnewline, é 日本 🙂"
    assert printable("ن\u200cم \u200f\u061c\U000e0041") == "ن\u200cم " + r"\u200f\u061c\U000e0041"
    assert printable("\r\ud800\u2028") == r"\x0d\ud800\u2028".replace(r"\x0d", r"\r")
    everything = "".join(map(chr, range(0x11_000)))
    assert RAW.search(everything)
    assert not RAW.search(printable(everything))


def test_a_size_does_not_end_a_sentence():
    assert first_sentence("Unable to allocate 256. GiB for an array. Try less.") == (
        "Unable to allocate 256. GiB for an array"
    )


def test_json_means_the_same():
    values = [EVIL, "\ud800", "\r\n\t", "é", "\u200f\U000e0041\ufeff"]
    text = printable_json(json.dumps(values, ensure_ascii=False))
    assert not RAW.search(text)
    assert json.loads(text) == values
    assert "é" in text


def test_markdown_shows_text_as_it_stands():
    assert markdown("a|b\n<script>[x](y) `c` *d*") == r"a\|b \<script\>\[x\](y) \`c\` \*d\*"
    assert markdown_code("a`b|c\nd") == r"`a'b\|c d`"
    assert markdown("SmolLM2-135M_x.y") == "SmolLM2-135M_x.y"


def clean(result, *words, code=0):
    assert result.code == code, result.err
    assert not RAW.search(result.out + result.err)
    for word in words:
        assert word in result.out + result.err


def test_a_tensor_s_name_in_an_error(convert, tmp_path):
    source = tiny.save(tiny.build(), tmp_path / "source")
    tensors = tiny.tensors(source)
    name = f"model.layers.0.self_attn.{EVIL}x_proj.weight"
    save_file({**tensors, name: tensors["lm_head.weight"].clone()}, source / "model.safetensors", {"format": "pt"})
    result = convert("inspect", source)
    result.refused(SPELT)
    clean(result, code=2)


@pytest.fixture
def named(tmp_path):
    """Return a model with files of evil names, in a folder of such a name."""
    source = tiny.save(tiny.build(), tmp_path / EVIL)
    (source / f"{EVIL}.bin").write_text("left out")
    (source / f"{EVIL}.md").write_text("copied")
    return source


def test_names_of_files_in_tables(convert, named, tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("TERM", "dumb")
    clean(convert("inspect", named), SPELT, f"{SPELT}.bin")
    clean(convert("inspect", named, "--json"))
    out = tmp_path / f"{EVIL}.out"
    clean(convert("mha-to-gqa", named, out, "--groups", 2, "--method", "mean"), f"{SPELT}.out", f"{SPELT}.bin")
    clean(convert("verify", named, out), "OK")
    (out / f"{EVIL}.md").unlink()
    clean(convert("verify", named, out), f"the file {SPELT}.md is missing", code=3)


def test_a_name_of_megabytes_makes_no_long_line(convert, tmp_path):
    source = tiny.save(tiny.build(), tmp_path / "source")
    tensors = tiny.tensors(source)
    name = f"{'a' * 200_000}.self_attn.x_proj.weight"
    save_file({**tensors, name: tensors["lm_head.weight"].clone()}, source / "model.safetensors", {"format": "pt"})
    result = convert("inspect", source)
    result.refused("Error: ", "x_proj.weight", "refused.")
    assert len(result.err) < 5000


def test_a_name_with_a_line_break_in_a_table(convert, named, tmp_path):
    (named / "x\n wrote everything.bin").write_text("")
    result = convert("mha-to-gqa", named, tmp_path / "out", "--groups", 2, "--method", "mean", "--dry-run").succeeded()
    assert "\n wrote everything" not in result.out


def test_a_name_makes_no_second_line(convert, named, tmp_path):
    out = tmp_path / "out"
    convert("mha-to-gqa", named, out, "--groups", 2, "--method", "mean")
    (out / "x\nOK: all agree").write_text("")
    result = convert("verify", named, out)
    assert (result.code, result.err.count("\n")) == (3, 1)


def test_the_status_of_a_run(uptrain, distilled, tmp_path):
    run = tmp_path / EVIL
    shutil.copytree(distilled, run)
    state = run / "run_state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "status": "failed", "reason": EVIL}))
    clean(uptrain("status", run), SPELT)
    clean(uptrain("status", run, "--json"))
    assert json.loads(uptrain("status", run, "--json").out)["reason"] == EVIL
    clean(uptrain("report", run), SPELT)
    assert not RAW.search((run / "report.html").read_text())


def test_generated_text(capsys):
    from model.common.console import echo

    echo(f"one\n\ttwo {EVIL}", nl=False)
    assert capsys.readouterr().out == f"one\n\ttwo {SPELT}"


def test_the_card_of_a_conversion(convert, tmp_path):
    source = tiny.save(tiny.build(), tmp_path / "x|<img src=y>[z](w)")
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "n_head_kv": "|<script>\n# [a](b)"}))
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", "mean").succeeded()
    section = (tmp_path / "out/README.md").read_text().partition("<!-- groupwise: begin -->")[2]
    assert r"| Base model | x\|\<img src=y\>\[z\](w) |" in section
    assert r"\<script\>" in section
    assert not re.search(r"(?<!\\)<(script|img)", section)
    assert "\n#" not in section.partition("\n## Conversion")[2]


def test_the_card_of_a_gguf():
    import yaml

    from model.checkpoint.formats.gguf.reader import _card

    text = _card({"general.name": "x\n---\n# <b>y", "general.license": "mit\nbase_model: evil"}).decode()
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front)["license"] == "mit\nbase_model: evil"
    assert "base_model" not in yaml.safe_load(front)
    assert body.strip() == r"# x --- # \<b\>y"


def test_the_card_of_an_export(tmp_path):
    from uptrain.export.model_card import model_card

    record = {
        "settings": {"model": "m`|<b>", "steps": 2, "loss": "mix", "teacher": "t|`", "schedule": "<i>", "lr": 1e-3,
                     "optimizer": "a|b", "precision": "fp32"},
        "budget": {"alpha": None}, "step": 1, "tokens": 10, "data_sha256": "|" * 64, "evaluations": [],
    }  # fmt: skip
    (tmp_path / "config.json").write_text("{}")
    card = model_card(tmp_path, record).decode()
    assert r"from `m'\|<b>`, 1 of 2 steps" in card
    assert r"| Teacher | `t\|'` |" in card
    assert r"\<i\>, peak 0.001, a\|b, fp32" in card


PRINTS = re.compile(r"print|click\.s?echo\w*|rich\.print\w*|sys\.std(out|err)\..*write(lines)?|(.*\.)?Console")
"""Calls that send text to the terminal as it stands."""


def prints(text: str) -> list[str]:
    return [name for _, name in named_calls(ast.parse(text)) if PRINTS.fullmatch(name)]


def test_text_leaves_through_one_door():
    """The functions of `model/common/console.py` escape what they print; whatever prints otherwise prints raw."""
    for folder in ("convert", "model", "uptrain"):
        for path in (ROOT / folder).rglob("*.py"):
            if path != ROOT / "model/common/console.py":
                assert not prints(path.read_text()), path


@pytest.mark.parametrize(
    "text",
    [
        "print(x)", "click.echo(x)", "from click import secho as say; say(x)", "sys.stdout.write(x)",
        "sys.stderr.write(x)", "sys.stdout.buffer.write(x)", "sys.stdout.writelines(x)",
        "from sys import stderr; stderr.write(x)", "rich.print(x)", "from rich import print as show; show(x)",
        "rich.console.Console()", "from rich.console import Console as Screen; Screen().print(x)",
    ],
)  # fmt: skip
def test_other_doors_are_seen(text):
    assert prints(text)


def run_in_shell(script: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    """Run `python -m convert` as `$convert` in a shell, with the arguments as $1, $2, …"""
    words = ["sh", "-c", script, "sh", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "convert": f"{sys.executable} -m convert"}
    return subprocess.run(words, capture_output=True, text=True, env=environment)


def test_closed_and_full_streams(tmp_path):
    """A service may start a command without standard streams, or with a log on a full disk."""
    source = tiny.save(tiny.build(), tmp_path / "source")
    convert = "$convert mha-to-gqa $1 $2 --groups 2 --method mean"
    done = run_in_shell(f"{convert} >&- 2>&-", source, tmp_path / "closed")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert tiny.tensors(tmp_path / "closed")
    missing = run_in_shell("$convert inspect $1 2>&-", tmp_path / "missing")
    assert (missing.returncode, missing.stdout) == (2, "")
    full = run_in_shell(f"{convert} --json >/dev/full", source, tmp_path / "full")
    assert (full.returncode, full.stderr) == (
        1, "Error: only the result could not be printed (No space left on device); what was written is complete.\n"
    )  # fmt: skip
    assert tiny.tensors(tmp_path / "full")
    assert run_in_shell(f"{convert} 2>/dev/full", source, tmp_path / "out").returncode == 0


def test_a_terminal_without_width(tmp_path):
    source = tiny.save(tiny.build(), tmp_path / "source")
    assert "K/V heads" in run_in_shell("COLUMNS=0 $convert inspect $1", source).stdout


def program(*arguments, **environment):
    words = [sys.executable, "-m", "convert", *map(str, arguments)]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **environment}, text=True
    )


@pytest.mark.parametrize(("groups", "code"), [(2, 0), (3, 2)])
def test_a_reader_that_leaves_changes_no_exit_code(source, tmp_path, groups, code):
    process = program("mha-to-gqa", source, tmp_path / "out", "--groups", groups, "--method", "mean")
    process.stdout.close()
    process.stderr.close()
    assert process.wait() == code
    assert (tmp_path / "out").exists() == (code == 0)


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("mha-to-gqa", "--help")])
def test_a_reader_of_help_that_leaves(arguments):
    process = program(*arguments)
    process.stdout.close()
    with process.stderr:
        assert (process.wait(), process.stderr.read()) == (0, "")


def test_a_terminal_of_few_characters(source, tmp_path):
    arguments = ("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", "mean")
    out, err = (process := program(*arguments, PYTHONIOENCODING="ascii")).communicate()
    assert (process.returncode, err) == (0, "")
    assert r"8 \u2192 2" in out


@pytest.mark.parametrize("rank", ["1", ""])
def test_errors_do_not_depend_on_a_launcher(source, tmp_path, rank):
    process = program("mha-to-gqa", source, tmp_path / "out", "--groups", 3, "--method", "mean", LOCAL_RANK=rank)
    _, err = process.communicate()
    assert process.returncode == 2 and err.startswith("Error: --groups 3 is not possible")
