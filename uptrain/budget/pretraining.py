"""Table of the pre-training of well-known checkpoints: tokens, global batch and peak learning rate.

`certainty` applies to a row's least certain number. "sure": read in the named source. "reported": a rounded or
second-hand number in the source. "from memory": not verified. "4M" and "2M" tokens are read as 2^22 and 2^21, which are
whole sequences.
"""

from dataclasses import dataclass

M2, M4, M8 = 2**21, 2**22, 2**23

Shape = tuple[str, int, int, int, int, int]
"""`model_type`, hidden_size, layers, query heads, intermediate_size, vocab_size. K/V heads change in conversion."""


@dataclass(frozen=True)
class PretrainingRecord:
    """Pre-training of one checkpoint."""

    name: str
    """Value of `--original`."""
    pattern: str
    """Regular expression of its names on the hub, without the owner, in lower case; includes official fine-tunes."""
    shape: Shape
    tokens: int
    batch_tokens: int
    peak_lr: float
    certainty: str
    source: str
    note: str = ""

    @property
    def steps(self) -> int:
        """Optimizer steps, rounded."""
        return round(self.tokens / self.batch_tokens)


LLAMA_1 = "Touvron et al. 2023, arXiv 2302.13971, table 2"
LLAMA_2 = "Touvron et al. 2023, arXiv 2307.09288, table 1"
CODE_LLAMA = "Rozière et al. 2023, arXiv 2308.12950, sections 2.1 and 2.5"
OPEN_LLAMA = "https://github.com/openlm-research/open_llama: the hyperparameters of LLaMA"
SHEARED = "https://github.com/princeton-nlp/LLM-Shearing, llmshearing/scripts/continue_pretrain.sh"
SMOLLM = "https://huggingface.co/blog/smollm and the model cards"
SMOLLM2 = "Ben Allal et al. 2025, arXiv 2502.02737, and the model cards"
TINYLLAMA = "https://huggingface.co/TinyLlama, training details of the model cards"
AMBER = "https://github.com/LLM360/amber-train, main.py; batch size from arXiv 2312.06550"
DEEPSEEK = "https://github.com/deepseek-ai/DeepSeek-LLM, README section 4"
OLMO_2 = "https://github.com/allenai/OLMo, configs/official-*; steps from the names of the checkpoints"
PYTHIA = "https://github.com/EleutherAI/pythia, README and models/*.yml"

SHAPE_7B = ("llama", 4096, 32, 32, 11008, 32000)
SHAPE_13B = ("llama", 5120, 40, 40, 13824, 32000)
CODE_7B = ("llama", 4096, 32, 32, 11008, 32016)
CODE_13B = ("llama", 5120, 40, 40, 13824, 32016)
SMOL_135M = ("llama", 576, 30, 9, 1536, 49152)
SMOL_360M = ("llama", 960, 32, 15, 2560, 49152)
SMOL_1_7B = ("llama", 2048, 24, 32, 8192, 49152)

ALL_STAGES = "Llama 2 and the code stage together"
CODE_STAGE = "the code stage alone, without Llama 2's 2 T tokens"
PRUNED = "the training after pruning, without that of the Llama 2 it was pruned from"
DOLMINO = "stage 1; mid-training on Dolmino follows it"


def _pythia(size: str, hidden: int, layers: int, heads: int, vocab: int, peak_lr: float) -> PretrainingRecord:
    shape = ("gpt_neox", hidden, layers, heads, 4 * hidden, vocab)
    pattern = rf"pythia-{size}(-deduped)?"
    return PretrainingRecord(f"pythia-{size}", pattern, shape, 143_000 * M2, M2, peak_lr, "sure", PYTHIA)


