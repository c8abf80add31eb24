"""α becomes steps as the published figures have them; what is not known is asked for, never guessed."""

import json
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from convert.latent.latent_recipe import LATENT
from convert.merging.methods import HEAD_METHODS, LAYER_METHODS
from model.checkpoint import TensorInfo
from model.checkpoint.latent_norm import LATENT_NORM_KEY
from model.common.counts import counted, format_count, parse_count
from model.common.errors import InputError
from uptrain.budget.budget import BudgetOptions, default_peak_lr, evaluation_warning, make_budget
from uptrain.budget.conversion_record import source_names
from uptrain.budget.identify import SHAPE_KEYS, find_original, known_originals
from uptrain.budget.methods import METHODS, PEAK_DIVISOR
from uptrain.budget.pretraining import ORIGINALS, PretrainingRecord
from uptrain.estimates import training_time
from uptrain.estimates.parameter_counts import count_parameters
from uptrain.models.trainable_choices import TRAINABLE

# The steps of α = 0.05 with the original's own batch, as published figures give them.
STEPS_AT_5_PERCENT = {
    "llama-1-7b": 11_921, "llama-1-13b": 11_921, "llama-1-33b": 16_690, "llama-1-65b": 16_690,
    "llama-2-7b": 23_842, "llama-2-13b": 23_842, "open-llama-3b": 11_921, "open-llama-7b": 11_921,
    "open-llama-13b": 11_921, "sheared-llama-1.3b": 2_400, "sheared-llama-2.7b": 2_400, "smollm-1.7b": 25_000,
    "deepseek-llm-7b": 10_597, "olmo-2-7b": 46_433, "olmo-2-1b": 95_368,
    "pythia-70m": 7_150, "pythia-160m": 7_150, "pythia-410m": 7_150, "pythia-1b": 7_150, "pythia-1.4b": 7_150,
    "pythia-2.8b": 7_150, "pythia-6.9b": 7_150, "pythia-12b": 7_150, "tinyllama-1.1b": 71_526,
}  # fmt: skip
ORIGINAL_STEPS = {
    "llama-1-7b": 238_419, "llama-1-33b": 333_786, "llama-2-7b": 476_837, "code-llama-7b-code-stage": 119_209,
    "sheared-llama-1.3b": 48_000, "smollm-1.7b": 500_000, "olmo-2-7b": 928_646, "pythia-6.9b": 143_000,
}  # fmt: skip
PEAKS = {"llama-2-7b": 1e-4, "llama-1-65b": 5e-5, "pythia-70m": 1e-3 / 3, "deepseek-llm-7b": 1.4e-4}
SEQ_LEN = 2048
KNOWN = ", ".join(original.name for original in ORIGINALS)


def config(original: PretrainingRecord) -> dict[str, object]:
    return {"model_type": original.shape[0], **dict(zip(SHAPE_KEYS, original.shape[1:], strict=True))}


def budget_of(request, of=None, names=(), method=None, trainable="attention"):
    return make_budget(request, of or {}, names, SEQ_LEN, method, trainable)


def refusal(request: BudgetOptions, of: dict[str, object], *names: str) -> str:
    with pytest.raises(InputError) as error:
        budget_of(request, of, names)
    return str(error.value)


@pytest.mark.parametrize("original", ORIGINALS, ids=lambda original: original.name)
def test_certain_rows_give_the_published_steps(original):
    budget = budget_of(BudgetOptions(alpha=0.05, original=original.name))
    if original.certainty == "sure" or original.name in STEPS_AT_5_PERCENT:
        assert budget.steps == STEPS_AT_5_PERCENT[original.name]
    assert budget.steps == math.ceil(original.tokens / original.batch_tokens / 20 - 1e-9)
    assert budget.original == original.name
    assert budget.alpha == 0.05


def test_original_steps_and_default_peaks():
    assert {name: find_original(name).steps for name in ORIGINAL_STEPS} == ORIGINAL_STEPS
    assert {name: default_peak_lr(find_original(name).peak_lr, PEAK_DIVISOR) for name in PEAKS} == PEAKS


