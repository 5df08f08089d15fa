"""Data files of others: columns, or a DataError; whatever the bytes."""

from __future__ import annotations

import contextlib
import gzip
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given

from tests.hostile import hostile_bytes
from yunlu.core.errors import DataError
from yunlu.training.data.audio import read_audio
from yunlu.training.data.files import locate
from yunlu.training.data.images import ImageShape, read_image
from yunlu.training.data.readers import READERS, format_of
from yunlu.training.data.table import FileRef

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = ImageShape(channels=1, height=2, width=2)
NPY = b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (%s,), }"
TABLES = (
    *(b"a,b\n1,2\n", b"label\ttext\n", b'{"a": 1}\n', b"PAR1", b"PAR1\x15\x00\x15\x00PAR1", b";"),
    *(NPY % b"3", NPY % b"-1", NPY % b"10**30", NPY.replace(b"<f8", b"|O") % b"3", b'"a""b"'),
    *(b"PK\x05\x06" + bytes(18), gzip.compress(b"a,b\n1,2\n"), b"\x1f\x8b\x08\x00"),
)
MEDIA = (
    *(b"\x89PNG\r\n\x1a\n", b"\x00\x00\x00\rIHDR", b"\x00\x00\x00\x02" * 2, b"GIF89a", b"BM"),
    *(b"\xff\xd8\xff\xe0", b"\xff\xc0\x00\x11\x08", b"RIFF\x24\x00\x00\x00WAVEfmt ", b"data"),
    *(b"\x10\x00\x00\x00\x01\x00\x01\x00", b"fLaC\x00\x00\x00\x22", b"OggS\x00\x02", b"II*\x00"),
    *(b"P6 2 2 255\n", b"ID3\x04\x00", b"\xff\xfb\x90\x00", b"RIFF\x24\x00\x00\x00WEBPVP8 "),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@given(hostile_bytes(*TABLES))
@example(b"[" * 100_000)
@example(b'{"\\ud800": "\\udfff"}\n')
@example(b'{"a": ' + b"9" * 5000 + b"}\n")
@example(b'{"a": NaN}\n{"a": 1e999}\n{"a": null}\n')
@example(b"a,b\n" + b"9" * 400 + b",1\n")
@example(b"a,b\n" + b"9" * 5000 + b",1\n")
@example(b"\xef\xbb\xbf")
@example(NPY % b"2**62")
def test_a_table_is_read_or_a_data_error(folder: Path, data: bytes) -> None:
    for name in ("a", "a.gz"):
        (folder / name).write_bytes(data)
        file = locate(str(folder / name))
        for form, read in READERS.items():
            try:
                columns = read(file)
            except DataError as error:
                str(error).encode()
            else:
                assert all("\ud800" not in str(key) for key in columns), form
        with contextlib.suppress(DataError):
            assert format_of(file) in READERS


@given(hostile_bytes(*MEDIA))
def test_an_image_or_a_sound_is_read_or_a_data_error(folder: Path, data: bytes) -> None:
    path = folder / "medium"
    path.write_bytes(data)
    for read in (lambda: read_image(FileRef(str(path)), SHAPE), lambda: read_audio(str(path))):
        with contextlib.suppress(DataError):
            read()
