"""GGUF files read as the checkpoints they were made from."""

import json
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny
import torch
from gguf_files import byte_letters, gguf_name, write_gguf
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen2Tokenizer

from model.checkpoint import open_checkpoint
from model.checkpoint.formats.gguf.tokenizer import tokenizer_files
from model.common.errors import CheckpointError

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}


@pytest.mark.parametrize(
    "model",
    [("llama", {"attention_bias": False}), ("llama", {"attention_bias": True}), ("qwen2", {})],
    ids=["llama", "llama with biases", "qwen2"],
)
@pytest.mark.parametrize("tied", [False, True])
def test_tensors_are_the_original_s(tmp_path, tied, model):
    family, settings = model
    model = tiny.build(family, **SHAPE, tie_word_embeddings=tied, **settings)
    with open_checkpoint(write_gguf(tmp_path / "x.gguf", model)) as checkpoint:
        state = {n: t for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")}
        assert checkpoint.tensors.keys() == state.keys()
        for name, tensor in state.items():
            rows = checkpoint.rows(name, 0, len(tensor))
            assert np.array_equal(rows, tensor.numpy()), name
            for start, stop in ((0, 1), (3, 21), (len(tensor) - 1, len(tensor))):
                assert np.array_equal(checkpoint.rows(name, start, stop), tensor.numpy()[start:stop]), name


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_every_kind_is_dequantised_as_the_gguf_package_does(tmp_path, kind):
    model = tiny.build(**SHAPE)
    path = write_gguf(tmp_path / "x.gguf", model, kind)
    stored = {t.name: t for t in gguf.GGUFReader(path).tensors}["blk.1.attn_v.weight"]
    expected = gguf.quants.dequantize(stored.data, stored.tensor_type)
    with open_checkpoint(path) as checkpoint:
        name = "model.layers.1.self_attn.v_proj.weight"
        dtype = kind if kind in ("F16", "BF16") else "F32"
        assert checkpoint.tensors[name].dtype == dtype
        assert np.array_equal(checkpoint.rows(name, 0, 32).astype(np.float32), expected)
        span = checkpoint.span(name)
        assert (span is None) == kind.startswith("Q")
        if span is not None:
            assert span.path.read_bytes()[span.offset : span.offset + span.length] == stored.data.tobytes()
        assert checkpoint.span("model.layers.1.self_attn.k_proj.weight") is None


@settings(max_examples=30)
@given(data=st.data(), kind=st.sampled_from(["F32", "F16", "BF16", "Q8_0"]))
def test_any_llama_is_what_the_gguf_package_reads(tmp_path_factory, data, kind):
    n_kv_heads, head_dim = data.draw(st.sampled_from([1, 2, 4])), 2 * data.draw(st.integers(1, 8))
    n_heads = n_kv_heads * data.draw(st.sampled_from([1, 2, 4]))
    if kind == "Q8_0":  # rows are whole blocks of 32
        head_dim = max(head_dim // 4 * 4, 4)
        n_heads, n_kv_heads = 8, data.draw(st.sampled_from([1, 2, 4, 8]))
    shape = {"num_attention_heads": n_heads, "num_key_value_heads": n_kv_heads, "head_dim": head_dim}
    path = tmp_path_factory.mktemp("g") / "x.gguf"
    write_gguf(path, tiny.build(**shape, hidden_size=32, intermediate_size=32 * data.draw(st.integers(1, 3))), kind)
    stored = {t.name: t for t in gguf.GGUFReader(path).tensors}
    with open_checkpoint(path) as checkpoint:
        assert {gguf_name(name) for name in checkpoint.tensors} == stored.keys()
        for name, tensor in checkpoint.tensors.items():
            gguf_tensor = stored[gguf_name(name)]
            expected = gguf.quants.dequantize(gguf_tensor.data, gguf_tensor.tensor_type)
            if heads := {"q_proj": n_heads, "k_proj": n_kv_heads}.get(name.split(".")[-2]):
                pairs = expected.reshape(heads, head_dim // 2, 2, -1)
                expected = pairs.swapaxes(1, 2).reshape(expected.shape)
            start = data.draw(st.integers(0, tensor.shape[0] - 1))
            for rows in (slice(None), slice(start, data.draw(st.integers(start + 1, tensor.shape[0])))):
                read = checkpoint.rows(name, *rows.indices(tensor.shape[0])[:2])
                assert np.array_equal(read.astype(np.float32), expected[rows]), name


def test_config_opens_and_means_the_same(tmp_path):
    model = tiny.build(**SHAPE)
    path = write_gguf(tmp_path / "x.gguf", model, **{"llama.rope.freq_base": 500000.0})
    with open_checkpoint(path) as checkpoint:
        config = checkpoint.config
        (tmp_path / "config.json").write_bytes(checkpoint.config_bytes)
    assert config["rms_norm_eps"] == 1e-6
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500000.0
    read = AutoConfig.from_pretrained(tmp_path)
    assert read.rope_parameters["rope_theta"] == 500000.0
    for key, value in SHAPE.items():
        assert getattr(read, key) == value


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0},
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 16.0,
                "llama.rope.scaling.original_context_length": 4096,
            },
            {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096},
        ),
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_rope_scaling(tmp_path, family, metadata, expected):
    metadata = {key.replace("llama", family): value for key, value in metadata.items()}
    model = tiny.build(family, **SHAPE, max_position_embeddings=64)
    with open_checkpoint(write_gguf(tmp_path / "x.gguf", model, **metadata)) as checkpoint:
        assert checkpoint.config["rope_scaling"] == expected
        parameters = {**(expected or {"rope_type": "default"}), "rope_theta": 10000.0}
        assert checkpoint.config["rope_parameters"] == parameters


