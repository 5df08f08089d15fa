"""Data files that unpack to far more than they look: refused in words, before memory is filled."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import math
import struct
import subprocess
import sys
import textwrap
import wave
import zipfile
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from yunlu.core.errors import DataError, YunluError
from yunlu.spec.job import DataSpec
from yunlu.training.data.audio import read_audio
from yunlu.training.data.images import FORMATS, ImageShape, read_image
from yunlu.training.data.sources import load_tables
from yunlu.training.data.table import FileRef

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHAPE = ImageShape(channels=3, height=4, width=4)
CODECS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}
ROWS = {
    "txt": b"a line of text\n",
    "csv": b"1,2,3\n",
    "tsv": b"1\t2\t3\n",
    "jsonl": b'{"a": 1, "b": "x"}\n',
}


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda text: monkeypatch.setenv("YUNLU_LIMITS", text)


def load(path: Path) -> Any:
    return load_tables(DataSpec(train=str(path)), seed=0).full_train


def refused(path: Path, words: str, setting: str | None = None) -> None:
    """By name, and with the setting that raises the limit."""
    with pytest.raises(DataError, match=words) as raised:
        load(path)
    assert path.name in raised.value.message
    if setting is not None:
        assert f"YUNLU_LIMITS={setting}=" in str(raised.value)


# Compressed text


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("form", ROWS)
def test_text_that_unpacks_too_far_is_refused(
    form: str, codec: str, tmp_path: Path, limit: Callable[[str], None]
) -> None:
    limit("ratio=40, ratio_from=64KiB")
    path = tmp_path / f"a.{form}.{codec}"
    path.write_bytes(CODECS[codec](ROWS[form] * 15_000))
    refused(path, "above 40 to 1", "ratio")


@pytest.mark.parametrize("codec", CODECS)
def test_a_small_file_may_pack_as_well_as_it_likes(codec: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.csv.{codec}"
    path.write_bytes(CODECS[codec](b"a,b\n" + b"1,2\n" * 5_000))
    assert len(load(path)) == 5_000


def test_honest_sparse_tables_pack_below_the_limit(
    tmp_path: Path, limit: Callable[[str], None]
) -> None:
    limit("ratio_from=0")
    table = np.zeros((3_000, 100), dtype=np.int64)
    table[np.arange(3_000), np.random.default_rng(0).integers(0, 100, 3_000)] = 1
    text = "\n".join(",".join(map(str, row)) for row in [range(100, 200), *table.tolist()])
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(text.encode()))
    assert len(load(path)) == 3_001


def test_the_limit_can_be_raised(tmp_path: Path, limit: Callable[[str], None]) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 5_000))
    limit("ratio=10, ratio_from=0")
    refused(path, "above 10 to 1", "ratio")
    limit("ratio=2000, ratio_from=0")
    assert len(load(path)) == 5_000


# Values that would not fit in memory


def _text_array(path: Path) -> None:
    np.save(path, np.full(2_000, "label"))


def _text_archive(path: Path) -> None:
    np.savez(path, x=np.full(2_000, "label"))


def _integers(path: Path) -> None:
    pq.write_table(pa.table({"x": np.random.default_rng(0).integers(0, 1 << 60, 20_000)}), path)


WIDE: dict[str, bytes | Callable[[Path], None]] = {
    "a.txt": b"ab\n" * 2_000,
    "a.csv": b"a,b\n" + b"1,2\n" * 1_000,
    "a.tsv": b"a\tb\n" + b"1\t2\n" * 1_000,
    "a.jsonl": b'{"a": 1}\n' * 2_000,
    "a.json": b"[" + b"[],{}," * 1_000 + b"{}]",
    "a.npy": _text_array,
    "a.npz": _text_archive,
    "a.parquet": _integers,
}


@pytest.mark.parametrize("name", WIDE)
def test_values_are_counted_before_they_are_made(
    name: str, tmp_path: Path, limit: Callable[[str], None]
) -> None:
    limit("memory=100kB")
    content = WIDE[name]
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        content(tmp_path / name)
    refused(tmp_path / name, "in memory; at most 97.7 KiB", "memory")


def test_shards_count_together(tmp_path: Path, limit: Callable[[str], None]) -> None:
    for number in range(8):
        (tmp_path / f"{number}.txt").write_bytes(b"a line of text\n" * 400)
    assert len(load(tmp_path)) == 3_200
    limit("memory=150kB")
    refused(tmp_path, "in memory", "memory")


def test_a_device_without_an_end_is_left_at_the_limit(limit: Callable[[str], None]) -> None:
    limit("memory=1MiB")
    with pytest.raises(DataError, match="/dev/zero takes at least"):
        load_tables(DataSpec(train="/dev/zero", format="text"), seed=0)


def test_a_key_of_its_own_in_each_record_is_refused(
    tmp_path: Path, limit: Callable[[str], None]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({f"key{row}": row}) for row in range(500)))
    limit("columns=400")
    refused(path, "has 500 columns; at most 400", "columns")
    limit("memory=1MB")
    refused(path, "in memory", "memory")


def test_a_table_of_too_many_columns_is_refused(
    tmp_path: Path, limit: Callable[[str], None]
) -> None:
    limit("columns=10")
    path = tmp_path / "a.csv"
    path.write_text(",".join(map(str, range(11))) + "\n" + "1," * 10 + "1\n")
    refused(path, "has 11 columns; at most 10", "columns")


def test_a_table_of_too_many_rows_is_refused(tmp_path: Path, limit: Callable[[str], None]) -> None:
    limit("rows=10")
    path = tmp_path / "a.csv"
    path.write_text("a,b\n" + "1,2\n" * 20)
    refused(path, "has 21 rows; at most 10", "rows")


# Parquet


def _zeros(**options: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        pq.write_table(pa.table({"x": np.zeros(1 << 19, dtype=np.int64)}), path, **options)

    return write


def _wide(path: Path) -> None:
    pq.write_table(pa.table({f"c{number}": [1, 2] * 5 for number in range(300)}), path)


def _fixed(path: Path) -> None:
    values = pa.array([bytes(1 << 12)] * 2_000, pa.binary(1 << 12))
    pq.write_table(pa.table({"x": values}), path)


def _repeated_lists(path: Path) -> None:
    lists = pa.array([["x" * 10_000] * 4] * 300)
    pq.write_table(pa.table({"x": lists}), path, compression="zstd")


@pytest.mark.parametrize(
    ("write", "settings", "words"),
    [
        (_zeros(), "ratio=10, ratio_from=1MiB", "above 40 to 1"),
        (_zeros(use_dictionary=False), "ratio=10, ratio_from=1MiB", "above 10 to 1"),
        (_zeros(), "memory=1MiB", "in memory"),
        (_zeros(row_group_size=1_000), "memory=1MiB", "in memory"),
        (_zeros(), "rows=1000", "has 524,288 rows"),
        (_wide, "columns=200", "has 300 columns"),
        (_fixed, "memory=4MiB", "in memory"),
        (_repeated_lists, "memory=4MiB", "in memory"),
    ],
)
def test_parquet_is_judged_by_its_footer_and_by_its_batches(
    write: Callable[[Path], None],
    settings: str,
    words: str,
    tmp_path: Path,
    limit: Callable[[str], None],
) -> None:
    path = tmp_path / "a.parquet"
    write(path)
    assert len(load(path))
    limit(settings)
    refused(path, words, settings.partition("=")[0])


def test_a_text_that_every_row_repeats_is_held_once(
    tmp_path: Path, limit: Callable[[str], None]
) -> None:
    """A megabyte in a dictionary and 5,000 rows that refer to it: 5 GB where each has a copy."""
    path = tmp_path / "a.parquet"
    column = pa.DictionaryArray.from_arrays(np.zeros(5_000, dtype=np.int32), ["x" * (1 << 20)])
    pq.write_table(pa.table({"x": column, "y": np.arange(5_000)}), path, store_schema=False)
    limit("memory=16MiB")
    texts = load(path)["x"]
    assert len(texts) == 5_000
    assert len({id(text) for text in texts}) == 1


@pytest.mark.parametrize("large", [512 << 20, 0])
def test_columns_come_back_as_they_were(
    large: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("yunlu.training.data.readers._LARGE_CHUNK_BYTES", large)
    table = pa.table(
        {
            "n": [1, None, 3],
            "s": ["a", None, "a"],
            "b": [b"\xff", b"", None],
            "list": [["a", None], [], None],
            "deep": [{"p": ["x"], "q": 1}, None, {"p": None, "q": 2}],
            "s.dot": ["x", "y", "z"],
            "c": pa.array(["u", "v", "u"]).dictionary_encode(),
            "l": pa.array(["u", None, "u"], pa.large_string()),
            "m": pa.array([[("k", "v")], [], None], pa.map_(pa.string(), pa.string())),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    found = load(tmp_path / "a.parquet").columns
    assert list(found) == table.column_names
    for name in table.column_names[1:]:
        assert found[name] == table[name].to_pylist(), name
    assert np.isnan(found["n"][1])


# NumPy


def _npy(shape: tuple[int, ...], content: bytes = b"", dtype: str = "<f8") -> bytes:
    buffer = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, header)
    return buffer.getvalue() + content


def _npz(path: Path, **members: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)


@pytest.mark.parametrize(
    "shape", [(1 << 37,), (1 << 20, 1 << 20), (3, 1 << 61), (5,)], ids=["1TiB", "8TiB", "2^64", "5"]
)
def test_an_array_that_claims_more_than_its_file_holds_is_refused(
    shape: tuple[int, ...], tmp_path: Path, limit: Callable[[str], None]
) -> None:
    limit("rows=1T")
    (tmp_path / "a.npy").write_bytes(_npy(shape, bytes(32)))
    refused(tmp_path / "a.npy", "claims an array of .* bytes, but holds")
    _npz(tmp_path / "a.npz", x=_npy(shape, bytes(32)))
    refused(tmp_path / "a.npz", "claims an array of .* bytes, but holds")


def test_rows_without_content_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(_npy((1 << 60, 0)))
    refused(path, "rows; at most 1,000,000,000", "rows")


def test_zeros_in_an_archive_are_refused_when_they_are_many(
    tmp_path: Path, limit: Callable[[str], None]
) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.zeros((100, 5_000)))
    assert load(path)["x"].shape == (100, 5_000)
    limit("ratio_from=1MiB")
    refused(path, "above 250 to 1", "ratio")
    limit("memory=1MiB")
    refused(path, "in memory", "memory")
    limit("columns=0")
    refused(path, "has 1 members; at most 0", "columns")


def test_an_archive_that_names_one_stream_many_times_is_refused(
    tmp_path: Path, limit: Callable[[str], None]
) -> None:
    """Members that overlap, as in Fifield's bomb: the packed sizes add up to more than the file."""
    path = tmp_path / "a.npz"
    _npz(path, x=_npy((1 << 14,), np.random.default_rng(0).bytes(8 << 14)))
    content = path.read_bytes()
    start = content.index(b"PK\x01\x02")
    end = content.index(b"PK\x05\x06")
    entry = content[start:end]
    directory = entry * 400
    tail = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 400, 400, len(directory), start, 0)
    path.write_bytes(content[:start] + directory + tail)
    limit("ratio=100, ratio_from=1MiB")
    refused(path, "above 100 to 1", "ratio")


