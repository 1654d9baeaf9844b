"""Runs passes of the model over requests, with drafts where they pay, and measures its speed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reprise.cache.payload import Payload
from reprise.core.clock import Clock
from reprise.core.pass_price import PassReading
from reprise.core.tokens import as_tokens
from reprise.drafts.benefit import PASS_SIZES
from reprise.drafts.drafter import DecodingRow, Draft, note, propose
from reprise.engine import memory as device_memory
from reprise.engine.running.live_sequence import LiveSequence
from reprise.engine.running.pass_dimensions import price_by_dimensions
from reprise.engine.running.runner import TokenFailure, TokenResult
from reprise.engine.running.score import SCORED_AT_ONCE
from reprise.loop.requests import Decoding, Prefilling, RunningRequest
from reprise.loop.sequences import SequencePool
from reprise.schedule.state import Slice, Speed


class Executor:
    """Runs one pass at a time."""

    def __init__(self, sequences: SequencePool, *, context: int | None, clock: Clock) -> None:
        """`context`: the most positions of one sequence."""
        self._sequences = sequences
        self._runner = runner = sequences.runner
        self._context = context
        self._clock = clock
        self.speed = Speed()
        """As measured so far: of its passes, and of what the worker does beside them."""
        loaded = runner.loaded
        self.price = price_by_dimensions(loaded.model, loaded.blueprint, loaded.config, runner.footprint)
        """What a pass takes at its peak. Immutable; any thread may ask."""

    def prefill(self, requests: Sequence[RunningRequest], slices: Sequence[Slice]) -> None:
        """Feed each request its slice; all have the same length."""
        started_s, (first, *_) = self._clock(), slices
        chunks = [request.prompt.tokens[s.start : s.stop] for request, s in zip(requests, slices, strict=True)]
        lives = _lives(requests)
        num, deepest = len(first) * len(slices), max(piece.start for piece in slices)
        # Logits of a scored prompt, and a tower that runs again within the pass, are not what others would take.
        is_plain = all(live.scorer is None for live in lives) and all(int(chunk.min()) >= 0 for chunk in chunks)
        before = device_memory.watch_peak()
        with self._sequences.memory.charged_for_pass(self.price_to_prefill(lives, len(first), deepest)):
            self._runner.prefill(lives, chunks)
        if is_plain:
            self.note_peak(num, deepest, device_memory.read_peak(before))
        self.speed = self.speed.after_prefill(num, self._clock() - started_s, position=first.start)

    def try_a_pass(self, num: int) -> None:
        """Measure the peak of a pass over `num` tokens, before any request arrives."""
        live = self._runner.begin()
        try:
            before = device_memory.watch_peak()
            self._runner.prefill([live], [as_tokens(np.arange(num) % self._runner.loaded.vocab_size)])
            self.note_peak(num, 0, device_memory.read_peak(before))
        finally:
            self._runner.stop(live)

    def begin_decode(self, request: RunningRequest, *, keeps_row: bool, is_audited: bool) -> None:
        """Start to decode: the prompt is computed except its last token."""
        phase = request.phase
        assert isinstance(phase, Prefilling), phase
        if request.stats.decode_began_s is None:
            request.stats.decode_began_s = self._clock()
        if phase.preempted is None:
            self._runner.begin_decode(phase.live, request.job, keeps_row=keeps_row, is_audited=is_audited)
        else:
            pending = int(phase.preempted.prompt.tokens[-1])
            self._runner.resume_decode(phase.live, phase.preempted.sampler, pending=pending)
        request.enter(Decoding(live=phase.live, lease=phase.lease, plan=phase.plan))

    def sample_from(self, request: RunningRequest, row: Payload, *, is_audited: bool) -> TokenResult | TokenFailure:
        """The first token of a request at the end of its prompt, sampled from the stored logits `row`."""
        phase = request.phase
        assert isinstance(phase, Prefilling), phase
        request.enter(Decoding(live=phase.live, lease=phase.lease, plan=phase.plan))
        return self._runner.sample_from(phase.live, request.job, row, is_audited=is_audited)

    def decode(self, group: Sequence[RunningRequest], *, is_alone: bool) -> Sequence[TokenResult | TokenFailure]:
        """A token for each request of a group, or several where drafts are verified. `is_alone`: no other decodes."""
        lives = _lives(group)
        rows = _rows(group, lives, context=self._context) if self._may_draft(group) else []
        asked_s = self._clock()
        made = self._propose(group, lives, rows, is_alone=is_alone)
        started_s = self._clock()
        search_s = started_s - asked_s - sum(draft.seconds for draft in made if draft is not None)
        with self._sequences.memory.charged_for_pass(self.price_to_decode(lives, made)):
            results = self._runner.decode(
                lives,
                drafts=[[] if draft is None else draft.tokens.tolist() for draft in made],
                may_run_ahead=not any(row.drafts.holds_back for row in rows),
            )
        if rows and (len(rows) == 1 or is_alone):
            self._note(rows, lives, made, results, seconds=self._clock() - started_s, search_s=search_s)
        return results

    def _note(
        self,
        rows: Sequence[DecodingRow],
        lives: Sequence[LiveSequence],
        made: Sequence[Draft | None],
        results: Sequence[TokenResult | TokenFailure],
        *,
        seconds: float,
        search_s: float,
    ) -> None:
        """Record what a pass over these requests took and brought, unless one of them failed."""
        by_live = {id(result.live): result for result in results}
        taken = [result for live in lives if isinstance(result := by_live[id(live)], TokenResult)]
        if len(rows) > len(taken):
            return
        made = [draft if result.num_drafted > 0 else None for draft, result in zip(made, taken, strict=True)]
        note(rows, made, [len(result.sampled) for result in taken], seconds=seconds, search_s=search_s)

    def _may_draft(self, group: Sequence[RunningRequest]) -> bool:
        """Whether drafts are looked for in this step: where they bring nothing, most steps cost nothing."""
        drafts = group[0].drafts
        if len(group) > 1 or drafts is None or not drafts.is_idle or group[0].job.constraint is not None:
            return True
        drafts.skip()
        return False

    def _propose(
        self,
        group: Sequence[RunningRequest],
        lives: Sequence[LiveSequence],
        rows: Sequence[DecodingRow],
        *,
        is_alone: bool,
    ) -> list[Draft | None]:
        """The drafts of a group that decodes alone, as far as they are worth verifying."""
        nothing: list[Draft | None] = [None] * len(group)
        if not rows or any(request.stats.first_token_s is None for request in group):
            # A first token is sampled alone: the state at the prompt's end is stored for exact repeats.
            return nothing
        for row, request in zip(rows, group, strict=True):
            row.drafts.read_prompt(len(request.job.prompt))
            row.drafts.holds_back = False
        if not is_alone:
            return nothing
        room = min(PASS_SIZES[-1] if self._context is None else self._context - live.position for live in lives)
        made = propose(rows, most=room, is_chosen=len(rows) == 1 and lives[0].rows.ahead is not None)
        if not any(made):
            return nothing
        nbytes = self.price_to_decode(lives, made)
        return made if self._sequences.fits_draft(lives, _length(lives, made), pass_nbytes=nbytes) else nothing

    def price_to_prefill(self, lives: Sequence[LiveSequence], num: int, deepest: int) -> int:
        """What a pass takes over `num` tokens of each, where the last of them is at `deepest`."""
        num_scored = min(num, SCORED_AT_ONCE) * sum(live.scorer is not None for live in lives)
        return self.price.of(num * len(lives), deepest, num_outputs=num_scored)

    def price_to_decode(self, lives: Sequence[LiveSequence], drafts: Sequence[Draft | None] = ()) -> int:
        """What a pass takes that decodes, with drafts to verify: the logits of all its tokens are there."""
        num, deepest = _length(lives, drafts) * len(lives), max(live.position for live in lives)
        return self.price.of(num, deepest, num_outputs=num, num_decoding=len(lives))

    def price_to_guess(self, live: LiveSequence, num: int) -> int:
        """What `num` guesses of a head or companion take: at most a token of a pass each, with logits, as what is fed
        before them; and the entries of a head that are written first, for which nothing attends to others."""
        fed, hidden = 1 + len(live.unfed) + num, live.rows.hidden
        guesses = self.price.of(fed, live.position, num_outputs=fed, num_decoding=1)
        num_waiting = 0 if hidden is None else len(hidden.waiting)
        return guesses if num_waiting == 0 else guesses + self.price.of(num_waiting, 0)

    # Measurements.

    def note_peak(self, num_tokens: int, position: int, reading: PassReading) -> None:
        """Record what a pass over `num_tokens` of all its rows at `position` took beside the states."""
        self.price = self.price.after_pass(num_tokens, position, reading)


def _rows(group: Sequence[RunningRequest], lives: Sequence[LiveSequence], *, context: int | None) -> list[DecodingRow]:
    """The requests of a group as drafts see them; empty where nothing is drafted."""
    rows: list[DecodingRow] = []
    for request, live in zip(group, lives, strict=True):
        drafts, job = request.drafts, request.job
        if drafts is None:
            return []
        num = len(request.generated) + 1
        most = job.max_tokens - num if context is None else min(job.max_tokens, context - len(job.prompt)) - num
        rows.append(DecodingRow(drafts=drafts, num_fed=1 + len(live.unfed), most=most, forced=live.ready.grammar_draft))
    return rows


def _length(lives: Sequence[LiveSequence], drafts: Sequence[Draft | None]) -> int:
    """The tokens of each sequence in a pass that decodes."""
    each = drafts or [None] * len(lives)
    return max(
        1 + len(live.unfed) + (0 if draft is None else len(draft.tokens))
        for live, draft in zip(lives, each, strict=True)
    )


def _lives(requests: Sequence[RunningRequest]) -> list[LiveSequence]:
    lives = [request.live for request in requests if request.live is not None]
    assert len(lives) == len(requests), "every request of a pass runs"
    return lives
