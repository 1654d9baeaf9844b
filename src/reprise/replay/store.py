"""One store that a trace is replayed against: what the loop does with it, without the model."""

from dataclasses import dataclass

from reprise.cache.node import SegmentSizes
from reprise.cache.policy import ExpectedSaving, Policy
from reprise.cache.prefix_cache import PrefixCache
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Tokens, join_tokens
from reprise.memory import Memory
from reprise.plan.checkpoints import fallback_tokens, interval_tokens, make_plan
from reprise.replay.payloads import SizedSource, Sizes
from reprise.replay.policies import POLICIES
from reprise.replay.request import Request


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a replay counted, in real tokens. `settled`: computed while nobody waited."""

    requests: int = 0
    prompt: int = 0
    reused: int = 0
    settled: int = 0

    @property
    def computed(self) -> int:
        """Prompt tokens that were not reused."""
        return self.prompt - self.reused

    @property
    def hit_share(self) -> float:
        """Reused ÷ prompt tokens; 0 for an empty trace."""
        return self.reused / self.prompt if self.prompt > 0 else 0.0


class Replay:
    """A store of one policy and budget (bytes; None: no bound), and the tally of what went through it."""

    def __init__(self, *, policy: str, budget: int | None, sizes: Sizes, unit: int = 1, settles: bool = False) -> None:
        """`settles`: compute the next turn's known beginning after each request."""
        self._settles = settles
        self.tally = Tally()
        self._sizes = sizes
        self._unit = unit
        self._now_s = 0.0
        whole = SegmentSizes()
        cut = SegmentSizes(
            longest=max(1, whole.longest // unit),
            tail=max(1, whole.tail // unit),
            fallback=fallback_tokens(checkpoint_nbytes=sizes.checkpoint, kv_nbytes_per_token=sizes.full) // unit,
        )
        self.cache = PrefixCache(
            sizes.layout(unit=unit),
            memory=Memory(budget),
            policy=_policy(policy, unit),
            sizes=cut,
            clock=lambda: self._now_s,
        )
        self._source = SizedSource(sizes, unit)
        self._interval = max(
            1, interval_tokens(checkpoint_nbytes=sizes.checkpoint, kv_nbytes_per_token=sizes.full) // unit
        )

    def take(self, request: Request) -> int:
        """Serve one request. Gives the number of real tokens reused."""
        assert request.unit == self._unit, "a replay reads traces of one granularity"
        cache, prompt = self.cache, request.prompt
        self._now_s = request.at_s
        tokens = prompt.tokens
        last = len(tokens) - 1 if request.unit == 1 else len(tokens)
        resume_at, match = cache.lookup(tokens, last)
        known = max(request.shareable, resume_at)
        lease = cache.lease(cache.match(tokens[:known]) if known < len(tokens) else match, resume_at)
        lease.is_restored = True
        is_branch = match.continues is not None and match.length < len(tokens)
        plan = make_plan(
            prompt,
            layout=cache.layout,
            resume_at=resume_at,
            end=last,
            branches=[match.length] if is_branch else (),
            interval=self._interval,
        )
        for mark in plan.checkpoints:
            self._commit(tokens[: mark.position], mark.kind, request, number=lease.number)
        if cache.layout.resumes_anywhere:
            self._commit(tokens, BoundaryKind.PROMPT_END, request, number=lease.number)
        self._now_s = request.at_s + request.took_s
        answer_length = request.answer_length
        if answer_length is not None:
            cache.note_answer(lease, answer_length, calls_tool=request.calls_tool)
        if request.answer is not None and len(request.answer) > 0:
            whole = join_tokens(tokens, request.answer)
            self._commit(whole, BoundaryKind.GENERATION_END, request, number=lease.number)
        cache.release(lease)
        cache.compact_path(tokens)
        # The last token is always computed: its logits start the decode.
        reused = min(resume_at * request.unit, request.num_tokens - 1)
        self.tally.requests += 1
        self.tally.prompt += request.num_tokens
        self.tally.reused += reused
        if self._settles and request.next_known is not None:
            self._settle(request, request.next_known, number=lease.number)
        return reused

    def _settle(self, request: Request, tokens: Tokens, *, number: int | None) -> None:
        resume_at, match = self.cache.lookup(tokens, len(tokens))
        if number is not None:
            self.cache.expect(match, number=number)
        lease = self.cache.lease(match, resume_at, is_request=False)
        self._commit(tokens, BoundaryKind.STABLE, request, number=number)
        self.cache.release(lease)
        self.tally.settled += (len(tokens) - resume_at) * request.unit

    def _commit(self, tokens: Tokens, kind: BoundaryKind, request: Request, *, number: int | None = None) -> None:
        self.cache.commit(
            tokens,
            self._source,
            kind=kind,
            is_auxiliary=request.is_auxiliary,
            stable_at=request.prompt.stable_at,
            number=number,
        )


def _policy(name: str, unit: int) -> Policy:
    return ExpectedSaving(unit_tokens=unit) if name == "cost" else POLICIES[name]()
