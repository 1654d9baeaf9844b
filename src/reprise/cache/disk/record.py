"""Records: what is kept on disk, and the answers about it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from reprise.cache.disk.keys import KEY_NBYTES, block_key, mark_key, token_bytes
from reprise.core.tokens import Tokens, own_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A run of bytes, with the type and shape that its writer gives it; nothing here depends on those."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview
    """Contiguous if it is a view."""

    @property
    def nbytes(self) -> int:
        return self.data.nbytes if isinstance(self.data, memoryview) else len(self.data)


# Compared by identity: two records of one key are two writes.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Record:
    """A block (the entries of the positions ``[start, start + len(tokens))``) or a mark (what else position p needs).

    `tokens` are those of the block, or of the mark's tail ``[start, p)``. `about` is anything that JSON can hold.
    """

    root: bytes
    parent: bytes
    key: bytes
    is_mark: bool
    start: int
    tokens: Tokens
    about: Mapping[str, Any]
    sections: tuple[Section, ...]

    def __post_init__(self) -> None:
        assert len(self.root) == len(self.parent) == KEY_NBYTES, self
        assert self.key == key_of(self.parent, self.tokens, is_mark=self.is_mark), self
        assert self.start >= 0 and self.position > 0 and (self.is_mark or len(self.tokens) > 0), self
        assert (self.start == 0) == (self.parent == self.root), self

    @classmethod
    def of(
        cls,
        *,
        root: bytes,
        parent: bytes,
        is_mark: bool,
        start: int,
        tokens: Tokens,
        about: Mapping[str, Any],
        sections: tuple[Section, ...],
    ) -> Self:
        """The record of these tokens, with their key: a block begins at `start`, and so does a mark's tail."""
        return cls(
            root=root,
            parent=parent,
            key=key_of(parent, tokens, is_mark=is_mark),
            is_mark=is_mark,
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


def key_of(parent: bytes, tokens: Tokens, *, is_mark: bool) -> bytes:
    """The key of a record."""
    return mark_key(parent, token_bytes(tokens)) if is_mark else block_key(parent, token_bytes(tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """`position` can be resumed from these records: the blocks in order, then the mark if there is one.

    `position` is where the last record ends, or inside the last block where every position can be resumed.
    """

    position: int
    namespace: str
    keys: tuple[bytes, ...]
    nbytes: int
    """What `Record.nbytes` of them adds up to."""

    def __post_init__(self) -> None:
        assert self.position > 0 and len(self.keys) > 0, self


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """What has to be put, in this order, so that a position can be resumed."""

    blocks: tuple[tuple[int, bytes], ...]
    """The blocks that are not there: index (block k is ``[k * block, (k + 1) * block)``) and parent key."""
    needs_mark: bool
    mark_parent: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStats:
    """What a disk cache holds and has done. Bytes are those of files, but for `queued_nbytes`."""

    files: int
    """Record files of this model."""
    nbytes: int
    """Bytes of all files in this model's folder."""
    others_nbytes: int
    """Bytes of all other files below the directory, when last looked at."""
    max_bytes: int
    queued_nbytes: int
    written_nbytes: int
    read_nbytes: int
    evicted: int
    quarantined: int
    errors: int
