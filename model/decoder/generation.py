"""Generate text: prefill the KV cache with the prompts, then decode one token at a time.

python -m model.decoder.generation FOLDER --prompt "Once upon a time"
"""

import time
from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from model.common import checks, console
from model.common.command_options import FiniteFloat, PathType, WholeNumber, device_option
from model.common.console import echo
from model.common.errors import CheckpointError, InputError
from model.decoder.devices import find_device, out_of_memory_as_run_error
from model.decoder.kv_cache import KVCache
from model.decoder.llama import LlamaForCausalLM
from model.decoder.loading import load_model
from model.tokenizer import open_tokenizer, refusing_tokenizer_errors

NOT_NATIVE = "this family runs in transformers' classes; generate with transformers instead."


def pad_left(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
    """Return left-padded prompts, [B, T], and the number of padding tokens of each, [B]; None without padding."""
    longest = max(map(len, prompts))
    padding_B = torch.tensor([longest - len(prompt) for prompt in prompts])
    ids_BT = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    return ids_BT, padding_B if padding_B.any() else None


@torch.inference_mode()
def prefill(model: LlamaForCausalLM, ids_BT: Tensor, cache: KVCache) -> Tensor:
    """Store the prompts in the KV cache, and return the logits of the token after them, [B, V]."""
    hidden_BTM = model.model(ids_BT, cache=cache)
    return model.logits(hidden_BTM[:, -1:])[:, 0]


@torch.inference_mode()
def decode(model: LlamaForCausalLM, ids_B: Tensor, cache: KVCache) -> Tensor:
    """Append one token to each text, and return the logits of the next one, [B, V]."""
    return prefill(model, ids_B[:, None], cache)


def generate(
    model: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    stop_ids: Sequence[int] | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """Return the generated tokens of each prompt, up to a stop id, which is not included.

    `stop_ids`: None uses the model's end-of-text tokens; an empty list generates all `max_new_tokens`.
    `temperature`: 0 is greedy. `top_p`: sample from the smallest set of tokens with at least this probability
    (Holtzman et al. 2020). The same seed gives the same text.

    Raises CheckpointError for a model of transformers' classes, and InputError for a prompt without tokens, an id
    outside the vocabulary, or a number out of its range.
    """
    if not isinstance(model, LlamaForCausalLM):
        raise CheckpointError(NOT_NATIVE)
    stop_ids = model.stop_ids if stop_ids is None else stop_ids
    out: list[list[int]] = [[] for _ in prompts]
    running = [True] * len(prompts)
    for ids in stream(model, prompts, max_new_tokens, temperature=temperature, top_p=top_p, seed=seed):
        for row, token in enumerate(ids):
            running[row] = running[row] and token not in stop_ids
            if running[row]:
                out[row].append(token)
        if not any(running):
            break
    return out


def stream(
    model: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Iterator[list[int]]:
    """Yield the next token of every prompt, one step at a time. The arguments and errors are those of `generate`."""
    _check_request(model.config.vocab_size, prompts, max_new_tokens, temperature, top_p)
    weight = model.lm_head_weight
    ids_BT, padding_B = pad_left(prompts)
    ids_BT = ids_BT.to(weight.device)
    padding_B = None if padding_B is None else padding_B.to(weight.device)
    capacity = ids_BT.shape[1] + max_new_tokens
    cache = KVCache(model.config, len(prompts), capacity, weight.dtype, weight.device, padding_B)
    generator = torch.Generator(weight.device).manual_seed(seed)
    logits_BV = prefill(model, ids_BT, cache)
    for step in range(max_new_tokens):
        ids_B = sample(logits_BV, temperature, top_p, generator)
        yield ids_B.tolist()
        if step + 1 < max_new_tokens:
            logits_BV = decode(model, ids_B, cache)


def _check_request(
    vocab_size: int, prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float, top_p: float
) -> None:  # fmt: skip
    """Raise InputError for arguments of `generate` that are not possible."""
    if any(isinstance(prompt, int) for prompt in prompts):
        raise InputError("prompts must be a list of prompts, each a list of token ids; give [prompt].")
    if not len(prompts) or not all(map(len, prompts)):
        raise InputError("a prompt has no tokens; give at least one token in each prompt, and at least one prompt.")
    for wrong in (token for prompt in prompts for token in prompt if not 0 <= token < vocab_size):
        raise InputError(f"the prompts hold the id {wrong}; the model's vocabulary has the ids 0 to {vocab_size - 1}.")
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens = {max_new_tokens}; it must be at least 1.")
    if not (temperature >= 0 and isfinite(temperature)):
        raise InputError(f"temperature = {temperature}; it must be a finite number of at least 0.")
    if not 0 < top_p <= 1:
        raise InputError(f"top_p = {top_p}; it must be above 0 and at most 1.")


def sample(logits_BV: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    """Return each row's next token, [B]."""
    if temperature < torch.finfo(logits_BV.dtype).tiny:  # 0, or what is 0 in the dtype of the logits
        return logits_BV.argmax(dim=-1)
    p_BV = ((logits_BV - logits_BV.amax(dim=-1, keepdim=True)) / temperature).softmax(dim=-1)
    if top_p == 1:
        return torch.multinomial(p_BV, 1, generator=generator)[:, 0]
    p_BV, order_BV = p_BV.sort(dim=-1, descending=True)
    before_BV = p_BV.cumsum(dim=-1) - p_BV
    is_outside_BV = before_BV >= top_p
    is_outside_BV[:, 0] = False  # where top_p is 0 in the dtype of the logits
    p_BV = p_BV.masked_fill(is_outside_BV, 0.0)
    choice_B1 = torch.multinomial(p_BV, 1, generator=generator)
    return order_BV.gather(1, choice_B1)[:, 0]


def show(
    folder: Path, prompt: str, max_new_tokens: int, temperature: float, top_p: float, seed: int, device: str
) -> None:
    """Print the continuation of a prompt while it is generated, then the speeds and the size of the KV cache."""
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):  # how Python reads other bytes
        raise CheckpointError("the prompt is not valid UTF-8; give it in the encoding of the terminal.")
    model, tokenizer = load_model(folder, device=device), open_tokenizer(folder)
    if not isinstance(model, LlamaForCausalLM):
        raise CheckpointError(f"{folder}: {NOT_NATIVE}")
    model.prepack()
    with refusing_tokenizer_errors(f"{folder}: the tokenizer cannot read the prompt", CheckpointError):
        ids: list[int] = tokenizer(prompt).input_ids
    if not ids:
        raise CheckpointError("the prompt is empty; write at least one word.")
    if max(ids) >= (n_tokens := model.config.vocab_size):
        raise CheckpointError(
            f"{folder}: the tokenizer gives the id {max(ids)}, but the model has a vocabulary of {n_tokens:,}; they "
            "do not belong together."
        )
    out, text = list[int](), ""
    times = [time.perf_counter()]
    echo(prompt, nl=False)
    try:
        for (token,) in stream(model, [ids], max_new_tokens, temperature=temperature, top_p=top_p, seed=seed):
            times.append(time.perf_counter())
            if token in model.stop_ids:
                break
            # A character may need several tokens, so all tokens are decoded again. An incomplete one ends in U+FFFD.
            out.append(token)
            longer = str(tokenizer.decode(out))
            if not longer.endswith("\ufffd"):
                echo(longer[len(text) :], nl=False)
                text = longer
    except BaseException:
        echo("")  # the message of the error begins a line
        raise
    echo("\n\n" + _report(model, len(ids), times), err=True)


def _report(model: LlamaForCausalLM, n_prompt: int, times: list[float]) -> str:
    """Return the speeds and the size of the KV cache, from the times of the start and of each token."""
    config, steps = model.config, len(times) - 2
    n_tokens = n_prompt + steps
    elements = sum(heads * size for heads, size in config.cached_shapes)
    nbytes = n_tokens * config.n_layers * elements * model.lm_head_weight.dtype.itemsize
    cached = f"{config.n_kv_heads} K/V heads"
    if config.latent is not None:
        cached = f"a latent of {config.latent.latent_dim} and a key of {config.latent.qk_rope_head_dim}"
    decoded = f"{steps / (times[-1] - times[1]):.1f} tokens/s" if steps else "no step"
    return (
        f"prefill {n_prompt / (times[1] - times[0]):.1f} tokens/s · decode {decoded} · KV cache {nbytes:,} bytes "
        f"({cached} for {config.n_heads} query heads, {n_tokens} tokens)"
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=PathType())
@click.option("--prompt", required=True, metavar="TEXT", help="Text to continue.")
@click.option(
    "--max-new-tokens",
    type=WholeNumber(1, 1 << 20),
    default=64,
    show_default=True,
    metavar="N",
    help="Tokens to generate at most.",
)
@click.option(
    "--temperature",
    type=FiniteFloat(min=0),
    default=0.0,
    show_default=True,
    metavar="T",
    help="Temperature of the sampling. 0 takes the likeliest token.",
)
@click.option(
    "--top-p",
    type=FiniteFloat(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    metavar="P",
    help="Draw from the likeliest tokens that together have this probability.",
)
@click.option(
    "--seed",
    type=WholeNumber(0, checks.MAX_COUNT),
    default=0,
    show_default=True,
    metavar="N",
    help="Seed of the sampling.",
)
@device_option("run the model on")
def command(folder: Path, **options: Any) -> None:
    """Generate text with the checkpoint in FOLDER: llama, mistral, qwen2 or latent attention.

    Of a model that also reads images or sound, the language model inside is used, if it is of these families.
    """
    device = str(find_device(options.pop("device")))
    with out_of_memory_as_run_error(device, "give --device cpu"):
        show(folder, device=device, **options)


def main() -> None:
    """Run the command line."""
    console.run(command)


if __name__ == "__main__":
    main()
