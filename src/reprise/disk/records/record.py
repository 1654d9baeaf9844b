"""Records, the unit of storage on disk, and their keys.

KV is a function of the model (its fingerprint), the namespace and the tokens before it. A block's key is the hash of
the previous block's key and its own tokens; a tail record's, of the key of the last whole block before it and the
tokens since. The first record of a path has a root as parent, the hash of model and namespace.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reprise.core.tokens import Tokens

KEY_NBYTES = 32
TOKEN_NBYTES = 4
FORMAT_VERSION = 2
"""Version of the file format. Part of every root key, so records of other versions are never found."""

DTYPE_NBYTES: Mapping[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32"), 4),
    **dict.fromkeys(("uint64", "int64", "complex64"), 8),
}
"""Bytes per element of the dtypes a section can have."""


def token_bytes(tokens: Tokens) -> bytes:
    """The token ids as little-endian int32, as they are hashed, compared and stored."""
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()


def root_key(*, fingerprint: str, namespace: str) -> bytes:
    """The root key of all records of a model and namespace."""
    return _hash(b"root", FORMAT_VERSION.to_bytes(4, "little"), fingerprint.encode(), namespace.encode())


def block_key(parent: bytes, tokens: bytes) -> bytes:
    """The key of a block; its parent is the previous block or the root."""
    return _hash(b"block", parent, tokens)


def tail_key(parent: bytes, tail: bytes) -> bytes:
    """The key of a tail record; its parent is the last whole block before it or the root. `tail` may be empty."""
    return _hash(b"tail", parent, tail)


def key_of(parent: bytes, tokens: bytes, *, is_tail: bool) -> bytes:
    """The key of a record."""
    return tail_key(parent, tokens) if is_tail else block_key(parent, tokens)


def folder_name(fingerprint: str) -> str:
    """The name of a model's folder: 16 hex digits."""
    return _hash(b"model", fingerprint.encode()).hex()[:16]


def _hash(*parts: bytes) -> bytes:
    # Length-prefixed, so that different parts never concatenate to the same bytes.
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """An array as bytes. `dtype` is a key of `DTYPE_NBYTES`; a memoryview in `data` must be contiguous."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    def __post_init__(self) -> None:
        assert self.nbytes == DTYPE_NBYTES[self.dtype] * math.prod(self.shape), (self.dtype, self.shape, self.nbytes)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes if isinstance(self.data, memoryview) else len(self.data)


# Compared by identity: two records with one key are two writes.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class DiskRecord:
    """A block (the entries of ``[start, start + len(tokens))``) or a tail record (what else position p needs).

    `tokens` are the block's, or those of the tail ``[start, p)``. `about` is any JSON object.
    """

    root: bytes
    parent: bytes
    key: bytes = field(init=False)
    is_tail: bool
    start: int
    tokens: Tokens
    about: Mapping[str, Any]
    sections: tuple[Section, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", key_of(self.parent, token_bytes(self.tokens), is_tail=self.is_tail))
        assert len(self.root) == len(self.parent) == KEY_NBYTES, self
        assert self.start >= 0 and self.position > 0 and (self.is_tail or len(self.tokens) > 0), self
        assert (self.start == 0) == (self.parent == self.root), self

    @property
    def position(self) -> int:
        """The position at which the record ends."""
        return self.start + len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of its sections and tokens, in memory."""
        return sum(section.nbytes for section in self.sections) + int(self.tokens.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexEntry:
    """What the index keeps of a record."""

    key: bytes
    parent: bytes
    root: bytes
    is_tail: bool
    start: int
    tokens: bytes
    """Of the block or the tail, little-endian int32."""
    nbytes: int
    """`DiskRecord.nbytes`."""
    file_nbytes: int

    @property
    def stop(self) -> int:
        """The position at which the record ends."""
        return self.start + len(self.tokens) // TOKEN_NBYTES


def entry_of(record: DiskRecord, *, file_nbytes: int) -> IndexEntry:
    return IndexEntry(
        key=record.key,
        parent=record.parent,
        root=record.root,
        is_tail=record.is_tail,
        start=record.start,
        tokens=token_bytes(record.tokens),
        nbytes=record.nbytes,
        file_nbytes=file_nbytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskMatch:
    """The records from which `position` can be resumed: blocks in order, then a tail record if there is one.

    `position` is the end of the last record, or lies inside it if every position is resumable.
    """

    position: int
    namespace: str
    keys: tuple[bytes, ...]
    nbytes: int
    """Sum of their `DiskRecord.nbytes`."""

    def __post_init__(self) -> None:
        assert self.position > 0 and len(self.keys) > 0, self


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingRecords:
    """What must be `put`, in this order, so that a position can be resumed once those asked for before it can."""

    blocks: tuple[tuple[int, bytes], ...]
    """The missing blocks as (k, parent key); block k is ``[k * block, (k + 1) * block)``."""
    needs_tail: bool
    tail_parent: bytes