# Images


def _png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    header = struct.pack(">2L5B", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(bytes(64))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">L", len(data)) + kind + data + struct.pack(">L", zlib.crc32(kind + data))
        for kind, data in parts
    )


def _declared(form: str) -> bytes:
    """An image of 4 × 4 pixels whose header claims 50,000 × 50,000."""
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4)).save(buffer, form)
    data = bytearray(buffer.getvalue())
    if form == "BMP":
        data[18:26] = struct.pack("<2L", 50_000, 50_000)
    elif form == "GIF":
        data[6:10] = struct.pack("<2H", 50_000, 50_000)
    elif form == "JPEG":
        at = data.index(b"\xff\xc0")
        data[at + 5 : at + 9] = struct.pack(">2H", 50_000, 50_000)
    elif form == "PPM":
        data = bytearray(b"P6 50000 50000 255\n" + bytes(48))
    elif form == "TIFF":
        return _tiff(50_000)
    return bytes(data)


def _tiff(edge: int) -> bytes:
    tags = [(256, 4, 1, edge), (257, 4, 1, edge), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)]
    tags += [(273, 4, 1, 8), (277, 3, 1, 1), (278, 4, 1, edge), (279, 4, 1, 16)]
    entries = b"".join(struct.pack("<2H2L", *tag) for tag in tags)
    return b"II*\0" + struct.pack("<LH", 8, len(tags)) + entries + bytes(4)