@pytest.mark.parametrize(
    ("method", "trainable", "peak"),
    [
        (None, "all", 1e-4), (None, "lora", 1e-4), ("mean", "attention", 1e-4), ("pca", "attention", 1e-4),
        ("fit", "all", 2e-5), ("fit", "attention", 5e-5), ("fit", "kv", 1e-4), ("fit", "lora", 1e-4),
        ("latent", "all", 2e-5), ("latent", "attention", 2e-5),
    ],
)  # fmt: skip
def test_the_default_peak_is_lower_after_a_fitted_conversion(method, trainable, peak):
    budget = budget_of(BudgetOptions(alpha=0.05, original="llama-2-7b"), method=method, trainable=trainable)
    assert budget.peak_lr == peak
    share = {1e-4: "1/3", 5e-5: "1/6", 2e-5: "1/15"}[peak]
    with pytest.raises(InputError, match=f"--lr .peak learning rate; {share} of"):
        budget_of(BudgetOptions(steps=5, global_batch_tokens=4096), method=method, trainable=trainable)


def test_rows_are_well_formed():
    assert len({original.name for original in ORIGINALS}) == len(ORIGINALS)
    for original in ORIGINALS:
        assert original.certainty in ("sure", "reported", "from memory")
        assert original.source and original.batch_tokens % 2048 == 0
        assert 1e-5 < original.peak_lr < 1e-2
        re.compile(original.pattern)


def test_alpha_is_exact():
    """0.07 of 100 steps is 7, though the binary 0.07 x 100 is above 7; a token more takes a step more."""
    batch = {"global_batch_tokens": SEQ_LEN, "lr": 1e-4}
    assert budget_of(BudgetOptions(alpha=0.07, original_tokens=100 * SEQ_LEN, **batch)).steps == 7
    assert budget_of(BudgetOptions(alpha=0.07, original_tokens=100 * SEQ_LEN + 1, **batch)).steps == 8


@given(st.integers(1, 10**13), st.integers(1, 4096), st.integers(1, 1000))
def test_steps_are_the_fewest_that_reach_alpha(original_tokens, sequences, thousandths):
    request = BudgetOptions(
        alpha=thousandths / 1000, original_tokens=original_tokens, global_batch_tokens=sequences * SEQ_LEN, lr=1e-4
    )
    budget = budget_of(request)
    assert budget.tokens * 1000 >= thousandths * original_tokens > (budget.tokens - sequences * SEQ_LEN) * 1000


def test_a_batch_of_ones_own_keeps_the_tokens():
    own = budget_of(BudgetOptions(alpha=0.05, original="llama-2-7b"))
    half = budget_of(BudgetOptions(alpha=0.05, original="llama-2-7b", global_batch_tokens=2**21))
    assert half.steps == 47_684
    assert own.tokens == pytest.approx(half.tokens, rel=1e-4)
    assert (own.original_steps, half.original_steps) == (476_837, 953_674)


def test_tokens_and_steps_give_alpha():
    tokens = budget_of(BudgetOptions(tokens=50 * 10**9, original="llama-2-7b"))
    assert (tokens.steps, tokens.alpha) == (11_921, pytest.approx(0.025, rel=1e-4))
    steps = budget_of(BudgetOptions(steps=100, global_batch_tokens=4096, lr=1e-4))
    assert (steps.steps, steps.tokens, steps.alpha, steps.original) == (100, 409_600, None, None)


def test_given_options_go_before_the_table():
    request = BudgetOptions(alpha=0.1, original="llama-2-7b", original_tokens=10**12, lr=2e-5)
    budget = budget_of(request)
    assert (budget.steps, budget.peak_lr, budget.original_tokens) == (23_842, 2e-5, 10**12)


