"""The file of a record: what is read is what was written, or it is said not to be."""

import hashlib
import io
import json
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.core.tokens import as_tokens
from reprise.disk.records.format import (
    LENGTH,
    MAX_HEADER_NBYTES,
    OtherVersion,
    Unverified,
    encode,
    read_header,
    read_record,
)
from reprise.disk.records.record import (
    DTYPE_NBYTES,
    FORMAT_VERSION,
    DiskRecord,
    Section,
    block_key,
    folder_name,
    root_key,
    tail_key,
)
from tests.disk.chains import content_of
from tests.matrix import examples

ROOT = root_key(fingerprint="model", namespace="")
OTHER = block_key(ROOT, b"1234")

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def sections(draw: st.DrawFn) -> Section:
    dtype = draw(st.sampled_from(sorted(DTYPE_NBYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    nbytes = math.prod(shape) * DTYPE_NBYTES[dtype]
    content = draw(st.binary(min_size=nbytes, max_size=nbytes))
    # Whatever the element size of a view, bytes are bytes.
    view = draw(st.sampled_from([bytes, memoryview, lambda b: memoryview(np.frombuffer(b, dtype=np.uint8).copy())]))
    if nbytes > 0 and nbytes % 4 == 0 and draw(st.booleans()):
        view = lambda b: memoryview(np.frombuffer(b, dtype=np.float32).copy().reshape(-1, 1))  # noqa: E731
    return Section(dtype=dtype, shape=shape, data=view(content))


@st.composite
def records(draw: st.DrawFn) -> DiskRecord:
    is_tail, start = draw(st.booleans()), draw(st.sampled_from([0, 1, 512, 2**31]))
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1 if start == 0 or not is_tail else 0, max_size=20))
    return DiskRecord(
        root=ROOT,
        parent=ROOT if start == 0 else OTHER,
        is_tail=is_tail,
        start=start,
        tokens=as_tokens(ids),
        about=draw(st.dictionaries(st.text(), json_values, max_size=3)),
        sections=tuple(draw(st.lists(sections(), max_size=4))),
    )


def file_of(record: DiskRecord) -> bytes:
    encoded = encode(record)
    content = b"".join(bytes(chunk) for chunk in encoded.chunks)
    assert len(content) == encoded.nbytes
    return content


def read(content: bytes) -> DiskRecord:
    return read_record(io.BufferedReader(io.BytesIO(content)), len(content))


def header_read(content: bytes) -> object:
    return read_header(io.BufferedReader(io.BytesIO(content)), len(content))


def small(**changes: object) -> DiskRecord:
    given = {
        "root": ROOT,
        "parent": ROOT,
        "start": 0,
        "tokens": as_tokens([1, 2, 3]),
        "about": {"x": 1},
        "sections": (
            Section(dtype="uint8", shape=(3,), data=b"abc"),
            Section(dtype="uint8", shape=(70,), data=bytes(range(70))),
        ),
    }
    return DiskRecord(is_tail=False, **(given | changes))  # type: ignore[arg-type]


@given(record=records())
@settings(max_examples=examples(150), deadline=None)
def test_what_is_read_is_what_was_written(record: DiskRecord) -> None:
    again = read(file_of(record))
    assert content_of(again) == content_of(record)
    assert again.nbytes == record.nbytes
    assert not again.tokens.flags.writeable
    assert all(section.data.readonly for section in again.sections)  # type: ignore[union-attr]
    # Each can be freed before the others, and none is zeroed first, while all threads wait.
    owners = [section.data.obj for section in again.sections]  # type: ignore[union-attr]
    assert len(set(map(id, owners))) == len(owners) and all(isinstance(owner, np.ndarray) for owner in owners)


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
@settings(max_examples=examples(150), deadline=None)
def test_any_changed_bit_is_noticed(record: DiskRecord, where: st.DataObject, bit: int) -> None:
    content = bytearray(file_of(record))
    at = where.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << bit
    with pytest.raises((Unverified, OtherVersion)):
        read(bytes(content))


@given(record=records(), length=st.integers(0))
@settings(max_examples=examples(150), deadline=None)
def test_any_other_length_is_noticed(record: DiskRecord, length: int) -> None:
    content = file_of(record)
    for wrong in (content[: length % len(content)], content + b"x"):
        with pytest.raises(Unverified):
            header_read(wrong)
        with pytest.raises(Unverified):
            read(wrong)


def test_the_body_begins_at_a_multiple_of_64() -> None:
    content = file_of(small())
    assert content.index(b"abc") % 64 == 0
    assert content.index(bytes(range(70))) == content.index(b"abc") + 3


@given(record=records())
@settings(max_examples=examples(60), deadline=None)
def test_other_tools_read_the_same(record: DiskRecord) -> None:
    found = dict(safetensors.deserialize(file_of(record)))
    assert len(found) == len(record.sections)
    for i, section in enumerate(record.sections):
        assert (bytes(found[str(i)]["data"]), tuple(found[str(i)]["shape"])) == (bytes(section.data), section.shape)


def test_a_body_is_not_read_for_the_header() -> None:
    class CountingFile(io.BytesIO):
        num_read = 0

        def readinto(self, buffer) -> int:  # type: ignore[override]
            count = super().readinto(buffer)
            CountingFile.num_read += count
            return count

    record = small(sections=(Section(dtype="uint8", shape=(10**6,), data=bytes(10**6)),))
    content = file_of(record)
    read_header(io.BufferedReader(CountingFile(content), buffer_size=512), len(content))  # type: ignore[arg-type]
    assert CountingFile.num_read < 10_000


@pytest.mark.parametrize("content", [b"REPRIS\r\n" + bytes(500), None])
def test_a_file_of_another_version_says_so(content: bytes | None) -> None:
    if content is None:
        content = with_header(file_of(small()), f'"version": "{FORMAT_VERSION}"', '"version": "9"')
    with pytest.raises(OtherVersion):
        header_read(content)


@pytest.mark.parametrize("claimed", [2**63, 2**40, MAX_HEADER_NBYTES + 1, MAX_HEADER_NBYTES])
def test_a_damaged_header_length_allocates_nothing(claimed: int, tmp_path: Path) -> None:
    path = tmp_path / "damaged.kv"
    # As long as any header may be, but for the last case: a file with holes takes no room.
    size = 10**6 if claimed == MAX_HEADER_NBYTES else 2**31
    with path.open("wb") as file:
        file.write(LENGTH.pack(claimed))
        file.truncate(size)
    tracemalloc.start()
    try:
        with path.open("rb") as file, pytest.raises(Unverified, match="header cannot be"):
            read_header(file, size)
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


def with_header(content: bytes, old: str, new: str) -> bytes:
    """The file with other words in its header, and the checksum that belongs to them."""
    (length,) = LENGTH.unpack(content[: LENGTH.size])
    text = content[LENGTH.size : LENGTH.size + length].decode()
    assert text.count(old) == 1, (old, text)
    changed = text.replace(old, new).strip()
    try:
        fields = json.loads(changed)
        metadata = fields["__metadata__"]
        del metadata["header_sha256"]
        said = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        metadata["header_sha256"] = hashlib.sha256(said.encode()).hexdigest()
        changed = json.dumps(fields)
    except (RecursionError, KeyError):
        pass
    changed += " " * (-(8 + len(changed)) % 64)
    return LENGTH.pack(len(changed)) + changed.encode() + content[LENGTH.size + length :]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"AQAAAAIAAAADAAAA"', '"AQAAAAIAAAAEAAAA"'),
        ('"start": "0"', '"start": "-1"'),
        ('"start": "0"', '"start": "512"'),
        ('"start": "0"', '"start": "x"'),
        ("[3, 73]", "[-1, 69]"),
        ("[3, 73]", "[640, 710]"),
        ("[3, 73]", "[3, 74]"),
        ("[3, 73]", "[0, 70]"),
        ("[70]", "[71]"),
        ("[70]", "[-70]"),
        ('"dtype": "U8", "shape": [70]', '"dtype": "U16", "shape": [70]'),
        ('"dtype": "U8", "shape": [70]', '"dtype": "F4", "shape": [70]'),
        ('"is_tail": "0"', '"is_tail": "1"'),
        ('"about": "{\\"x\\": 1}"', '"about": "3"'),
        ('"about": "{\\"x\\": 1}"', '"about": "' + "[" * 100_000 + "]" * 100_000 + '"'),
        ('"__metadata__"', '"__meta__"'),
        ('"format": "reprise"', '"format": "pt"'),
        ('"1": {', '"2": {'),
    ],
)
def test_a_header_that_makes_no_sense_is_refused_whatever_its_checksum(old: str, new: str) -> None:
    content = file_of(small())
    assert read(with_header(content, '\\"x\\": 1', '\\"x\\": 2')).about == {"x": 2}
    with pytest.raises(Unverified):
        header_read(with_header(content, old, new))


def test_keys_differ_in_everything_that_they_depend_on() -> None:
    keys = [
        ROOT,
        root_key(fingerprint="model", namespace="x"),
        root_key(fingerprint="modelx", namespace=""),
        root_key(fingerprint="mode", namespace="l"),
        block_key(ROOT, b"1234"),
        tail_key(ROOT, b"1234"),
        tail_key(ROOT, b""),
        tail_key(OTHER, b""),
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
        DiskRecord(root=ROOT, parent=ROOT, is_tail=True, start=0, tokens=as_tokens([]), about={}, sections=())
