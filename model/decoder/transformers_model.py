"""Wrap transformers' own classes in the interface of `model.decoder.llama`, for families without native code.

Code that needs only logits and losses (training, evaluation, a teacher) works with both.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.common import checks
from model.common.errors import CheckpointError
from model.decoder.losses import IGNORED, next_token_targets
from model.decoder.masks import document_mask, document_positions
from model.decoder.transformers_classes import build_hf_model, read_hf_config, refusing
from model.families import FAMILIES
from model.files.read import MAX_CONFIG_BYTES, check_size

FULL, SLIDING = "full_attention", "sliding_attention"
"""What configs and classes of transformers call the kinds of layers."""
_PROBED = 12
"""Tokens of the rows that show whether documents are separate."""
_CLOSE, _NEARLY = 0.05, 0.3
"""Largest difference of two runs' logits that counts as rounding, in standard deviations of the logits: within one
batch, and between batches of different shapes."""


HF_PREFIX = "hf_model."
"""How the names of a `TransformersModel`'s parameters begin, by its attribute."""


class TransformersModel(nn.Module):
    """A causal language model of transformers with the interface of `LlamaForCausalLM`."""

    state_dtype: torch.dtype | None = None
    """The dtype to which FSDP2 casts the states that enter a layer; None without it."""

    def __init__(self, hf_model: nn.Module) -> None:
        super().__init__()
        self.hf_model = hf_model

    @property
    def lm_head_weight(self) -> Tensor:
        """The LM head's matrix, [V, M]. Some families scale or cap the logits after it; `forward` includes that."""
        weight = self.hf_model.get_output_embeddings().weight  # type: ignore[operator]
        assert isinstance(weight, Tensor)
        return weight

    def hidden(self, ids_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Return the hidden states before the LM head, [B, T, M]."""
        body = self.hf_model.base_model
        hidden_BTM: Tensor = body(ids_BT, use_cache=False, **self._packing(documents_BT)).last_hidden_state  # type: ignore[operator]
        return hidden_BTM

    def forward(
        self, ids_BT: Tensor, labels_BT: Tensor | None = None, documents_BT: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits, or the sum of losses and their number, as `LlamaForCausalLM.forward` does."""
        logits_BTV: Tensor = self.hf_model(ids_BT, use_cache=False, **self._packing(documents_BT)).logits.float()
        if labels_BT is None:
            return logits_BTV
        targets_BT = next_token_targets(labels_BT, documents_BT)
        loss = F.cross_entropy(
            logits_BTV[:, :-1].flatten(0, 1), targets_BT.flatten(), reduction="sum", ignore_index=IGNORED
        )
        return loss, (targets_BT != IGNORED).sum()

    def train(self, mode: bool = True) -> Self:
        """Leave the class in evaluation mode: in training mode it may draw noise, by dropout or in routers of experts.

        Noise would depend on the division of a step into micro-batches and processes, and would be distilled. The own
        decoder draws none either.
        """
        super().train(mode)
        self.hf_model.eval()
        return self

    def check_packing(self, seq_len: int) -> None:
        """Raise CheckpointError if documents packed into windows of `seq_len` tokens cannot be separated.

        Separation needs attention with a causal mask. Convolutions and recurrent states do not use it. Where scores
        depend on distance (ALiBi), it does not suffice. Classes with sliding windows take other masks for these; that
        those of Groupwise's families do is tested. Separation is also impossible if transformers chooses the rotary
        frequencies of all documents by the longest one. Windows may not be longer than a table of positions either.
        """
        config: Any = self.hf_model.config
        both_ways = getattr(config, "use_bidirectional_attention", None)
        if getattr(config, "is_causal", None) is False or both_ways in (True, "all"):
            raise CheckpointError(
                f"model_type {config.model_type!r} has attention to later tokens here (is_causal = false or "
                "use_bidirectional_attention in config.json); only causal models can be trained or evaluated."
            )
        if others := sorted(_kinds(config) - {FULL, SLIDING}):
            raise CheckpointError(
                f"model_type {config.model_type!r} cannot be trained or evaluated here: a mask does not separate the "
                f"documents of a window in its layers of the kind {' and '.join(others)}."
            )
        window = _window_in_class(config)
        if window is not None and seq_len > window and config.model_type not in FAMILIES:
            raise CheckpointError(
                f"model_type {config.model_type!r} cannot be trained or evaluated on windows of {seq_len} tokens "
                f"here: its layers see the last {window} tokens only; {_shorter(window)}."
            )
        chosen = _known(config, "keep_window_size")  # Doge's
        if chosen is not None and seq_len > chosen:
            raise CheckpointError(
                f"model_type {config.model_type!r} cannot be trained or evaluated on windows of {seq_len} tokens "
                f"here: in more than {chosen} tokens, it chooses those to attend to among all documents; "
                f"{_shorter(chosen)}."
            )
        attention = getattr(config, "attn_config", None)
        if config.model_type == "bloom" or getattr(config, "alibi", False) or getattr(attention, "alibi", False):
            raise CheckpointError(
                f"model_type {config.model_type!r} cannot be trained or evaluated here: its attention counts distances "
                "(ALiBi) across the documents of a window."
            )
        context = getattr(config, "max_position_embeddings", None)
        if context is not None and 0 < context < seq_len and not getattr(config, "rope_parameters", None):
            raise CheckpointError(
                f"model_type {config.model_type!r} has positions for {context} tokens only, so it cannot be trained or "
                f"evaluated on windows of {seq_len} tokens; {_shorter(context)}."
            )
        for context in _length_dependent_contexts(config):
            if seq_len > context:
                raise CheckpointError(
                    f"model_type {config.model_type!r} cannot be trained or evaluated on windows of {seq_len} "
                    f"tokens here: beyond {context} tokens its rotary frequencies depend on the longest document of a "
                    f"batch; {_shorter(context)}."
                )

    def _packing(self, documents_BT: Tensor | None) -> dict[str, Any]:
        """Return the arguments that make transformers separate packed documents."""
        if documents_BT is None:
            return {}
        self.check_packing(documents_BT.shape[1])
        return {"attention_mask": self._masks(documents_BT), "position_ids": document_positions(documents_BT)}

    def _masks(self, documents_BT: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the mask of all layers, or those of both kinds of layers, as classes with `layer_types` take them."""
        config: Any = self.hf_model.config
        window = _window_in_class(config)
        if window is None or documents_BT.shape[1] <= window:
            return self._mask(documents_BT, None)
        if FULL not in _kinds(config):
            return self._mask(documents_BT, window)
        return {FULL: self._mask(documents_BT, None), SLIDING: self._mask(documents_BT, window)}

    def _mask(self, documents_BT: Tensor, window: int | None) -> Tensor:
        """Return what is added to the scores, [B, 1, T, T]: 0, or the least number where a token does not attend."""
        allowed = document_mask(documents_BT, window, dense=True).allowed_B1TS
        assert allowed is not None
        dtype = self._mask_dtype(allowed.device.type)
        mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return mask.masked_fill(~allowed, torch.finfo(dtype).min)

    def _mask_dtype(self, device_type: str) -> torch.dtype:
        """Return the dtype of a mask that is added to the scores.

        torch's attention under autocast (or in FSDP2's layers) would cast a wider mask in each layer, and keep each
        copy for the backward pass. Scores that a class computes itself may be float32, so the mask is so too.
        """
        config: Any = self.hf_model.config
        if config._attn_implementation == "sdpa":
            if torch.is_autocast_enabled(device_type):
                return torch.get_autocast_dtype(device_type)
            if self.state_dtype is not None:
                return self.state_dtype
        # The widest: states are float32 in training, and parameters that are not trained may be narrower. Then the
        # embedding knows the dtype of states, also where a teacher shares all of the student's parameters.
        dtypes = {parameter.dtype for parameter in self.parameters()}
        embedding: Any = self.hf_model.get_input_embeddings()  # type: ignore[operator]
        if hasattr(embedding, "state_dtype"):
            dtypes.add(embedding.state_dtype)
        return functools.reduce(torch.promote_types, dtypes)


def _kinds(config: Any) -> set[str]:
    """Return the kinds of attention that the config names for layers; empty if all are of one kind."""
    return {*(_known(config, "layer_types") or ())}


def _window_in_class(config: Any) -> int | None:
    """Return how many tokens layers with a sliding window see, by a class's config; None if no layer has one."""
    kinds, window = _kinds(config), _known(config, "sliding_window")
    if kinds and SLIDING not in kinds:
        return None
    if window is None and kinds:
        raise CheckpointError(
            f"config.json of model_type {config.model_type!r} has layers of the kind {SLIDING} and no sliding_window "
            "(or use_sliding_window = false); correct it."
        )
    return None if window is None else checks.whole_number(window, "config.json has sliding_window")


def _known(config: Any, key: str) -> Any:
    """Return a setting of a config; None if its class does not know the key, which it keeps and the model ignores.

    Of other classes than Groupwise's families, which might read it all the same, return whatever the config holds.
    """
    is_ignored = config.model_type in FAMILIES and not hasattr(type(config), key)
    return None if is_ignored else getattr(config, key, None)


def _shorter(n_tokens: int) -> str:
    return f"use windows of {n_tokens} tokens at most (--seq-len {n_tokens})"


def _length_dependent_contexts(config: Any) -> Iterator[int]:
    """Yield, for each rotary embedding with length-dependent frequencies, the length from which they change.

    (transformers, `modeling_rope_utils.dynamic_rope_update`.)
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        if rope.get("rope_type") == "longrope" and rope.get("short_factor") != rope.get("long_factor"):
            yield rope["original_max_position_embeddings"]
        elif rope.get("rope_type") == "dynamic":
            yield config.max_position_embeddings


def load_hf_model(folder: Path, n_stored: int, dtype: torch.dtype | None, device: str) -> TransformersModel:
    """Open a folder with transformers' auto class. `n_stored`: how many elements its tensors have.

    Raises CheckpointError if transformers cannot build the model, or tensors are missing, left over or of the wrong
    shape.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        meta_model = build_hf_model(folder, dtype)
    n_parameters = sum(parameter.numel() for parameter in meta_model.parameters())
    if n_parameters > 2 * n_stored:  # transformers would first allocate all; a tied LM head may count twice
        raise CheckpointError(
            f"{folder}: config.json describes a model of {n_parameters:,} parameters, but the files hold "
            f"{n_stored:,}; they do not match."
        )
    if (folder / "generation_config.json").exists():
        check_size(folder / "generation_config.json", MAX_CONFIG_BYTES)
    with refusing(f"transformers can build no model from {folder}/config.json"):
        opened: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=read_hf_config(folder),
            trust_remote_code=False,
            dtype=dtype or "auto",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    hf_model, loading = opened
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loading[kind]:
            raise CheckpointError(f"{folder}: {kind.replace('_', ' ')}: {sorted(map(str, loading[kind]))[0]}, …")
    model = TransformersModel(hf_model.to(device)).eval()
    check_separation(model)
    return model


@torch.no_grad()  # not inference mode: what a class caches in its first pass may be needed for gradients
def check_separation(model: TransformersModel) -> None:
    """Raise CheckpointError if packed documents see each other, or a token sees later ones.

    Run three short rows of two documents. Row 1 differs from row 0 in the first document, row 2 in the last token. The
    second document must also have nearly the logits that it has alone, also where the class itself numbers the
    positions: RoBERTa's do not begin at 0. Skipped for the families of Groupwise, which the tests compare.
    """
    config: Any = model.hf_model.config
    if config.model_type in FAMILIES:
        return
    vocab_size, half = len(model.lm_head_weight), _PROBED // 2
    row_T = 3 + torch.arange(_PROBED)
    ids_BT = torch.stack([row_T, row_T, row_T])
    ids_BT[1, :half] += _PROBED
    ids_BT[2, -1] += _PROBED
    ids_BT = (ids_BT % vocab_size).to(model.lm_head_weight.device)
    documents_BT = (torch.arange(_PROBED, device=ids_BT.device) >= half).long().expand(3, -1)
    problem = (
        f"model_type {config.model_type!r} cannot be trained or evaluated here: its class does not run on a short text"
    )
    with refusing(problem, running=True):
        first_TV, other_TV, later_TV = model(ids_BT, None, documents_BT)
        (alone_TV,) = model(ids_BT[:1, half:], None, torch.zeros_like(documents_BT[:1, half:]))
        (by_class_TV,) = model(ids_BT[:1, half:])
    scale = first_TV.std()
    leaks = (first_TV[half:] - other_TV[half:]).abs().max() > _CLOSE * scale
    sees_later = (first_TV[:-1] - later_TV[:-1]).abs().max() > _CLOSE * scale
    differs_alone = (first_TV[half:] - alone_TV).abs().max() > _NEARLY * scale
    has_other_positions = (by_class_TV - alone_TV).abs().max() > _CLOSE * scale
    if leaks or sees_later or differs_alone or has_other_positions:
        problem = "packed documents are not separate"
        if sees_later:
            problem = "a token sees later ones"
        elif has_other_positions and not leaks:
            problem = "the positions of a text do not begin at 0"
        raise CheckpointError(
            f"model_type {config.model_type!r} cannot be trained or evaluated here: in its class, {problem}."
        )
