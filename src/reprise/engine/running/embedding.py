"""One pass over inputs of an embedder, in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from reprise.core.embedding import EmbeddingInput, Vectors
from reprise.core.failpoints import Failpoint, reach
from reprise.engine.models.embedders import EmbedderModel
from reprise.engine.models.load import LoadedModel

_AT_ONCE = 2048
"""Passes over at least this many tokens are evaluated piece by piece, which bounds their memory."""


class EmbeddingPass:
    """A pass over several inputs, padded on the right. `nbytes`: about what it takes beside the weights."""

    def __init__(self, loaded: LoadedModel, inputs: Sequence[EmbeddingInput], *, chunk: int, evaluates: bool) -> None:
        """`chunk`: see `EmbedderModel.run`. `evaluates`: each piece is computed when it is given."""
        model = loaded.model
        assert isinstance(model, EmbedderModel), loaded.name
        length = max(len(each.tokens) for each in inputs)
        self._model, self._inputs, self._chunk = model, inputs, chunk
        self._evaluates = evaluates or length * len(inputs) >= _AT_ONCE
        self.nbytes = model.pass_nbytes(len(inputs), length)

    def run(self) -> Iterator[Vectors | None]:
        """None for each piece, and the vectors at the end."""
        reach(Failpoint.EMBED, self._inputs)
        piece: mx.array | None = None
        for following in self._model.run(self._inputs, chunk=self._chunk):
            if piece is not None:
                if self._evaluates:
                    mx.eval(piece)
                yield None
            piece = following
        assert piece is not None
        mx.eval(piece)
        yield np.array(piece, dtype=np.float32)
