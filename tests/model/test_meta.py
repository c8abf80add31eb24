"""Meta's checkpoints read as the Hugging Face folder of the same model."""

import json

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from tiny_tokenizers import make_sentencepiece
from torch_files import assert_same_conversion, bits, cast, in_pairs, write_meta
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from convert.merging.methods import find_head_method
from model.checkpoint import open_checkpoint
from model.checkpoint.formats.rope_order import half_split_rows

# Sizes that 8 files can be cut from.
SHAPE = {"hidden_size": 64, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 64}


@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
@pytest.mark.parametrize("llama3", [False, True], ids=["llama2", "llama3"])
@pytest.mark.parametrize("n_files", [1, 2, 4, 8])
def test_converts_as_the_hugging_face_folder_does(convert, tmp_path, n_files, llama3, fused):
    model = tiny.build(**SHAPE)
    dtype = {1: "float32", 2: "float16"}.get(n_files, "bfloat16")
    folder = tiny.save(model, tmp_path / "folder", dtype)
    meta = write_meta(tmp_path / "meta", model, n_files, dtype, llama3, fused)
    for groups in (16, 4, 1):
        assert_same_conversion(convert, folder, meta, tmp_path, groups)


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("n_files", [1, 2, 4, 8])
def test_grouped_heads_also_where_files_outnumber_them(convert, tmp_path, n_files, n_kv_heads):
    model = tiny.build(**{**SHAPE, "num_key_value_heads": n_kv_heads})
    folder = tiny.save(model, tmp_path / "folder", "bfloat16")
    meta = write_meta(tmp_path / "meta", model, n_files, "bfloat16", llama3=True, fused=n_files == 8)
    for groups in {n_kv_heads, 1}:
        assert_same_conversion(convert, folder, meta, tmp_path, groups)


