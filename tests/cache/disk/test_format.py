"""The file of a record: what is read is what was written, or it is said not to be."""

import hashlib
import io
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.cache.disk.format import (
    MAGIC,
    MAX_HEADER_NBYTES,
    PREFIX,
    OtherVersion,
    Unverified,
    encode,
    read_header,
    read_record,
)
from reprise.cache.disk.keys import FORMAT_VERSION, block_key, folder_name, mark_key, root_key
from reprise.cache.disk.record import Record, Section
from reprise.core.tokens import as_tokens
from tests.cache.disk.chains import content_of

ROOT = root_key(fingerprint="model", namespace="")
OTHER = block_key(ROOT, b"1234")

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def sections(draw: st.DrawFn) -> Section:
    content = draw(st.binary(max_size=200))
    # Whatever the type is called, and whatever the element size of a view, bytes are bytes.
    view = draw(st.sampled_from([bytes, memoryview, lambda b: memoryview(np.frombuffer(b, dtype=np.uint8).copy())]))
    if len(content) > 0 and len(content) % 4 == 0 and draw(st.booleans()):
        view = lambda b: memoryview(np.frombuffer(b, dtype=np.float32).copy().reshape(-1, 1))  # noqa: E731
    dtype = draw(st.sampled_from(["float16", "bfloat16", "float32", "uint32", "int8", "bool", "complex64", "état"]))
    shape = tuple(draw(st.lists(st.integers(0, 2**40), max_size=4)))
    return Section(dtype=dtype, shape=shape, data=view(content))


@st.composite
def records(draw: st.DrawFn) -> Record:
    is_mark, start = draw(st.booleans()), draw(st.sampled_from([0, 1, 512, 2**31]))
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1 if start == 0 or not is_mark else 0, max_size=20))
    return Record.of(
        root=ROOT,
        parent=ROOT if start == 0 else OTHER,
        is_mark=is_mark,
        start=start,
        tokens=as_tokens(ids),
        about=draw(st.dictionaries(st.text(), json_values, max_size=3)),
        sections=tuple(draw(st.lists(sections(), max_size=4))),
    )


def file_of(record: Record) -> bytes:
    encoded = encode(record)
    content = b"".join(bytes(chunk) for chunk in encoded.chunks)
    assert len(content) == encoded.nbytes
    return content


def read(content: bytes) -> Record:
    return read_record(io.BufferedReader(io.BytesIO(content)), len(content))


def header_read(content: bytes) -> object:
    return read_header(io.BufferedReader(io.BytesIO(content)), len(content))


def small(**changes: object) -> Record:
    given = {
        "root": ROOT,
        "parent": ROOT,
        "start": 0,
        "tokens": as_tokens([1, 2, 3]),
        "about": {"x": 1},
        "sections": (
            Section(dtype="u8", shape=(3,), data=b"abc"),
            Section(dtype="u8", shape=(70,), data=bytes(range(70))),
        ),
    }
    return Record.of(is_mark=False, **(given | changes))  # type: ignore[arg-type]


@given(record=records())
@settings(max_examples=150, deadline=None)
def test_what_is_read_is_what_was_written(record: Record) -> None:
    again = read(file_of(record))
    assert content_of(again) == content_of(record)
    assert again.nbytes == record.nbytes
    assert not again.tokens.flags.writeable
    assert all(section.data.readonly for section in again.sections)  # type: ignore[union-attr]


def test_any_changed_byte_of_the_body_is_noticed() -> None:
    content = file_of(small())
    body_at = content.index(b"abc")
    for at in range(body_at, len(content)):
        changed = bytearray(content)
        changed[at] ^= 1
        header_read(bytes(changed))
        with pytest.raises(Unverified, match="body"):
            read(bytes(changed))


@given(record=records(), where=st.data(), bit=st.integers(0, 7))
@settings(max_examples=150, deadline=None)
def test_any_changed_bit_is_noticed(record: Record, where: st.DataObject, bit: int) -> None:
    content = bytearray(file_of(record))
    at = where.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << bit
    try:
        again = read(bytes(content))
    except (Unverified, OtherVersion):
        return
    # Only the zeros between header and body are free to change.
    assert content_of(again) == content_of(record)
    header_nbytes = PREFIX.unpack(bytes(content[: PREFIX.size]))[2]
    assert PREFIX.size + header_nbytes + 32 <= at < len(content) - sum(s.nbytes for s in record.sections)


@given(record=records(), length=st.integers(0))
@settings(max_examples=150, deadline=None)
def test_any_other_length_is_noticed(record: Record, length: int) -> None:
    content = file_of(record)
    for wrong in (content[: length % len(content)], content + b"x"):
        with pytest.raises(Unverified):
            header_read(wrong)
        with pytest.raises(Unverified):
            read(wrong)