def decode(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    read_image(FileRef(str(path)), SHAPE)


@pytest.mark.parametrize("form", ["PNG", "BMP", "GIF", "JPEG", "PPM", "TIFF"])
def test_an_image_that_claims_billions_of_pixels_is_not_decoded(form: str, tmp_path: Path) -> None:
    data = _png(50_000, 50_000) if form == "PNG" else _declared(form)
    with pytest.raises(DataError, match=r"claims .*; at most 80,000,000 are read") as raised:
        decode(tmp_path / f"a.{form.lower()}", data)
    assert "YUNLU_LIMITS=pixels=" in str(raised.value)


def test_the_pixels_of_an_image_can_be_limited_and_released(
    tmp_path: Path, limit: Callable[[str], None]
) -> None:
    buffer = io.BytesIO()
    Image.new("L", (100, 100)).save(buffer, "PNG")
    limit("pixels=9999")
    with pytest.raises(DataError, match="100 × 100 pixels; at most 9,999"):
        decode(tmp_path / "a.png", buffer.getvalue())
    limit("pixels=10000")
    decode(tmp_path / "a.png", buffer.getvalue())


@pytest.mark.parametrize("chunk", [b"zTXt", b"iTXt", b"iCCP"])
def test_text_beside_the_pixels_is_not_unpacked(chunk: bytes, tmp_path: Path) -> None:
    packed = zlib.compress(bytes(20 << 20))
    prefix = {b"zTXt": b"a\0\0", b"iTXt": b"a\0\1\0\0\0", b"iCCP": b"a\0\0"}[chunk]
    data = _png(4, 4, (chunk, prefix + packed))
    with pytest.raises(DataError, match="cannot be decoded as an image"):
        decode(tmp_path / "a.png", data)


@pytest.mark.parametrize(
    "form", ["EPS", "ICO", "PDF", "TGA", "PCX", "SGI", "ICNS", "DDS", "JPEG2000"]
)
def test_only_common_formats_are_opened(form: str, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16)).save(buffer, form)
    with pytest.raises(DataError, match="none of PNG, JPEG, BMP, GIF, WEBP, TIFF, PPM"):
        decode(tmp_path / "a.png", buffer.getvalue())


