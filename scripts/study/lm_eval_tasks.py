"""Write tasks for EleutherAI's lm-evaluation-harness from local texts, so that it needs no hub.

    python -m scripts.study.lm_eval_tasks valid.jsonl TASKS
    lm_eval run --model hf --model_args pretrained=OUT --include_path TASKS --tasks last_word,prose

TEXTS is a file of JSON lines with a key `text`, or a folder of .txt files. `last_word`: predict the last word of a
passage (as in LAMBADA, Paperno et al. 2016, but passages are not selected for it). `prose`: bits per byte of short
passages. A passage consists of whole sentences, at most 800 characters.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import click

from scripts.study.behaviour import documents

MAX_LENGTH, MIN_LENGTH = 800, 400
"""Characters of a passage, which fits in the context of small models."""
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {output_type}
doc_to_text: "{context}"
doc_to_target: "{target}"
metric_list:
{metrics}
metadata:
  version: 1.0
"""
TASKS = {
    "last_word": ("loglikelihood", "{{before}}", " {{word}}", ("acc", "perplexity")),
    "prose": ("loglikelihood_rolling", "", "{{before}} {{word}}", ("bits_per_byte", "byte_perplexity")),
}
"""Name → output type, prompt, target and metrics."""


@click.command(help=__doc__)
@click.argument("texts", type=click.Path(exists=True, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--passages", type=click.IntRange(min=1), default=200, show_default=True, help="How many of each text.")
def main(texts: Path, out: Path, passages: int) -> None:
    n_passages = write_tasks(texts, out, passages)
    click.echo(f"{n_passages} passages, tasks {' and '.join(TASKS)}, in {out}.")


def write_tasks(texts: Path, out: Path, passages: int) -> int:
    """Write the tasks and their data, at most `passages` from each text, and return the number of passages."""
    out.mkdir(parents=True, exist_ok=True)
    data = out.resolve() / "passages.jsonl"
    rows = [row for text in documents(texts) for row, _ in zip(split(text), range(passages), strict=False)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, (output_type, context, target, measures) in TASKS.items():
        metrics = "\n".join(f"  - metric: {measure}" for measure in measures)
        task = TASK.format(
            name=name,
            data=json.dumps(str(data)),
            output_type=output_type,
            context=context,
            target=target,
            metrics=metrics,
        )
        (out / f"{name}.yaml").write_text(task)
    return len(rows)


def split(text: str) -> Iterator[dict[str, str]]:
    """Yield passages of whole sentences, each as the text before its last word, and that word."""
    passage = ""
    for sentence in re.split(r"(?<=[.!?])\s+", " ".join(text.split())):
        passage = f"{passage} {sentence}".strip()
        if len(passage) > MAX_LENGTH:
            passage = sentence if len(sentence) <= MAX_LENGTH else ""
        if len(passage) >= MIN_LENGTH and (match := re.fullmatch(r"(.*) (\w+)[.!?]", passage)):
            yield {"before": match[1], "word": match[2]}
            passage = ""


if __name__ == "__main__":
    main()
