"""Constraints of one sequence: llguidance's matcher, and the wait for the end of thinking."""

import re
from collections.abc import Collection, Sequence
from time import thread_time

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from reprise.chat.grammars.grammar_trial import sentence_of
from reprise.core.errors import BadRequest
from reprise.core.job import Constraint, ForcingConstraint, Thinking, ThinkingTracker

Mask = npt.NDArray[np.uint32]
"""A bit a token, 32 tokens a word, lowest bit first."""


_TOO_LARGE = re.compile(r"too (many|large|big|complex)|fuel exhausted|limit|\bmax is\b", re.IGNORECASE)
"""llguidance's message when one of its limits is reached; it reports a token that is not allowed in another way."""


_MAX_STEP_S = 1.0
"""Processor time of the engine's thread for one token. Every other answer waits for it, so one whose grammar is so slow
ends; grammars that can be compiled in time take up to 0.3 s."""


class MatcherConstraint:
    """`core.job.Constraint` on a matcher with one user.

    Where the grammar is complete only the tokens that end the generation are allowed. Tokens behind the end of the
    mask (logits can be wider than the vocabulary) are not allowed.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self) -> Mask | None:
        begun_s = thread_time()
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
        if self._matcher.is_error():
            raise self._error()
        if thread_time() - begun_s > _MAX_STEP_S:
            raise BadRequest("The grammar takes too long to continue at this token. Simplify it.")
        return mask

    def accept(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise self._error()

    def forced(self) -> Sequence[int]:
        return self._matcher.compute_ff_tokens()

    def _error(self) -> Exception:
        # The first line is the sentence, what follows is the parser's state.
        sentence = sentence_of(self._matcher).partition("\n")[0]
        if _TOO_LARGE.search(sentence) is not None:
            return BadRequest(f"The grammar is too large to continue at this token ({sentence}). Simplify it.")
        return ValueError(sentence)


class AfterThinking:
    """Holds the answer to `inner`, and lets thinking be anything.

    Thinking does not end the generation: `eos` is not allowed inside it. `accept` has to see every token, also those
    that a thinking budget forces.
    """

    def __init__(self, inner: Constraint, thinking: Thinking, *, eos: Collection[int]) -> None:
        self._inner = inner
        self._start = thinking.start
        self._eos = eos
        self._tracker = ThinkingTracker(thinking)
        self._num_started = 0
        """How many of the tokens that start thinking have come."""
        self._is_answering = False

    def allowed(self) -> Mask | None:
        inner = self._inner.allowed()
        if self._is_answering or inner is None:
            return inner
        if self._tracker.is_open:
            mask = np.full(inner.shape, 0xFFFFFFFF, dtype=np.uint32)
            for token in self._eos:
                _forbid(mask, token)
            return mask
        # What the grammar allows besides is an answer without thinking; inside the start there is no way back.
        mask = inner.copy() if self._num_started == 0 else np.zeros_like(inner)
        if len(self._start) > 0:
            _allow(mask, self._start[self._num_started])
        return mask

    def accept(self, token: int) -> None:
        if self._is_answering:
            self._inner.accept(token)
        elif self._tracker.is_open:
            self._tracker.saw(token)
            self._is_answering = not self._tracker.is_open
        elif len(self._start) > 0 and token == self._start[self._num_started]:
            self._num_started += 1
            self._tracker.saw(token)
        elif self._num_started == 0:
            self._inner.accept(token)
            self._is_answering = True
        else:
            raise ValueError("the tokens that start thinking are not complete")

    def forced(self) -> Sequence[int]:
        if self._is_answering and isinstance(self._inner, ForcingConstraint):
            return self._inner.forced()
        return self._start[self._num_started :] if self._num_started > 0 else ()


def _allow(mask: Mask, token: int) -> None:
    if token // 32 < len(mask):
        mask[token // 32] |= np.uint32(1 << (token % 32))


def _forbid(mask: Mask, token: int) -> None:
    if token // 32 < len(mask):
        mask[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << (token % 32)))