@pytest.mark.parametrize("form", FORMATS)
def test_common_formats_are_opened(form: str, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16)).save(buffer, form)
    decode(tmp_path / "a.png", buffer.getvalue())


# Sounds


def _wav(rate: int, channels: int = 1, *, declared: int | None = None, frames: int = 8) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(8_000)
        file.writeframes(bytes(2 * channels * frames))
    data = bytearray(buffer.getvalue())
    data[24:28] = struct.pack("<L", rate)
    if declared is not None:
        data[4:8] = data[40:44] = struct.pack("<L", declared)
    return bytes(data)


def _flac(frames: int) -> bytes:
    """Only the header: 16 kHz, one channel, 16 bits."""
    bits = 16_000 << 44 | 0 << 41 | 15 << 36 | frames
    info = struct.pack(">2H", 4096, 4096) + bytes(6) + bits.to_bytes(8, "big") + bytes(16)
    return b"fLaC" + b"\x80" + len(info).to_bytes(3, "big") + info


def listen(path: Path, data: bytes, rate: int | None = None) -> int:
    path.write_bytes(data)
    return len(read_audio(str(path), sample_rate=rate)[0])


@pytest.mark.parametrize("rate", [1, 2, 100, 999, 768_001, 1_000_000, 2_000_000_000])
def test_a_sound_of_an_impossible_rate_is_refused(rate: int, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="samples per second; expected 1,000 to 768,000") as raised:
        listen(tmp_path / "a.wav", _wav(rate, frames=500), 16_000)
    assert "YUNLU_LIMITS=sample_rate_" in str(raised.value)


def test_a_sound_of_four_gigahertz_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        listen(tmp_path / "a.wav", _wav(4_000_000_000))


def test_low_rates_can_be_allowed(tmp_path: Path, limit: Callable[[str], None]) -> None:
    limit("sample_rate_min=100")
    assert listen(tmp_path / "a.wav", _wav(250, frames=500)) == 500


@pytest.mark.parametrize("channels", [65, 1_024])
def test_a_sound_of_many_channels_is_refused(channels: int, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"claims {channels:,} channels; at most 64"):
        listen(tmp_path / "a.wav", _wav(8_000, channels))


def test_a_sound_of_65535_channels_is_refused(tmp_path: Path) -> None:
    data = bytearray(_wav(8_000, 1, frames=1 << 17))
    data[22:24] = struct.pack("<H", 65_535)
    data[32:34] = struct.pack("<H", 65_534)
    with pytest.raises(DataError):
        listen(tmp_path / "a.wav", bytes(data))


