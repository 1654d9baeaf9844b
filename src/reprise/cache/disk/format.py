"""The file of one record, as bytes.

    magic (8), format version (u32), header length (u64), all little-endian
    header: JSON in UTF-8
    SHA-256 of everything before it (32)
    zeros up to a multiple of 64
    body: the sections, each at a multiple of 64 from the body's beginning, zeros between them

The header holds the record's keys (hex), start, tokens (base64 of little-endian int32), `about`, the place of each
section, and the body's length and SHA-256. Nothing follows the body.
"""

import base64
import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from typing import Any, cast

import numpy as np

from reprise.cache.disk.keys import FORMAT_VERSION, KEY_NBYTES, token_bytes
from reprise.cache.disk.record import Record, Section, key_of
from reprise.core.tokens import Tokens

# The line end notices a copy that took the file for text.
MAGIC = b"REPRIS\r\n"
PREFIX = struct.Struct("<8sIQ")
ALIGNMENT = 64
MAX_HEADER_NBYTES = 64 * 1024 * 1024
"""A longer header is taken for damage, whatever the file's size."""

Bytes = bytes | memoryview


class Unverified(Exception):
    """The file is not what its writer wrote; the sentence says where it differs."""


class OtherVersion(Exception):
    """The file says that another version of the format wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionPlace:
    """Where a section's bytes lie in the body: ``[offset, offset + nbytes)``."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Header:
    """All of a record but its bytes."""

    root: bytes
    parent: bytes
    key: bytes
    is_mark: bool
    start: int
    tokens: Tokens
    about: dict[str, Any]
    sections: tuple[SectionPlace, ...]
    body_at: int
    body_nbytes: int
    body_sha256: bytes

    @property
    def nbytes(self) -> int:
        """`Record.nbytes` of the record."""
        return sum(place.nbytes for place in self.sections) + int(self.tokens.nbytes)

    @property
    def file_nbytes(self) -> int:
        return self.body_at + self.body_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A file's content: these runs of bytes, one after the other."""

    chunks: tuple[Bytes, ...]
    nbytes: int


def encode(record: Record) -> Encoded:
    """The file of a record. The sections' bytes are not copied. O(bytes): the body is hashed."""
    places = tuple(_places(record.sections))
    body = tuple(_body(record.sections, places))
    body_hash = hashlib.sha256()
    for chunk in body:
        body_hash.update(chunk)
    body_nbytes = places[-1].offset + places[-1].nbytes if places else 0
    header = json.dumps(
        {
            "root": record.root.hex(),
            "parent": record.parent.hex(),
            "key": record.key.hex(),
            "is_mark": record.is_mark,
            "start": record.start,
            "tokens": base64.b64encode(token_bytes(record.tokens)).decode(),
            "about": dict(record.about),
            "sections": [{"dtype": p.dtype, "shape": p.shape, "offset": p.offset, "nbytes": p.nbytes} for p in places],
            "body_nbytes": body_nbytes,
            "body_sha256": body_hash.hexdigest(),
        }
    ).encode()
    assert len(header) <= MAX_HEADER_NBYTES, len(header)
    front = PREFIX.pack(MAGIC, FORMAT_VERSION, len(header)) + header
    front += hashlib.sha256(front).digest()
    front += bytes(_up(len(front)) - len(front))
    return Encoded(chunks=(front, *body), nbytes=len(front) + body_nbytes)


