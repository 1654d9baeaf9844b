"""Random trees of prompts, in bursts, with cancels and failures, on a real engine: warm = cold, and the books balance.

Every answer is compared with that of a second engine, which has no prefix cache and runs one request at a time.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from reprise.core.events import FinishReason, Sampled
from reprise.core.job import Purpose, Sampling, Thinking
from reprise.core.prompt import Boundary, BoundaryKind
from reprise.loop.worker import Worker
from tests.loop.driving import GREEDY, DrivenEngine, SubmittedJob

_KINDS = (BoundaryKind.STABLE, BoundaryKind.SYSTEM, BoundaryKind.LAST_USER, BoundaryKind.EXPLICIT)
_TIE = 1e-3
"""Two tokens whose log-probabilities are closer than this may change places by rounding."""

_GONE = "the reader is gone"
"""The message of the error that a watch of these tests raises."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _SentRequest:
    """A request that was sent. `will_end`: nothing cuts it short."""

    tokens: list[int]
    num: int
    sampling: Sampling
    thinking: Thinking | None
    will_end: bool
    running: SubmittedJob


@dataclass(slots=True)
class Seen:
    """What a run has covered, so that a test can tell that it covered something."""

    compared: int = 0
    reused: int = 0
    cancelled: int = 0
    failed: int = 0
    ties: int = 0


