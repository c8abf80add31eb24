"""EleutherAI's lm-evaluation-harness opens what we write, and scores local texts with it as our own code does."""

import json
import lzma
import math
import subprocess
import sys
from pathlib import Path

import interop
import pytest
import tiny
import torch
from tokenizers import Tokenizer

import convert
from model.decoder.loading import load_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SAMPLE = Path(convert.__file__).parent / "calibration_text/sample_texts/mixture.jsonl.xz"
PASSAGES = 12


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("texts")
    lines = lzma.decompress(SAMPLE.read_bytes()).decode().splitlines()
    (folder / "mixture.txt").write_text("\n\n".join(json.loads(line)["text"] for line in lines)[:20000])
    return folder


@pytest.fixture(scope="module")
def tasks(texts, tmp_path_factory) -> Path:
    interop.need("lm_eval")
    out: Path = tmp_path_factory.mktemp("harness") / "tasks"
    command = [sys.executable, "-m", "scripts.study.lm_eval_tasks", texts, out, "--passages", str(PASSAGES)]
    subprocess.run(command, cwd=interop.ROOT, check=True)
    return out


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Return a parent, its conversions, and one that was uptrained and exported."""
    interop.need("lm_eval")
    place = tmp_path_factory.mktemp("models")
    folders = {"parent": tiny.DEMO} | {
        f"GQA-{n}": out for n, out in interop.convert_to_all(tiny.DEMO, place).items() if n < 8
    }
    (place / "text").mkdir()
    (place / "text/speech.txt").write_text(lzma.decompress(SAMPLE.read_bytes()).decode()[-40000:])
    uptrain = (sys.executable, "-m", "uptrain")
    options = ("--tokens", "4096", "--global-batch-tokens", "2048", "--lr", "5e-4", "--seq-len", "512")
    run, exported = place / "run", place / "exported"
    subprocess.run(
        [*uptrain, "run", folders["GQA-2"], "--data", place / "text", *options, "--out", run],
        cwd=interop.ROOT,
        check=True,
    )
    subprocess.run([*uptrain, "export", run, exported], cwd=interop.ROOT, check=True)
    return folders | {"uptrained": exported}


def score(model: Path, texts: Path) -> dict[str, dict[str, float]]:
    """Return the harness' figures of each task."""
    program = interop.need("lm_eval") / "bin/lm_eval"
    command = [sys.executable, "-m", "scripts.study.on_tasks", model, "--texts", texts, "--passages", str(PASSAGES)]
    done = subprocess.run(
        [*command, "--program", program], cwd=interop.ROOT, check=True, capture_output=True, text=True
    )
    scores: dict[str, dict[str, float]] = json.loads(done.stdout)
    return scores


def expected(model: Path, tasks: Path) -> dict[str, float]:
    """Return the same figures by our own code, each passage by itself."""
    ours, tokenizer = load_model(model, torch.float32), Tokenizer.from_file(str(model / "tokenizer.json"))
    end = json.loads((model / "config.json").read_text())["eos_token_id"]
    rows = [json.loads(line) for line in (tasks / "passages.jsonl").read_text().splitlines()]
    nats, n_bytes, words, right = 0.0, 0, [], 0
    for row in rows:
        passage = f"{row['before']} {row['word']}"
        before, ids = ([end, *tokenizer.encode(text).ids] for text in (row["before"], passage))
        assert ids[: len(before)] == before
        with torch.inference_mode():
            log_probs = ours(torch.tensor([ids]))[0, :-1].log_softmax(-1)
        targets = torch.tensor(ids[1:])
        given = log_probs.gather(1, targets[:, None])[:, 0]
        nats, n_bytes = nats - float(given.sum()), n_bytes + len(passage.encode())
        # The harness begins with an end of text only where nothing else is given.
        start = len(before) - 1
        with torch.inference_mode():
            log_probs = ours(torch.tensor([ids[1:]]))[0, :-1].log_softmax(-1)[start - 1 :]
        words.append(float(log_probs.gather(1, targets[start:, None]).sum()))
        right += int((log_probs.argmax(-1) == targets[start:]).all())
    return {
        "bits_per_byte": nats / n_bytes / math.log(2),
        "perplexity": math.exp(-sum(words) / len(words)),
        "acc": right / len(words),
    }


@pytest.mark.parametrize("name", ["parent", "GQA-4", "GQA-2", "GQA-1", "uptrained"])
def test_scores(models, texts, tasks, figure, name):
    theirs, ours = score(models[name], texts), expected(models[name], tasks)
    assert theirs["last_word"]["acc"] == ours["acc"]
    for task, measure in (("prose", "bits_per_byte"), ("last_word", "perplexity")):
        difference = abs(theirs[task][measure] / ours[measure] - 1)
        figure(f"lm-evaluation-harness: {measure}, relative", difference)
        assert difference < 1e-4
