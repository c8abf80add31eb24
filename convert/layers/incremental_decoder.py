"""Run a whole model one token at a time, with a KV cache: by the project's own decoder, or its class in transformers.

Letters: B texts side by side, V vocabulary.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from convert.calibration_text.choices import SELF, SHIPPED
from convert.errors import UnsupportedMethodError
from model.checkpoint import Checkpoint
from model.decoder.config import is_native
from model.decoder.generation import decode
from model.decoder.kv_cache import KVCache
from model.decoder.llama import LlamaForCausalLM
from model.decoder.loading import build_meta, load_llama
from model.decoder.transformers_classes import cache_argument
from model.families import find_family


class IncrementalDecoder(ABC):
    """A model in memory, and the KV cache of the texts that it continues."""

    n_embeddings: int
    """Number of rows of the embedding."""

    @abstractmethod
    def begin(self, n_rows: int, n_tokens: int) -> None:
        """Begin `n_rows` empty texts, of at most `n_tokens` tokens each."""

    @abstractmethod
    def append(self, ids_B: Tensor) -> Tensor:
        """Append one token to each text. Return the logits of the next one, [B, V], float32 on the CPU."""


def check_can_generate(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedMethodError for an encoder-decoder, which continues no text.

    Raises CheckpointError if a tensor is missing or left over.
    """
    family = find_family(checkpoint.config).family
    if family.is_encoder_decoder:
        raise UnsupportedMethodError(
            f"--calibration {SELF} needs a model that continues texts, and model_type {family.model_type!r} is an "
            f"encoder-decoder; calibrate on a text instead: --calibration {SHIPPED}, or a file."
        )
    if is_native(checkpoint.config):
        build_meta(checkpoint)


def open_model(checkpoint: Checkpoint, device: str) -> IncrementalDecoder:
    """Load a whole model onto a device, in the checkpoint's dtype.

    Raises CheckpointError if neither the project's own decoder nor transformers can load it.
    """
    if is_native(checkpoint.config):
        model = load_llama(checkpoint, None, device)
        model.prepack()
        return _Native(model)
    from convert.layers.transformers_model_layers import TransformersModelLayers  # transformers takes seconds to import

    return _Transformers(TransformersModelLayers(checkpoint, 1, device).load_whole())


class _Native(IncrementalDecoder):
    def __init__(self, model: LlamaForCausalLM) -> None:
        self._model, self._weight = model, model.lm_head_weight
        self.n_embeddings = model.model.embed_tokens.num_embeddings

    def begin(self, n_rows: int, n_tokens: int) -> None:
        self._cache = KVCache(self._model.config, n_rows, n_tokens, self._weight.dtype, self._weight.device)

    def append(self, ids_B: Tensor) -> Tensor:
        return decode(self._model, ids_B.to(self._weight.device), self._cache).cpu()


class _Transformers(IncrementalDecoder):
    def __init__(self, hf_model: Any) -> None:
        self._model, self._cache_argument = hf_model, cache_argument(hf_model)
        self.n_embeddings = self._model.get_input_embeddings().weight.shape[0]

    def begin(self, n_rows: int, n_tokens: int) -> None:
        from transformers import DynamicCache

        # With the config, layers with sliding windows cache no more than their window.
        self._cache = DynamicCache(config=self._model.config)

    @torch.inference_mode()
    def append(self, ids_B: Tensor) -> Tensor:
        ids_B1 = ids_B[:, None].to(self._model.device)
        logits_B1V: Tensor = self._model(ids_B1, use_cache=True, **{self._cache_argument: self._cache}).logits
        return logits_B1V[:, 0].float().cpu()
