"""What a record is called: a hash of everything that its bytes depend on.

KV is a function of the model (its fingerprint), of the namespace and of the tokens before it. So a block is named by
the block before it and its own tokens, a mark by the last whole block below it and the tokens behind that, and the
first of a chain by a root that stands for model and namespace.
"""

import hashlib

import numpy as np

from reprise.core.tokens import Tokens

KEY_NBYTES = 32
FORMAT_VERSION = 1
"""Of the files, and part of every root: what another version wrote is never found."""


def token_bytes(tokens: Tokens) -> bytes:
    """The ids as little-endian int32, four bytes each: the form in which they are hashed, compared and stored."""
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()


def root_key(*, fingerprint: str, namespace: str) -> bytes:
    """The key that all records of a model and namespace hang on."""
    return _hash(b"root", FORMAT_VERSION.to_bytes(4, "little"), fingerprint.encode(), namespace.encode())


def block_key(parent: bytes, tokens: bytes) -> bytes:
    """The key of a block: its parent is the block before it, or the root."""
    return _hash(b"block", parent, tokens)


def mark_key(parent: bytes, tail: bytes) -> bytes:
    """The key of a mark: its parent is the last whole block below it, or the root; `tail` may be empty."""
    return _hash(b"mark", parent, tail)


def folder_name(fingerprint: str) -> str:
    """The name of a model's folder: 16 hex digits."""
    return _hash(b"model", fingerprint.encode()).hex()[:16]


def _hash(*parts: bytes) -> bytes:
    # Each part with its length, so that no two lists of parts read the same.
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()
