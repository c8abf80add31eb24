"""The Llama code against transformers: logits, gradients, packing."""

import copy
import errno
import os

import pytest
import tiny
import torch
from gguf_files import write_gguf
from llama_pairs import FAMILIES, ROPES, pair, random_ids
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from model import generate, load_model
from model.common.errors import CheckpointError
from model.decoder.config import is_native
from model.decoder.generation import decode, pad_left, prefill
from model.decoder.kv_cache import KVCache
from model.decoder.transformers_model import TransformersModel


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("n_kv_heads", [8, 2, 1])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("family", "layout"), FAMILIES)
def test_logits_and_gradients_of_every_family(tmp_path, family, layout, tied, n_kv_heads, attention):
    hf_model, ours = pair(tmp_path, family, num_key_value_heads=n_kv_heads, tie_word_embeddings=tied, **layout)
    hf_model.set_attn_implementation(attention)
    ids = random_ids(2, 20)
    check_logits_and_gradients(hf_model, ours, ids)


@pytest.mark.parametrize("n_kv_heads", [8, 2, 1])
@pytest.mark.parametrize("length", [12, 50])
@pytest.mark.parametrize("rope", ROPES)
def test_logits_and_gradients_of_every_rope(tmp_path, rope, length, n_kv_heads):
    """Shorter than the original context, and beyond it."""
    hf_model, ours = pair(tmp_path, num_key_value_heads=n_kv_heads, rope_parameters=ROPES[rope])
    check_logits_and_gradients(hf_model, ours, random_ids(2, length))


@pytest.mark.parametrize("rope", ["linear", "dynamic", "yarn", "llama3"])
def test_both_spellings_of_rope_mean_the_same(tmp_path, rope):
    _, ours = pair(tmp_path, rope_parameters=ROPES[rope])
    scaling = {key: value for key, value in ROPES[rope].items() if key != "rope_theta"}
    for old in (scaling, {("type" if key == "rope_type" else key): value for key, value in scaling.items()}):
        tiny.edit_config(
            tmp_path / "model", rope_parameters=..., rope_theta=ROPES[rope]["rope_theta"], rope_scaling=old
        )
        assert torch.equal(load_model(tmp_path / "model")(random_ids(1, 40)), ours(random_ids(1, 40)))


def check_logits_and_gradients(hf_model, ours, ids):
    expected, logits = hf_model(ids).logits, ours(ids)
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() <= 1e-5
    loss_sum, n_valid = ours(ids, labels_BT=ids)
    loss = hf_model(ids, labels=ids).loss
    assert n_valid == ids.numel() - len(ids)
    assert (loss_sum / n_valid).item() == pytest.approx(loss.item(), abs=2e-6)
    loss.backward()
    (loss_sum / n_valid).backward()
    gradients = {name: parameter.grad for name, parameter in hf_model.named_parameters()}
    assert gradients.keys() == {name for name, _ in ours.named_parameters()}
    for name, parameter in ours.named_parameters():
        error = (parameter.grad - gradients[name]).norm() / gradients[name].norm().clamp(min=1e-12)
        assert error <= 1e-5, name


def test_the_state_dict_is_the_file(tmp_path):
    for tied in (False, True):
        folder = tiny.save(tiny.build(tie_word_embeddings=tied, attention_bias=True), tmp_path / str(tied))
        ours, file = load_model(folder).state_dict(), tiny.tensors(folder)
        assert ours.keys() == file.keys()
        assert all(torch.equal(ours[name], file[name]) for name in file)


def test_bfloat16_is_as_near_to_float32_as_transformers_is(tmp_path):
    hf_model, _ = pair(tmp_path, num_key_value_heads=2, num_hidden_layers=4)
    ids = random_ids(4, 30)
    exact = hf_model(ids).logits
    half = copy.deepcopy(hf_model).to(torch.bfloat16)
    their_error = (half(ids).logits.float() - exact).abs().mean()
    our_error = (load_model(tmp_path / "model", torch.bfloat16)(ids) - exact).abs().mean()
    assert 0 < our_error <= 1.1 * their_error


# Packed documents


DOCUMENTS = [[5, 9, 1, 17], [32], [3, 2, 1, 1, 25]]


def numbered(lengths):
    return torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])


