"""A server without a model: renderer, planner and prefix cache as the loop uses them, answers and thoughts given.

Nothing is computed, so the counts of a long run come in a minute. Every settle is finished before the next request.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from reprise.cache.prefix_cache import PrefixCache
from reprise.chat.answer import Answer
from reprise.chat.rendering.render import Renderer
from reprise.chat.request import ChatRequest
from reprise.chat.templates.rendered import Rendered
from reprise.core.outcome import Outcome, Reason
from reprise.core.prompt import BoundaryKind, Prompt
from reprise.core.tokens import Tokens, as_tokens, join_tokens
from reprise.lab.demo.oracle import Oracle
from reprise.plan.checkpoints import interval_tokens, make_plan
from reprise.replay.payloads import SizedSource, Sizes

HYBRID = Sizes(full=24 * 1024, snapshot=20 << 20)
"""Bytes like those of a hybrid with 4B parameters: 24 KiB of KV a token, snapshots of 20 MiB."""


@dataclass(slots=True, kw_only=True)
class TokenTally:
    """Tokens of all requests so far."""

    requests: int = 0
    prompt: int = 0
    computed: int = 0
    settled: int = 0
    oracle: int = 0
    generated: int = 0

    @property
    def share(self) -> float:
        """Tokens computed while a user waited ÷ prompt tokens."""
        return self.computed / self.prompt if self.prompt > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedRequest:
    """A request that was read, and what was reused and computed of it."""

    rendered: Rendered
    outcome: Outcome


class OfflineServer:
    """One model's renderer and prefix cache."""

    def __init__(self, renderer: Renderer, *, settles: bool, sizes: Sizes = HYBRID) -> None:
        self.renderer = renderer
        self.tally = TokenTally()
        self._settles = settles
        self._cache = PrefixCache(sizes.layout())
        self._source = SizedSource(sizes, 1)
        self._interval = interval_tokens(checkpoint_nbytes=sizes.checkpoint, kv_nbytes_per_token=sizes.full)
        self._oracle = Oracle()

    def ask(self, request: ChatRequest) -> ReplayedRequest:
        """Read the prompt; `answer` has to follow."""
        rendered = self.renderer.render(request)
        prompt = rendered.prompt
        self.tally.requests += 1
        self.tally.prompt += len(prompt)
        self.tally.oracle += self._oracle.cost(prompt.tokens)
        outcome = self._prefill(prompt, end=len(prompt) - 1)
        # The last token starts the decode and is always computed.
        outcome = replace(outcome, num_prefilled=outcome.num_prefilled + 1)
        self.tally.computed += outcome.num_prefilled
        return ReplayedRequest(rendered=rendered, outcome=outcome)

    def answer(self, rendered: Rendered, sampled: Sequence[int], answer: Answer) -> None:
        """The model has sampled these tokens, which mean `answer`."""
        # The last token was sampled and not computed.
        run = join_tokens(rendered.prompt.tokens, as_tokens(sampled[:-1]))
        self._commit(run, BoundaryKind.GENERATION_END)
        self._oracle.remember(run)
        self.tally.generated += len(sampled)
        self.renderer.learn(rendered, sampled, answer)
        if self._settles:
            branch = "tool" if answer.tool_calls else "user"
            known = self.renderer.next_turn(rendered, answer, branch=branch)
            if known is not None:
                self.tally.settled += self._prefill(known, end=len(known)).num_prefilled

    def _prefill(self, prompt: Prompt, *, end: int) -> Outcome:
        """Commit what the loop would commit on the way to `end`; says what was reused and computed."""
        match = self._cache.match(prompt.tokens)
        resume_at = self._cache.resume_at(match, limit=end)
        lease = self._cache.lease(match, resume_at)
        is_branch = match.continues is not None and match.length < len(prompt)
        plan = make_plan(
            prompt,
            layout=self._cache.layout,
            resume_at=resume_at,
            end=end,
            branches=[match.length] if is_branch else (),
            interval=self._interval,
        )
        for mark in plan.checkpoints:
            self._commit(prompt.tokens[: mark.position], mark.kind)
        self._cache.release(lease)
        return Outcome(
            num_prompt=len(prompt),
            num_matched=match.length,
            num_reused=resume_at,
            num_prefilled=end - resume_at,
            # What the loop tells without knowing the chat; the rest is `Renderer.explain`'s.
            reason=Reason.COLD if match.length == 0 else Reason.BRANCHED if is_branch else Reason.NEW_TOKENS,
            stored_next=match.continues,
        )

    def _commit(self, tokens: Tokens, kind: BoundaryKind) -> None:
        self._cache.commit(tokens, self._source, kind=kind)