@pytest.mark.parametrize(
    ("kind", "factor", "refused"), [("yarn", 4.0, True), ("linear", 2.0, True), ("none", 1.0, False)]
)
def test_factors_beside_another_scaling(convert, tmp_path, kind, factor, refused):
    """config.json has a place for one of the two."""
    model = tiny.build()
    model.rope_factors = [1.0, 1.0]
    keys = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": factor}
    result = convert("to-hf", write_gguf(tmp_path / "x.gguf", model, **keys), tmp_path / "out")
    if refused:
        result.refused(f"scales the rotary embedding twice, by rope_freqs.weight and by the type '{kind}'")
    else:
        result.succeeded()


def test_llama3_scaling_is_recovered_from_its_factors(tmp_path):
    """The factors come from transformers: its default frequencies ÷ its llama3 ones."""
    scaling = {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    shape = {**SHAPE, "head_dim": 64}
    plain = tiny.build(**shape, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    scaled = tiny.build(**shape, rope_parameters={**scaling, "rope_theta": 500000.0})
    plain.rope_factors = (plain.model.rotary_emb.inv_freq / scaled.model.rotary_emb.inv_freq).tolist()
    assert max(plain.rope_factors) == 32.0
    path = write_gguf(tmp_path / "x.gguf", plain, **{"llama.rope.freq_base": 500000.0})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config["rope_scaling"] == scaling


@pytest.mark.parametrize(("family", "dtype"), [("llama", "F32"), ("llama", "F16"), ("qwen2", "F32")])
def test_converting_a_gguf_equals_converting_the_folder(convert, tmp_path, family, dtype):
    model = tiny.build(family, **SHAPE)
    if dtype == "F16":
        model = AutoModelForCausalLM.from_pretrained(tiny.save(model, tmp_path / "h", "float16"), dtype=torch.float16)
    folder = tiny.save(model, tmp_path / "folder", "float16" if dtype == "F16" else "float32")
    path = write_gguf(tmp_path / "x.gguf", model, dtype)
    for source, out in ((folder, "from-folder"), (path, "from-gguf")):
        convert("mha-to-gqa", "--method", "mean", source, tmp_path / out, "--groups", 2).succeeded()
        convert("verify", source, tmp_path / out).succeeded()
    a, b = tiny.tensors(tmp_path / "from-folder"), tiny.tensors(tmp_path / "from-gguf")
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name].float(), b[name].float()), name


def test_a_qwen2_s_config_means_the_same(tmp_path):
    model = tiny.build("qwen2", **SHAPE, vocab_size=300)
    path = write_gguf(tmp_path / "x.gguf", model, **{"qwen2.rope.freq_base": 1000000.0})
    with open_checkpoint(path) as checkpoint:
        (tmp_path / "config.json").write_bytes(checkpoint.config_bytes)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_bytes(bytes(checkpoint.side_files[name]))
    read = AutoConfig.from_pretrained(tmp_path)
    assert type(read) is type(model.config)
    assert read.rope_parameters == {"rope_type": "default", "rope_theta": 1000000.0}
    assert read.layer_types == ["full_attention"] * model.config.num_hidden_layers
    assert AutoTokenizer.from_pretrained(tmp_path).model_max_length == model.config.max_position_embeddings
    for key, value in SHAPE.items():
        assert getattr(read, key) == value


