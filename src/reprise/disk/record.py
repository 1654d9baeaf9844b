"""Records: what is kept on disk, what they are called, and the answers about them.

KV is a function of the model (its fingerprint), of the namespace and of the tokens before it. So a block is named by
the block before it and its own tokens, a tail record by the last whole block below it and the tokens behind that, and
the first of a chain by a root that stands for model and namespace.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from reprise.core.tokens import Tokens, own_tokens

KEY_NBYTES = 32
FORMAT_VERSION = 2
"""Of the files, and part of every root: what another version wrote is never found."""

DTYPE_NBYTES: Mapping[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32"), 4),
    **dict.fromkeys(("uint64", "int64", "complex64"), 8),
}
"""The types that a section's numbers can have, and their sizes."""


def token_bytes(tokens: Tokens) -> bytes:
    """The ids as little-endian int32, four bytes each: the form in which they are hashed, compared and stored."""
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()


def root_key(*, fingerprint: str, namespace: str) -> bytes:
    """The key that all records of a model and namespace hang on."""
    return _hash(b"root", FORMAT_VERSION.to_bytes(4, "little"), fingerprint.encode(), namespace.encode())


def block_key(parent: bytes, tokens: bytes) -> bytes:
    """The key of a block: its parent is the block before it, or the root."""
    return _hash(b"block", parent, tokens)


def tail_key(parent: bytes, tail: bytes) -> bytes:
    """The key of a tail record: its parent is the last whole block below it, or the root; `tail` may be empty."""
    return _hash(b"tail", parent, tail)


def key_of(parent: bytes, tokens: Tokens, *, is_tail: bool) -> bytes:
    """The key of a record."""
    return tail_key(parent, token_bytes(tokens)) if is_tail else block_key(parent, token_bytes(tokens))


def folder_name(fingerprint: str) -> str:
    """The name of a model's folder: 16 hex digits."""
    return _hash(b"model", fingerprint.encode()).hex()[:16]


def _hash(*parts: bytes) -> bytes:
    # Each part with its length, so that no two lists of parts read the same.
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """An array as bytes. `dtype` is a key of `DTYPE_NBYTES`; a view in `data` is contiguous."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    def __post_init__(self) -> None:
        assert self.nbytes == DTYPE_NBYTES[self.dtype] * math.prod(self.shape), (self.dtype, self.shape, self.nbytes)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes if isinstance(self.data, memoryview) else len(self.data)


# Compared by identity: two records of one key are two writes.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DiskRecord:
    """A block (the entries of ``[start, start + len(tokens))``) or a tail record (what else position p needs).

    `tokens` are those of the block, or of the tail ``[start, p)``. `about` is anything that JSON can hold.
    """

    root: bytes
    parent: bytes
    key: bytes
    is_tail: bool
    start: int
    tokens: Tokens
    about: Mapping[str, Any]
    sections: tuple[Section, ...]

    def __post_init__(self) -> None:
        assert len(self.root) == len(self.parent) == KEY_NBYTES, self
        assert self.key == key_of(self.parent, self.tokens, is_tail=self.is_tail), self
        assert self.start >= 0 and self.position > 0 and (self.is_tail or len(self.tokens) > 0), self
        assert (self.start == 0) == (self.parent == self.root), self

    @classmethod
    def of(
        cls,
        *,
        root: bytes,
        parent: bytes,
        is_tail: bool,
        start: int,
        tokens: Tokens,
        about: Mapping[str, Any],
        sections: tuple[Section, ...],
    ) -> Self:
        """The record of these tokens, with their key: a block begins at `start`, and so does a tail."""
        return cls(
            root=root,
            parent=parent,
            key=key_of(parent, tokens, is_tail=is_tail),
            is_tail=is_tail,
            start=start,
            tokens=own_tokens(tokens),
            about=about,
            sections=sections,
        )

    @property
    def position(self) -> int:
        """Where the record ends."""
        return self.start + len(self.tokens)

    @property
    def nbytes(self) -> int:
        """The bytes of its sections and tokens, which is what it holds in memory."""
        return sum(section.nbytes for section in self.sections) + int(self.tokens.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskMatch:
    """`position` can be resumed from these records: the blocks in order, then the tail record if there is one.

    `position` is where the last record ends, or inside the last block where every position can be resumed.
    """

    position: int
    namespace: str
    keys: tuple[bytes, ...]
    nbytes: int
    """What `DiskRecord.nbytes` of them adds up to."""

    def __post_init__(self) -> None:
        assert self.position > 0 and len(self.keys) > 0, self


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingRecords:
    """What has to be put, in this order, so that a position can be resumed."""

    blocks: tuple[tuple[int, bytes], ...]
    """The blocks that are not there: index (block k is ``[k * block, (k + 1) * block)``) and parent key."""
    needs_tail: bool
    tail_parent: bytes