def test_a_length_that_only_the_header_claims_makes_no_room(tmp_path: Path) -> None:
    assert listen(tmp_path / "a.wav", _wav(8_000, declared=2_000_000_000)) == 8


@pytest.mark.parametrize("frames", [500_000_001, (1 << 36) - 1])
def test_a_compressed_sound_that_claims_hours_is_refused(frames: int, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="samples of sound; at most 500,000,000"):
        listen(tmp_path / "a.flac", _flac(frames))


def test_samples_are_counted_before_and_after_resampling(
    tmp_path: Path, limit: Callable[[str], None]
) -> None:
    limit("samples=1000")
    data = _wav(8_000, frames=800)
    assert listen(tmp_path / "a.wav", data) == 800
    with pytest.raises(DataError, match="claims 1,600 samples of sound"):
        listen(tmp_path / "a.wav", data, 16_000)
    with pytest.raises(DataError, match="claims 1,600 samples of sound"):
        listen(tmp_path / "a.wav", _wav(8_000, 2, frames=800))


def test_a_media_file_larger_than_memory_is_not_read(
    tmp_path: Path, limit: Callable[[str], None]
) -> None:
    limit("memory=1MiB")
    path = tmp_path / "a.png"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DataError, match=r"takes at least 1.0 TiB in memory"):
        read_image(FileRef(str(path)), SHAPE)


# JSON


@pytest.mark.parametrize(
    "text",
    [
        "[" * 4_000,
        '{"a":' * 4_000,
        '{"a": ' + "[" * 100 + "]" * 100 + "}",
        '[{"a": ' + "[" * 100 + "]" * 100 + "}]",
        '{"a": ' + "9" * 5_000 + "}",
        '{"a": "\\ud8"}',
    ],
    ids=["lists", "objects", "a level too much", "in a list", "5000 digits", "torn escape"],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_hostile_json_is_refused(text: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    data = text.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    refused(path, "is not valid JSON")


def test_half_a_character_is_replaced_in_names_and_values(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"t\\ud800": "x\\ud83d", "u": ["\\udfff"], "v": "\\ud83d\\ude00"}\n' * 20)
    table = load(path)
    assert table["t\ufffd"][0] == "x\ufffd"
    assert table["u"][0] == ["\ufffd"]
    assert table["v"][0] == "\U0001f600"


def test_numbers_that_are_none_stay_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": NaN, "b": 1e999, "c": -Infinity}\n' * 20)
    table = load(path)
    assert math.isnan(table["a"][0])
    assert table["b"][0] == math.inf == -table["c"][0]


# Real bombs, in a process that may not grow


def _csv_bomb(path: Path) -> None:
    """4.2 MB that unpack to 4 GiB: members of gzip can be repeated."""
    path.write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * (16 << 20), 9) * 64)


def _parquet_bomb(path: Path) -> None:
    """Less than 100 KB that unpack to 1.25 GiB."""
    table = pa.table({"x": pa.array([bytes(256)] * (1 << 16), pa.binary(256))})
    with pq.ParquetWriter(path, table.schema) as writer:
        for _ in range(80):
            writer.write_table(table)


def _npz_bomb(path: Path) -> None:
    member = _npy((1 << 24,), bytes(1 << 27))
    _npz(path, **{f"x{number}": member for number in range(2)})


@pytest.mark.parametrize(
    ("name", "make"),
    [("a.csv.gz", _csv_bomb), ("a.parquet", _parquet_bomb), ("a.npz", _npz_bomb)],
)
def test_memory_stays_bounded_with_the_limits_as_they_are(
    name: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    """Half a gigabyte beyond what the imports take is all that the process can have."""
    make(tmp_path / name)
    program = """
        import resource, sys
        from pathlib import Path
        import pyarrow.parquet
        from yunlu.core.errors import DataError
        from yunlu.training.data.files import locate
        from yunlu.training.data.readers import READERS, format_of

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + (512 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        file = locate(sys.argv[1])
        try:
            READERS[format_of(file)](file)
        except DataError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / name)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "to 1, as files do that are made to fill a memory" in done.stdout, done.stderr
    assert "YUNLU_LIMITS=ratio=" in done.stdout


def test_errors_of_limits_survive_the_way_out_of_a_loading_process() -> None:
    import pickle

    from yunlu.core.limits import over_limit

    error = over_limit("x", "pixels", 5)
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, YunluError)
    assert str(again) == str(error)
