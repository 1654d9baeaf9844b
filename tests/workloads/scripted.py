"""The engine loop with a prompter: what the model says is given, token by token, and an oracle counts beside it.

A tiny model with random weights does not write tool calls by itself. Here a grammar with one way through it forces its
tokens, so everything else is real: the model computes each of them, and samples them under that grammar.
"""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from reprise.core.events import Event, Finished, FinishReason, Sampled
from reprise.core.job import Constraint, Job, Purpose
from reprise.core.outcome import Outcome
from reprise.core.tokens import Tokens, as_tokens, join_tokens
from reprise.lab.demo.oracle import Oracle
from tests.loop.passing import Passing

Spell = Callable[[str], list[int]]
_PATIENCE_S = 120.0


class Forced:
    """A grammar that allows one token at a time, in this order."""

    def __init__(self, tokens: Sequence[int], vocab_size: int) -> None:
        self._left = list(tokens)
        self._num_words = (vocab_size + 31) // 32

    def allowed(self) -> npt.NDArray[np.uint32] | None:
        """The mask of the next token; None behind the last one."""
        if not self._left:
            return None
        mask = np.zeros(self._num_words, dtype=np.uint32)
        mask[self._left[0] // 32] = np.uint32(1 << (self._left[0] % 32))
        return mask

    def accept(self, token: int) -> None:
        """Raises ValueError for any other token."""
        if not self._left or token != self._left.pop(0):
            raise ValueError(token)


def odd_spelling(encode: Spell, seed: int = 7) -> Spell:
    """A tokenizer that cuts its text at random first: models sample such spellings, tokenizers never give them."""
    source = random.Random(seed)

    def spell(text: str) -> list[int]:
        tokens: list[int] = []
        at = 0
        while at < len(text):
            # Markup stays whole.
            end = text.find(">", at) + 1 if text[at] == "<" else at + source.randint(2, 9)
            markup_at = text.find("<", at + 1, end)
            stop = end if markup_at < 0 else markup_at
            tokens += encode(text[at:stop])
            at = stop
        return tokens

    return spell


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedJob:
    """A job that has ended. `oracle`: what a server that remembers every state would have computed of its prompt."""

    job: Job
    reason: FinishReason
    outcome: Outcome
    oracle: int
    generated: tuple[int, ...]


@dataclass(eq=False)
class ScriptedEngine(Passing):
    """A `Backend`: the loop, with the text of each answer given by `says`."""

    spell: Spell
    vocab_size: int
    says: Callable[[Job], str] = lambda job: ""
    holds: Callable[[Job, Event], bool] = lambda job, event: False
    """Where this is so the engine waits, with all that it has to do, until `go_on` is set."""
    go_on: threading.Event = field(default_factory=threading.Event)
    submitted: Callable[[Job], None] = lambda job: None
    """Called once the loop has a job."""
    cancelled: Callable[[str], None] = lambda job_id: None
    """Called once the loop is to cancel a job."""
    oracle: Oracle = field(default_factory=Oracle)
    served: list[FinishedJob] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def submit(self, job: Job, sink: Callable[[Event], None]) -> None:
        is_answer = job.purpose is Purpose.GENERATE
        script = self.spell(self.says(job)) if is_answer else []
        with self.lock:
            cost = self.oracle.cost(job.prompt.tokens)
        generated: list[int] = []

        def listen(event: Event) -> None:
            if isinstance(event, Sampled):
                generated.append(event.token)
            elif isinstance(event, Finished):
                self._ended(
                    FinishedJob(
                        job=job,
                        reason=event.reason,
                        outcome=event.outcome,
                        oracle=cost,
                        generated=tuple(generated),
                    )
                )
            sink(event)
            if self.holds(job, event):
                assert self.go_on.wait(_PATIENCE_S)

        def constraint() -> Constraint:
            return Forced(script, self.vocab_size)

        self.loop.submit(replace(job, constraint=constraint) if is_answer else job, listen)
        self.submitted(job)

    def cancel(self, job_id: str) -> bool:
        is_known = super().cancel(job_id)
        self.cancelled(job_id)
        return is_known

    def _ended(self, served: FinishedJob) -> None:
        # The last token was sampled and not computed: nothing stands behind it.
        run: Tokens = join_tokens(served.job.prompt.tokens, as_tokens(served.generated[:-1]))
        with self.lock:
            self.served.append(served)
            if served.job.purpose is not Purpose.SETTLE:
                num_prompt = len(served.job.prompt) if served.generated else None
                self.oracle.remember(run, num_prompt=num_prompt)

    def of(self, purpose: Purpose) -> list[FinishedJob]:
        """The jobs of this purpose that have ended, in the order in which they did."""
        with self.lock:
            return [served for served in self.served if served.job.purpose is purpose]
