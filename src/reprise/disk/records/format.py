"""The file format of one record: a safetensors file, readable by any safetensors tool.

    header length (u64, little-endian)
    header: JSON, padded with spaces to a multiple of 64 bytes from the start of the file
    body: the sections in order, named "0", "1", …

`__metadata__` in the header holds the record's keys (hex), start, tokens (base64 of little-endian int32), `about` (as
JSON) and two SHA-256 checksums: one of the body, one of the rest of the header. Nothing follows the body.

The library's own reader is not used: it maps the file, and an I/O error under a mapping kills the process; or it takes
the file as bytes and copies them again. Here a header is read without its body, the body is hashed and used in the
buffer it was read into, and I/O errors are exceptions.
"""

import base64
import hashlib
import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from io import BufferedReader, BytesIO
from itertools import accumulate
from typing import Any, cast

import numpy as np

from reprise.core.tokens import as_tokens
from reprise.disk.records.record import (
    DTYPE_NBYTES,
    FORMAT_VERSION,
    KEY_NBYTES,
    TOKEN_NBYTES,
    DiskRecord,
    IndexEntry,
    Section,
    key_of,
    token_bytes,
)

LENGTH = struct.Struct("<Q")
FORMAT = "reprise"
ALIGNMENT = 64
MAX_HEADER_NBYTES = 64 * 1024 * 1024
"""A longer header counts as damage, whatever the file's size."""