@pytest.mark.parametrize("rope", ["default", "dynamic"])
@pytest.mark.parametrize(("family", "layout"), [("llama", {}), ("mistral", {"sliding_window": 6})])
@pytest.mark.parametrize("n_kv_heads", [8, 2])
def test_packed_documents_equal_the_same_alone(tmp_path, family, layout, n_kv_heads, rope):
    _, ours = pair(tmp_path, family, num_key_value_heads=n_kv_heads, rope_parameters=ROPES[rope], **layout)
    ids, documents = random_ids(3, 32), torch.stack([numbered(lengths) for lengths in DOCUMENTS])
    packed = ours(ids, documents_BT=documents)
    total = torch.zeros(())
    count = 0
    for row, lengths in enumerate(DOCUMENTS):
        start = 0
        for n in lengths:
            alone = ids[row : row + 1, start : start + n]
            assert (packed[row, start : start + n] - ours(alone)[0]).abs().max() <= 1e-5
            loss, valid = ours(alone, labels_BT=alone)
            total, count, start = total + loss, count + valid, start + n
    loss, valid = ours(ids, labels_BT=ids, documents_BT=documents)
    assert valid == count
    assert loss.item() == pytest.approx(total.item(), rel=1e-6)


def stretched(tmp_path):
    """Return transformers' model and ours, in float64, with dynamic RoPE whose original context is 8 tokens."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    hf_model, ours = pair(tmp_path, num_key_value_heads=2, rope_parameters=rope, max_position_embeddings=8)
    return hf_model.double(), ours.double()


def test_with_dynamic_rope_a_row_s_loss_is_its_own(tmp_path):
    """Whatever the micro-batch: one document of 32 tokens beside eight of 4."""
    _, ours = stretched(tmp_path)
    ids, documents = random_ids(2, 32), torch.stack([numbered([32]), numbered([4] * 8)])
    together, _ = ours(ids, ids, documents)
    one_by_one = [ours(ids[i : i + 1], ids[i : i + 1], documents[i : i + 1])[0] for i in (0, 1)]
    assert together.item() == pytest.approx(sum(one_by_one).item(), rel=1e-6)  # it is float32


@pytest.mark.parametrize("lengths", [[4, 28], [28, 4], [16, 16], [5, 9, 18]])
def test_with_dynamic_rope_a_packed_document_equals_transformers_alone(tmp_path, lengths):
    hf_model, ours = stretched(tmp_path)
    ids = random_ids(1, 32)
    packed = ours(ids, documents_BT=numbered(lengths)[None])
    for alone, logits in zip(ids.split(lengths, 1), packed.split(lengths, 1), strict=True):
        fresh = copy.deepcopy(hf_model)  # it keeps the frequencies of the longest text so far
        assert (logits - fresh(alone).logits).abs().max() <= 1e-5


def test_with_dynamic_rope_left_padded_prompts_equal_single_ones(tmp_path):
    """Each is rotated by its own length: two are beyond the original context, two are not."""
    _, ours = stretched(tmp_path)
    prompts = [random_ids(n, seed=n).tolist() for n in (3, 11, 1, 20)]
    ids, padding = pad_left(prompts)
    batched = prefill(ours, ids, KVCache(ours.config, 4, 20, torch.float64, "cpu", padding))
    for prompt, logits in zip(prompts, batched, strict=True):
        assert (logits - ours(torch.tensor([prompt]))[0, -1]).abs().max() <= 1e-5


def test_no_gradient_crosses_a_document_s_border(tmp_path):
    _, ours = pair(tmp_path, num_key_value_heads=2)
    ids, documents = random_ids(1, 20), numbered([8, 12])[None]
    embedded = ours.model.embed_tokens(ids).detach().requires_grad_()
    ours.model.embed_tokens.register_forward_hook(lambda *_: embedded)
    ours(ids, documents_BT=documents)[0, 8:].square().sum().backward()
    assert (embedded.grad[0, :8] == 0).all()
    assert (embedded.grad[0, 8:].abs().sum(dim=1) > 0).all()


def test_rope_scaling_in_both_spellings(tmp_path):
    """As converted models have it, so that transformers 4 applies it too."""
    scaling = {"rope_type": "linear", "factor": 4.0}
    folder = tiny.save(tiny.build(rope_parameters={**scaling, "rope_theta": 54321.0}), tmp_path / "model")
    tiny.edit_config(folder, rope_scaling={"type": "linear", "factor": 4.0}, rope_theta=54321.0)
    ids = torch.arange(12).view(2, 6)
    hf_model = AutoModelForCausalLM.from_pretrained(folder)
    assert hf_model.model.rotary_emb.config.rope_parameters["factor"] == 4.0
    assert (load_model(folder)(ids) - hf_model(ids).logits).abs().max() < 1e-6


# What is refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "nonsense"}, "KeyError: 'nonsense'"),
        ({"rope_parameters": {"rope_type": "axial", "factor": 2.0}}, "RoPE type 'axial'"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "longrope, but gives no short_factor"),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "short_factor": [1, 2],
                    "long_factor": [1, 3, 4],
                    "attention_factor": 1.0,
                }
            },
            "2 numbers in short_factor and 3 in long_factor; both must have 2",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "no low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            "both rope_parameters .* and rope_scaling ",
        ),
        ({"intermediate_size": 41}, "has shape"),
        ({"tie_word_embeddings": True}, "ties head and embedding"),
        ({"attention_bias": True}, "lacks the tensor model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_what_the_code_does_not_implement_is_refused_by_name(tmp_path, changes, words):
    folder = tiny.save(tiny.build(), tmp_path / "model")
    tiny.edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=words):
        load_model(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "relu"},
        {
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 4.0,
                "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0], "attention_factor": 1.0,
            }
        },
    ],
    ids=["relu", "longrope"],
)  # fmt: skip
def test_other_settings_of_its_class_run_in_the_class(tmp_path, changes):
    stock = tiny.build(**changes)
    folder = tiny.save(stock, tmp_path / "model")
    model, ids = load_model(folder), torch.arange(12).view(2, 6)
    assert isinstance(model, TransformersModel)
    assert not is_native(stock.config.to_dict())
    with torch.inference_mode():
        assert (model(ids) - stock.eval()(ids).logits).abs().max() < 1e-6


def test_unexpected_tensors_are_refused(tmp_path):
    folder = tiny.save(tiny.build(), tmp_path / "model")
    save_file({**tiny.tensors(folder), "score.weight": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"score\.weight"):
        load_model(folder)


def test_a_tied_lm_head_may_stand_in_the_file(tmp_path):
    folder = tiny.save(tiny.build(tie_word_embeddings=True), tmp_path / "model")
    tensors = tiny.tensors(folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    assert load_model(folder).lm_head is None


@pytest.mark.parametrize("bare", [False, True])
def test_a_tied_lm_head_may_stand_for_the_embedding(tmp_path, bare):
    _, ours = pair(tmp_path, tie_word_embeddings=True)
    folder, ids = tmp_path / "model", random_ids(1, 8)
    tensors = tiny.tensors(folder)
    if bare:
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    embedding = "embed_tokens.weight" if bare else "model.embed_tokens.weight"
    both = {**tensors, "lm_head.weight": tensors[embedding].clone()}
    for kept in (both, {name: tensor for name, tensor in both.items() if name != embedding}):
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
        assert torch.equal(load_model(folder)(ids), ours(ids))


def test_matrices_of_several_dtypes_are_widened(tmp_path):
    folder = tiny.save(tiny.build(), tmp_path / "model")
    tensors = tiny.tensors(folder)
    tensors = {name: tensor.bfloat16() if "q_proj" in name else tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = load_model(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight, tensors["model.layers.0.self_attn.q_proj.weight"])
    assert len(generate(model, [[1, 2, 3]], 4)[0]) == 4


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_biases_of_a_gguf_are_float32(tmp_path, kind):
    """They take the matrices' dtype, without which torch does not add them."""
    path = write_gguf(tmp_path / "model.gguf", tiny.build("qwen2", vocab_size=300), kind)
    model = load_model(path)
    attention = model.model.layers[0].self_attn
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[kind]
    assert {attention.q_proj.bias.dtype, attention.q_proj.weight.dtype} == {dtype}
    assert len(generate(model, [[1, 2, 3]], 4, stop_ids=[])[0]) == 4