row = PretrainingRecord
# fmt: off
ORIGINALS = (
    row("llama-1-7b", "llama-7b(-hf)?", SHAPE_7B, 10**12, M4, 3e-4, "sure", LLAMA_1),
    row("llama-1-13b", "llama-13b(-hf)?", SHAPE_13B, 10**12, M4, 3e-4, "sure", LLAMA_1),
    row("llama-1-33b", "llama-3[03]b(-hf)?", ("llama", 6656, 60, 52, 17920, 32000), 14 * 10**11, M4, 1.5e-4,
        "sure", LLAMA_1),
    row("llama-1-65b", "llama-65b(-hf)?", ("llama", 8192, 80, 64, 22016, 32000), 14 * 10**11, M4, 1.5e-4,
        "sure", LLAMA_1),
    row("llama-2-7b", "llama-2-7b(-chat)?(-hf)?", SHAPE_7B, 2 * 10**12, M4, 3e-4, "sure", LLAMA_2),
    row("llama-2-13b", "llama-2-13b(-chat)?(-hf)?", SHAPE_13B, 2 * 10**12, M4, 3e-4, "sure", LLAMA_2),
    row("code-llama-7b", "codellama-7b(-instruct)?(-hf)?", CODE_7B, 25 * 10**11, M4, 3e-4, "from memory",
        CODE_LLAMA, ALL_STAGES),
    row("code-llama-7b-code-stage", "codellama-7b(-instruct)?(-hf)?", CODE_7B, 5 * 10**11, M4, 3e-4,
        "from memory", CODE_LLAMA, CODE_STAGE),
    row("code-llama-13b", "codellama-13b(-instruct)?(-hf)?", CODE_13B, 25 * 10**11, M4, 3e-4, "from memory",
        CODE_LLAMA, ALL_STAGES),
    row("code-llama-13b-code-stage", "codellama-13b(-instruct)?(-hf)?", CODE_13B, 5 * 10**11, M4, 3e-4,
        "from memory", CODE_LLAMA, CODE_STAGE),
    row("open-llama-3b", "open_llama_3b(_v2)?", ("llama", 3200, 26, 32, 8640, 32000), 10**12, M4, 3e-4,
        "reported", OPEN_LLAMA),
    row("open-llama-7b", "open_llama_7b(_v2)?", SHAPE_7B, 10**12, M4, 3e-4, "reported", OPEN_LLAMA),
    row("open-llama-13b", "open_llama_13b", SHAPE_13B, 10**12, M4, 3e-4, "reported", OPEN_LLAMA),
    row("sheared-llama-1.3b", r"sheared-llama-1\.3b", ("llama", 2048, 24, 16, 5504, 32000), 48_000 * 2**20, 2**20,
        1e-4, "sure", SHEARED, PRUNED),
    row("sheared-llama-2.7b", r"sheared-llama-2\.7b", ("llama", 2560, 32, 20, 6912, 32000), 48_000 * 2**20, 2**20,
        1e-4, "sure", SHEARED, PRUNED),
    row("smollm-135m", "smollm-135m(-instruct)?", SMOL_135M, 600_000 * 2**20, 2**20, 3e-3, "reported", SMOLLM),
    row("smollm-360m", "smollm-360m(-instruct)?", SMOL_360M, 600_000 * 2**20, 2**20, 3e-3, "from memory", SMOLLM),
    row("smollm-1.7b", r"smollm-1\.7b(-instruct)?", SMOL_1_7B, 500_000 * M2, M2, 5e-4, "reported", SMOLLM),
    row("smollm2-135m", "smollm2-135m(-instruct)?", SMOL_135M, 2 * 10**12, 2**20, 3e-3, "from memory", SMOLLM2),
    row("smollm2-360m", "smollm2-360m(-instruct)?", SMOL_360M, 4 * 10**12, 2**20, 3e-3, "from memory", SMOLLM2),
    row("smollm2-1.7b", r"smollm2-1\.7b(-instruct)?", SMOL_1_7B, 11 * 10**12, M2, 5e-4, "reported", SMOLLM2),
    row("tinyllama-1.1b", r"tinyllama-1\.1b-(intermediate-step-1431k-3t|chat-v1\.0)",
        ("llama", 2048, 22, 32, 5632, 32000), 3 * 10**12, M2, 4e-4, "sure", TINYLLAMA),
    row("amber-7b", "amber(chat)?", SHAPE_7B, 360 * 1_706_976 * 2048, 2240 * 2048, 3e-4, "reported", AMBER),
    row("deepseek-llm-7b", "deepseek-llm-7b-(base|chat)", ("llama", 4096, 30, 32, 11008, 102400), 2 * 10**12,
        2304 * 4096, 4.2e-4, "sure", DEEPSEEK),
    row("olmo-2-1b", "olmo-2-0425-1b(-.*)?", ("olmo2", 2048, 16, 16, 8192, 100352), 1_907_359 * M2, M2, 4e-4,
        "sure", OLMO_2, DOLMINO),
    row("olmo-2-7b", "olmo-2-1124-7b(-.*)?", ("olmo2", 4096, 32, 32, 11008, 100352), 928_646 * M4, M4, 3e-4,
        "sure", OLMO_2, DOLMINO),
    row("olmo-2-13b", "olmo-2-1124-13b(-.*)?", ("olmo2", 5120, 40, 40, 13824, 100352), 596_057 * M8, M8, 9e-4,
        "from memory", OLMO_2, DOLMINO),
    _pythia("70m", 512, 6, 8, 50304, 1e-3),
    _pythia("160m", 768, 12, 12, 50304, 6e-4),
    _pythia("410m", 1024, 24, 16, 50304, 3e-4),
    _pythia("1b", 2048, 16, 8, 50304, 3e-4),
    _pythia("1.4b", 2048, 24, 16, 50304, 2e-4),
    _pythia("2.8b", 2560, 32, 32, 50304, 1.6e-4),
    _pythia("6.9b", 4096, 32, 32, 50432, 1.2e-4),
    _pythia("12b", 5120, 36, 40, 50688, 1.2e-4),
)
# fmt: on
