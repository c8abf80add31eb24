"""What calibration sees of T5's decoder, against a plain forward pass of the whole model in transformers."""

from dataclasses import replace

import pytest
import tiny
import torch
from families_without_gqa import HEAD_DIM, HIDDEN, N_HEADS, STOCK_CLASSES, mt5, t5
from rounding import assert_close
from safetensors.torch import save_file
from tiny_tokenizers import make_tokenizer
from transformers import T5ForConditionalGeneration

from convert.calibration.float32_weights import head_weights
from convert.layers.t5_layers import T5ModelLayers
from convert.merging.layer_merge import read_attention
from convert.merging.merge_recipe import MergeRecipe
from convert.planning.merge_plan import make_merge_plan
from model.checkpoint import open_checkpoint
from model.remote_code.modeling_t5_gqa import T5GQAForConditionalGeneration

LENGTH = 17
ENCODED = LENGTH // 2
IDS = torch.randint(1, 60, (3, LENGTH), generator=torch.Generator().manual_seed(0))
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "d_kv": 24, "num_decoder_layers": 3}
CASES = [{}, GATED]


def logits(folder, model_class=T5ForConditionalGeneration):
    model = model_class.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        return model(input_ids=IDS, decoder_input_ids=IDS.flip(1)).logits


def plain(folder, model_class):
    """Return what a plain forward pass of the stock class computes: sublayers' parts and outputs, and all weights."""
    model = model_class.from_pretrained(folder, attn_implementation="eager").eval()
    parts, outputs = [], []
    for block in model.decoder.block:
        for place, attention in ((0, block.layer[0].SelfAttention), (1, block.layer[1].EncDecAttention)):
            parts.append({})
            for name in "qkvo":
                hook = lambda module, args, out, name=name, known=parts[-1]: known.__setitem__(name, out)  # noqa: E731
                getattr(attention, name).register_forward_hook(hook)
            end = block.layer[0] if place == 0 else block.layer[2]
            end.register_forward_hook(
                lambda module, args, out: outputs.append(out[0] if isinstance(out, tuple) else out)
            )
    with torch.no_grad():
        decoder_ids = torch.cat([torch.zeros(3, 1, dtype=torch.long), IDS[:, ENCODED:-1]], 1)
        out = model(input_ids=IDS[:, :ENCODED], decoder_input_ids=decoder_ids, output_attentions=True)
    both = zip(out.decoder_attentions, out.cross_attentions, strict=True)
    return parts, outputs, [weights for pair in both for weights in pair]


@pytest.mark.parametrize(("make", "changes"), [*((t5, changes) for changes in CASES), (mt5, {})])
def test_what_is_seen_is_what_the_whole_model_computes(tmp_path, make, changes):
    folder = tiny.save(make(**changes), tmp_path / "source")
    parts, outputs, all_weights = plain(folder, STOCK_CLASSES[make])
    with open_checkpoint(folder) as checkpoint, torch.no_grad():
        layers = T5ModelLayers(checkpoint, LENGTH)
        merges = make_merge_plan(checkpoint, 2, MergeRecipe("pca"), None).conversions
        assert len(merges) == layers.n_layers == len(parts)
        states_BTM = layers.embed(IDS)
        for index in range(layers.n_layers):
            layer, seen = layers.load(index), []
            x_BTM = layer.inputs(states_BTM)
            attended_BTM, states_BTM = layer.run(states_BTM, seen.append)
            assert_close(states_BTM[:, ENCODED:], outputs[index])
            assert_close(attended_BTM[:, ENCODED:], parts[index]["o"])
            assert not attended_BTM[:, :ENCODED].any()
            heads = (seen[0].q_BTHD, seen[0].rotated_k_BTKD, seen[0].v_BTKD)
            for name, each in zip("qkv", heads, strict=True):
                assert_close(each.flatten(2), parts[index][name])
            q_HTD, k_KTD = (each[0].transpose(0, 1) for each in heads[:2])
            weights_HST = layer.attention_weights(q_HTD, k_KTD, torch.arange(LENGTH - ENCODED))
            assert_close(weights_HST, all_weights[index][0])
            weights = head_weights(read_attention(checkpoint, merges[index]))
            assert_close(layer.heads_out(weights, x_BTM) @ weights.o_MC.T, attended_BTM)