def test_generation_refuses_a_folder_without_model_or_tokenizer(generation, tmp_path):
    folder = tiny.save(tiny.build(), tmp_path / "model")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    generation(tmp_path / "nowhere", "--prompt", "x").refused("nowhere")
    generation(folder, "--prompt", "x").refused(f"{folder} holds no tokenizer (tokenizer.json or tokenizer.model)")


def test_generation_ends_a_failed_read_with_exit_code_1(generation, tmp_path, monkeypatch):
    def fail(folder, device):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder))

    monkeypatch.setattr("model.decoder.generation.load_model", fail)
    result = generation(tmp_path, "--prompt", "x")
    assert (result.code, result.err) == (1, f"Error: [Errno 5] Input/output error: '{tmp_path}'\n")


def test_a_full_cache_and_ids_outside_the_vocabulary_are_refused(tmp_path):
    _, ours = pair(tmp_path)
    cache = KVCache(ours.config, 1, 5, torch.float32, "cpu")
    prefill(ours, random_ids(1, 4), cache)
    with pytest.raises(ValueError, match="grows to 6 tokens, but the cache holds 5"):
        prefill(ours, random_ids(1, 2), cache)
    for wrong in (67, -1):
        with pytest.raises(ValueError, match=f"token id {wrong} is outside the vocabulary, which has 67"):
            ours(torch.tensor([[1, wrong]]))


