"""Layers that are restored piece by piece, as steps of the engine do it."""

from collections.abc import Sequence

import mlx.core as mx

from reprise.cache.lookup import SegmentSlice
from reprise.engine.states.layers import KvLayer
from reprise.engine.states.restoration import LayerRestoration


def restore_in_pieces(layer: KvLayer, parts: Sequence[SegmentSlice], position: int, *, at_most: int) -> list[int]:
    """Restore a fresh layer from `parts`, each piece evaluated by itself. Gives the bytes of each."""
    restoration = LayerRestoration(layer, parts, position)
    pieces: list[int] = []
    while not restoration.is_over:
        least = restoration.least_nbytes(parts)
        piece, nbytes = restoration.advance(parts, at_most=at_most)
        mx.eval(piece)
        assert nbytes <= max(at_most, least), "a buffer, or one more entry of it"
        pieces.append(nbytes)
    assert restoration.nbytes == layer.nbytes
    return pieces