_MAGIC_OF_VERSION_1 = b"REPRIS\r\n"
_METADATA = "__metadata__"
_HEADER_SUM = "header_sha256"
_NAMES = {
    **{"bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "float16": "F16"},
    **{"bfloat16": "BF16", "uint32": "U32", "int32": "I32", "float32": "F32", "uint64": "U64", "int64": "I64"},
    "complex64": "C64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
assert _NAMES.keys() == DTYPE_NBYTES.keys()

Bytes = bytes | memoryview


class Unverified(Exception):
    """A damaged file; the message describes the damage."""


class OtherVersion(Exception):
    """The file has another format version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionPlace:
    """The position of a section's bytes in the body: ``[offset, offset + nbytes)``."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return DTYPE_NBYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordHeader:
    """A record without the bytes of its sections."""

    entry: IndexEntry
    about: dict[str, Any]
    sections: tuple[SectionPlace, ...]
    body_at: int
    body_sha256: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedFile:
    """A file's content as consecutive chunks."""

    chunks: tuple[Bytes, ...]
    nbytes: int


def encode(record: DiskRecord) -> EncodedFile:
    """The file of a record. Sections are hashed but not copied. O(bytes)."""
    body_sum = hashlib.sha256()
    for section in record.sections:
        body_sum.update(section.data)
    stops = list(accumulate((section.nbytes for section in record.sections), initial=0))
    metadata = {
        "format": FORMAT,
        "version": str(FORMAT_VERSION),
        "root": record.root.hex(),
        "parent": record.parent.hex(),
        "key": record.key.hex(),
        "is_tail": str(int(record.is_tail)),
        "start": str(record.start),
        "tokens": base64.b64encode(token_bytes(record.tokens)).decode(),
        "about": json.dumps(dict(record.about)),
        "body_sha256": body_sum.hexdigest(),
    }
    header: dict[str, dict[str, Any]] = {_METADATA: metadata}
    for i, section in enumerate(record.sections):
        header[str(i)] = {
            "dtype": _NAMES[section.dtype],
            "shape": list(section.shape),
            "data_offsets": [stops[i], stops[i + 1]],
        }
    metadata[_HEADER_SUM] = _checksum(header)
    text = json.dumps(header).encode()
    text += b" " * (-(LENGTH.size + len(text)) % ALIGNMENT)
    assert len(text) <= MAX_HEADER_NBYTES, len(text)
    front = LENGTH.pack(len(text)) + text
    body = tuple(section.data for section in record.sections if section.nbytes > 0)
    return EncodedFile(chunks=(front, *body), nbytes=len(front) + stops[-1])


def read_header(file: BufferedReader | BytesIO, file_nbytes: int) -> RecordHeader:
    """The header of a file; the body is not read. Raises Unverified, OtherVersion and OSError."""
    first = file.read(LENGTH.size)
    if len(first) < LENGTH.size:
        raise Unverified("it ends before its header begins")
    if first == _MAGIC_OF_VERSION_1:
        raise OtherVersion("it is of format version 1")
    (header_nbytes,) = cast("tuple[int]", LENGTH.unpack(first))
    # Checked before allocating: a damaged length could be any number.
    if header_nbytes > MAX_HEADER_NBYTES or LENGTH.size + header_nbytes > file_nbytes:
        raise Unverified(f"its header cannot be {header_nbytes} bytes long")
    text = file.read(header_nbytes)
    try:
        header = _parsed(text, body_at=LENGTH.size + header_nbytes)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unverified(f"its header cannot be read ({error})") from error
    entry = header.entry
    if entry.key != key_of(entry.parent, entry.tokens, is_tail=entry.is_tail):
        raise Unverified("its key is not that of its tokens")
    if entry.file_nbytes != file_nbytes:
        raise Unverified(f"it is {file_nbytes} bytes long instead of {entry.file_nbytes}")
    return header


def read_record(file: BufferedReader | BytesIO, file_nbytes: int) -> DiskRecord:
    """The whole record, verified, each section in its own buffer. Raises like `read_header`."""
    header = read_header(file, file_nbytes)
    file.seek(header.body_at)
    body_sum = hashlib.sha256()
    sections: list[Section] = []
    for place in header.sections:
        sections.append(_read_section(file, place))
        body_sum.update(sections[-1].data)
    if body_sum.digest() != header.body_sha256:
        raise Unverified("its body has the wrong checksum")
    entry = header.entry
    return DiskRecord(
        root=entry.root,
        parent=entry.parent,
        is_tail=entry.is_tail,
        start=entry.start,
        tokens=as_tokens(np.frombuffer(entry.tokens, dtype="<i4")),
        about=header.about,
        sections=tuple(sections),
    )


def _read_section(file: BufferedReader | BytesIO, place: SectionPlace) -> Section:
    """The next section of the body, in a buffer that can be freed separately."""
    # The size is bounded by the file's, which the header was compared with. Not a bytearray: zeroing it would hold the
    # GIL and stall other streams, while reading and hashing release it.
    data = np.empty(place.nbytes, dtype=np.uint8).data
    if file.readinto(data) != place.nbytes:
        raise Unverified("it ends before its body does")
    return Section(dtype=place.dtype, shape=place.shape, data=data.toreadonly())


def _checksum(header: dict[str, Any]) -> str:
    """SHA-256 (hex) of the header without this field, in canonical JSON."""
    metadata = {name: text for name, text in header[_METADATA].items() if name != _HEADER_SUM}
    canonical = json.dumps({**header, _METADATA: metadata}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _parsed(text: bytes, *, body_at: int) -> RecordHeader:
    """The header in this JSON. Raises OtherVersion, or one of the errors that `read_header` catches."""
    fields = cast("dict[str, Any]", json.loads(text))
    metadata = cast("dict[str, str]", fields[_METADATA])
    if metadata["format"] != FORMAT:
        raise ValueError("it is not a record")
    if metadata["version"] != str(FORMAT_VERSION):
        raise OtherVersion(f"it is of format version {metadata['version']}")
    if metadata[_HEADER_SUM] != _checksum(fields):
        raise ValueError("it has the wrong checksum")
    tokens = base64.b64decode(metadata["tokens"], validate=True)
    sections = tuple(_places(fields[str(i)] for i in range(len(fields) - 1)))
    body_nbytes = sum(place.nbytes for place in sections)
    entry = IndexEntry(
        root=bytes.fromhex(metadata["root"]),
        parent=bytes.fromhex(metadata["parent"]),
        key=bytes.fromhex(metadata["key"]),
        is_tail=bool(int(metadata["is_tail"])),
        start=int(metadata["start"]),
        tokens=tokens,
        nbytes=body_nbytes + len(tokens),
        file_nbytes=body_at + body_nbytes,
    )
    if {len(entry.root), len(entry.parent), len(entry.key)} != {KEY_NBYTES}:
        raise ValueError("a key of another length")
    if entry.start < 0 or (entry.start == 0) != (entry.parent == entry.root):
        raise ValueError(f"a start at {entry.start}")
    if len(tokens) % TOKEN_NBYTES != 0 or (len(tokens) == 0 and (entry.start == 0 or not entry.is_tail)):
        raise ValueError(f"{len(tokens)} bytes of tokens")
    return RecordHeader(
        entry=entry,
        about=dict(json.loads(metadata["about"])),
        sections=sections,
        body_at=body_at,
        body_sha256=bytes.fromhex(metadata["body_sha256"]),
    )


def _places(described: Iterable[dict[str, Any]]) -> list[SectionPlace]:
    """The sections in order; raises ValueError unless each begins where the previous one ends."""
    places: list[SectionPlace] = []
    at = 0
    for each in described:
        shape = tuple(int(size) for size in each["shape"])
        place = SectionPlace(dtype=_DTYPES[each["dtype"]], shape=shape, offset=at)
        if min(shape, default=0) < 0 or each["data_offsets"] != [at, at + place.nbytes]:
            raise ValueError(f"a section at {each['data_offsets']}")
        places.append(place)
        at += place.nbytes
    return places
