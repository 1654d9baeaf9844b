"""Tries on this device whether passes over several tokens give what single steps give, and what they cost.

Devices have other kernels for passes of other sizes, which may round otherwise, and which make costs rise in steps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import pairwise

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from reprise.core.clock import Clock
from reprise.core.tokens import Tokens
from reprise.engine.models.load import LoadedModel
from reprise.engine.running.runner import LiveSequence, Runner
from reprise.engine.states.sequence_batch import SequenceBatch

NEAR_TIE = 0.01
"""Logits that differ by less choose the same token, except between two that are as near."""
SHORT, LONG = 64, 1100
"""Lengths of the texts that are continued: devices have other kernels for long ones."""

_ROUNDS = 3
"""How often the cost of a size is measured, besides while tokens are compared."""
MOST_ROWS = 4
"""Sequences of the largest group whose passes are tried: in larger ones drafts save less."""
_SIZES_TOGETHER = (2, 3, 4, 5, 6, 8)
_NUM_TOGETHER = 24
"""Tokens of each sequence of a group that are compared."""
_SHORTER = 7
"""By how many tokens each of them is shorter than the one before."""
_NUM_FIRST = 16
"""Tokens that `why_never_the_same` compares."""

Logits = npt.NDArray[np.float32]


def are_same(several: Logits, single: Logits, *, tolerance: float) -> bool:
    """Whether both choose the same token at each position, from logits that differ by at most `tolerance`.

    Shapes ``(n, vocabulary)``. Not for NaN.
    """
    is_near = bool(np.abs(several - single).max() <= tolerance)
    return is_near and np.array_equal(several.argmax(axis=-1), single.argmax(axis=-1))


class PassTrial:
    """The trial of one model. `advance` runs the next pass, so that whoever comes meanwhile waits for one alone."""

    def __init__(
        self,
        runner: Runner,
        sizes: Sequence[int],
        *,
        tolerance: float,
        note: Callable[[int, int, float], None],
        clock: Clock,
        most_rows: int = 1,
    ) -> None:
        """`sizes`: of the passes whose costs are measured, in order; up to the largest, each size is compared.

        `tolerance`: see `are_same`. `note`: receives the sequences of a pass, its tokens of each, and its seconds.
        `most_rows`: of the largest group that decodes.
        """
        self._runner = runner
        self._sizes = sizes
        self._tolerance = tolerance
        self._note = note
        self._clock = clock
        self._most_rows = min(most_rows, MOST_ROWS)
        self._lives: list[LiveSequence] = []
        self._steps = self._run()
        self.largest = 1
        """The largest size such that passes of up to this size give what single steps give, as far as was tried."""
        self.largest_together: dict[int, int] = {}
        """The same of passes over several sequences, by their number."""
        self.is_over = False

    @staticmethod
    def num_positions(context: int | None) -> int:
        """The most positions that its sequence has."""
        return LONG + 64 if context is None else min(LONG + 64, context)

    def advance(self) -> None:
        """Run the next pass."""
        self.is_over = next(self._steps, True) is not None

    def stop(self) -> None:
        """Free its sequence. The trial cannot go on."""
        self._steps.close()
        self._end()

    def _run(self) -> Generator[None]:
        """Compare passes of all sizes behind a short text, then those of some behind a long one, and measure costs."""
        most = self._most(SHORT)
        if most < 2:
            return
        tokens = self._tokens(SHORT + most)
        single = yield from self._in_passes(tokens, 1)
        for size in range(2, most + 1):
            # After so many passes that their effect on the layers shows as well.
            if not self._agree((yield from self._in_passes(tokens, size)), single):
                break
            self.largest = size
        if self.largest > 1:
            yield from self._try_behind_long()
        for num_rows in range(2, self._most_rows + 1 if self.largest > 1 else 0):
            yield from self._try_together(num_rows)

    def _try_behind_long(self) -> Generator[None]:
        most = min(self.largest, self._most(LONG))
        start = LONG if most > 1 else SHORT
        most = most if most > 1 else self.largest
        tokens = self._tokens(start + most)
        yield from self._begin(tokens[:start])
        found: dict[int, Logits] = {}
        sizes = [1, *sorted({size for size in self._sizes if 1 < size < most} | {most})]
        for size in sizes * _ROUNDS:
            found[size] = self._timed(self._runner.logits_undone, tokens[start : start + size])
            yield
        singles: list[Logits] = []
        for at in range(start, len(tokens)):
            singles.append(self._timed(self._runner.logits, tokens[at : at + 1]))
            yield
        self._end()
        single = np.concatenate(singles)
        for before, size in pairwise(sizes):
            if not self._agree(found[size], single[:size]):
                self.largest = before
                return

    def _in_passes(self, tokens: Tokens, size: int) -> Generator[None, None, Logits]:
        """The logits behind each token after the short text, fed in passes over up to `size` tokens."""
        yield from self._begin(tokens[:SHORT])
        passes: list[Logits] = []
        for at in range(SHORT, len(tokens), size):
            passes.append(self._timed(self._runner.logits, tokens[at : at + size]))
            yield
        self._end()
        return np.concatenate(passes)

    def _try_together(self, num_rows: int) -> Generator[None]:
        """Compare passes over several sequences of different lengths with such passes over a token of each."""
        if self._most(SHORT) < _NUM_TOGETHER:
            return
        single = yield from self._in_passes_together(num_rows, 1)
        for size in (size for size in _SIZES_TOGETHER if size <= self.largest):
            found = yield from self._in_passes_together(num_rows, size)
            if not all(map(self._agree, found, single)):
                break
            self.largest_together[num_rows] = size

    def _in_passes_together(self, num_rows: int, size: int) -> Generator[None, None, list[Logits]]:
        tokens = self._tokens(SHORT + _NUM_TOGETHER)
        starts = [SHORT - _SHORTER * row for row in range(num_rows)]
        for start in starts:
            yield from self._begin(tokens[:start])
        passes: list[Logits] = []
        for at in range(0, _NUM_TOGETHER, size):
            chunks = [tokens[start + at : start + min(at + size, _NUM_TOGETHER)] for start in starts]
            started_s = self._clock()
            logits = self._runner.logits_together(self._lives, chunks)
            self._note(num_rows, len(chunks[0]), self._clock() - started_s)
            passes.append(np.array(logits.astype(mx.float32)))
            yield
        self._end()
        joined: Logits = np.concatenate(passes, axis=1)
        return list(joined)

    def _begin(self, tokens: Tokens) -> Generator[None]:
        live = self._runner.begin()
        self._lives.append(live)
        for at in range(0, len(tokens), SHORT):
            self._runner.prefill([live], [tokens[at : at + SHORT]])
            yield

    def _end(self) -> None:
        for live in self._lives:
            self._runner.drop(live)
        self._lives = []

    def _timed(self, feed: Callable[[LiveSequence, Tokens], mx.array], tokens: Tokens) -> Logits:
        (live,) = self._lives
        started_s = self._clock()
        logits = feed(live, tokens)
        self._note(1, len(tokens), self._clock() - started_s)
        return np.array(logits.astype(mx.float32))

    def _agree(self, several: Logits, single: Logits) -> bool:
        return are_same(several, single, tolerance=self._tolerance)

    def _tokens(self, num: int) -> Tokens:
        return _made_up(num, self._runner.loaded.vocab_size)

    def _most(self, start: int) -> int:
        """The largest size that can be tried behind so many tokens."""
        context = self._runner.loaded.context
        return self._sizes[-1] if context is None else min(self._sizes[-1], context - start)


def why_never_the_same(loaded: LoadedModel, *, tolerance: float) -> str | None:
    """Why no draft of this model can be verified on this device, in a few words; None: some may be.

    Tries passes over two tokens behind a short text, some thirty passes in all: what drafts for the model need not be
    loaded if even these differ.
    """
    context = loaded.context
    if not loaded.blueprint.can_undo or (context is not None and context < SHORT + _NUM_FIRST):
        return None
    tokens = _made_up(SHORT + _NUM_FIRST, loaded.vocab_size)
    single, several = (_logits(loaded, tokens, size) for size in (1, 2))
    if are_same(several, single, tolerance=tolerance):
        return None
    return "passes over two tokens do not give the same as single steps on this device"


def _logits(loaded: LoadedModel, tokens: Tokens, size: int) -> Logits:
    rows = SequenceBatch(loaded.blueprint)
    rows.forward(loaded.model, mx.array(tokens[None, :SHORT]))
    mx.eval(rows.arrays())
    found: list[mx.array] = []
    for at in range(SHORT, len(tokens), size):
        found.append(rows.forward(loaded.model, mx.array(tokens[None, at : at + size]))[0].astype(mx.float32))
        mx.eval(found[-1], rows.arrays())
    return np.array(mx.concatenate(found, axis=0))


def _made_up(num: int, vocab_size: int) -> Tokens:
    return np.arange(num, dtype=np.int32) % vocab_size
