"""Small files that would fill the memory: compressed zeros, lines without an end. And what is no fault: padding."""

import gzip
import io
import json
import lzma
import zlib

import pytest
import tiny
from limits import bounded
from tiny_tokenizers import make_tokenizer

from model.common.errors import InputError
from model.texts import compressed, find_reader

LIMIT = 4 << 20
ZEROS = bytes(64 << 20)


def zstd(content):
    return pytest.importorskip("zstandard").compress(content)


PACK = {
    ".gz": lambda content: gzip.compress(content, 1),
    ".xz": lambda content: lzma.compress(content, preset=0),
    ".zst": zstd,
}


@pytest.fixture(scope="module")
def bombs():
    """Return compressed files of 4 GB of zeros: a member of 64 MB over and over."""
    return {suffix: pack(ZEROS) * 64 for suffix, pack in PACK.items()}


@pytest.fixture
def small_limit(monkeypatch):
    """Lower the limit of a line, so that little has to be decompressed to reach it."""
    monkeypatch.setattr(compressed, "MAX_LINE_BYTES", LIMIT)


@pytest.mark.parametrize(("suffix", "megabytes"), [(".gz", 5), (".xz", 5), (".zst", 40)])
def test_the_first_byte_of_a_bomb(bombs, suffix, megabytes):
    """A block of the file is no reason to decompress all that it gives."""
    with bounded(megabytes), compressed.open_compressed(io.BytesIO(bombs[suffix]), f"a{suffix}") as stream:
        assert stream.read(1) == b"\0"


@pytest.mark.parametrize("suffix", PACK)
def test_a_bomb_as_data(bombs, tmp_path, small_limit, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(PACK[suffix](b'{"input_ids": [1]}\n') + bombs[suffix])
    reader = find_reader("jsonl")
    (piece,) = reader.split(str(path), 1 << 20)
    with bounded(60), pytest.raises(InputError, match=rf"a\.jsonl\{suffix}:2: the line is longer than 4,194,304 bytes"):
        list(reader.read(piece, "text"))


def test_a_bomb_is_refused_in_one_line(bombs, uptrain, tmp_path, small_limit):
    (tmp_path / "a.jsonl.gz").write_bytes(bombs[".gz"])
    command = ("prepare", "--vocab-size", 300, "--seq-len", 8, "--out", tmp_path / "out", "--workers", 1, "--data")
    uptrain(*command, tmp_path / "a.jsonl.gz").refused("a.jsonl.gz:1: the line is longer than")


@pytest.mark.parametrize("pieces", [1 << 30, 3 << 20])
def test_a_line_without_an_end(tmp_path, small_limit, pieces):
    """Whether the file is read as one piece or as several, of which some begin amid the line."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"input_ids": [1]}\n' * 3)
    with path.open("r+b") as file:
        file.truncate(64 << 20)
    reader = find_reader("jsonl")
    first, *others = reader.split(str(path), pieces)
    with bounded(30), pytest.raises(InputError, match=r"a\.jsonl:4: the line is longer than"):
        list(reader.read(first, "text"))
    with bounded(30):
        for piece in others[:20]:
            assert list(reader.read(piece, "text")) == []


def test_lines_up_to_the_limit_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(compressed, "MAX_LINE_BYTES", 40)
    line = b'{"text": "%s"}\n' % (b"a" * 27)
    assert len(line) == 40
    for suffix, content in (("", line * 3), (".gz", gzip.compress(line * 3)), (".xz", lzma.compress(line * 3))):
        (tmp_path / f"a.jsonl{suffix}").write_bytes(content)
        reader = find_reader("jsonl")
        for size in (1 << 20, 7, 41):
            pieces = reader.split(str(tmp_path / f"a.jsonl{suffix}"), size)
            documents = [record.content for piece in pieces for record in reader.read(piece, "text")]
            assert documents == ["a" * 27] * 3


def test_a_text_file_that_is_no_document(uptrain, tmp_path):
    with (tmp_path / "a.txt").open("wb") as file:
        file.truncate(50 << 30)
    tokenizer = make_tokenizer(tmp_path / "t")
    command = ("prepare", "--tokenizer", tokenizer, "--seq-len", 8, "--out", tmp_path / "out", "--workers", 1, "--data")
    uptrain(*command, tmp_path / "a.txt").refused("a.txt has more than 268,435,456 bytes", "divide it")


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.xz"])
def test_a_bomb_as_calibration_text(bombs, convert, tmp_path, small_limit, kind):
    source = make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "source"))
    path = tmp_path / f"a.{kind}"
    path.write_bytes(bombs.get(path.suffix, b""))
    if kind == "jsonl":
        with path.open("wb") as file:
            file.truncate(50 << 30)
    command = ("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", "pca", "--calibration")
    convert(*command, path).refused(f"a.{kind}:1: the line is longer than 4,194,304 bytes")


def test_windows_of_a_decompressor_are_bounded():
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 30}]
    content = lzma.compress(b"a\n", filters=filters)
    with (
        compressed.open_compressed(io.BytesIO(content), "a.xz") as stream,
        pytest.raises(EOFError, match="emory"),
    ):
        stream.read()
    zstandard = pytest.importorskip("zstandard")
    parameters = zstandard.ZstdCompressionParameters(window_log=30)
    writer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    content = writer.compress(b"a\n") + writer.flush()
    with compressed.open_compressed(io.BytesIO(content), "a.zst") as stream, pytest.raises(EOFError, match="memory"):
        stream.read()


@pytest.mark.parametrize("zeros", [0, 1, 512, 70_000])
def test_zeros_after_a_gzip_member(zeros):
    """As `gzip -t` and tapes allow."""
    content = gzip.compress(b"one\n") + bytes(zeros)
    for packed, expected in ((content, b"one\n"), (content * 2, b"one\none\n")):
        with compressed.open_compressed(io.BytesIO(packed), "a.gz") as stream:
            assert stream.read() == expected


@pytest.mark.parametrize("zeros", [0, 4, 8, 70_000, 1, 3, 70_001])
def test_zeros_after_an_xz_stream(zeros):
    """The format allows multiples of four (xz file format, 2.2)."""
    content = lzma.compress(b"one\n") + bytes(zeros)
    for packed, expected in ((content, b"one\n"), (content * 2, b"one\none\n")):
        with compressed.open_compressed(io.BytesIO(packed), "a.xz") as stream:
            if zeros % 4:
                with pytest.raises(EOFError, match="padding"):
                    stream.read()
            else:
                assert stream.read() == expected


@pytest.mark.parametrize("suffix", PACK)
def test_everything_comes_out(suffix):
    """Also where output waits in the decompressor when its input has ended."""
    content = b"".join(zlib.crc32(str(i).encode()).to_bytes(4, "little") for i in range(300_000)) + bytes(5 << 20)
    packed = PACK[suffix](content)
    with compressed.open_compressed(io.BytesIO(packed * 2), f"a{suffix}") as stream:
        assert stream.read() == content * 2
    for cut in (1, 5, len(packed) // 2, len(packed) - 1):
        with compressed.open_compressed(io.BytesIO(packed[:-cut]), f"a{suffix}") as stream, pytest.raises(EOFError):
            stream.read()


def test_deep_json_as_calibration_text(convert, tmp_path):
    source = make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "source"))
    (tmp_path / "a.jsonl").write_text('{"a": ' + "[" * 100_000 + "\n" + json.dumps({"text": "a"}))
    command = ("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", "pca", "--calibration")
    convert(*command, tmp_path / "a.jsonl").refused("a.jsonl:1: not valid JSON: nested too deeply")