@pytest.mark.parametrize(
    ("name", "source", "recognised"),
    [
        ("llama-2-7b", "meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("llama-2-7b", "Llama-2-7b-chat-hf", "llama-2-7b"),
        ("llama-2-13b", "meta-llama/Llama-2-13b-hf", "llama-2-13b"),
        ("llama-1-7b", "huggyllama/llama-7b", "llama-1-7b"),
        ("open-llama-7b", "openlm-research/open_llama_7b_v2", "open-llama-7b"),
        ("amber-7b", "LLM360/Amber", "amber-7b"),
        ("smollm-1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "smollm2-1.7b"),
        ("smollm-135m", "HuggingFaceTB/SmolLM-135M", "smollm-135m"),
        ("deepseek-llm-7b", "anything", "deepseek-llm-7b"),
        ("open-llama-3b", "anything", "open-llama-3b"),
    ],
)
def test_recognised_by_shape_and_source(name, source, recognised):
    assert [o.name for o in known_originals(config(find_original(name)), ("something/else", source))] == [recognised]


def test_name_alone_does_not_identify_a_model():
    assert (
        known_originals({**config(find_original("llama-2-7b")), "hidden_size": 4160}, ("meta-llama/Llama-2-7b-hf",))
        == ()
    )


def test_every_method_that_changes_the_attention_has_its_facts():
    """`repeat` is recorded too, but computes what the source does."""
    assert METHODS.keys() == {*HEAD_METHODS, *LAYER_METHODS, LATENT}
    assert all(facts.peak_divisors.keys() == set(TRAINABLE) for facts in METHODS.values())


def test_kv_heads_do_not_matter():
    converted = {**config(find_original("deepseek-llm-7b")), "num_key_value_heads": 4}
    assert budget_of(BudgetOptions(alpha=0.05), converted).steps == 10_597


def test_latent_attention_does_not_matter():
    original, source = config(find_original("llama-2-7b")), ("meta-llama/Llama-2-7b-hf",)
    entry = {LATENT_NORM_KEY: {"kind": "eps", "weight": 1.0}, "kv_lora_rank": 448, "qk_rope_head_dim": 64}
    latent = {**original, "model_type": "deepseek_v3", **entry}
    assert known_originals(latent, source) == known_originals(original, source) == (find_original("llama-2-7b"),)


def test_ambiguous_shape_is_refused():
    assert refusal(BudgetOptions(alpha=0.05), config(find_original("llama-2-7b")), "my-model") == (
        "the model's shape is that of llama-1-7b (1 T tokens), llama-2-7b (2 T tokens), open-llama-7b (1 T tokens), "
        "amber-7b (1.259 T tokens); say which with --original NAME, or give --original-tokens (how many tokens it was "
        "pre-trained on, e.g. 2T; not needed with --tokens N or --steps N in place of --alpha), "
        "--global-batch-tokens (tokens of one optimizer step, e.g. 4194304), --lr (peak learning rate; 1/3 of the "
        "pre-training's is usual)."
    )


def test_code_llama_asks_which_stage():
    message = refusal(BudgetOptions(alpha=0.05), config(find_original("code-llama-7b")), "codellama/CodeLlama-7b-hf")
    assert "code-llama-7b (2.5 T tokens), code-llama-7b-code-stage (500 B tokens); say which" in message


def test_unknown_model_is_refused():
    assert refusal(BudgetOptions(alpha=0.05), {"model_type": "llama"}) == (
        "the model's pre-training is not in the table of known originals; give --original-tokens (how many tokens it "
        "was pre-trained on, e.g. 2T; not needed with --tokens N or --steps N in place of --alpha), "
        "--global-batch-tokens (tokens of one optimizer step, e.g. 4194304), --lr (peak learning rate; 1/3 of the "
        "pre-training's is usual), or name a known one with --original NAME (an unknown NAME lists them). To begin "
        "without knowing them, replace --alpha 0.05 by --tokens 50M --global-batch-tokens 131072 --lr 5e-5."
    )
    assert refusal(BudgetOptions(tokens=10**9, global_batch_tokens=2**20), {}) == (
        "the model's pre-training is not in the table of known originals; give --lr (peak learning rate; 1/3 of the "
        "pre-training's is usual), or name a known one with --original NAME (an unknown NAME lists them)."
    )


@pytest.mark.parametrize(
    ("options", "seq_len", "first_run"),
    [
        (BudgetOptions(alpha=0.05, lr=1e-4), 4096, "replace --alpha 0.05 by --tokens 50M --global-batch-tokens 131072"),
        (BudgetOptions(alpha=0.1, original_tokens=10**12), 4096, "add --global-batch-tokens 131072 --lr 5e-5"),
        (BudgetOptions(steps=100, global_batch_tokens=4096), 4096, "add --lr 5e-5"),
        # a small batch for few tokens, and always whole windows, whose number most numbers of GPUs divide
        (BudgetOptions(tokens=20_000), 64, "add --global-batch-tokens 256 --lr 5e-5"),
        (BudgetOptions(tokens=20_000), 4096, "add --global-batch-tokens 4096 --lr 5e-5"),
        (BudgetOptions(tokens=10**9), 1000, "add --global-batch-tokens 128000 --lr 5e-5"),
    ],
)
def test_the_refusal_names_options_that_start_a_first_run(options, seq_len, first_run):
    unknown = {"model_type": "llama"}
    with pytest.raises(InputError) as refused:
        make_budget(options, unknown, (), seq_len, "fit", "attention")
    assert str(refused.value).endswith(f" To begin without knowing them, {first_run}.")


def test_a_first_run_of_all_parameters_begins_lower():
    with pytest.raises(InputError, match="--lr 2e-5"):
        make_budget(BudgetOptions(tokens=10**9), {"model_type": "llama"}, (), 4096, "fit", "all")


def test_unknown_name_lists_the_known():
    assert refusal(BudgetOptions(alpha=0.05, original="gpt-5"), {}) == f"--original gpt-5: unknown; known are {KNOWN}."
    assert refusal(BudgetOptions(alpha=0.05, original="Llama2-7b"), {}) == (
        f"--original Llama2-7b: unknown; did you mean llama-2-7b? Known are {KNOWN}."
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give exactly one of --alpha, --tokens and --steps, for example --alpha 0.0025; given: none."),
        (
            {"alpha": 0.1, "steps": 5},
            "give exactly one of --alpha, --tokens and --steps, for example --alpha 0.0025; given: --alpha and "
            "--steps.",
        ),
        ({"alpha": 5.0}, "--alpha 5.0: it is a share of the original pre-training; 0.05 means 5 %."),
        ({"alpha": 0.0}, "--alpha 0.0: it is a share of the original pre-training; 0.05 means 5 %."),
        ({"alpha": math.nan}, "--alpha nan: it is a share of the original pre-training; 0.05 means 5 %."),
        ({"steps": 5, "lr": -1.0}, "--lr -1.0: the peak learning rate must be above 0."),
        ({"steps": 5, "lr": math.nan}, "--lr nan: the peak learning rate must be above 0."),
    ],
)
def test_bad_requests(options, message):
    with pytest.raises(InputError) as error:
        BudgetOptions(**options)
    assert str(error.value) == message


@pytest.mark.parametrize(("batch", "choice"), [(4_000_000, "3999744 or 4001792"), (100, "2048")])
def test_a_batch_is_whole_sequences(batch, choice):
    assert refusal(BudgetOptions(steps=5, lr=1e-4, global_batch_tokens=batch), {}) == (
        f"a global batch of {batch} tokens is not a whole number of windows of 2048 tokens; "
        f"choose --global-batch-tokens {choice}, or a shorter --seq-len."
    )


def test_source_names_follow_earlier_conversions(tmp_path):
    assert source_names(tmp_path) == (tmp_path.name,), "not converted: its own name"
    snapshot = tmp_path / "models--meta-llama--Llama-2-7b-hf/snapshots" / ("a" * 40)
    assert source_names(snapshot) == ("meta-llama/Llama-2-7b-hf",)
    earlier = {"source": {"name": "meta-llama/Llama-2-7b-hf", "groupwise": None}}
    (tmp_path / "groupwise.json").write_text(json.dumps({"source": {"name": "llama-gqa-16", "groupwise": earlier}}))
    assert source_names(tmp_path) == ("llama-gqa-16", "meta-llama/Llama-2-7b-hf")


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"source": 3}', '{"source": {"name": "x", "n_kv_heads": Infinity}}']
)
def test_damaged_provenance_is_refused(tmp_path, text):
    (tmp_path / "groupwise.json").write_text(text)
    with pytest.raises(InputError, match=r"groupwise\.json is damaged: .*; convert the model again, or remove"):
        source_names(tmp_path)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2T", 2 * 10**12), ("50B", 5 * 10**10), ("1.5M", 1_500_000), ("512k", 512_000), ("4194304", 2**22),
        ("4_194_304", 2**22), ("4,194,304", 2**22), (" 1 ", 1), ("0.0000000000011T", None), ("1.259T", 1_259 * 10**9),
        ("", None), ("B", None), ("-5", None), ("0", None), ("1.5", None), ("1e9", None), ("5 B", None),
        ("5G", None), ("١", None), (".5B", None), ("1.B", None), ("0.5B", 500_000_000),
    ],
)  # fmt: skip
def test_parse_count(text, count):
    if count is not None:
        assert parse_count(text) == count
    else:
        with pytest.raises(InputError, match=r"is not a (whole number of at least 1|count); give a whole number such"):
            parse_count(text)