# Families without native code


def gpt_neox(tmp_path, **changes):
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=67, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, **changes,
    )  # fmt: skip
    hf_model = GPTNeoXForCausalLM(config).eval()
    hf_model.save_pretrained(tmp_path / "neox")
    return hf_model, load_model(tmp_path / "neox")


def test_other_families_open_behind_the_same_interface(tmp_path):
    hf_model, ours = gpt_neox(tmp_path)
    ids = random_ids(2, 20)
    assert torch.equal(ours(ids), hf_model(ids).logits)
    assert torch.allclose(ours.hidden(ids) @ ours.lm_head_weight.T, ours(ids), atol=1e-6)
    loss_sum, n_valid = ours(ids, ids)
    assert (loss_sum / n_valid).item() == pytest.approx(hf_model(ids, labels=ids).loss.item(), rel=1e-6)
    native = pair(tmp_path)[1]
    assert torch.allclose(native.hidden(ids) @ native.lm_head_weight.T, native(ids), atol=1e-5)
    with pytest.raises(CheckpointError, match="generate with transformers instead"):
        generate(ours, [[1, 2]], 3)


def test_other_families_keep_packed_documents_apart(tmp_path):
    _, ours = gpt_neox(tmp_path)
    ids, documents = random_ids(1, 20), numbered([8, 12])[None]
    packed = ours(ids, documents_BT=documents)
    assert (packed[:, :8] - ours(ids[:, :8])).abs().max() <= 1e-5
    assert (packed[:, 8:] - ours(ids[:, 8:])).abs().max() <= 1e-5
    together, n = ours(ids, ids, documents)
    (a, n_a), (b, n_b) = (ours(part, part) for part in (ids[:, :8], ids[:, 8:]))
    assert n == n_a + n_b
    assert together.item() == pytest.approx((a + b).item(), rel=1e-6)


@pytest.mark.parametrize("family", [family for family in tiny.STOCK if family not in tiny.WRAPPERS])
def test_every_family_keeps_packed_documents_apart(tmp_path, family):
    ours = load_model(tiny.save(tiny.build(family), tmp_path / family), torch.float32)
    ids, documents = random_ids(1, 20), numbered([8, 12])[None]
    packed = ours(ids, documents_BT=documents)
    assert (packed[:, :8] - ours(ids[:, :8])).abs().max() <= 1e-5
    assert (packed[:, 8:] - ours(ids[:, 8:])).abs().max() <= 1e-5


def test_other_families_whose_frequencies_depend_on_the_longest_document_are_refused(tmp_path):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    _, ours = gpt_neox(tmp_path, rope_parameters=rope, rotary_pct=1.0)
    ours(random_ids(1, 64), documents_BT=numbered([30, 34])[None])
    with pytest.raises(CheckpointError, match=r"windows of 65 tokens here: beyond 64 tokens .* \(--seq-len 64\)"):
        ours(random_ids(1, 65), documents_BT=numbered([30, 35])[None])


def test_other_families_with_missing_tensors_are_refused(tmp_path):
    gpt_neox(tmp_path)
    file = tmp_path / "neox/model.safetensors"
    tensors = tiny.tensors(tmp_path / "neox")
    tensors.pop("gpt_neox.layers.0.mlp.dense_h_to_4h.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="missing keys: gpt_neox"):
        load_model(tmp_path / "neox")


# Compiling


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")  # the compiler warns about its own doings
@pytest.mark.parametrize("n_kv_heads", [8, 2])
def test_blocks_compile_to_one_graph_for_training_and_decoding(tmp_path, n_kv_heads):
    _, ours = pair(tmp_path, num_key_value_heads=n_kv_heads)
    ids = random_ids(2, 24)
    expected = ours(ids)
    ours(ids, ids)[0].backward()
    gradients = {name: parameter.grad.clone() for name, parameter in ours.named_parameters()}
    ours.zero_grad()
    torch._dynamo.reset()
    for layer in ours.model.layers:
        layer.compile(fullgraph=True)
    ours(ids, ids)[0].backward()
    for name, parameter in ours.named_parameters():
        assert (parameter.grad - gradients[name]).norm() <= 1e-5 * gradients[name].norm(), name
    cache = KVCache(ours.config, 2, 24, torch.float32, "cpu")
    with torch.inference_mode():
        logits = prefill(ours, ids[:, :10], cache)
        for i in range(10, 24):
            assert (logits - expected[:, i - 1]).abs().max() <= 1e-5
            logits = decode(ours, ids[:, i], cache)