def test_a_qwen2_that_chats_has_two_ends(tmp_path):
    """Its file names `<|im_end|>` alone; transformers must stop at `<|endoftext|>` too."""
    model = tiny.build("qwen2", **SHAPE)
    with open_checkpoint(write_gguf(tmp_path / "x.gguf", model)) as checkpoint:
        assert json.loads(bytes(checkpoint.side_files["generation_config.json"]))["eos_token_id"] == 0
    tokens = ["<|im_end|>", "<|endoftext|>"]
    with open_checkpoint(write_gguf(tmp_path / "y.gguf", model, first_tokens=tokens)) as checkpoint:
        assert json.loads(bytes(checkpoint.side_files["generation_config.json"]))["eos_token_id"] == [0, 1]
        assert checkpoint.config["eos_token_id"] == 0


def add_output_bias(model):
    projection = model.model.layers[1].self_attn.o_proj
    projection.bias = torch.nn.Parameter(torch.ones(projection.out_features))


def drop_key_bias(model):
    model.model.layers[1].self_attn.k_proj.bias = None


@pytest.mark.parametrize(
    ("change", "problem"),
    [(add_output_bias, r"holds .*1\.self_attn\.o_proj\.bias"), (drop_key_bias, r"lacks .*1\.self_attn\.k_proj\.bias")],
)
def test_biases_that_a_qwen2_does_not_have(tmp_path, change, problem):
    """Read by transformers, one would be dropped or made up."""
    model = tiny.build("qwen2", **SHAPE)
    change(model)
    with pytest.raises(CheckpointError, match=problem):
        open_checkpoint(write_gguf(tmp_path / "x.gguf", model))


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        (("self_attn.k_proj", "self_attn.v_proj"), r"lacks model\.layers\.0\.self_attn\.o_proj\.bias"),
        (("self_attn.o_proj",), r"lacks model\.layers\.0\.self_attn\.k_proj\.bias"),
        (("mlp.down_proj",), r"lacks model\.layers\.0\.mlp\.gate_proj\.bias"),
        ((), r"holds lm_head\.bias"),
    ],
)
def test_biases_that_a_llama_does_not_have(tmp_path, parts, problem):
    """The config says of all projections together whether they have biases. transformers would drop the others."""
    model = tiny.build("llama", **SHAPE)
    layers = [layer.get_submodule(part) for layer in model.model.layers for part in parts]
    for projection in layers or [model.lm_head]:
        projection.bias = torch.nn.Parameter(torch.ones(projection.out_features))
    with pytest.raises(CheckpointError, match=problem):
        open_checkpoint(write_gguf(tmp_path / "x.gguf", model))


# The tokenizer


LETTERS = byte_letters()


@given(text=st.text(alphabet=st.sampled_from("ab 1234'sSLt\n\té\u0301ü漢字🙂.,!Ⅷ\u00a0"), max_size=30))
@example("it'Sab 'sab I'LLab we'Reab 'Tab 'vEm'dab 'mab")
def test_qwen2_s_tokens_are_those_of_transformers(text):
    """The regular expression decides which letters may be merged, so merge every pair of the bytes used."""
    used = b"sStTrREvLlmdab 123'\n."  # a letter may rather join the next one than the apostrophe before it
    pairs = [(LETTERS[a], LETTERS[b]) for a in used for b in used]
    tokens = ["<|endoftext|>", *LETTERS, *("".join(pair) for pair in pairs)]
    merges = [" ".join(pair) for pair in pairs]
    fields = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "token_type": [3] + [1] * (len(tokens) - 1)}
    fields |= {"merges": merges, "eos_token_id": 0}
    files = tokenizer_files(Path("x"), {f"tokenizer.ggml.{key}": value for key, value in fields.items()})
    ours = Tokenizer.from_str(bytes(files["tokenizer.json"]).decode())
    theirs = Qwen2Tokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs)
    assert ours.encode(text).ids == theirs(text).input_ids
    assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs(text).input_ids)