def read_header(file: BufferedReader, file_nbytes: int) -> Header:
    """The header at the file's beginning; the body is not read. Raises Unverified, OtherVersion and OSError."""
    prefix = file.read(PREFIX.size)
    if len(prefix) < PREFIX.size:
        raise Unverified("it ends before its header begins")
    magic, version, header_nbytes = cast("tuple[bytes, int, int]", PREFIX.unpack(prefix))
    if magic != MAGIC:
        raise Unverified("it does not begin like a record")
    if version != FORMAT_VERSION:
        raise OtherVersion(f"it is of format version {version}")
    # Looked at before anything is allocated: a damaged length could be any number.
    if header_nbytes > MAX_HEADER_NBYTES or PREFIX.size + header_nbytes + KEY_NBYTES > file_nbytes:
        raise Unverified(f"its header cannot be {header_nbytes} bytes long")
    text = file.read(header_nbytes)
    if file.read(KEY_NBYTES) != hashlib.sha256(prefix + text).digest():
        raise Unverified("its header has another checksum")
    body_at = _up(PREFIX.size + header_nbytes + KEY_NBYTES)
    try:
        header = _parsed(text, body_at)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Unverified(f"its header cannot be read ({error})") from error
    if header.key != key_of(header.parent, header.tokens, is_mark=header.is_mark):
        raise Unverified("its key is not that of its tokens")
    if header.file_nbytes != file_nbytes:
        raise Unverified(f"it is {file_nbytes} bytes long instead of {header.file_nbytes}")
    return header


def read_record(file: BufferedReader, file_nbytes: int) -> Record:
    """The whole record, verified. Its sections are views of one buffer. Raises as `read_header` does."""
    header = read_header(file, file_nbytes)
    file.seek(header.body_at)
    # No longer than the file, which the header was compared with.
    body = bytearray(header.body_nbytes)
    if file.readinto(body) != header.body_nbytes:
        raise Unverified("it ends before its body does")
    if hashlib.sha256(body).digest() != header.body_sha256:
        raise Unverified("its body has another checksum")
    view = memoryview(body).toreadonly()
    return Record(
        root=header.root,
        parent=header.parent,
        key=header.key,
        is_mark=header.is_mark,
        start=header.start,
        tokens=header.tokens,
        about=header.about,
        sections=tuple(
            Section(dtype=p.dtype, shape=p.shape, data=view[p.offset : p.offset + p.nbytes]) for p in header.sections
        ),
    )


def _up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _places(sections: tuple[Section, ...]) -> Iterator[SectionPlace]:
    at = 0
    for section in sections:
        offset = _up(at)
        at = offset + section.nbytes
        yield SectionPlace(dtype=section.dtype, shape=section.shape, offset=offset, nbytes=section.nbytes)


def _body(sections: tuple[Section, ...], places: tuple[SectionPlace, ...]) -> Iterator[Bytes]:
    at = 0
    for section, place in zip(sections, places, strict=True):
        if place.offset > at:
            yield bytes(place.offset - at)
        if place.nbytes > 0:
            yield section.data
        at = place.offset + place.nbytes


def _parsed(text: bytes, body_at: int) -> Header:
    """The header of this JSON. Raises ValueError, KeyError or TypeError where it does not say what a header says."""
    fields = cast("dict[str, Any]", json.loads(text))
    tokens = np.frombuffer(base64.b64decode(fields["tokens"], validate=True), dtype="<i4").astype(np.int32)
    tokens.flags.writeable = False
    header = Header(
        root=bytes.fromhex(fields["root"]),
        parent=bytes.fromhex(fields["parent"]),
        key=bytes.fromhex(fields["key"]),
        is_mark=bool(fields["is_mark"]),
        start=int(fields["start"]),
        tokens=tokens,
        about=dict(fields["about"]),
        sections=tuple(
            SectionPlace(
                dtype=str(place["dtype"]),
                shape=tuple(int(size) for size in place["shape"]),
                offset=int(place["offset"]),
                nbytes=int(place["nbytes"]),
            )
            for place in fields["sections"]
        ),
        body_at=body_at,
        body_nbytes=int(fields["body_nbytes"]),
        body_sha256=bytes.fromhex(fields["body_sha256"]),
    )
    if {len(header.root), len(header.parent), len(header.key)} != {KEY_NBYTES}:
        raise ValueError("a key of another length")
    if header.start < 0 or (header.start == 0) != (header.parent == header.root):
        raise ValueError(f"a start at {header.start}")
    if len(tokens) == 0 and (header.start == 0 or not header.is_mark):
        raise ValueError("no tokens")
    if any(p.offset < 0 or p.nbytes < 0 or p.offset + p.nbytes > header.body_nbytes for p in header.sections):
        raise ValueError("a section outside of the body")
    return header