def test_sections_lie_at_multiples_of_64() -> None:
    content = file_of(small())
    assert content.index(b"abc") % 64 == 0
    assert content.index(bytes(range(70))) % 64 == 0


def test_a_body_is_not_read_for_the_header() -> None:
    class Counting(io.BytesIO):
        num_read = 0

        def readinto(self, buffer) -> int:  # type: ignore[override]
            count = super().readinto(buffer)
            Counting.num_read += count
            return count

    record = small(sections=(Section(dtype="u8", shape=(10**6,), data=bytes(10**6)),))
    content = file_of(record)
    read_header(io.BufferedReader(Counting(content), buffer_size=512), len(content))  # type: ignore[arg-type]
    assert Counting.num_read < 10_000


def test_a_file_of_another_version_says_so() -> None:
    content = bytearray(file_of(small()))
    content[8:12] = (FORMAT_VERSION + 1).to_bytes(4, "little")
    with pytest.raises(OtherVersion):
        header_read(bytes(content))


@pytest.mark.parametrize("claimed", [2**63, 2**40, MAX_HEADER_NBYTES + 1, MAX_HEADER_NBYTES])
def test_a_damaged_header_length_allocates_nothing(claimed: int, tmp_path: Path) -> None:
    path = tmp_path / "damaged.kv"
    # As long as any header may be, but for the last case: a file with holes takes no room.
    size = 10**6 if claimed == MAX_HEADER_NBYTES else 2**31
    with path.open("wb") as file:
        file.write(PREFIX.pack(MAGIC, FORMAT_VERSION, claimed))
        file.truncate(size)
    tracemalloc.start()
    try:
        with path.open("rb") as file, pytest.raises(Unverified, match="header cannot be"):
            read_header(file, size)
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


def with_header(content: bytes, old: bytes, new: bytes) -> bytes:
    """The file with other words in its header, and the checksum that belongs to them."""
    _, version, length = PREFIX.unpack(content[: PREFIX.size])
    text = content[PREFIX.size : PREFIX.size + length]
    assert text.count(old) == 1
    changed = text.replace(old, new)
    front = PREFIX.pack(MAGIC, version, len(changed)) + changed
    front += hashlib.sha256(front).digest()
    front += bytes(-len(front) % 64)
    return front + content[-(-(PREFIX.size + length + 32) // 64) * 64 :]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"AQAAAAIAAAADAAAA"', b'"AQAAAAIAAAAEAAAA"'),
        (b'"start": 0', b'"start": -1'),
        (b'"start": 0', b'"start": 512'),
        (b'"offset": 64', b'"offset": -1'),
        (b'"offset": 64', b'"offset": 640'),
        (b'"nbytes": 70', b'"nbytes": 71'),
        (b'"body_nbytes": 134', b'"body_nbytes": 135'),
        (b'"body_nbytes": 134', b'"body_nbytes": "x"'),
        (b'"is_mark": false', b'"is_mark": true'),
        (b'"about": {"x": 1}', b'"about": 3'),
        (b'"sections"', b'"section"'),
        (b'"about": {"x": 1}', b'"about": ' + b"[" * 100_000 + b"]" * 100_000),
    ],
)
def test_a_header_that_makes_no_sense_is_refused_whatever_its_checksum(old: bytes, new: bytes) -> None:
    content = file_of(small())
    assert content_of(read(with_header(content, b'"x": 1', b'"x": 2'))) != content_of(small())
    with pytest.raises(Unverified):
        header_read(with_header(content, old, new))


def test_keys_differ_in_everything_that_they_depend_on() -> None:
    keys = [
        ROOT,
        root_key(fingerprint="model", namespace="x"),
        root_key(fingerprint="modelx", namespace=""),
        root_key(fingerprint="mode", namespace="l"),
        block_key(ROOT, b"1234"),
        mark_key(ROOT, b"1234"),
        mark_key(ROOT, b""),
        mark_key(OTHER, b""),
        block_key(OTHER, b"1234"),
        block_key(ROOT, b"12345678"),
        block_key(block_key(ROOT, b"1234"), b"5678"),
    ]
    assert len(set(keys)) == len(keys) and all(len(key) == 32 for key in keys)
    assert folder_name("model") != folder_name("other") and len(folder_name("model")) == 16


def test_a_record_checks_itself() -> None:
    for wrong in (
        {"parent": OTHER},
        {"start": 4},
        {"start": -1},
        {"tokens": as_tokens([])},
        {"root": b"short"},
    ):
        with pytest.raises(AssertionError):
            small(**wrong)
    with pytest.raises(AssertionError):
        Record.of(root=ROOT, parent=ROOT, is_mark=True, start=0, tokens=as_tokens([]), about={}, sections=())
    with pytest.raises(AssertionError):
        Record(
            root=ROOT,
            parent=ROOT,
            key=OTHER,
            is_mark=False,
            start=0,
            tokens=as_tokens([9]),
            about={},
            sections=(),
        )
