"""The model's head or companion as a source of drafts, with an account of what its guesses bring."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reprise.core.backend import DraftSource
from reprise.core.clock import Clock
from reprise.core.tokens import as_tokens
from reprise.drafts.benefit import DraftAccount, DraftCosts
from reprise.drafts.drafter import Draft, Drafts
from reprise.quiet import why_quiet

if TYPE_CHECKING:
    from reprise.loop.requests import RunningRequest
    from reprise.loop.sequences import SequencePool


class DraftingHead:
    """What guesses for a model beside it, its costs, and what it has saved so far."""

    def __init__(
        self,
        sequences: SequencePool,
        drafts: Drafts,
        *,
        nbytes: int,
        is_model: bool,
        background: str,
        clock: Clock,
    ) -> None:
        """`nbytes`: of its weights. `is_model`: it is a companion, a model of its own. `background`: see `Settings`."""
        self.sequences = sequences
        self.drafts = drafts
        self.background = background
        self.clock = clock
        self.costs = DraftCosts(relative=nbytes / max(1, sequences.runner.loaded.nbytes))
        self.account = DraftAccount()
        self.source = DraftSource.DRAFT_MODEL if is_model else DraftSource.HEAD

    @staticmethod
    def of(sequences: SequencePool, drafts: Drafts, *, background: str, clock: Clock) -> DraftingHead | None:
        """The head of the model of these sequences; None if it has none."""
        head = sequences.runner.loaded.head
        if head is None or not head.is_there:
            return None
        return DraftingHead(
            sequences, drafts, nbytes=head.nbytes, is_model=head.is_model, background=background, clock=clock
        )

    def follow(self, request: RunningRequest) -> HeadDrafts:
        """Its drafts for the answer to this request."""
        return HeadDrafts(self, request)


class HeadDrafts:
    """The head's drafts of one answer (`reprise.drafts.drafter.ComputedDrafts`).

    They need nothing but the pass that they follow: its states for prompt and answer are there already.
    """

    def __init__(self, head: DraftingHead, request: RunningRequest) -> None:
        self.source = head.source
        self._head = head
        self._request = request
        self._num_answered = 0
        """Tokens of the answer that the account knows of."""
        self._guessed: tuple[int, list[int]] | None = None
        """The length of the answer at the last draft, and its tokens."""

    @property
    def match(self) -> int:
        # Sampled tokens agree less often than greedy ones.
        live = self._request.live
        return 0 if live is None or live.ready.is_greedy else 1

    @property
    def step_s(self) -> float | None:
        return self._head.costs.step_s(self._head.drafts.costs)

    def is_ready(self, *, saving_s: float, num_left: int) -> bool:
        """Whether its guesses have not cost more so far than they brought, and the machine is not to be left alone."""
        self._settle()
        return not self._head.account.is_overdrawn and why_quiet(self._head.background) is None

    def draft(self, num: int) -> Draft | None:
        head, live = self._head, self._request.live
        assert live is not None, "answers are drafted while they are decoded"
        num_fed = 1 + len(live.unfed)
        if not head.sequences.fits_draft(live, num_fed + num):
            return None
        started_s = head.clock()
        tokens = head.sequences.runner.guess(live, num)
        seconds = head.clock() - started_s
        passes = head.drafts.costs
        head.costs.note_steps(num, seconds)
        head.account.add(1 - passes.relative(num_fed + num) - num * self._head.costs.step_s(passes) / passes.one_s)
        self._guessed = len(self._request.generated), tokens
        return Draft(as_tokens(tokens), self.source, self.match, seconds)

    def end(self) -> None:
        self._settle()

    def _settle(self) -> None:
        """Note what the last draft has brought, and how far the answer is."""
        generated, account = self._request.generated, self._head.account
        if self._guessed is not None:
            (at, guessed), self._guessed = self._guessed, None
            pairs = list(zip(guessed, generated[at:], strict=False))
            account.add(next((i for i, (guess, token) in enumerate(pairs) if guess != token), len(pairs)))
        account.note_answered(len(generated) - self._num_answered)
        self._num_answered = len(generated)
