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
        note: Callable[[int, float], None],
        clock: Clock,
    ) -> None:
        """`sizes`: of the passes whose costs are measured, in order; up to the largest, each size is compared.

        `tolerance`: see `are_same`. `note`: receives a size and the seconds of a pass of that size.
        """
        self._runner = runner
        self._sizes = sizes
        self._tolerance = tolerance
        self._note = note
        self._clock = clock
        self._live: LiveSequence | None = None
        self._steps = self._run()
        self.largest = 1
        """The largest size such that passes of up to this size give what single steps give, as far as was tried."""
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

    def _try_behind_long(self) -> Generator[None]:
        most = min(self.largest, self._most(LONG))
        start = LONG if most > 1 else SHORT
        most = most if most > 1 else self.largest
        tokens = self._tokens(start + most)
        yield from self._begin(tokens[:start])
        found: dict[int, Logits] = {}
        sizes = [1, *sorted({size for size in self._sizes if 1 < size < most} | {most})]
        for size in sizes * _ROUNDS:
            found[size] = self._undone(tokens[start : start + size])
            yield
        singles: list[Logits] = []
        for at in range(start, len(tokens)):
            singles.append(self._fed(tokens[at : at + 1]))
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
            passes.append(self._fed(tokens[at : at + size]))
            yield
        self._end()
        return np.concatenate(passes)

    def _begin(self, tokens: Tokens) -> Generator[None]:
        self._live = self._runner.begin()
        for at in range(0, len(tokens), SHORT):
            self._runner.prefill([self._live], [tokens[at : at + SHORT]])
            yield

    def _end(self) -> None:
        if self._live is not None:
            self._runner.drop(self._live)
            self._live = None

    def _fed(self, tokens: Tokens) -> Logits:
        assert self._live is not None
        return self._timed(self._runner.logits, tokens)

    def _undone(self, tokens: Tokens) -> Logits:
        return self._timed(self._runner.logits_undone, tokens)

    def _timed(self, feed: Callable[[LiveSequence, Tokens], mx.array], tokens: Tokens) -> Logits:
        assert self._live is not None
        started_s = self._clock()
        logits = feed(self._live, tokens)
        self._note(len(tokens), self._clock() - started_s)
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