@given(st.integers(1, 10**15))
def test_counts_round_trip(count):
    assert parse_count(str(count)) == count
    assert parse_count(f"{count}K") == 1000 * count


def test_format_count():
    shown = {1: "1", 999: "999", 1000: "1 K", 20_320: "20.32 K", 6_738_415_616: "6.738 B", 2 * 10**12: "2 T"}
    assert {count: format_count(count) for count in shown} == shown


def test_a_count_with_its_noun():
    assert [counted(n, "file") for n in (0, 1, 2, 1200)] == ["0 files", "1 file", "2 files", "1,200 files"]


def test_time_is_two_operations_for_each_product_of_a_parameter_and_a_token():
    alone = training_time.estimate_time(training_time.flops_per_token(10**9, 10**9, 0) * 10**12, 4, 0.25)
    assert (alone["flops"], alone["recomputing_share"]) == (6 * 10**21, 0.25)
    assert alone["device_hours"]["H100"] == pytest.approx(6e21 / (0.4 * 989e12) / 3600)
    assert alone["hours"]["H100"] == alone["device_hours"]["H100"] / 4
    assert training_time.flops_per_token(10**9, 10**9, 10**9) == 8 * 10**9
    assert training_time.flops_per_token(10**9, 2 * 10**8, 10**9) == 64 * 10**8


