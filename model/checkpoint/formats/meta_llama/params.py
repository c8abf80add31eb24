"""Read Meta's `params.json`: the sizes and settings of a Llama that its tensor shapes do not contain.

Source: `ModelArgs` in Meta's llama and llama-models repositories, and the files of the released models.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from model.checkpoint.hf_config import llama3_scaling
from model.common import checks
from model.common.errors import CheckpointError
from model.files.read import read_json

PARAMS = "params.json"

# The supported keys. Any other key may change the model's output, and is refused.
KEYS = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps",
    "rope_theta", "use_scaled_rope", "rope_scaling_factor", "max_seq_len", "max_batch_size",
}  # fmt: skip

# `dim` → RoPE's scaling factor. Llama 3.1 (8B, 70B, 405B) and 3.2 (1B, 3B) have the same keys but other factors.
SCALING_FACTORS = {4096: 8.0, 8192: 8.0, 16384: 8.0, 2048: 32.0, 3072: 32.0}

LLAMA3_VOCABULARY = 128256


class Params:
    """The settings in the file. Errors name the file and the key."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / PARAMS
        self._values = _read(self.path)
        for key, value in self._values.items():
            if key not in KEYS:
                raise CheckpointError(
                    f"{self.path} has the setting {key} = {value!r}, which is not one of Llama 1 to 3's; not supported."
                )
        self.dim = self._integer("dim")
        self.n_layers = self._integer("n_layers")
        self.n_heads = self._integer("n_heads")
        self.n_kv_heads = self._integer("n_kv_heads", self.n_heads)
        if self.dim % self.n_heads or self.dim // self.n_heads % 2 or self.n_heads % self.n_kv_heads:
            raise CheckpointError(
                f"{self.path} has dim = {self.dim}, n_heads = {self.n_heads} and n_kv_heads = {self.n_kv_heads}, which "
                "do not make equal heads of even size."
            )
        self.head_dim = self.dim // self.n_heads
        self.norm_eps = self._number("norm_eps")
        self.rope_theta = self._number("rope_theta", 10000.0)
        self.rope_scaling = self._rope_scaling()

    def vocab_size(self, n_rows: int) -> int:
        """Return the size of the vocabulary: the embedding's `n_rows`. Llama 1 and 2 state -1 in the file.

        Raises CheckpointError if the file states another size.
        """
        stated = self._values.get("vocab_size", -1)
        if stated not in (-1, n_rows) or isinstance(stated, bool | float):
            raise CheckpointError(
                f"{self.path} says vocab_size = {stated!r}, but tok_embeddings has {n_rows} rows; they do not match."
            )
        return n_rows

    def context_length(self) -> tuple[int, str | None]:
        """Return `max_position_embeddings`, and a note for the user if it is an assumption."""
        if self._values.get("max_seq_len") is not None:
            return self._integer("max_seq_len"), None
        if self.rope_scaling:
            length, of = 131072, "Llama 3.1 and later"
        elif self.rope_theta == 500000.0:
            length, of = 8192, "Llama 3"
        elif self.rope_theta == 1000000.0:
            length, of = 16384, "Code Llama"
        else:
            # norm_eps is 1e-5 in Llama 2, and 1e-6 in Llama 1 up to 33B. Llama 1's 65B has 1e-5, too, and the width of
            # Llama 2's 70B, but no grouped heads.
            is_llama2 = self.norm_eps == 1e-5 and (self.dim < 8192 or self.n_kv_heads < self.n_heads)
            length, of = (4096, "Llama 2") if is_llama2 else (2048, "Llama 1")
        return length, (
            f"{PARAMS} does not give the context length; config.json says max_position_embeddings = {length}, as in "
            f"{of}. Correct it there if it is wrong, or set max_seq_len in {PARAMS}."
        )

    def special_tokens(self, vocab_size: int) -> dict[str, int]:
        """Return the tokens that begin and end a text: Llama 3's, or those of Llama 1 and 2 (SentencePiece)."""
        bos, eos = (128000, 128001) if vocab_size >= LLAMA3_VOCABULARY else (1, 2)
        return {"bos_token_id": bos, "eos_token_id": eos}

    def end_of_turn(self, vocab_size: int) -> Iterator[str]:
        """Yield a note for Llama 3: the file does not tell an Instruct model, whose turns end otherwise."""
        if vocab_size >= LLAMA3_VOCABULARY:
            yield (
                "eos_token_id is 128001, the base model's; for an Instruct model, set it to [128001, 128008, 128009] "
                "in config.json and generation_config.json, or texts do not end with a turn."
            )

    def _rope_scaling(self) -> dict[str, Any] | None:
        scaled = self._values.get("use_scaled_rope", False)
        if not isinstance(scaled, bool):
            raise CheckpointError(f"{self.path} has use_scaled_rope = {scaled!r}; it must be true or false.")
        if not scaled:
            return None
        factor = self._number("rope_scaling_factor", SCALING_FACTORS.get(self.dim))
        return llama3_scaling(factor)

    def _integer(self, key: str, default: int | None = None) -> int:
        return checks.whole_number(self._get(key, default), f"{self.path} has {key}")

    def _number(self, key: str, default: float | None = None) -> float:
        return checks.number(self._get(key, default), f"{self.path} has {key}", above=0.0)

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self.path} lacks {key}, which is required.")
        return value


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path.parent} has consolidated.*.pth but no {PARAMS}, which describes the model.")
    values = read_json(path)
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a {type(values).__name__}, not a JSON object.")
    return values
