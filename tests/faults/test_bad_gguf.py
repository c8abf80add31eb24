"""GGUF files whose headers lie: each is read, or refused in one line, at once and without memory."""

import random
import struct
from pathlib import Path

import numpy as np
import pytest
import tiny
from gguf_files import write_gguf
from limits import bounded

from model.checkpoint import open_checkpoint
from model.checkpoint.formats.gguf.header import MAX_ELEMENTS
from model.checkpoint.formats.gguf.tokenizer import _merges_from_scores
from model.common.errors import CheckpointError

UINT8, UINT32, STRING, ARRAY, F32 = 0, 4, 8, 9, 0


def text(content):
    return struct.pack("<Q", len(content)) + content


def pair(name, kind, value=b""):
    return text(name) + struct.pack("<I", kind) + value


def array(kind, n, content=b""):
    return struct.pack("<IQ", kind, n) + content


def tensor(name=b"token_embd.weight", shape=(4, 4), kind=F32, offset=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(pairs=(), tensors=(), n_pairs=None, n_tensors=None, version=3, order="<"):
    counts = (len(tensors) if n_tensors is None else n_tensors, len(pairs) if n_pairs is None else n_pairs)
    return b"GGUF" + struct.pack(f"{order}IQQ", version, *counts) + b"".join([*pairs, *tensors])


FILES = {
    "array beyond the end": (header([pair(b"x", ARRAY, array(UINT32, 1 << 40))]), "elements"),
    "array of 0-byte texts": (header([pair(b"x", ARRAY, array(STRING, 1 << 20))]), "truncated"),
    "too many elements": (
        header([pair(b"x", ARRAY, array(UINT8, MAX_ELEMENTS + 1, bytes(MAX_ELEMENTS + 1)))]), "elements",
    ),
    "nested arrays": (header([pair(b"x", ARRAY, array(ARRAY, 1, array(ARRAY, 1) * 90_000))]), "array of arrays"),
    "text beyond the end": (header([pair(b"x", STRING, struct.pack("<Q", 1 << 62))]), "truncated"),
    "name beyond the end": (header([struct.pack("<Q", 2**64 - 1)]), "truncated"),
    "keys beyond the end": (header(n_pairs=1 << 16), "truncated"),
    "too many keys": (header(n_pairs=1 << 60), "more than any model has"),
    "tensors beyond the end": (header(n_tensors=1 << 16), "0 dimensions"),
    "too many tensors": (header(n_tensors=1 << 60), "more than any model has"),
    "a key with control characters": (header([pair(b"a\x1bb", UINT32, bytes(4))]), "printable ASCII"),
    "unknown kind of value": (header([pair(b"x", 13)]), "unknown type 13"),
    "dimensions overflow": (header(tensors=[tensor(shape=(1 << 33, 1 << 31))]), "describes 73,786,976,294,838,"),
    "dimensions overflow to 0": (header(tensors=[tensor(shape=(1 << 63, 2))]), "truncated"),
    "a dimension of 0": (header(tensors=[tensor(shape=(1 << 63, 0))]), "impossible shape"),
    "no dimensions": (header(tensors=[tensor(shape=())]), "0 dimensions"),
    "many dimensions": (header(tensors=[text(b"x") + struct.pack("<I", 1 << 31)]), "2147483648 dimensions"),
    "unknown type": (header(tensors=[tensor(kind=999)]), "unknown type 999"),
    "rows of half a block": (header(tensors=[tensor(shape=(40, 2), kind=8)]), "impossible shape [40, 2]"),
    "offset beyond the end": (header(tensors=[tensor(offset=1 << 50)]), "truncated"),
    "offset not aligned": (header(tensors=[tensor(offset=1)]), "not aligned"),
    "overlapping tensors": (header(tensors=[tensor(b"a"), tensor(b"b")]), "overlap"),
    "alignment 0": (header([pair(b"general.alignment", UINT32, struct.pack("<I", 0))]), "alignment is 0"),
    "alignment 3": (header([pair(b"general.alignment", UINT32, struct.pack("<I", 3))]), "alignment is 3"),
    "alignment 2 GB": (header([pair(b"general.alignment", UINT32, struct.pack("<I", 1 << 31))]), "alignment is 2"),
    "alignment as text": (header([pair(b"general.alignment", STRING, text(b"x"))]), "not a 32-bit number"),
    "big-endian": (header(order=">"), "big-endian"),
    "version 1": (header(version=1), "version 1"),
    "the same key twice": (header([pair(b"x", UINT32, bytes(4))] * 2), "the key x occurs twice"),
    "the same tensor twice": (
        header(tensors=[tensor(shape=(8,)), tensor(shape=(8,), offset=32)]) + bytes(200), "duplicated tensor",
    ),
    "not GGUF": (b"GGML" + bytes(100), "does not begin with GGUF"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_lying_headers(convert, tmp_path, name):
    content, words = FILES[name]
    path = tmp_path / "x.gguf"
    path.write_bytes(content + bytes(32))
    convert("to-hf", tmp_path / "x.gguf", tmp_path / "warm")  # imports what reading GGUF needs
    with bounded(200, 2.0):
        convert("inspect", path).refused("x.gguf", words)


def test_an_enormous_sparse_text(convert, tmp_path):
    path = tmp_path / "x.gguf"
    with path.open("wb") as file:
        file.write(header([pair(b"tokenizer.chat_template", STRING, struct.pack("<Q", 50 << 30))]))
        file.truncate(51 << 30)
    with bounded(200, 2.0):
        convert("inspect", path).refused("x.gguf", "header does not end within 100,000,000 bytes")


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def whole(request, tmp_path_factory):
    """Return a small valid file, and where its data begins."""
    path = tmp_path_factory.mktemp("gguf") / "x.gguf"
    model = tiny.build(
        request.param, hidden_size=32, num_attention_heads=4, num_key_value_heads=4, head_dim=8, num_hidden_layers=1
    )
    content = write_gguf(path, model).read_bytes()
    data = sum(parameter.numel() for parameter in model.parameters()) * 4
    return content, len(content) - data


MUTATIONS = 400


def mutated(content, end, rng):
    """Change a few bytes or numbers before `end`, or cut something out of the file or into it."""
    changed = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at, kind = rng.randrange(4, end), rng.randrange(5)
        if kind == 0:
            changed[at] = rng.randrange(256)
        elif kind == 1:
            changed[at : at + 4] = struct.pack("<I", rng.choice([0, 1, 8, 9, 12, 13, 1 << 16, 1 << 31, 2**32 - 1]))
        elif kind == 2:
            changed[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 1 << 20, 1 << 40, 1 << 63, 2**64 - 1]))
        elif kind == 3:
            del changed[at : at + rng.randint(1, 40)]
        else:
            changed[at:at] = bytes(rng.randint(1, 40))
    return bytes(changed)


@pytest.mark.parametrize("seed", range(4))
def test_any_header(whole, tmp_path, seed):
    """Whatever a header holds, it is read or refused with a CheckpointError, at once."""
    content, end = whole
    path, rng, refused = tmp_path / "x.gguf", random.Random(seed), 0
    for _ in range(MUTATIONS):
        path.write_bytes(mutated(content, end, rng))
        with bounded(200, 2.0):
            try:
                with open_checkpoint(path) as checkpoint:
                    for name, stored in checkpoint.tensors.items():
                        assert len(checkpoint.rows(name, 0, stored.shape[0])) == stored.shape[0]
            except CheckpointError as error:
                refused += 1
                assert "\n" not in str(error)
                assert len(str(error)) < 1000
    assert 0 < refused < MUTATIONS


def test_the_unchanged_file_is_read(whole, tmp_path):
    (tmp_path / "x.gguf").write_bytes(whole[0])
    with open_checkpoint(tmp_path / "x.gguf") as checkpoint:
        assert checkpoint.tensors


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": [], "scores": [], "token_type": []}, "no tokens"),
        ({"tokens": [1, 2, 3]}, "not text"),
        ({"tokens": ["a", "b", "c" * 1025]}, "a token of 1,025 characters"),
        ({"scores": [0.0]}, "scores that do not fit"),
        ({"scores": ["a", "b", "c"]}, "scores that do not fit"),
        ({"scores": [0.0, 0.0, float("nan")]}, "scores that do not fit"),
        ({"token_type": [1, 1, True]}, "token types that do not fit"),
        ({"unknown_token_id": 3}, "unknown_token_id = 3"),
        ({"bos_token_id": True}, "bos_token_id = True"),
        ({"add_bos_token": "yes"}, "add_bos_token = 'yes'"),
        ({"add_space_prefix": [1]}, "add_space_prefix = [1]"),
        ({"model": "gpt2", "pre": ["smollm"], "merges": []}, "pre = ['smollm']"),
        ({"model": "gpt2", "pre": "smollm", "merges": [5]}, "merges that are not pairs"),
    ],
)
def test_tokenizers_of_wrong_types(tmp_path, changes, words):
    from model.checkpoint.formats.gguf.tokenizer import tokenizer_files

    fields = {
        "model": "llama", "tokens": ["a", "b", "c"], "scores": [0.0, -1.0, -2.0], "token_type": [1, 1, 1], **changes,
    }  # fmt: skip
    with pytest.raises(CheckpointError) as refused:
        tokenizer_files(tmp_path / "x.gguf", {f"tokenizer.ggml.{key}": value for key, value in fields.items()})
    assert words in str(refused.value)


