"""How a draft model follows texts: the answers that it drafts for, and what is settled of the next turn."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reprise.cache.node import Lease
from reprise.core.allowance import StepAllowance
from reprise.core.backend import DraftSource
from reprise.core.job import Job
from reprise.core.prompt import BoundaryKind, Prompt
from reprise.core.tokens import Tokens, as_tokens
from reprise.disk.ports import Reading
from reprise.drafts.drafter import Draft
from reprise.engine import memory as device_memory
from reprise.engine.running.draft_sequence import DraftSequence
from reprise.loop.requests import RunningRequest
from reprise.loop.sequences import initial_decode_slots
from reprise.plan.checkpoints import Plan, make_plan

if TYPE_CHECKING:
    from reprise.loop.draft_model import DraftModel

log = logging.getLogger("reprise.loop")

_AT_ONCE = 32
"""The number of missing tokens that are fed along with the drafting pass; more are fed in passes before it."""
_SHARE_OF_STALL = 0.25
"""The share of the largest inter-token gap that one step may spend on a prefix for the draft model."""
_LEAST_S = 1e-9
"""The least time of a token: some clocks have a coarse resolution."""
_RETRY = 64
"""Tokens of an answer after which it tries again for lack of memory."""


_TRIAL = 6.0
"""What its drafts may lose until it rests, in passes over one token: enough to learn how often they are right."""
_MOST_CREDIT = 32.0
"""What it may at most have saved, in the same unit: what was earned long ago is no reason to lose it."""
_SHARE_OF_TRIALS = 0.005
"""The share of the time that answers take which it may lose on trials after that."""


class DraftAccount:
    """What drafts have brought so far, less what they cost, in passes of the other model over one token.

    Where they lose, their model rests: what it may lose from then on is a small share of the time that answers take.
    """

    def __init__(self) -> None:
        self.balance = 0.0

    @property
    def is_overdrawn(self) -> bool:
        return self.balance < -_TRIAL

    def allows(self, num_passes: float) -> bool:
        """Whether so much may be spent on a text before it is seen what that brings."""
        return self.balance >= 0 or num_passes <= _TRIAL / 2

    def add(self, num_passes: float) -> None:
        """Drafts have saved so many passes; less than 0: they have cost them."""
        self.balance = max(-2 * _TRIAL, min(_MOST_CREDIT, self.balance + num_passes))

    def note_answered(self, num_tokens: int) -> None:
        """So many tokens of answers were decoded."""
        if self.balance < 0:
            self.balance = min(0.0, self.balance + _SHARE_OF_TRIALS * num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Following:
    """The state of a text that the draft model follows."""

    sequence: DraftSequence
    lease: Lease
    plan: Plan


class _ReadableText:
    """A text as its disk tier sees it (`reprise.disk.ports.TierRequest`): as a request that waits until it runs."""

    def __init__(self, text: FollowedText, request: RunningRequest) -> None:
        self._text = text
        self._request = request
        self.reading = Reading()

    @property
    def id(self) -> str:
        return self._request.id

    @property
    def job(self) -> Job:
        return self._request.job

    @property
    def namespace(self) -> str:
        return self._request.namespace

    @property
    def prompt(self) -> Prompt:
        return self._request.job.prompt

    @property
    def end(self) -> int:
        return min(self._text.limit, len(self.prompt))

    @property
    def is_auxiliary(self) -> bool:
        return self._request.is_auxiliary

    @property
    def is_waiting(self) -> bool:
        return not self._text.is_running and not self.has_ended

    @property
    def has_ended(self) -> bool:
        return self._text.has_ended

    def tokens_to(self, position: int) -> Tokens:
        return self._request.tokens_to(position)


class FollowedText:
    """The text of a request in the draft model: its sequence, where that resumed, and what is stored of it."""

    def __init__(self, model: DraftModel, request: RunningRequest) -> None:
        self._model = model
        self._request = request
        self._following: _Following | None = None
        self._on_disk = _ReadableText(self, request)
        self.has_ended = False

    @property
    def is_running(self) -> bool:
        """Whether it has a sequence."""
        return self._following is not None

    @property
    def _length(self) -> int:
        return len(self._request.job.prompt) + len(self._request.generated)

    @property
    def limit(self) -> int:
        """Where its prefill ends."""
        raise NotImplementedError

    def _text(self, start: int, stop: int) -> Sequence[int]:
        """The tokens ``[start, stop)`` of prompt and answer."""
        prompt, generated = self._request.job.prompt.tokens, self._request.generated
        end = len(prompt)
        if start >= end:
            return generated[start - end : stop - end]
        return [*prompt[start:stop].tolist(), *generated[: max(0, stop - end)]]

    # Starting.

    def _look_up(self) -> int:
        """The position at which it could resume."""
        request = self._request
        return self._model.cache.lookup(request.tokens, self.limit, namespace=request.namespace).position

    def _load(self, reusable: int) -> bool:
        """Have more than ``[0, reusable)`` read from disk, if that is quicker than to compute it.

        Returns whether to wait for that. Nothing that runs is stopped for it.
        """
        disk, sequences = self._model.disk, self._model.sequences
        position, num_prompt = disk.would_read_to(self._on_disk, held=reusable), len(self._request.job.prompt)
        if position > 0 and not self._model.make_room(sequences.estimate_to_admit(num_prompt, position)):
            return False
        return disk.begin(self._on_disk)

    @property
    def is_loading(self) -> bool:
        """Whether what memory lacks of its prompt is being read from disk."""
        return self._on_disk.reading.is_loading

    def _begin(self, *, reusable: int, is_request: bool) -> bool:
        """Start a sequence at the best stored position, `reusable` when last looked up. False if there is no room."""
        model, request = self._model, self._request
        reserve = max(self._length, len(request.job.prompt) + initial_decode_slots(request.job))
        if not model.make_room(model.sequences.estimate_to_admit(reserve, reusable)):
            return False
        resume_at, match = model.cache.lookup(request.tokens, self.limit, namespace=request.namespace)
        lease = model.cache.lease(match, resume_at, is_request=is_request)
        try:
            live = model.sequences.start(match, resume_at, reserve=reserve)
        except Exception:
            model.cache.release(lease)
            raise
        if is_request:
            model.memory.note_use()
            model.num_reused += resume_at
        model.num_loaded += min(self._on_disk.reading.take_loaded(), resume_at)
        plan = self._plan(resume_at, match.length)
        self._following = _Following(sequence=DraftSequence(model.runner, live), lease=lease, plan=plan)
        model.sequences.measure()
        return self.is_running

    def _plan(self, resume_at: int, matched: int) -> Plan:
        prompt, model = self._request.job.prompt, self._model
        end = max(resume_at, len(prompt))
        return make_plan(
            prompt,
            layout=model.cache.layout,
            resume_at=resume_at,
            end=end,
            branches=[matched] if 0 < matched < len(prompt) else (),
            interval=model.interval,
        )

    def _restore(self, following: _Following) -> bool:
        """Continue the restore of its sequence. Returns whether it can run."""
        model, request, live = self._model, self._request, following.sequence.live
        if live.restoration is None:
            return True
        allowance = StepAllowance(model.max_stall_s, clock=model.clock)
        allowance.renew()
        tokens = request.tokens_to(following.plan.resume_at)
        is_there = model.sequences.restore(live, tokens, namespace=request.namespace, allowance=allowance)
        model.sequences.measure()
        return is_there and self.is_running

    # Computing.

    def _compute(self, following: _Following) -> tuple[int, float]:
        """Compute a chunk of the missing tokens, up to the next checkpoint, and store it there.

        Returns the tokens fed and the seconds that took: none if it was given up for lack of room.
        """
        model, sequence = self._model, following.sequence
        start = sequence.position
        token_s = model.costs.token_s(model.drafts.costs)
        num = max(_AT_ONCE, min(model.chunk, int(_SHARE_OF_STALL * model.max_stall_s / max(token_s, _LEAST_S))))
        stops = [position for position in following.plan.positions if position > start]
        stop = min([start + num, self.limit, *stops])
        if not model.make_room(sequence.growth(stop - start)):
            self.give_up()
            return 0, 0.0
        started_s = model.clock()
        num_fed = sequence.feed(self._text(start, stop))
        seconds = model.clock() - started_s
        model.costs.note_prefill(stop - start, seconds)
        if stop in stops:
            self._store(following, following.plan.kind_at(stop))
        model.sequences.measure()
        return num_fed, seconds

    # Storing and ending.

    def _store(self, following: _Following, kind: BoundaryKind) -> Tokens:
        """Store the state of the sequence at its position. Returns the tokens up to there."""
        model, request, sequence = self._model, self._request, following.sequence
        tokens = request.tokens_to(sequence.position)
        if model.is_on:
            model.cache.commit(
                tokens,
                model.runner.source(sequence.live),
                kind=kind,
                namespace=request.namespace,
                is_auxiliary=request.is_auxiliary,
                stable_at=request.job.prompt.stable_at,
            )
            model.disk.note(self._on_disk, sequence.position, kind)
        return tokens

    def _end_kind(self, following: _Following) -> BoundaryKind:
        """The kind of boundary at its end."""
        raise NotImplementedError

    def end(self) -> None:
        """The request has ended: store what was computed, and free the sequence."""
        self._model.leave(self)
        self._stop()
        self.has_ended = True

    def _stop(self) -> None:
        following = self._following
        if following is None:
            return
        try:
            if following.sequence.live.restoration is None:
                # Correct predictions are stored as well.
                following.sequence.keep(self._text(following.sequence.position, self._length))
                tokens = self._store(following, self._end_kind(following))
            else:
                tokens = self._request.tokens_to(following.sequence.position)
            self._following = None
            self._model.cache.release(following.lease)
            self._model.sequences.end(following.sequence.live, tokens, namespace=self._request.namespace)
            self._model.cache.compact_path(
                tokens, namespace=self._request.namespace, max_entries=self._model.sequences.max_compacted
            )
            self._model.sequences.measure()
        except Exception as error:
            self._following = following
            self._fail(error)

    def give_up(self) -> None:
        """Free its sequence, without storing what is not stored yet."""
        following, self._following = self._following, None
        if following is None:
            return
        model, live = self._model, following.sequence.live
        try:
            model.cache.release(following.lease)
            model.sequences.discard(live, self._request.tokens, namespace=self._request.namespace)
            model.sequences.measure()
        except Exception:
            log.exception("cannot release a sequence of the draft model, so the draft model's cache is dropped")
            model.sequences.drop(live)
            model.cache.reset()
            model.sequences.reset()

    def _fail(self, error: Exception) -> None:
        """The draft model failed: its request continues without it."""
        log.error("the draft model failed for request %s", self._request.id, exc_info=error)
        self.give_up()
        if device_memory.is_out_of_memory(error):
            self._model.give_up()
            device_memory.give_back()


class FollowedAnswer(FollowedText):
    """The drafts of one answer (`reprise.drafts.drafter.ComputedDrafts`)."""

    source = DraftSource.DRAFT_MODEL

    def __init__(self, model: DraftModel, request: RunningRequest) -> None:
        super().__init__(model, request)
        self._reusable: int | None = None
        """Where it can resume; None if it was not looked up yet."""
        self._again_at = 0
        """The length of the answer at which it next tries to start."""
        self._num_answered = 0
        """Tokens of the answer that the account knows of."""
        self._invested = 0.0
        """What computing its prefix has cost, in passes: counted at the end, after what it brought."""
        self._has_drafted = False
        self._guessed: tuple[int, tuple[int, ...]] | None = None
        """The length of the answer at the last draft, and its tokens."""

    @property
    def limit(self) -> int:
        # The last token is fed by the drafting pass.
        return self._length - 1

    @property
    def match(self) -> int:
        # Sampled tokens agree less often than greedy ones.
        live = self._request.live
        return 0 if live is None or live.ready.is_greedy else 1

    @property
    def step_s(self) -> float | None:
        model = self._model
        if not model.is_loaded or len(self._request.generated) < self._again_at or not model.has_context(self._length):
            return None
        return model.costs.step_s(model.drafts.costs)

    # Drafting.

    def is_ready(self, *, saving_s: float, num_left: int) -> bool:
        try:
            return self._prepare(saving_s * num_left)
        except Exception as error:
            self._fail(error)
            return False

    def _prepare(self, saving_s: float) -> bool:
        model = self._model
        self._settle_account()
        if model.account.is_overdrawn:
            return False
        if model.sequences.is_broken:
            model.reset()
        if self._following is None and not self._start(saving_s):
            return False
        following = self._following
        assert following is not None
        if not self._restore(following):
            return False
        sequence = following.sequence
        lacking = self._length - sequence.position
        if lacking <= _AT_ONCE:
            return True
        if not self._is_worth(lacking, saving_s):
            return False
        num_fed, seconds = self._compute(following)
        model.num_prefilled += num_fed
        model.drafts.saved_s -= seconds
        if self._has_drafted:
            model.account.add(-self._passes(num_fed))
        else:
            self._invested += self._passes(num_fed)
        # It may have been given up for lack of memory.
        return self.is_running and self._length - sequence.position <= _AT_ONCE

    def _start(self, saving_s: float) -> bool:
        """Start a sequence, if computing what is not stored pays off and there is room."""
        if self.is_loading:
            return False
        if self._reusable is None:
            reusable = self._look_up()
            if self._load(reusable):
                return False
            self._reusable = reusable
        if not self._is_worth(self._length - self._reusable, saving_s):
            return False
        if self._begin(reusable=self._reusable, is_request=True):
            return True
        self._again_at = len(self._request.generated) + _RETRY
        return False

    def draft(self, num: int) -> Draft | None:
        try:
            return self._draft(num)
        except Exception as error:
            self._fail(error)
            return None

    def _draft(self, num: int) -> Draft | None:
        model, following, live = self._model, self._following, self._request.live
        assert following is not None and live is not None
        sequence = following.sequence
        text = self._text(sequence.position, self._length)
        if not model.make_room(sequence.growth(len(text) + num)):
            self.give_up()
            return None
        if max(text) >= model.runner.loaded.vocab_size:
            # A padding token of the other model's vocabulary.
            self.give_up()
            return None
        started_s = model.clock()
        num_fed, tokens = sequence.guess(text, num, sampler=live.ready, vocab_size=model.vocab_size)
        seconds = model.clock() - started_s
        model.num_prefilled += num_fed
        model.costs.note_steps(num, seconds)
        passes = model.drafts.costs
        cost = self._passes(num_fed - 1) + num * model.costs.step_s(passes) / passes.one_s
        model.account.add(1 - passes.relative(1 + len(live.unfed) + num) - cost)
        self._guessed, self._has_drafted = (len(self._request.generated), tuple(tokens)), True
        model.sequences.measure()
        return Draft(as_tokens(tokens), self.source, self.match, seconds)

    # What it costs and brings.

    def _passes(self, num_tokens: int) -> float:
        """What computing so many tokens costs the draft model, in passes of the other model."""
        passes = self._model.drafts.costs
        return num_tokens * self._model.costs.token_s(passes) / passes.one_s

    def _is_worth(self, lacking: int, saving_s: float) -> bool:
        """Whether to compute so many tokens for a saving of so many seconds in the rest of the answer."""
        cost, one_s = self._passes(lacking), self._model.drafts.costs.one_s
        return cost * one_s <= saving_s and self._model.account.allows(cost)

    def _settle_account(self) -> None:
        """Note what the last draft has brought, and how far the answer is."""
        generated, account = self._request.generated, self._model.account
        if self._guessed is not None:
            (at, guessed), self._guessed = self._guessed, None
            pairs = list(zip(guessed, generated[at:], strict=False))
            account.add(next((i for i, (guess, token) in enumerate(pairs) if guess != token), len(pairs)))
        account.note_answered(len(generated) - self._num_answered)
        self._num_answered = len(generated)

    # Ending.

    def end(self) -> None:
        """The answer has ended: store what was computed, and free the sequence."""
        self._settle_account()
        self._model.account.add(-self._invested)
        super().end()

    def _end_kind(self, following: _Following) -> BoundaryKind:
        self._model.cache.note_answer(following.lease, len(self._request.generated))
        return BoundaryKind.GENERATION_END

    def give_up(self) -> None:
        """Free its sequence. It may start again later in the answer."""
        self._reusable = None
        self._again_at = len(self._request.generated) + _RETRY
        super().give_up()

    def _fail(self, error: Exception) -> None:
        super()._fail(error)
        self._again_at = self._request.job.max_tokens


class SettledPrefix(FollowedText):
    """The known prefix of a next turn, which the draft model computes while the server is idle.

    Part of a job that settles it for the model, and ends with that. What was computed by then is stored.
    """

    def __init__(self, model: DraftModel, request: RunningRequest) -> None:
        super().__init__(model, request)
        self._is_over = False

    @property
    def limit(self) -> int:
        return len(self._request.job.prompt)

    @property
    def is_in_memory(self) -> bool:
        """Whether there is nothing left to do."""
        return self._look_up() == self.limit

    @property
    def lacking(self) -> int:
        """How many of its tokens are not stored, in memory or on disk."""
        return self.limit - max(self._look_up(), self._model.disk.reach(self._on_disk))

    def advance(self) -> bool:
        """Compute the next part. Returns whether anything is left to do."""
        try:
            return self._advance()
        except Exception as error:
            self._fail(error)
            return False

    def _advance(self) -> bool:
        model = self._model
        if self._is_over or not model.is_loaded or model.sequences.is_broken:
            return False
        if self._following is None:
            reusable = self._look_up()
            if self._load(reusable):
                return True
            if not self._begin(reusable=reusable, is_request=False):
                return False
        following = self._following
        assert following is not None
        if not self._restore(following):
            return self.is_running
        if following.sequence.position < self.limit:
            num_fed, _ = self._compute(following)
            model.num_settled += num_fed
        return self.is_running and following.sequence.position < self.limit

    def pause(self) -> None:
        """Store what was computed, and free the sequence until there is time again."""
        self._stop()

    def give_up(self) -> None:
        """Free its sequence: others need the room, so nothing more is computed ahead."""
        self._is_over = True
        super().give_up()

    def _end_kind(self, following: _Following) -> BoundaryKind:
        is_whole = following.sequence.position >= self.limit
        return self._request.end_kind if is_whole else BoundaryKind.INTERVAL
