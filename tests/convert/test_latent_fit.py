"""Latent attention that is fitted to a calibration text: what it loses, that it repeats, and what verify finds."""

import json
import signal
from pathlib import Path

import latent
import llama_pairs
import numpy as np
import pytest
import tiny
import torch
from damage import edit_tensors, record_sha256, rewrite
from latent import divergence
from latent_reference import attend
from safetensors.torch import load_file
from self_kill import run_self_killing
from sentencepiece import SentencePieceTrainer
from tiny_tokenizers import make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from convert.calibration.float32_weights import latent_weights
from convert.calibration.input_moments import InputSums
from convert.calibration.latent_queries import solve_queries
from convert.calibration.latent_survey import _most_useful
from convert.calibration_text.read import read_calibration_text
from convert.latent.closed_form import moments_from_norm, solve
from convert.latent.frequencies import even_pair_indices
from convert.latent.latent_recipe import LATENT, LatentRecipe
from convert.layers.layer_stream import iter_layers
from convert.planning.latent_plan import make_latent_plan
from model import load_model
from model.checkpoint import open_checkpoint

SIZE = ("--latent", 12, "--rope", 8)
QUICK = (*SIZE, "--calibration-tokens", 1024)


@pytest.fixture
def source(tmp_path):
    return make_tokenizer(latent.make_source(tmp_path / "source", vocab_size=300), 300)


@pytest.mark.parametrize("norm", ["eps", "bias"])
def test_unfolded_latent_attention_is_found_again_from_a_text(convert, tmp_path, norm):
    source = make_tokenizer(latent.make_unfolded(tmp_path / "source", 6, vocab_size=300), 300)
    size = ("--latent", 6 + (norm == "bias"), "--rope", 8, "--latent-norm", norm)
    convert("mha-to-mla", source, tmp_path / "out", *size, "--calibration-tokens", 1024, "--refine", 0).succeeded()
    assert divergence(latent.logits(source), latent.logits(tmp_path / "out")) < 1e-7
    written = latent.config(tmp_path / "out")
    assert written["rope_parameters"]["rope_type"] == "default"  # every pair once
    assert written["qk_nope_head_dim"] == 40  # padded, as all stock frequencies of this size
    assert json.loads((tmp_path / "out/groupwise.json").read_text())["latent"]["frequencies"] == "stock"
    assert "longrope" not in (tmp_path / "out/README.md").read_text()
    convert("verify", source, tmp_path / "out").succeeded()


@pytest.mark.slow
def test_the_constant_of_a_bias_outweighs_the_latent_of_a_trained_model(convert, tmp_path):
    """So that the stock class, which has the norm, computes what our decoder trains without it."""
    options = ("--latent", 224, "--rope", 32, "--latent-norm", "bias", "--calibration-tokens", 2048, "--refine", 0)
    convert("mha-to-mla", "assets/demo-mha", tmp_path / "out", *options).succeeded()
    speech = Path("assets/speeches/held-out/1800-Adams-1.txt").read_text()
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")(speech[:2000], return_tensors="pt").input_ids
    with torch.inference_mode():
        theirs = latent.open_stock(tmp_path / "out")(ids).logits
        assert (theirs - load_model(tmp_path / "out", torch.float32)(ids)).abs().max() < 5e-4


def test_the_same_bytes_again_and_verified(convert, source, tmp_path):
    for name in ("one", "two"):
        convert("mha-to-mla", source, tmp_path / name, *QUICK).succeeded()
    assert tiny.snapshot(tmp_path / "one") == tiny.snapshot(tmp_path / "two")
    record = json.loads((tmp_path / "one/groupwise.json").read_text())
    assert (record["method"], record["refit"], record["refine"]) == ("latent", True, 1024)
    assert len(record["latent"]["pair_indices"]) == 4
    card = (tmp_path / "one/README.md").read_text()
    assert "each layer refined on 1,024 tokens" in card
    assert "Open it in bfloat16 or float32: in float16 it computes NaN." in card
    result = convert("verify", source, tmp_path / "one")
    assert (result.code, "rounding" in result.out) == (0, False), result


