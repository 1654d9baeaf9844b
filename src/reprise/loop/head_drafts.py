"""The model's head or companion as a source of drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reprise.core.backend import DraftSource
from reprise.core.clock import Clock
from reprise.core.tokens import as_tokens
from reprise.drafts.benefit import DraftCosts
from reprise.drafts.drafter import Draft, Drafts
from reprise.quiet import why_quiet

if TYPE_CHECKING:
    from reprise.engine.models.heads import HeadFacts
    from reprise.engine.running.live_sequence import LiveSequence
    from reprise.loop.requests import RunningRequest
    from reprise.loop.sequences import SequencePool


@dataclass(slots=True, kw_only=True, eq=False)
class DraftingHead:
    """What guesses for a model beside it, and its costs."""

    sequences: SequencePool
    drafts: Drafts
    facts: HeadFacts
    price: Callable[[LiveSequence, int], int]
    """Bytes that a number of guesses for a sequence take at their peak."""
    background: str
    """See `Settings`."""
    clock: Clock
    costs: DraftCosts = field(init=False)

    def __post_init__(self) -> None:
        self.costs = DraftCosts(relative=self.facts.nbytes / max(1, self.sequences.runner.loaded.nbytes))

    def follow(self, request: RunningRequest) -> HeadDrafts:
        """Its drafts for the answer to this request."""
        return HeadDrafts(self, request)


class HeadDrafts:
    """The head's drafts of one answer (`reprise.drafts.drafter.ComputedDrafts`).

    They need nothing but the pass that they follow: its states for prompt and answer are there already.
    """

    def __init__(self, head: DraftingHead, request: RunningRequest) -> None:
        self.source = DraftSource.DRAFT_MODEL if head.facts.is_model else DraftSource.HEAD
        self._head = head
        self._request = request

    @property
    def match(self) -> int:
        # Sampled tokens agree less often than greedy ones.
        live = self._request.live
        return 0 if live is None or live.ready.is_greedy else 1

    @property
    def step_s(self) -> float:
        return self._head.costs.step_s(self._head.drafts.costs)

    @property
    def is_ready(self) -> bool:
        """Whether the machine is not to be left alone."""
        return why_quiet(self._head.background) is None

    def draft(self, num: int) -> Draft | None:
        head, live = self._head, self._request.live
        assert live is not None, "answers are drafted while they are decoded"
        num_fed, nbytes = 1 + len(live.unfed), head.price(live, num)
        if not head.sequences.fits_draft([live], num_fed + num, pass_nbytes=nbytes):
            return None
        started_s = head.clock()
        with head.sequences.memory.charged_for_pass(nbytes):
            tokens = head.sequences.runner.guess(live, num)
        head.costs.note_steps(num, head.clock() - started_s)
        seconds = num * head.costs.step_s(head.drafts.costs)
        return Draft(as_tokens(tokens), self.source, self.match, seconds)
