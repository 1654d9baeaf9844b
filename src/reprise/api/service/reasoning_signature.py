"""Marks on reasoning that leaves the server, by which it is known again when a client sends it back.

They are checksums, not secrets: they hold across restarts and replicas, and whoever wants to forge one can. Nothing is
gained by that, since a client may send any reasoning it likes.
"""

import base64
import binascii
import hashlib

_PREFIX = "reprise1."
_DIGEST_NBYTES = 18


def signature_of(reasoning: str) -> str:
    """The signature of a thinking block."""
    return _PREFIX + _encoded(_digest(reasoning))


def is_signed(reasoning: str, signature: str) -> bool:
    """Whether the signature is of this server's making and of this reasoning."""
    return signature == signature_of(reasoning)


def encode_reasoning(reasoning: str) -> str:
    """The reasoning as one opaque word, for clients that keep it without reading it."""
    return f"{signature_of(reasoning)}.{_encoded(reasoning.encode())}"


def decode_reasoning(encoded: str) -> str | None:
    """The reasoning in a sealed word, or None if it is not of this server's making."""
    try:
        _, _, text = encoded.removeprefix(_PREFIX).partition(".")
        reasoning = base64.b64decode(text.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError):
        return None
    return reasoning if encoded == encode_reasoning(reasoning) else None


def _digest(reasoning: str) -> bytes:
    return hashlib.blake2b(reasoning.encode(), digest_size=_DIGEST_NBYTES, person=b"reprise").digest()


def _encoded(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode()