@pytest.mark.parametrize("options", [(*SIZE, "--calibration", "none"), (*QUICK, "--refine", 0)])
@pytest.mark.parametrize(
    ("epsilon", "tied", "dtype"),
    [
        (1e-6, False, ()),
        (1e-6, True, ()),
        (1e-6, True, ("--dtype", "bfloat16")),
        (1e-5, True, ()),
        (1e-5, False, ("--dtype", "bfloat16")),
    ],
)
def test_the_card_names_what_was_changed(convert, tmp_path, options, epsilon, tied, dtype):
    changes = {"vocab_size": 300, "rms_norm_eps": epsilon, "tie_word_embeddings": tied}
    source = make_tokenizer(latent.make_source(tmp_path / "source", **changes), 300)
    out = tmp_path / "out"
    convert("mha-to-mla", source, out, *options, *dtype).succeeded()
    before, after = (
        {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for folder in (source, out)
    )
    card = " ".join((out / "README.md").read_text().split())
    assert "Queries, keys and values were converted" in card
    assert ("The embedding and the output projections of attention and MLP are scaled" in card) == (epsilon != 1e-6)
    assert ("The LM head, which the base model shares with the embedding, is a tensor of its own" in card) == tied
    assert (after.keys() - before.keys() >= {"lm_head.weight"}) == tied
    fitted = "The output projections of attention were fitted to them" in card
    assert fitted == (options != (*SIZE, "--calibration", "none"))
    if epsilon == 1e-6:
        output = "model.layers.1.self_attn.o_proj.weight"
        assert torch.equal(before[output].to(after[output].dtype), after[output]) == (not fitted)


@pytest.mark.parametrize("refined", [0, 1024])
def test_verify_tolerates_another_solution(convert, source, tmp_path, monkeypatch, refined):
    """As on another processor: other weights, which serve as well."""
    convert("mha-to-mla", source, tmp_path / "out", *QUICK, "--refine", refined).succeeded()
    monkeypatch.setattr("convert.calibration.latent_queries._RIDGE", 1.01e-3)
    result = convert("verify", source, tmp_path / "out")
    assert (result.code, "but for rounding" in result.out) == (0, True), result


@pytest.mark.parametrize("part", ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"])
def test_verify_finds_a_worse_layer(convert, source, tmp_path, part):
    """Even where the record says that it should be so."""
    out = tmp_path / "out"
    convert("mha-to-mla", source, out, *QUICK, "--max-shard-size", "1GB").succeeded()
    rewrite(out, lambda tensors: tensors[f"model.layers.1.self_attn.{part}.weight"].mul_(1.5))
    record_sha256(out)
    result = convert("verify", source, out)
    assert (result.code, "layer 1 has a validation error" in result.err) == (3, True), result.err


def test_verify_finds_a_change_of_any_kind(convert, source, tmp_path):
    out = tmp_path / "out"
    convert("mha-to-mla", source, out, *QUICK).succeeded()
    edit_tensors(out, lambda name, t: t * 1.0001 if "layers.0.self_attn.o_proj" in name else t)
    tiny.edit_config(out, rms_norm_eps=1e-5)
    result = convert("verify", source, out)
    assert result.code == 3
    assert "o_proj.weight has SHA-256" in result.err and "rms_norm_eps = 1e-05; it should be 1e-06" in result.err


def test_killed_midway_it_resumes_to_the_same_bytes(convert, source, tmp_path):
    arguments = ("mha-to-mla", source, tmp_path / "out", *QUICK, "--workers", 1)
    convert("mha-to-mla", source, tmp_path / "expected", *QUICK, "--workers", 1).succeeded()
    expected = tiny.snapshot(tmp_path / "expected")
    for n in (3, 9, 14, 20):
        assert run_self_killing(n, "convert", *arguments, output=tmp_path / f"killed-{n}") == -signal.SIGKILL
        assert not (tmp_path / "out").exists()
    assert (tmp_path / ".out.groupwise").is_dir()
    convert(*arguments).succeeded()
    assert tiny.snapshot(tmp_path / "out") == expected
    assert not (tmp_path / ".out.groupwise").exists()


OTHERS = ("transmla", "care", "svd")


@pytest.mark.slow
def test_fitted_to_a_text_it_is_better_than_the_methods_of_others(convert, tmp_path):
    """On the demo's model, whose heads are trained, and text that no conversion saw."""
    demo = Path(__file__).parents[2] / "assets/demo-mha"
    with open_checkpoint(demo) as checkpoint:
        ids = torch.from_numpy(read_calibration_text(checkpoint, "shipped", 16384).ids_NT[-8:])

    def logits(folder):
        with torch.inference_mode():
            return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits

    parent, divergences = logits(demo), {}
    size = ("--latent", 64, "--rope", 32, "--calibration-tokens", 4096)
    for name in ("fit", *OTHERS):
        convert("mha-to-mla", demo, tmp_path / name, *size, "--method", name, "--refine", 0).succeeded()
        divergences[name] = divergence(parent, logits(tmp_path / name))
    assert divergences["fit"] < 0.5 * min(divergences[name] for name in OTHERS), divergences


def _first_layer(source, tmp_path, sizes=SIZE):
    """Yield the first layer of a source, run on a text, its request and its sums."""
    with open_checkpoint(source) as checkpoint:
        text = read_calibration_text(checkpoint, "shipped", 1024)
        pair_indices = (0.0, 0.0, 1.0, 3.0)
        recipe = LatentRecipe(
            LATENT, kv_lora_rank=sizes[1], qk_rope_head_dim=sizes[3], pair_indices=pair_indices, text=text,
            frequencies="stock",  # so that queries are padded
        )  # fmt: skip
        work = make_latent_plan(checkpoint, recipe, None).conversions[0]
        (tmp_path / "scratch").mkdir()
        with torch.no_grad():
            layer = next(iter_layers(checkpoint, text, tmp_path / "scratch", lambda n: None, "cpu"))
            sums = InputSums(layer, work.sizes.hidden_size)
            layer.run(sums.add)
            yield checkpoint, layer, work, sums


def test_what_runs_on_the_text_is_the_reference_of_float64(source, tmp_path):
    for checkpoint, layer, work, _ in _first_layer(source, tmp_path):
        fitted = solve(work.read(checkpoint), moments_from_norm(np.ones(64)), work.target)
        frequencies = work.target.frequencies_C
        x = layer.inputs([0])
        weights = latent_weights(fitted, frequencies)
        actual = (weights.heads_out(x) @ weights.o_MC.T)[0].numpy()
        expected = attend(fitted, x[0].double().numpy(), frequencies)
        assert np.abs(actual - expected).max() < 1e-5 * np.abs(expected).max()


def test_balancing_scales_both_sides_and_changes_no_output(source, tmp_path):
    for checkpoint, layer, work, _ in _first_layer(source, tmp_path):
        fitted = solve(work.read(checkpoint), moments_from_norm(np.ones(64)), work.target)
        fitted.latent_LX[3] = 0.0  # one that nothing is read into
        fitted.q_HNX[1] *= 1000.0
        fitted.key_RX[[2, 2 + len(fitted.key_RX) // 2]] *= 1000.0
        fitted.o_HMD[0] /= 1000.0
        balanced = fitted.balanced(keep_output=False)
        x, frequencies = layer.inputs([0])[0].double().numpy(), work.target.frequencies_C
        assert np.array_equal(attend(balanced, x, frequencies), attend(fitted, x, frequencies))
        used = [n for n in range(work.sizes.kv_lora_rank) if n != 3]
        up = np.concatenate([balanced.k_HNL[:, : work.sizes.head_dim], balanced.v_HDL], axis=1)[..., used]
        _assert_balanced(_rms(balanced.latent_LX[used], 1), _rms(up, (0, 1)))
        keys = slice(work.sizes.head_dim)  # the rest pads
        _assert_balanced(_rms(balanced.k_HNL[:, keys], 2), _rms(balanced.q_HNX[:, keys], 2))
        _assert_balanced(_rms(balanced.v_HDL, 2), _rms(balanced.o_HMD, 1))
        assert fitted.balanced(keep_output=True).o_HMD is fitted.o_HMD
        halves = np.split(balanced.key_RX, 2), np.split(balanced.q_HRX, 2, axis=1)
        _assert_balanced(_rms(np.stack(halves[0]), (0, 2)), _rms(np.stack(halves[1]), (0, 1, 3)))


def _rms(weights: np.ndarray, axes: int | tuple[int, ...]) -> np.ndarray:
    return np.sqrt((weights**2).mean(axis=axes))


def _assert_balanced(made: np.ndarray, read: np.ndarray) -> None:
    ratios = made / read
    assert ratios.size
    assert ratios.min() > 0.45, ratios
    assert ratios.max() < 2.2, ratios


def test_what_is_written_with_the_default_norm_is_balanced(convert, source, tmp_path):
    convert("mha-to-mla", source, tmp_path / "out", *QUICK, "--refine", 0).succeeded()
    tensors = {
        name: tensor for file in (tmp_path / "out").glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    config = latent.config(tmp_path / "out")
    place, size = "model.layers.0.self_attn.", config["kv_lora_rank"]
    rows = tensors[f"{place}kv_a_proj_with_mqa.weight"][:size].double() * 2.0**30
    up = tensors[f"{place}kv_b_proj.weight"].double()
    into, out_of = rows.square().mean(dim=1).sqrt(), up[up.any(dim=1)].square().mean(dim=0).sqrt()
    gain = float(tensors[f"{place}kv_a_layernorm.weight"][0]) / 2.0**30 / 1e-3  # how γ was rounded
    ratios = into * gain / out_of
    assert ratios.min() > 0.49
    assert ratios.max() < 2.04


def test_the_moments_are_those_of_the_definition(source, tmp_path, monkeypatch):
    monkeypatch.setattr("convert.calibration.input_moments.QUERIES", 1 << 20)  # all of them
    for checkpoint, layer, work, sums in _first_layer(source, tmp_path):
        before, moments = work.read(checkpoint), sums.moments()
        frequencies = np.array(work.source_rope.frequencies)
        n_windows, length, half = layer.windows.n_windows, layer.windows.window_tokens, 4
        keys, mixed, tokens = (np.zeros((64, 64)) for _ in range(3))
        for window in range(n_windows):
            x = layer.inputs([window])[0].double().numpy()
            angles = np.outer(np.arange(length), frequencies)
            turn = np.exp(1j * angles)
            tokens += x.T @ x
            for q, k in zip(before.q_HDX, before.k_KDX, strict=True):
                q_c, k_c = ((x @ (w[:half] + 1j * w[half:]).T) * turn for w in (q, k))
                scores = (q_c.conj() @ k_c.T).real / np.sqrt(8)
                scores[np.triu_indices(length, 1)] = -np.inf
                a = np.exp(scores - scores.max(axis=1, keepdims=True))
                a /= a.sum(axis=1, keepdims=True)
                means = a @ x
                keys += ((x.T * a.sum(axis=0)) @ x - means.T @ means) / (8 * length)
                mixed += means.T @ means / (8 * length)
        for actual, expected in (
            (moments.tokens_XX, tokens / (n_windows * length)),
            (moments.attended_XX, keys / n_windows),
            (moments.mixed_XX, mixed / n_windows),
        ):
            assert np.abs(actual - expected).max() < 1e-4 * np.abs(expected).max()


def test_the_queries_are_the_least_squares_solution(source, tmp_path):
    """Compared with numpy's lstsq of all pairs of one head, each rotated by complex numbers."""
    for checkpoint, layer, work, sums in _first_layer(source, tmp_path):
        before, channels = work.read(checkpoint), work.target.frequencies_C
        own = np.array(work.source_rope.frequencies)
        fitted = solve(before, sums.moments(), work.target)
        drawn_keys = list(enumerate(sums.drawn_keys))
        after = solve_queries(layer, before, fitted, work.target, drawn_keys)
        head, features, targets = 3, [], []

        def rotate(rows, x, distance, frequencies):
            half = len(rows) // 2
            rotated = (x @ (rows[:half] + 1j * rows[half:]).T) * np.exp(1j * distance[..., None] * frequencies)
            return np.concatenate([rotated.real, rotated.imag], axis=-1)

        for window, drawn in drawn_keys:
            x = layer.inputs([window])[0].double().numpy()
            at = drawn.key_positions_HSC[head].numpy()
            distance = at - drawn.query_positions_S.numpy()[:, None]
            feature = [rotate(fitted.key_RX, x[at], distance, channels), x[at] @ fitted.latent_LX.T]
            features.append(np.concatenate(feature, axis=-1))
            targets.append(rotate(before.k_KDX[head], x[at], distance, own))
        features, targets = (np.concatenate(each) for each in (features, targets))
        features, targets = (
            (each - each.mean(axis=1, keepdims=True)).reshape(-1, each.shape[2]) for each in (features, targets)
        )
        ridge = np.diag(np.sqrt(1e-3 * (features**2).sum(axis=0)))
        padded = np.concatenate([features, ridge]), np.concatenate([targets, np.zeros((len(ridge), 8))])
        expected = np.linalg.lstsq(*padded, rcond=None)[0]
        assert np.abs(after.k_HNL[head, :8] - expected[8:].T).max() < 1e-3 * np.abs(expected).max()
        assert np.allclose(after.q_HRX[head], expected[:8] @ before.q_HDX[head], atol=1e-3)


def test_the_most_useful_components_are_rotated():
    benefits = np.array([[5.0, 4.0, 0.1], [6.0, 0.2, 0.1], [0.0, 0.0, 0.0], [3.0, 2.5, 2.0]])
    assert _most_useful(benefits, 5) == (0.0, 0.0, 1.0, 3.0, 3.0)
    assert even_pair_indices(4, 8) == (0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0)
    assert even_pair_indices(4, 6) == (0.0, 0.0, 1.0, 2.0, 2.0, 3.0)


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
@pytest.mark.parametrize("named_in", ["tokenizer_config.json", "config.json"])
def test_the_output_tokenises_as_the_source(convert, tmp_path, model_type, named_in):
    """Transformers chooses a tokenizer's class by the `model_type`, which changes, and by the class that is named."""
    changes = {"sliding_window": None} if model_type == "mistral" else {}
    source = make_tokenizer(tiny.save(tiny.build(model_type, vocab_size=300, **changes), tmp_path / "source"), 300)
    whole = json.loads((source / "tokenizer.json").read_text())  # splits digits, which GPT2Tokenizer does not
    digits = {"type": "Digits", "individual_digits": True}
    whole["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, whole["pre_tokenizer"]]}
    whole["model"] |= {
        "vocab": whole["model"]["vocab"] | {"12": 299},
        "merges": [*whole["model"]["merges"], ["1", "2"]],
    }
    (source / "tokenizer.json").write_text(json.dumps(whole))
    for name in ("tokenizer_config.json", "config.json"):
        content = json.loads((source / name).read_text())
        content.pop("tokenizer_class", None)
        named = {"tokenizer_class": "GPT2Tokenizer"} if name == named_in else {}
        (source / name).write_text(json.dumps(content | named))
    out = tmp_path / "out"
    size = ("--latent", 32, "--rope", 32, "--calibration", "none")
    convert("mha-to-mla", source, out, *size).succeeded()
    convert("verify", source, out).succeeded()
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (out, source))
    text = "it's 12345 o'clock:\n\n  don't STOP camelCase 100%"
    assert ours(text).input_ids == theirs(text).input_ids


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
@pytest.mark.parametrize("named", ["LlamaTokenizer", "LlamaTokenizerFast"])
def test_the_output_of_a_sentencepiece_vocabulary_alone_tokenises_as_the_source(convert, tmp_path, model_type, named):
    """For a Mistral, transformers ignores the class, which puts a space before a text."""
    changes = {"sliding_window": None} if model_type == "mistral" else {}
    source = tiny.save(tiny.build(model_type, vocab_size=320, **changes), tmp_path / "source")
    (source / "tokenizer.json").unlink()
    with (source / "tokenizer.model").open("wb") as file:
        SentencePieceTrainer.train(
            sentence_iterator=iter(["the quick brown fox jumps over the lazy dog 0123456789"] * 20), model_writer=file,
            vocab_size=300, model_type="bpe", byte_fallback=True, minloglevel=2,
        )  # fmt: skip
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": named, "add_bos_token": True, **special}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    out = tmp_path / "out"
    convert("mha-to-mla", source, out, "--latent", 32, "--rope", 32, "--calibration", "none").succeeded()
    convert("verify", source, out).succeeded()
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (out, source))
    text = "the dog:\n\n  don't jump 12"
    assert ours(text).input_ids == theirs(text).input_ids


def test_the_frequencies_are_announced_and_reported(convert, source, tmp_path):
    """In the plan, before they are chosen, and in the JSON of the conversion as in its record."""
    sizes = ("--latent", 16, "--rope", 4, "--calibration-tokens", 1024, "--refine", 0)
    dry = json.loads(convert("mha-to-mla", source, tmp_path / "out", *sizes, "--dry-run", "--json").out)
    assert any("rope_type longrope" in note for note in dry["notes"])
    decided = "the calibration text decides whether the rotated key gets frequencies of its own"
    assert any(decided in note for note in dry["notes"])
    summary = json.loads(convert("mha-to-mla", source, tmp_path / "out", *sizes, "--json").out)
    record = json.loads((tmp_path / "out/groupwise.json").read_text())
    assert summary["latent"] == record["latent"]
    assert summary["latent"]["pair_indices"] is not None
    assert any("rope_type longrope" in note for note in summary["notes"])
    assert any("the rotated key has frequencies of its own" in note for note in summary["notes"])


@pytest.mark.parametrize(
    ("head_dim", "given", "sizes"),
    [
        (64, (), (512, 64)),
        (80, (), (496, 80)),
        (128, (), (448, 128)),
        (256, (), (320, 256)),
        (32, (), (512, 64)),
        (320, (), (512, 64)),
        (128, ("--rope", 64), (512, 64)),
        (128, ("--latent", 256), (256, 128)),
    ],
)
def test_the_default_sizes_cache_576_elements_with_a_rotated_key_as_large_as_a_head(
    convert, tmp_path, head_dim, given, sizes
):
    heads = 16 if head_dim == 32 else 8  # eight would cache less than 576 elements
    wide = {"hidden_size": 512, "head_dim": head_dim, "num_attention_heads": heads, "num_key_value_heads": heads}
    wide |= {"vocab_size": 300, "num_hidden_layers": 1}
    source = make_tokenizer(latent.make_source(tmp_path / "source", **wide), 300)
    options = (*given, "--calibration", "none", "--dry-run", "--json")
    planned = json.loads(convert("mha-to-mla", source, tmp_path / "out", *options).out)["latent"]
    assert (planned["latent"], planned["rope"]) == sizes
    listed = json.loads(convert("inspect", source, "--json").out)["latent"]
    if not given:
        assert sizes in [(row["latent"], row["rope"]) for row in listed]


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ((512, 64), ()),
        ((256, 64), ("for 512 + 64 and, on some GPUs, 256 + 64. On", "VLLM_MLA_DISABLE=1 for 256 + 64")),
        ((448, 64), ("on some GPUs, 256 + 64, and not for 448 + 64. On", "VLLM_MLA_DISABLE=1 for 448 + 64")),
    ],
)
def test_notes_on_the_kernels_of_vllm(convert, tmp_path, size, words):
    source = latent.make_source(tmp_path / "source", hidden_size=512, num_hidden_layers=1)
    options = ("--latent", size[0], "--rope", size[1], "--calibration", "none", "--dry-run", "--json")
    notes = json.loads(convert("mha-to-mla", source, tmp_path / "out", *options).out)["notes"]
    notes = [note for note in notes if "GPU" in note or "CPU" in note]
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))