@pytest.mark.parametrize("method", ["mean", "first"])  # random heads have no order to keep
@settings(max_examples=40)
@given(
    groups=st.sampled_from([1, 2, 4]), per_group=st.sampled_from([1, 2, 3]), half=st.integers(1, 4), seed=st.integers(0)
)
def test_permuting_commutes_with_merging(method, groups, per_group, half, seed):
    heads, head_dim = groups * per_group, 2 * half
    w = np.random.default_rng(seed).normal(size=(heads * head_dim, 5)).astype(np.float32)
    pairs = in_pairs(torch.from_numpy(w), heads).numpy()

    def merged(rows, n):
        by_group = rows.reshape(groups, n // groups, head_dim, 5)
        return np.concatenate([find_head_method(method)(group, np.random.default_rng(seed)) for group in by_group])

    def permuted(rows):
        return half_split_rows(lambda start, stop: rows[start:stop], head_dim, 0, len(rows))

    assert np.array_equal(permuted(pairs), w)
    assert np.array_equal(permuted(merged(pairs, heads)), merged(permuted(pairs), heads))


@pytest.mark.parametrize("n_files", [1, 4])
def test_any_rows_are_the_original_s(tmp_path, n_files):
    model = tiny.build(**SHAPE)
    with open_checkpoint(write_meta(tmp_path / "meta", model, n_files)) as checkpoint:
        assert checkpoint.tensors.keys() == model.state_dict().keys()
        for name, tensor in model.state_dict().items():
            for start, stop in ((0, len(tensor)), (0, 1), (3, 21), (17, 18), (len(tensor) - 1, len(tensor))):
                assert np.array_equal(checkpoint.rows(name, start, stop), tensor.numpy()[start:stop]), name


def test_a_single_file_s_bytes_are_copied_as_they_are(tmp_path):
    with open_checkpoint(write_meta(tmp_path / "meta", tiny.build(**SHAPE))) as checkpoint:
        rewritten = {name for name in checkpoint.tensors if checkpoint.span(name) is None}
        assert rewritten == {f"model.layers.{i}.self_attn.{x}_proj.weight" for i in (0, 1) for x in "qk"}


def test_outputs_open_in_transformers_with_the_same_logits(convert, tmp_path):
    model = tiny.build(**{**SHAPE, "num_key_value_heads": 4}, rms_norm_eps=1e-5, rope_parameters=theta(500000.0))
    meta = write_meta(tmp_path / "meta", model, 2, rope_theta=500000.0)
    convert("mha-to-gqa", "--method", "mean", meta, tmp_path / "out", "--groups", 4).succeeded()
    opened, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.arange(48)[None]
    with torch.no_grad():
        assert torch.equal(opened(ids).logits, model(ids).logits)


def theta(value):
    return {"rope_type": "default", "rope_theta": value}


def config_of(tmp_path, model, **params):
    with open_checkpoint(write_meta(tmp_path / "meta", model, llama3=True, **params)) as checkpoint:
        (tmp_path / "config.json").write_bytes(checkpoint.config_bytes)
        return checkpoint.config, AutoConfig.from_pretrained(tmp_path), checkpoint.notes


def test_config_says_what_params_and_shapes_do(tmp_path):
    model = tiny.build(**SHAPE, rms_norm_eps=1e-5)
    config, read, _ = config_of(tmp_path, model, vocab_size=64, ffn_dim_multiplier=1.3, max_seq_len=512)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert (config["rope_scaling"], config["max_position_embeddings"]) == (None, 512)
    for key in (*SHAPE, "intermediate_size", "rms_norm_eps", "head_dim", "hidden_act", "tie_word_embeddings"):
        assert getattr(read, key) == getattr(model.config, key), key
    assert (read.bos_token_id, read.eos_token_id) == (1, 2)


@pytest.mark.parametrize(
    ("params", "context", "factor"),
    [
        ({}, 2048, None),
        ({"norm_eps": 1e-5}, 4096, None),
        ({"rope_theta": 1e6}, 16384, None),
        ({"rope_theta": 500000.0, "use_scaled_rope": False}, 8192, None),
        ({"rope_theta": 500000.0, "use_scaled_rope": True, "rope_scaling_factor": 8}, 131072, 8.0),
    ],
)
def test_rope_and_context_length(tmp_path, params, context, factor):
    config, read, notes = config_of(tmp_path, tiny.build(**SHAPE), **params)
    assert config["max_position_embeddings"] == context
    assert f"max_position_embeddings = {context}" in notes[0]
    assert (config["rope_scaling"] or {}).get("factor") == factor
    assert read.rope_parameters["rope_theta"] == params.get("rope_theta", 10000.0)
    if factor:
        llama31 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        expected = {"rope_type": "llama3", "factor": factor, **llama31}
        assert config["rope_scaling"] == expected
        assert read.rope_parameters == {**expected, "rope_theta": 500000.0}


@pytest.mark.parametrize(("dim", "factor"), [(4096, 8.0), (2048, 32.0)])
def test_the_released_models_scale_rope_as_their_size_tells(tmp_path, dim, factor):
    """Llama 3.1 8B and 3.2 1B, as their params.json stand."""
    from model.checkpoint.formats.meta_llama.params import Params

    values = {"dim": dim, "n_layers": 1, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, "multiple_of": 256}
    values |= {"ffn_dim_multiplier": 1.5, "norm_eps": 1e-05, "rope_theta": 500000.0, "use_scaled_rope": True}
    (tmp_path / "params.json").write_text(json.dumps(values))
    params = Params(tmp_path)
    assert params.rope_scaling["factor"] == factor
    assert params.special_tokens(128256) == {"bos_token_id": 128000, "eos_token_id": 128001}
    (note,) = params.end_of_turn(128256)
    assert "for an Instruct model, set it to [128001, 128008, 128009]" in note
    assert not list(params.end_of_turn(32000))


def test_transformers_reads_the_tokenizer_as_meta_does(convert, tmp_path):
    meta = write_meta(tmp_path / "meta", tiny.build(**SHAPE))
    make_sentencepiece(meta)
    convert("to-hf", meta, tmp_path / "out").succeeded()
    own = SentencePieceProcessor(model_file=str(meta / "tokenizer.model"))
    # transformers 5 does not put its own space before a text that begins with one
    for text in ("the quick fox", "12 dogs\n  jump", "über"):
        assert AutoTokenizer.from_pretrained(tmp_path / "out")(text).input_ids == [own.bos_id(), *own.encode(text)]


@pytest.mark.parametrize("where", ["beside", "above", "nowhere"])
def test_tokenizer_is_copied_and_missing_files_are_noted(convert, tmp_path, where):
    meta = write_meta(tmp_path / "llama/7B", tiny.build(**SHAPE))
    if where == "above":
        (meta / "tokenizer.model").rename(meta / "../tokenizer.model")
    elif where == "nowhere":
        (meta / "tokenizer.model").unlink()
    result = json.loads(convert("mha-to-mqa", "--method", "mean", meta, tmp_path / "out", "--json").out)
    files = {p.name for p in (tmp_path / "out").iterdir()}
    weights = {"model.safetensors", "config.json", "generation_config.json", "groupwise.json", "README.md"}
    assert files == weights | ({"tokenizer.model", "tokenizer_config.json"} if where != "nowhere" else set())
    assert "no tokenizer.json" in result["notes"][1]
    assert ("nor is there a tokenizer.model" in result["notes"][1]) == (where == "nowhere")
    assert result["skipped_files"] == ["checklist.chk", "tokenizer_checklist.chk"]
    assert "no tokenizer.json" in convert("inspect", meta).out
    (meta / "tokenizer.json").write_text("{}")
    assert len(json.loads(convert("inspect", meta, "--json").out)["notes"]) == 1


@st.composite
def llamas(draw):
    """Draw a Llama whose tensors some number of processes can hold, that number, and how they write it."""
    n_files = draw(st.sampled_from([1, 2, 4, 8]))
    n_heads = n_files * draw(st.integers(1, 2))
    kv_counts = [n for n in range(1, n_heads + 1) if n_heads % n == 0 and 0 in (n % n_files, n_files % n)]
    shape = {
        "num_attention_heads": n_heads,
        "num_key_value_heads": draw(st.sampled_from(kv_counts)),
        "hidden_size": 2 * n_heads * draw(st.integers(1, 3)),
        "intermediate_size": n_files * draw(st.integers(1, 5)),
        "vocab_size": n_files * draw(st.integers(1, 5)),
        "num_hidden_layers": draw(st.integers(1, 2)),
    }
    how = {"dtype": draw(st.sampled_from(["float32", "float16", "bfloat16"])), "llama3": draw(st.booleans())}
    return shape, n_files, {**how, "fused": draw(st.booleans())}


@settings(max_examples=40)
@given(llama=llamas(), data=st.data())
def test_any_llama_with_any_model_parallel_split(tmp_path_factory, llama, data):
    shape, n_files, how = llama
    model = tiny.build(**shape, bos_token_id=0, eos_token_id=0)
    tensors = cast(model, how["dtype"])
    with open_checkpoint(write_meta(tmp_path_factory.mktemp("m") / "meta", model, n_files, **how)) as checkpoint:
        assert checkpoint.tensors.keys() == tensors.keys()
        assert checkpoint.config["num_key_value_heads"] == shape["num_key_value_heads"]
        for name, tensor in tensors.items():
            start = data.draw(st.integers(0, len(tensor) - 1))
            stop = data.draw(st.integers(start + 1, len(tensor)))
            for rows in (slice(None), slice(start, stop)):
                values = checkpoint.rows(name, *rows.indices(len(tensor))[:2])
                assert values.shape == tensor[rows].shape, name
                assert np.ascontiguousarray(values).tobytes() == bits(tensor[rows]), name