def equivalent(folder, groups):
    """Write a model with `groups` K/V heads, each repeated, and the same with those in other coordinates."""
    torch.manual_seed(0)
    source = make_tokenizer(tiny.save(t5(vocab_size=300, initializer_factor=2.0), folder / "source"), 300)
    tensors, size = tiny.tensors(source), N_HEADS // groups
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"  # T5 1.0 has it
    tensors[unused] = torch.randn(32, N_HEADS)
    for name in [name for name in tensors if name.startswith("decoder.") and name[-9:] in (".k.weight", ".v.weight")]:
        heads = tensors[name].view(groups, size, HEAD_DIM, HIDDEN)[:, :1].expand(-1, size, -1, -1)
        tensors[name] = heads.reshape(-1, HIDDEN).contiguous()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    for name in [name for name in tensors if name.startswith("decoder.") and name.endswith(".k.weight")]:
        stem = name.removesuffix("k.weight")
        for mapped, undone in (("k", "q"), ("v", "o")):
            maps = torch.linalg.qr(torch.randn(N_HEADS, HEAD_DIM, HEAD_DIM))[0]
            heads = tensors[f"{stem}{mapped}.weight"].view(N_HEADS, HEAD_DIM, HIDDEN)
            tensors[f"{stem}{mapped}.weight"] = (maps @ heads).flatten(0, 1)
            other = tensors[f"{stem}{undone}.weight"]
            heads = (other if undone == "q" else other.T).reshape(N_HEADS, HEAD_DIM, HIDDEN)
            rows = (maps @ heads).flatten(0, 1)
            tensors[f"{stem}{undone}.weight"] = (rows if undone == "q" else rows.T).contiguous()
    many = folder / "many"
    many.mkdir()
    save_file(tensors, many / "model.safetensors", metadata={"format": "pt"})
    for file in ("config.json", "tokenizer.json"):
        (many / file).write_bytes((source / file).read_bytes())
    return source, many


@pytest.mark.parametrize("groups", [pytest.param(2, marks=pytest.mark.slow), 1])
def test_heads_equal_but_for_their_coordinates_merge_without_loss(convert, tmp_path, groups):
    source, many = equivalent(tmp_path, groups)
    expected = logits(source)
    limit = 2e-4 * float(expected.abs().max())
    assert (logits(many) - expected).abs().max() < limit / 2
    for method, options in (("mean", ()), ("pca", ("--calibration", "none")), ("fit", ("--refit",))):
        out = tmp_path / method
        tokens = ("--calibration-tokens", 4096) if method == "fit" else ()
        convert("mha-to-gqa", many, out, "--groups", groups, "--method", method, *options, *tokens).succeeded()
        lost = (logits(out, T5GQAForConditionalGeneration) - expected).abs().max()
        assert lost > 50 * limit if method == "mean" else lost < limit, method
    convert("verify", many, tmp_path / "fit").succeeded()


def test_merging_in_two_steps_refining_and_what_is_seen_of_grouped_heads(convert, tmp_path):
    """Our class for grouped heads runs as the stock class does."""
    source, many = equivalent(tmp_path, 2)
    first, second = tmp_path / "first", tmp_path / "second"
    options = ("--method", "fit", "--refit", "--refine", 2048, "--calibration-tokens", 4096)
    convert("mha-to-gqa", many, first, "--groups", 4, *options).succeeded()
    convert("mha-to-gqa", first, second, "--groups", 2, *options).succeeded()
    expected = logits(source)
    lost = (logits(second, T5GQAForConditionalGeneration) - expected).abs().max()
    assert lost < 4e-4 * float(expected.abs().max())
    convert("verify", first, second).succeeded()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decoder_start_token_id": None}, "config.json has decoder_start_token_id = None"),
        ({"decoder_start_token_id": 300}, "decoder_start_token_id = 300, but the model has a vocabulary of 300"),
    ],
)
def test_decoders_without_a_first_token(convert, tmp_path, changes, words):
    source = make_tokenizer(tiny.save(t5(vocab_size=300), tmp_path / "source"), 300)
    tiny.edit_config(source, **changes)
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2).refused(words, "--method mean")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("shared.weight", lambda t: None, "lacks the tensor shared.weight."),
        ("encoder.block.1.layer.1.DenseReluDense.wi.weight", lambda t: None, "lacks the tensor encoder.block.1."),
        ("encoder.block.1.layer.1.DenseReluDense.wi.weight", lambda t: t * float("nan"), "NaN or infinite values"),
        ("decoder.block.1.layer.2.DenseReluDense.wo.weight", lambda t: t[:-1].clone(), "DenseReluDense.wo.weight"),
    ],
)
def test_damaged_models_are_refused_in_one_line(convert, tmp_path, name, change, words):
    source = make_tokenizer(tiny.save(t5(vocab_size=300), tmp_path / "source"), 300)
    tensors = tiny.tensors(source)
    tensors[name] = change(tensors[name])
    save_file({n: t for n, t in tensors.items() if t is not None}, source / "model.safetensors", {"format": "pt"})
    given = convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--calibration-tokens", 4096)
    *notes, error = given.err.splitlines(keepends=True)
    assert all(note.startswith("Note: merged heads of t5 need model code") for note in notes)
    replace(given, err=error).refused(words)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


def test_heads_are_not_compared(convert, tmp_path):
    source = tiny.save(t5(vocab_size=300), tmp_path / "source")
    convert("inspect", source, "--heads").refused("--heads rotates heads to compare them, which is not implemented")