def test_the_default_rotated_key_is_no_larger_than_all_keys(convert, tmp_path):
    """64 dimensions would be refused, by the name of an option that was not given."""
    source = latent.make_source(tmp_path / "source", num_key_value_heads=2)
    options = ("--latent", 12, "--calibration", "none", "--dry-run", "--json")
    planned = json.loads(convert("mha-to-mla", source, tmp_path / "out", *options).out)["latent"]
    assert (planned["latent"], planned["rope"]) == (12, 16)


@pytest.mark.parametrize(
    ("n_kv_heads", "head_dim", "words"),
    [
        (4, 64, ("576 elements", "own KV cache holds 512", "give --latent and --rope, such as --latent 256")),
        (1, 8, ("can use at most 16", "small already")),
    ],
)
def test_default_sizes_that_save_nothing_are_refused(convert, tmp_path, n_kv_heads, head_dim, words):
    wide = {"hidden_size": 512, "head_dim": head_dim, "num_attention_heads": 8, "num_key_value_heads": n_kv_heads}
    source = make_tokenizer(latent.make_source(tmp_path / "source", **wide, vocab_size=300, num_hidden_layers=1), 300)
    convert("mha-to-mla", source, tmp_path / "out").refused(*words)
    given = ("--latent", 512, "--rope", 64) if head_dim == 64 else ("--latent", 16, "--rope", 8)
    convert("mha-to-mla", source, tmp_path / "out", *given, "--dry-run", "--calibration", "none").succeeded()