def test_flops_are_those_that_torch_counts():
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(3)))
    for n_trained in (3, 2, 1):
        model.requires_grad_(False)
        for layer in model[:n_trained]:
            layer.requires_grad_(True)
        inputs = torch.randn(5, 8, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            model(inputs).sum().backward()
        assert counter.get_total_flops() == 5 * training_time.flops_per_token(3 * 64, n_trained * 64, 0)


def test_rope_frequencies_are_no_parameters():
    tensors = [
        TensorInfo("a.weight", "F32", (3, 4)),
        TensorInfo("model.layers.0.self_attn.rotary_emb.inv_freq", "F32", (9,)),
    ]
    assert count_parameters(tensors) == 12


def test_evaluations_of_more_than_a_fifth_are_warned_of():
    assert evaluation_warning(20, 100) is None
    words = "read 2,100 held-out tokens in all, and the training 10,000; a larger --eval-every or less --eval-data"
    assert words in evaluation_warning(2100, 10_000)


def test_a_random_model_continues_no_schedule():
    """It has had no pre-training, though its length gives the number of its steps."""
    budget = budget_of(BudgetOptions(alpha=0.1, original_tokens=10**9, global_batch_tokens=SEQ_LEN, lr=1e-3))
    assert budget.schedule("inverse-sqrt", None).original_steps == budget.original_steps > 0
    assert budget.schedule("inverse-sqrt", None, from_scratch=True).original_steps == 0
