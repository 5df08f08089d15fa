"""A dictionary for fuzzing of text formats: what random bytes do not hit upon."""

from __future__ import annotations

from hypothesis import strategies as st

FRAGMENTS = (
    *(b"[[[[", b"]]]]", b"[", b"]", b"{", b"}", b'{"a":', b'"', b"\\", b",", b":", b"\n", b"\r\n"),
    *(
        b'"\\ud800"',
        b'"\\udc00\\ud800"',
        b"\\u",
        b"\xed\xa0\x80",
        b"\xff",
        b"\x00",
        b"\xef\xbb\xbf",
    ),
    *(b"NaN", b"-Infinity", b"1e999", b"-0", b"1e-999", b"9" * 4400, b"0x" + b"f" * 5000),
    *(
        b"null",
        b"true",
        b"-",
        b"- ",
        b": ",
        b"  ",
        b"\t",
        b"#",
        b"&a ",
        b"*a",
        b"<<: ",
        b"!!python/",
    ),
    *(b"PK\x03\x04", b"\x93NUMPY", b"\x80\x04", b"../", b"/dev/zero", b"\x1b]52;c;", b"__proto__"),
)


def hostile_bytes(*more: bytes) -> st.SearchStrategy[bytes]:
    """Bytes of fragments that parsers stumble over, with those of a format of one's own."""
    fragment = st.sampled_from((*more, *FRAGMENTS)) | st.binary(max_size=4)
    return st.lists(fragment, max_size=30).map(b"".join)