@pytest.mark.parametrize(
    ("rope", "frequencies", "rope_type", "nope"),
    [
        ("default", "longrope", "default", 40),  # as many channels as pairs: every pair once
        ("default", "stock", "default", 40),
        ("llama3", "longrope", "longrope", 8),
    ],
)
def test_queries_are_padded_only_for_engines_that_could_mistake_them(
    convert, tmp_path, rope, frequencies, rope_type, nope
):
    """The own code of vLLM takes equal rotated and unrotated sizes for attention without a latent.

    It computes stock frequencies only, so what `config.json` has counts, and not the option.
    """
    changes = {} if rope == "default" else {"rope_parameters": llama_pairs.ROPES[rope]}
    source, out = latent.make_source(tmp_path / "source", **changes), tmp_path / "out"
    options = ("--latent", 12, "--rope", 8, "--frequencies", frequencies, "--calibration", "none")
    convert("mha-to-mla", source, out, *options).succeeded()
    written = latent.config(out)
    assert written["rope_parameters"]["rope_type"] == rope_type
    assert written["qk_nope_head_dim"] == nope
    recorded = json.loads((out / "groupwise.json").read_text())["latent"]["frequencies"]
    assert recorded == ("longrope" if rope_type == "longrope" else "stock")
    assert ("rope_type longrope" in (out / "README.md").read_text()) == (rope_type == "longrope")
    convert("verify", source, out).succeeded()