@pytest.mark.parametrize("value", [-1.0, 0.0, 3e38])
def test_numbers_that_make_no_rope(convert, tmp_path, value):
    path = write_gguf(tmp_path / "x.gguf", tiny.build(), **{"llama.rope.freq_base": value})
    convert("inspect", path).refused("llama.rope.freq_base", "must be a positive number")


# Whole files that are not converted


def test_gguf_of_another_architecture(refuse_source, tmp_path):
    path = write_gguf(tmp_path / "x.gguf", tiny.build(), architecture="bert")
    refuse_source("architecture 'bert'", path=path)


@pytest.mark.parametrize("keep", [0, 3, 20, 500, -100])
def test_truncated_gguf(refuse_source, tmp_path, keep):
    path = write_gguf(tmp_path / "x.gguf", tiny.build())
    path.write_bytes(path.read_bytes()[:keep])
    refuse_source("x.gguf", "truncated", path=path)


def test_gguf_lfs_pointer(refuse_source, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    refuse_source("git-lfs pointer", path=path)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama.expert_count": 8}, ("llama.expert_count = 8", "not supported")),
        ({"llama.attention.sliding_window": 64}, ("sliding_window", "not supported")),
        ({"llama.rope.dimension_count": 2}, ("rope.dimension_count", "head size")),
        ({"llama.rope.scaling.type": "longrope"}, ("RoPE scaling 'longrope'",)),
        ({"qwen2.attention.sliding_window": 64}, ("qwen2.attention.sliding_window = 64", "not supported")),
        ({"qwen2.rope.dimension_count": 2}, ("qwen2.rope.dimension_count", "head size")),
        ({"qwen2.attention.key_length": 2}, ("8 heads of 2", "not the width")),
    ],
)
def test_gguf_settings_we_do_not_know(refuse_source, tmp_path, metadata, words):
    family = next(iter(metadata)).split(".")[0]
    refuse_source(*words, path=write_gguf(tmp_path / "x.gguf", tiny.build(family), **metadata))


