"""The token cache's reader: windows and their targets, across the borders of shards, and damaged caches."""

import hashlib
import itertools
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from caches import write_cache
from hypothesis import given
from hypothesis import strategies as st
from limits import few_files

from model.common.errors import InputError
from uptrain.data.token_cache import MANIFEST, CacheManifest, TokenCache

DOCUMENTS = st.lists(st.integers(1, 9), min_size=1, max_size=8)


def shards_of(lengths):
    """Make shards of documents of these lengths; all token ids differ."""
    ids = iter(range(10_000))
    return [[[next(ids) for _ in range(n)] for n in shard] for shard in lengths]


def brute_force(shards, seq_len):
    """Return every window as (ids, number of the document in the whole)."""
    documents = [ids for shard in shards for ids in shard]
    flat = [(token, number) for number, ids in enumerate(documents) for token in ids]
    return [flat[i : i + seq_len] for i in range(0, len(flat), seq_len)]


@given(st.lists(DOCUMENTS, min_size=1, max_size=4), st.integers(2, 12))
def test_windows_and_targets(lengths, seq_len):
    shards = shards_of(lengths)
    expected = brute_force(shards, seq_len)
    with tempfile.TemporaryDirectory() as folder:
        cache = TokenCache.open(write_cache(Path(folder) / "cache", shards, seq_len, vocab_size=10_000))
        assert cache.n_windows == len(expected)
        for index, window in enumerate(expected):
            ids, documents = cache.window(index)
            assert ids.dtype == documents.dtype == np.int64
            assert ids.tolist() == [token for token, _ in window]
            assert documents.tolist() == [number - window[0][1] for _, number in window]
            n_targets = sum(a[1] == b[1] for a, b in itertools.pairwise(window))
            assert cache.n_targets(np.array([index])) == n_targets
        all_windows = np.arange(cache.n_windows)
        assert cache.n_targets(all_windows) == sum(cache.n_targets(np.array([i])) for i in all_windows)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_highest_id(tmp_path, vocab_size, dtype):
    top = vocab_size - 1
    cache = TokenCache.open(write_cache(tmp_path / "cache", [[[0, top, top]]], 2, vocab_size))
    assert cache.manifest.dtype == dtype
    assert cache.window(0)[0].tolist() == [0, top]
    assert cache.window(1)[0].tolist() == [top]


def test_the_fingerprint_is_of_what_training_sees(tmp_path):
    def fingerprint(name, shards, seq_len=4, **options):
        return TokenCache.open(write_cache(tmp_path / name, shards, seq_len, **options)).manifest.sha256

    first = fingerprint("first", [[[1, 2, 3], [4, 5]]])
    assert fingerprint("same", [[[1, 2, 3], [4, 5]]], tokenizer="other") == first
    assert fingerprint("tokens", [[[1, 2, 3], [4, 6]]]) != first
    assert fingerprint("documents", [[[1, 2], [3, 4, 5]]]) != first
    assert fingerprint("windows", [[[1, 2, 3], [4, 5]]], seq_len=5) != first


def test_manifest_survives_writing(tmp_path):
    folder = write_cache(tmp_path / "cache", [[[1, 2, 3]], [[4, 5]]], 4)
    manifest = CacheManifest.parse(folder)
    assert manifest.to_json() == (folder / MANIFEST).read_bytes()
    assert (manifest.n_tokens, manifest.n_documents) == (5, 2)


# Damage


@pytest.fixture
def folder(tmp_path):
    return write_cache(tmp_path / "cache", [[[1, 2, 3]], [[4, 5]]], 4)


