"""Entries that the tree holds on loan from live sequences: where they are, and putting copies in their place."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reprise.cache.lookup import Restore
from reprise.cache.payload import Lent, SegmentPayload
from reprise.cache.tree import Node, Piece, walk
from reprise.core.kinds import Full, KvKind
from reprise.core.tokens import Tokens


@dataclass(frozen=True, slots=True, eq=False)
class LoanPlace:
    """A piece of an edge whose entries are lent, or could be."""

    node: Node
    kind: KvKind
    piece: Piece

    @property
    def payload(self) -> Lent:
        assert isinstance(self.piece.payload, Lent), self
        return self.piece.payload


def loans_on(root: Node, tokens: Tokens, lender: object, *, start: int = 0) -> tuple[LoanPlace, ...]:
    """What `lender` lends of the entries ``[start, …)`` on the path of `tokens`, in order.

    A piece that `start` lies within is cut there, which copies nothing.
    """
    found: list[LoanPlace] = []
    for node in walk(root, tokens).nodes:
        for kind, pieces in node.pieces.items():
            if start > node.start:
                _cut_at(pieces, start, lender)
            found.extend(LoanPlace(node, kind, p) for p in pieces if p.span.start >= start and is_lent_by(p, lender))
    return tuple(found)


def owned_on(root: Node, tokens: Tokens) -> tuple[LoanPlace, ...]:
    """The pieces of full attention on the path of `tokens` that are not lent, where one lease at most passes."""
    walked = walk(root, tokens)
    return tuple(
        LoanPlace(node, kind, piece)
        for node in walked.nodes
        if node.num_leases <= 1
        for kind, pieces in node.pieces.items()
        if isinstance(kind, Full)
        for piece in pieces
        if piece.span.stop <= walked.length and not isinstance(piece.payload, Lent)
    )


def _cut_at(pieces: list[Piece], position: int, lender: object) -> None:
    for i, piece in enumerate(pieces):
        if piece.span.start < position < piece.span.stop and is_lent_by(piece, lender):
            at = position - piece.span.start
            low, high = piece.span.clip(0, position), piece.span.clip(position, piece.span.stop)
            assert low is not None and high is not None
            pieces[i : i + 1] = [
                Piece(low, piece.payload.cut(0, at)),
                Piece(high, piece.payload.cut(at, len(piece.span))),
            ]
            return


def lender_of(piece: Piece) -> object | None:
    """Who lends the entries of this piece; None: the tree owns them."""
    return piece.payload.lender if isinstance(piece.payload, Lent) else None


def is_lent_by(piece: Piece, lender: object) -> bool:
    return lender_of(piece) is lender


def lenders_of(node: Node) -> tuple[object, ...]:
    """Who lends entries of this edge, each once."""
    lenders = {
        id(piece.payload.lender): piece.payload.lender
        for pieces in node.pieces.values()
        for piece in pieces
        if isinstance(piece.payload, Lent)
    }
    return tuple(lenders.values())


def lent_nbytes(pieces: Iterable[Piece]) -> int:
    """The bytes of those of the pieces that are lent."""
    return sum(piece.payload.nbytes for piece in pieces if isinstance(piece.payload, Lent))


def lent_on(node: Node) -> int:
    """The bytes of this edge that are lent."""
    return sum(lent_nbytes(pieces) for pieces in node.pieces.values())


def sole_lender(restore: Restore) -> object | None:
    """The one live sequence that lends all full-attention entries of what is read, or None."""
    lenders = {
        id(part.payload.lender) if isinstance(part.payload, Lent) else None: part.payload
        for kind, parts in restore.parts.items()
        if isinstance(kind, Full)
        for part in parts
    }
    if len(lenders) != 1:
        return None
    (payload,) = lenders.values()
    return payload.lender if isinstance(payload, Lent) else None


def put(places: Sequence[LoanPlace], payloads: Sequence[SegmentPayload]) -> int:
    """Put these payloads where the lent ones were; gives the change in bytes."""
    change = 0
    for place, payload in zip(places, payloads, strict=True):
        pieces = place.node.pieces[place.kind]
        change += payload.nbytes - place.piece.payload.nbytes
        pieces[pieces.index(place.piece)] = Piece(place.piece.span, payload)
    return change