def test_no_text_is_surveyed_where_the_frequencies_are_known(convert, tmp_path, monkeypatch):
    """The rotated key of MQA can hold all keys, and one stock channel has the frequency of the fastest pair."""
    source = latent.make_source(tmp_path / "source", num_key_value_heads=1, vocab_size=300)
    make_tokenizer(source, 300)

    def survey(*arguments):
        raise AssertionError("surveys")

    monkeypatch.setattr("convert.calibration.latent_survey.choose_pair_indices", survey)
    short = ("--calibration-tokens", 1024, "--refine", 0, "--json")
    cases = {
        "all keys": (("--latent", 6, "--rope", 8), [0.0, 1.0, 2.0, 3.0]),
        "all keys, longrope": (("--latent", 6, "--rope", 8, "--frequencies", "longrope"), [0.0, 1.0, 2.0, 3.0]),
        "one channel": (("--latent", 6, "--rope", 2, "--frequencies", "stock"), [0.0]),
    }
    for name, (options, pair_indices) in cases.items():
        out = tmp_path / name
        planned = json.loads(convert("mha-to-mla", source, out, *options, *short, "--dry-run").out)
        done = json.loads(convert("mha-to-mla", source, out, *options, *short).out)
        assert planned["latent"] == done["latent"], name
        assert (done["latent"]["pair_indices"], done["latent"]["frequencies"]) == (pair_indices, "stock"), name
        assert latent.config(out)["rope_parameters"]["rope_type"] == "default", name
        assert not any("longrope" in note for note in (*planned["notes"], *done["notes"])), name