def spm_fields(pieces, **changes):
    fixed = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": fixed + pieces,
        "tokenizer.ggml.scores": [0.0] * len(fixed) + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **changes,
    }


def sentencepiece(text: str, pieces: dict[str, float]) -> list[str]:
    """Encode by SentencePiece's rule, plainly: join the neighbours whose union scores highest, leftmost first."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(pieces[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in pieces]
        if not pairs:
            return parts
        i = -max(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


PIECES = ["▁a", "ab", "▁ab", "ba", "aba", "▁b", "bb", "abb", "bab", "▁▁", "▁", "a", "b"]


@given(text=st.text(alphabet="ab ", min_size=1, max_size=14))
def test_merges_from_scores_act_as_sentencepiece(text):
    files = tokenizer_files(Path("x"), spm_fields(PIECES))
    tokenizer = Tokenizer.from_str(bytes(files["tokenizer.json"]).decode())
    scores = {piece: -float(i) for i, piece in enumerate(PIECES)}
    assert tokenizer.encode(text, add_special_tokens=False).tokens == sentencepiece(text, scores)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_sentencepiece_bytes_and_specials(tmp_path):
    files = tokenizer_files(tmp_path, spm_fields(PIECES))
    tokenizer = Tokenizer.from_str(bytes(files["tokenizer.json"]).decode())
    encoded = tokenizer.encode("aé</s>b")
    assert encoded.tokens == ["<s>", "▁a", "<0xC3>", "<0xA9>", "</s>", "▁b"]
    config = json.loads(bytes(files["tokenizer_config.json"]))
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == ("<s>", "</s>", "<unk>")
    assert config["add_bos_token"] is True


@pytest.mark.parametrize(("pre", "begins"), [("llama-bpe", True), ("gpt-2", False), ("smollm", False)])
def test_texts_of_llama_3_begin_with_a_token_where_the_file_does_not_say(tmp_path, pre, begins):
    """As in llama.cpp."""
    fields = {
        "model": "gpt2", "pre": pre, "tokens": ["<s>", "a", "b"], "token_type": [3, 1, 1], "merges": [],
        "bos_token_id": 0,
    }  # fmt: skip
    files = tokenizer_files(tmp_path, {f"tokenizer.ggml.{key}": value for key, value in fields.items()})
    tokens = Tokenizer.from_str(bytes(files["tokenizer.json"]).decode()).encode("ab").tokens
    assert tokens == ["<s>"] * begins + ["a", "b"]
    assert json.loads(bytes(files["tokenizer_config.json"]))["add_bos_token"] is begins


def test_filling_tokens_are_not_added_tokens(tmp_path):
    pieces = [f"[PAD{i}]" for i in (259, 261)]  # the second is not at its own place
    files = tokenizer_files(
        tmp_path, spm_fields(pieces) | {"tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [4, 4]}
    )
    added = [token["id"] for token in json.loads(bytes(files["tokenizer.json"]))["added_tokens"]]
    assert added == [0, 1, 2, 260]


def test_unknown_tokenizers_are_refused(convert, tmp_path):
    with pytest.raises(CheckpointError, match="tokenizer of kind 'bert'"):
        tokenizer_files(tmp_path, {"tokenizer.ggml.model": "bert"})
    with pytest.raises(CheckpointError, match=f"tokenizer of kind '{'x' * 59}…; 'gpt2' and"):  # cut as all values are
        tokenizer_files(tmp_path, {"tokenizer.ggml.model": "x" * 200})
    gpt2 = {"model": "gpt2", "pre": "mystery", "tokens": ["a"], "token_type": [1], "merges": []}
    with pytest.raises(CheckpointError, match="pre-tokenizer 'mystery'; supported are gpt-2"):
        tokenizer_files(tmp_path, {f"tokenizer.ggml.{key}": value for key, value in gpt2.items()})
    with pytest.raises(CheckpointError, match="a Qwen 2 with the pre-tokenizer 'smollm'; only 'qwen2'"):
        other = {"general.architecture": "qwen2", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
        tokenizer_files(tmp_path, other)
    for missing in ("tokens", "token_type", "scores"):
        fields = spm_fields(PIECES)
        del fields[f"tokenizer.ggml.{missing}"]
        with pytest.raises(CheckpointError, match=rf"lacks tokenizer\.ggml\.{missing}"):
            tokenizer_files(tmp_path, fields)