@dataclass(slots=True, eq=False)
class RandomChats:
    """Random bursts of requests on `engine`, judged by `oracle`. The same seed sends the same requests."""

    engine: DrivenEngine
    oracle: DrivenEngine
    seed: int
    has_room: bool = True
    """The engine can store everything: then all that was computed has to be reused."""
    longest: int = 300
    vocabulary: int = 200
    seen: Seen = field(default_factory=Seen)
    _stored: dict[str, list[list[int]]] = field(default_factory=dict[str, list[list[int]]])

    def run(self, num_bursts: int) -> Seen:
        source = random.Random(self.seed)
        for _ in range(num_bursts):
            burst = [self._send(source) for _ in range(source.choice((1, 1, 2, 3, 5)))]
            is_cleared = source.random() < 0.1
            if is_cleared:
                self.engine.loop.clear()
            for asked in burst:
                asked.running.wait()
            for asked in burst:
                self._judge(asked)
            self.engine.ask(_check_at_rest)
            assert self.engine.loop.status().is_idle
            if self.has_room and not is_cleared:
                self._assert_reused(source.choice(burst))
        return self.seen

    def _assert_reused(self, asked: _SentRequest) -> None:
        """An exact repeat computes one token at most, the next turn what is new."""
        if not asked.will_end or asked.running.end.error is not None or not asked.running.tokens:
            return
        namespace = asked.running.job.namespace
        again = self.engine.run(asked.tokens, num=1, namespace=namespace)
        assert again.computed <= 1, (asked.tokens, again.end)
        longer = [*asked.tokens, *asked.running.tokens, 7, 8, 9]
        # The last token of an answer is not fed, unless another request had the same answer and went on.
        assert self.engine.run(longer, num=1, namespace=namespace).computed <= 4, (asked.tokens, asked.running.tokens)

    def _send(self, source: random.Random) -> _SentRequest:
        namespace = source.choice(("", "", "", "other"))
        tokens = self._prompt(source, self._stored.setdefault(namespace, []))
        num = source.randint(1, 12)
        sampling = self._sampling(source)
        thinking = Thinking(start=(5,), end=(6, 7), budget=2, is_open=True) if source.random() < 0.1 else None
        purpose = source.choices((Purpose.GENERATE, Purpose.PREFILL, Purpose.SETTLE), (8, 1, 1))[0]
        fate = source.choices(("ends", "is cancelled", "fails"), (8, 3, 1))[0]
        positions = sorted(source.sample(range(len(tokens) + 1), min(len(tokens), source.randint(0, 4))))
        boundaries = [Boundary(at, source.choice(_KINDS)) for at in positions]
        watch = _failing(source.randint(1, num)) if fate == "fails" else None
        pin_for_s = 1e12 if source.random() < 0.02 else None
        # When it has had so many events: whichever phase that is in.
        after = source.randint(0, 8) if fate == "is cancelled" else None
        running = self.engine.submit(
            tokens,
            num=num,
            boundaries=boundaries,
            sampling=sampling,
            purpose=purpose,
            namespace=namespace,
            thinking=thinking if purpose is Purpose.GENERATE else None,
            watch=watch,
            pin_for_s=pin_for_s,
            cancel_when=None if after is None else lambda running: len(running.events) >= after,
        )
        if after == 0:
            self.engine.loop.cancel(running.job.id)
        return _SentRequest(
            tokens=tokens,
            num=num,
            sampling=sampling,
            thinking=thinking,
            will_end=fate == "ends" and purpose is not Purpose.SETTLE,
            running=running,
        )

    def _prompt(self, source: random.Random, stored: list[list[int]]) -> list[int]:
        """A new conversation, or one that goes on from, repeats, cuts or leaves one that was there before."""
        before = source.choice(stored) if stored and source.random() < 0.85 else []
        if source.random() < 0.5:
            before = before[: source.randint(0, len(before))]
        words = [source.randrange(self.vocabulary) for _ in range(source.choice((0, 1, 1, 3, 10, 40, 90)))]
        tokens = [*before, *words][: self.longest]
        if not tokens:
            tokens = [source.randrange(self.vocabulary)]
        stored.append(tokens)
        return tokens

    def _sampling(self, source: random.Random) -> Sampling:
        match source.choice(("greedy", "greedy", "greedy", "seeded", "shaped", "told")):
            case "seeded":
                return Sampling(temperature=0.8, top_p=0.9, seed=source.randrange(2**63))
            case "shaped":
                return Sampling(temperature=0, repetition_penalty=1.2, logit_bias={3: 2.0})
            case "told":
                return Sampling(temperature=0, logprobs=2)
            case _:
                return GREEDY

    def _judge(self, asked: _SentRequest) -> None:
        running, end = asked.running, asked.running.end
        self.seen.cancelled += end.reason is FinishReason.CANCELLED
        self.seen.failed += end.reason is FinishReason.FAILED
        self.seen.reused += end.outcome.num_reused
        # Nothing but what was asked for goes wrong.
        assert end.error is None or _GONE in str(end.error), end.error
        if running.job.purpose is not Purpose.GENERATE:
            assert running.tokens == []
            return
        if asked.will_end:
            assert end.reason is FinishReason.LENGTH
            assert end.outcome.num_prompt == end.outcome.num_reused + end.outcome.num_prefilled
        num = max(1, len(running.tokens))
        options: dict[str, Any] = {"sampling": asked.sampling, "thinking": asked.thinking}
        expected = self.oracle.run(asked.tokens, num=num, **options).tokens[: len(running.tokens)]
        self.seen.compared += 1
        if running.tokens != expected:
            at = next(i for i, (a, b) in enumerate(zip(running.tokens, expected, strict=True)) if a != b)
            self._assert_tie(asked, expected[:at], running.tokens[at])
        # What comes next may go on from the answer, as the next turn of a chat does.
        self._stored[running.job.namespace].append([*asked.tokens, *running.tokens])

    def _assert_tie(self, asked: _SentRequest, before: list[int], token: int) -> None:
        self.seen.ties += 1
        told = self.oracle.run([*asked.tokens, *before], num=1, sampling=Sampling(temperature=0, logprobs=2))
        first = next(event for event in told.events if isinstance(event, Sampled))
        near = {other: logprob for other, logprob in first.top if first.logprob is not None}
        is_tie = token in near and abs(near[token] - max(near.values())) < _TIE
        assert is_tie, (asked.running.job.sampling, asked.tokens, before, token, first)


def _failing(num_tokens: int) -> Callable[[int], bool]:
    left = num_tokens

    def watch(token: int) -> bool:
        nonlocal left
        left -= 1
        if left == 0:
            raise RuntimeError(_GONE)
        return False

    return watch


def _check_at_rest(worker: Worker) -> None:
    """Nothing runs: all that is lent is parked, nothing is leased, and the books agree with what is held."""
    cache, idle = worker.cache, worker.sequences.idle
    worker.check()
    assert sum(root.num_leases for root in cache.tree.roots.values()) == 0
    sharing = {id(sequence) for node in cache.tree.nodes() for sequence in node.sequences()}
    # No sequence is held for nothing: each is parked, and the cache has something of it on loan.
    assert sharing == {id(live) for live in idle} and worker.runner.num_sequences == len(idle)