def test_gguf_tensors_we_do_not_know(refuse_source, tmp_path):
    model = tiny.build("qwen2")
    model.rope_factors = [1.0, 1.0]
    refuse_source("'rope_freqs.weight'", "refused", path=write_gguf(tmp_path / "x.gguf", model))


def test_gguf_with_more_tokens_than_rows(refuse_source, tmp_path):
    path = write_gguf(tmp_path / "x.gguf", tiny.build(vocab_size=64))
    content = path.read_bytes()
    path.write_bytes(
        content.replace(
            text(b"token_embd.weight") + struct.pack("<IQQ", 2, tiny.HIDDEN, 64),
            text(b"token_embd.weight") + struct.pack("<IQQ", 2, tiny.HIDDEN, 63),
        )
    )
    refuse_source("64 tokens, but an embedding of 63", path=path)


def test_gguf_rope_factors_we_do_not_know(refuse_source, tmp_path):
    model = tiny.build()
    model.rope_factors = [1.0, 3.3]
    refuse_source("rope_freqs.weight", "not Llama 3.1's", path=write_gguf(tmp_path / "x.gguf", model))


def test_gguf_mlp_of_another_size(refuse_source, tmp_path):
    path = write_gguf(tmp_path / "x.gguf", tiny.build(), **{"llama.feed_forward_length": 39})
    refuse_source("feed_forward_length = 39, but model.layers.0.mlp", " is (32, 40)", path=path)


def test_a_vocabulary_that_is_cut_in_too_many_ways():
    """All of a…ab…b: every cut of a token gives two tokens. The number grows with the cube of the length."""
    vocabulary = [f"{'a' * i}{'b' * j}" for i in range(150) for j in range(150) if i + j]
    with bounded(400, 10.0), pytest.raises(CheckpointError, match=r"x\.gguf: the tokens .* can be cut in more than"):
        _merges_from_scores(Path("x.gguf"), vocabulary, [0.0] * len(vocabulary), [1] * len(vocabulary))


def test_gguf_not_finite(refuse_source, tmp_path):
    model = tiny.build()
    model.model.layers[0].self_attn.k_proj.weight.data[3, 3] = np.inf
    refuse_source("layers.0.self_attn.k_proj", "NaN or infinite", path=write_gguf(tmp_path / "x.gguf", model))


def test_a_part_of_a_gguf(convert, tmp_path):
    model = tiny.build(vocab_size=300)
    part = write_gguf(tmp_path / "a-00001-of-00002.gguf", model, **{"split.count": 2, "split.no": 0})
    convert("to-hf", part, tmp_path / "out").refused("is one of 2 parts", "llama-gguf-split --merge")
