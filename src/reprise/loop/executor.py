"""Runs passes of the model over requests, with drafts where they pay, and measures its speed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reprise.cache.payload import Payload
from reprise.core.clock import Clock
from reprise.core.pass_price import PassPrice, PassReading
from reprise.core.tokens import as_tokens
from reprise.drafts.drafter import Draft
from reprise.engine import memory as device_memory
from reprise.engine.running.live_sequence import LiveSequence
from reprise.engine.running.pass_dimensions import price_by_dimensions
from reprise.engine.running.runner import TokenFailure, TokenResult
from reprise.loop.requests import Decoding, Prefilling, RunningRequest
from reprise.loop.sequences import SequencePool
from reprise.schedule.state import Slice, Speed


class Executor:
    """Runs one pass at a time. Owns the measured speed."""

    def __init__(self, sequences: SequencePool, *, context: int | None, clock: Clock) -> None:
        """`context`: the most positions of one sequence."""
        self._sequences = sequences
        self._runner = runner = sequences.runner
        self._context = context
        self._clock = clock
        self._speed = Speed()
        self._price = price_by_dimensions(runner.loaded.model, runner.loaded.blueprint, runner.loaded.config)

    @property
    def speed(self) -> Speed:
        return self._speed

    @property
    def price(self) -> PassPrice:
        """What a prefill pass takes at its peak. Immutable; any thread may ask."""
        return self._price

    def prefill(self, requests: Sequence[RunningRequest], slices: Sequence[Slice]) -> None:
        """Feed each request its slice; all have the same length."""
        started_s, (first, *_) = self._clock(), slices
        chunks = [request.prompt.tokens[s.start : s.stop] for request, s in zip(requests, slices, strict=True)]
        lives = _lives(requests)
        num, deepest = len(first) * len(slices), max(piece.start for piece in slices)
        # Logits of a scored prompt, and a tower that runs again within the pass, are not what others would take.
        is_plain = all(live.scorer is None for live in lives) and all(int(chunk.min()) >= 0 for chunk in chunks)
        before = device_memory.watch_peak()
        with self._sequences.charged_for_pass(self._price.of(num, deepest)):
            self._runner.prefill(lives, chunks)
        if is_plain:
            self.note_peak(num, deepest, device_memory.read_peak(before))
        self.note_prefill(num, self._clock() - started_s, position=first.start)

    def try_a_pass(self, num: int) -> None:
        """Measure the peak of a pass over `num` tokens, before any request comes."""
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
        """A token for each request of a group, or several for one that decodes alone with a draft."""
        draft = self._draft(group[0], is_alone=is_alone)
        drafts = group[0].drafts
        started_s = self._clock()
        results = self._runner.decode(
            _lives(group),
            draft=draft.tokens.tolist() if draft is not None else (),
            may_run_ahead=drafts is None or not drafts.holds_back,
        )
        for result in results if len(group) == 1 else ():
            if drafts is not None and isinstance(result, TokenResult):
                drafts.note(
                    draft if result.num_drafted > 0 else None,
                    num_fed=result.num_fed,
                    num_tokens=len(result.sampled),
                    seconds=self._clock() - started_s,
                )
        return results

    def _draft(self, request: RunningRequest, *, is_alone: bool) -> Draft | None:
        """A draft for a request that decodes alone, or None if none is worth verifying."""
        drafts, live = request.drafts, request.live
        if drafts is None or live is None or request.stats.first_token_s is None:
            # The first token is sampled alone: the state at the prompt's end is stored for exact repeats.
            return None
        drafts.read_prompt(len(request.job.prompt))
        if not is_alone:
            drafts.holds_back = False
            return None
        most = request.job.max_tokens - len(request.generated) - 1
        if self._context is not None:
            most = min(most, self._context - len(request.job.prompt) - len(request.generated) - 1)
        num_fed = 1 + len(live.unfed)
        is_chosen = live.rows.ahead is not None
        draft = drafts.propose(num_fed=num_fed, most=most, forced=live.ready.grammar_draft(), is_chosen=is_chosen)
        if draft is None or not self._sequences.fits_draft(live, num_fed + len(draft.tokens)):
            return None
        return draft

    # Measurements.

    def note_prefill(self, num_tokens: int, seconds: float, *, position: int) -> None:
        """Record that a pass over `num_tokens` of prompts from `position` took `seconds`."""
        self._speed = self._speed.after_prefill(num_tokens, seconds, position=position)

    def note_peak(self, num_tokens: int, position: int, reading: PassReading) -> None:
        """Record what a pass over `num_tokens` of all its rows at `position` took beside the states."""
        self._price = self._price.after_pass(num_tokens, position, reading)

    def note_tower(self, num_rows: int, seconds: float) -> None:
        """Record what the tower took for an image of `num_rows` placeholders."""
        self._speed = self._speed.after_tower(num_rows, seconds)

    def note_load(self, num_tokens: int, seconds: float) -> None:
        """Record that `num_tokens` of a prompt were read from disk in `seconds`."""
        self._speed = self._speed.after_load(num_tokens, seconds)

    def note_decode(self, seconds: float) -> None:
        """Record the time of one pass of every decode group."""
        self._speed = self._speed.after_decode(seconds)

    def note_generation(self, seconds: float) -> None:
        """Record the time from a request's first decoded token to its last."""
        self._speed = self._speed.after_generation(seconds)


def _lives(requests: Sequence[RunningRequest]) -> list[LiveSequence]:
    lives = [request.live for request in requests if request.live is not None]
    assert len(lives) == len(requests), "every request of a pass runs"
    return lives