def refused(folder, *words):
    with pytest.raises(InputError) as error:
        TokenCache.open(folder)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_no_cache(tmp_path):
    refused(tmp_path, "not a token cache", "uptrain prepare")


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", "{", "[" * 100, '{"format": 1}', "null", '{"format": 1, "shards": 3}']
)
def test_damaged_manifest(folder, content):
    (folder / MANIFEST).write_text(content)
    refused(folder, MANIFEST, "damaged", "prepare the cache again")


def test_manifest_not_utf8(folder):
    (folder / MANIFEST).write_bytes(b'{"format": "\xff"}')
    refused(folder, MANIFEST, "damaged")


@pytest.mark.parametrize(
    "change", [{"seq_len": 5}, {"seq_len": 1}, {"dtype": "uint32"}, {"n_tokens": None}, {"extra": 1}]
)
def test_edited_manifest(folder, change):
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest.update(change)
    if change == {"n_tokens": None}:
        del manifest["n_tokens"]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    refused(folder, MANIFEST, "damaged")


def test_windows_of_more_tokens_than_any_command_makes(folder):
    """They would be allocated. Whoever edits the manifest can make its fingerprint right."""
    manifest = replace(CacheManifest.parse(folder), seq_len=1 << 59)
    (folder / MANIFEST).write_bytes(manifest.to_json())
    refused(folder, MANIFEST, "damaged", "seq_len = 576460752303423488; it must be at most 268435456")


def test_other_format(folder):
    manifest = json.loads((folder / MANIFEST).read_text()) | {"format": 2}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    refused(folder, "format 2", "this version reads 1")


@pytest.mark.parametrize("name", ["tokens-00001.bin", "documents-00000.bin"])
def test_truncated_or_missing_shard(folder, name):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1])
    refused(folder, name, f"has {len(content) - 1} bytes where the manifest says {len(content)}")
    (folder / name).unlink()
    refused(folder, "is missing", name)


@pytest.mark.parametrize("starts", [[0, 2**62, 3], [0, 3, 2], [-1, 2], [1], [0, 5], [0, 2, 2], [0, 2**63 - 1], []])
def test_documents_that_begin_elsewhere(tmp_path, starts):
    """All checksums are right: whoever changed the file can do that, too."""
    folder = write_cache(tmp_path / "cache", [[[1, 2], [3, 4, 5]]], 2, 300)
    content = np.array(starts, "<i8").tobytes()
    (folder / "documents-00000.bin").write_bytes(content)
    manifest = CacheManifest.parse(folder)
    sums = {"n_documents": len(starts), "documents_sha256": hashlib.sha256(content).hexdigest()}
    (folder / MANIFEST).write_bytes(replace(manifest, shards=(replace(manifest.shards[0], **sums),)).to_json())
    refused(folder, "documents-00000.bin does not hold the beginnings of documents in order")


def test_altered_to_an_id_that_cannot_be(tmp_path):
    """Its size is right, so it is noticed only when it is read."""
    folder = write_cache(tmp_path / "cache", [[[1, 2, 3, 4, 5]]], 2, 300)
    path = folder / "tokens-00000.bin"
    path.write_bytes(path.read_bytes()[:4] + b"\x2c\x01" + path.read_bytes()[6:])
    cache = TokenCache.open(folder)
    assert cache.window(0)[0].tolist() == [1, 2]
    with pytest.raises(InputError, match=r"window 1 holds the id 300, .* all are below 300; .* Prepare it again"):
        cache.window(1)


def test_more_shards_than_a_process_may_open(tmp_path, monkeypatch):
    """Each shard stays open. The limit of the shell, often 1,024, is raised as far as the system lets it be."""
    folder = write_cache(tmp_path / "cache", shards_of([[3]] * 200), 4, vocab_size=10_000)
    with few_files(100):
        cache = TokenCache.open(folder)
        assert cache.window(149)[0].tolist() == [596, 597, 598, 599]
    monkeypatch.setattr("resource.getrlimit", lambda _: (100, 100))

    def refuse(*_):
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr("resource.setrlimit", refuse)
    with pytest.raises(InputError, match=r"files must be open at the same time, but .* allows \d+ .*ulimit -Hn"):
        TokenCache.open(folder)
