"""The draft model: a small model that drafts where no earlier text continues like the answer.

It has its own sequences and prefix cache within the shared memory budget, so it does not compute a chat twice. Its
memory is freed before any request has to wait; answers then continue without drafts. Everything runs on the engine
thread, during the decode steps of the requests that it drafts for.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from reprise.cache.node import Lease, SegmentSizes
from reprise.cache.prefix_cache import PrefixCache
from reprise.core.allowance import StepAllowance
from reprise.core.backend import DraftModelStatus, DraftSource
from reprise.core.clock import Clock
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Tokens, as_tokens
from reprise.drafts.benefit import DraftCosts
from reprise.drafts.drafter import Draft, Drafts
from reprise.engine import memory as device_memory
from reprise.engine.draft_sequence import DraftSequence
from reprise.engine.load import LoadedModel
from reprise.engine.runner import LiveSequence, Runner
from reprise.loop.requests import RunningRequest
from reprise.loop.sequences import SequencePool, initial_decode_slots
from reprise.memory import Account, Memory
from reprise.plan.checkpoints import Plan, interval_tokens, make_plan

log = logging.getLogger("reprise.loop")

_AT_ONCE = 32
"""The number of missing tokens that are fed along with the drafting pass; more are fed in passes before it."""
_CHUNK = 512
_SHARE_OF_STALL = 0.25
"""The share of the largest inter-token gap that one step may spend on a prefix for the draft model."""
_LEAST_S = 1e-9
"""The least time of a token: some clocks have a coarse resolution."""
_RETRY = 64
"""Tokens of an answer after which it tries again for lack of memory."""


class DraftModel:
    """A loaded draft model, its cache, and the answers it follows."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        drafts: Drafts,
        target: LoadedModel,
        beside: Memory,
        sizes: SegmentSizes,
        chunk: int,
        max_stall_s: float,
        shares_from: int,
        is_on: bool,
        clock: Clock,
    ) -> None:
        """`target`: the model that it drafts for; `beside`: that model's memory.

        `chunk`: the most tokens per pass. `max_stall_s`: the largest inter-token gap. `is_on`: whether
        there is a prefix cache; without one nothing is stored.
        """
        self.runner = Runner(loaded, can_batch=False, shares_from=shares_from)
        self.memory = Memory(shared=beside.shared, is_spare=True)
        self.cache = PrefixCache(loaded.blueprint.layout, memory=self.memory, sizes=sizes, clock=clock)
        self.sequences = SequencePool(self.runner, self.cache, self.memory, chunk=chunk)
        self.memory.reclaim_from(_nothing, *self.sequences.reclaimers, self.give_up)
        self.costs = DraftCosts(relative=loaded.nbytes / max(1, target.nbytes))
        self.memory.evict_from(self.cache, token_s=lambda: self.costs.token_s(self.drafts.costs))
        self.drafts = drafts
        self.vocab_size = target.vocab_size
        self.chunk = min(chunk, _CHUNK)
        self.max_stall_s = max_stall_s
        self.clock = clock
        self.context = loaded.context
        self.is_loaded = True
        self.is_on = is_on
        self.num_reused = self.num_prefilled = 0
        self._followed: list[FollowedAnswer] = []
        footprint = self.runner.footprint
        self.interval = interval_tokens(checkpoint_nbytes=footprint.checkpoint, kv_nbytes_per_token=footprint.full)

    def follow(self, request: RunningRequest) -> FollowedAnswer:
        """Draft for the answer to this request."""
        followed = FollowedAnswer(self, request)
        self._followed.append(followed)
        return followed

    def leave(self, followed: FollowedAnswer) -> None:
        """Stop following an answer that has ended."""
        self._followed = [other for other in self._followed if other is not followed]

    # Memory.

    def make_room(self, nbytes: int) -> bool:
        """Make room for `nbytes` by evicting, here or elsewhere, but stop nothing that runs. False if that fails."""
        while not self.memory.fits(nbytes):
            if not self.memory.evict_from_others(None) and not self.cache.evict_one():
                return False
        return True

    def give_up(self) -> bool:
        """Free what is held for running answers, which continue without drafts. False if nothing is held."""
        held = [followed for followed in self._followed if followed.is_running]
        for followed in held:
            followed.give_up()
        return len(held) > 0

    def clear(self, namespace: str | None = None, *, owner: str | None = None) -> None:
        """Drop everything that no running answer uses, of one namespace or of all."""
        self.cache.clear(namespace, owner=owner)

    def reset(self) -> None:
        """Drop everything, when stored state can no longer be trusted."""
        self.give_up()
        self.cache.reset()
        self.sequences.reset()

    def load(self, loaded: LoadedModel) -> None:
        """Use these weights, which were loaded again."""
        assert loaded.fingerprint == self.runner.loaded.fingerprint, "the cache belongs to another model"
        self.runner.loaded, self.is_loaded = loaded, True

    @property
    def weights_nbytes(self) -> int:
        """Bytes of its weights in memory."""
        return self.runner.loaded.nbytes if self.is_loaded else 0

    def unload(self) -> int:
        """Release the weights and keep the cache. Returns the bytes released."""
        nbytes = self.weights_nbytes
        self.give_up()
        self.is_loaded = False
        self.runner.loaded = self.runner.loaded.without_weights()
        return nbytes

    def shutdown(self) -> None:
        """Free everything."""
        self.reset()
        self.memory.disconnect()
        self.memory.leave()

    def status(self) -> DraftModelStatus:
        return DraftModelStatus(
            name=self.runner.loaded.name,
            weights_nbytes=self.weights_nbytes,
            state_nbytes=self.memory.held,
            num_reused=self.num_reused,
            num_prefilled=self.num_prefilled,
        )

    def check(self) -> None:
        """AssertionError unless all accounts are right."""
        self.cache.check()
        self.memory.check({Account.SEQUENCES: self.runner.live_nbytes})


def _nothing() -> bool:
    """Stands for the reclaimers that a model's memory has before the others."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Following:
    """The state of an answer that the draft model follows."""

    sequence: DraftSequence
    lease: Lease
    plan: Plan


class FollowedAnswer:
    """The drafts of one answer (`reprise.drafts.drafter.ComputedDrafts`)."""

    source = DraftSource.DRAFT_MODEL

    def __init__(self, model: DraftModel, request: RunningRequest) -> None:
        self._model = model
        self._request = request
        self._following: _Following | None = None
        self._reusable: int | None = None
        """Where it can resume; None if it was not looked up yet."""
        self._again_at = 0
        """The length of the answer at which it next tries to start."""

    @property
    def is_running(self) -> bool:
        """Whether it has a sequence."""
        return self._following is not None

    @property
    def match(self) -> int:
        # Sampled tokens agree less often than greedy ones.
        live = self._request.live
        return 0 if live is None or live.ready.is_greedy else 1

    @property
    def step_s(self) -> float | None:
        model = self._model
        if not model.is_loaded or len(self._request.generated) < self._again_at:
            return None
        if model.context is not None and self._length + max(model.drafts.sizes) > model.context:
            return None
        return model.costs.step_s(model.drafts.costs)

    @property
    def _length(self) -> int:
        return len(self._request.job.prompt) + len(self._request.generated)

    def _text(self, start: int, stop: int) -> Sequence[int]:
        """The tokens ``[start, stop)`` of prompt and answer."""
        prompt, generated = self._request.job.prompt.tokens, self._request.generated
        end = len(prompt)
        if start >= end:
            return generated[start - end : stop - end]
        return [*prompt[start:stop].tolist(), *generated[: max(0, stop - end)]]

    # Drafting.

    def is_ready(self, *, saving_s: float, num_left: int) -> bool:
        try:
            return self._prepare(saving_s * num_left)
        except Exception as error:
            self._fail(error)
            return False

    def _prepare(self, saving_s: float) -> bool:
        model = self._model
        if model.sequences.is_broken:
            model.reset()
        if self._following is None and not self._start(saving_s):
            return False
        assert self._following is not None
        sequence = self._following.sequence
        if sequence.live.restoration is not None and not self._restore(sequence.live):
            return False
        lacking = self._length - sequence.position
        if lacking <= _AT_ONCE:
            return True
        if lacking * model.costs.token_s(model.drafts.costs) > saving_s:
            return False
        self._catch_up(self._following)
        # It may have been given up for lack of memory.
        return self.is_running and self._length - sequence.position <= _AT_ONCE

    def _start(self, saving_s: float) -> bool:
        """Start a sequence at the best stored position, if computing the rest pays off and there is room."""
        model, request = self._model, self._request
        if self._reusable is None:
            match = model.cache.match(request.tokens, namespace=request.namespace)
            self._reusable = model.cache.resume_at(match, limit=self._length - 1)
        lacking = self._length - self._reusable
        if lacking * model.costs.token_s(model.drafts.costs) > saving_s:
            return False
        reserve = max(self._length, len(request.job.prompt) + initial_decode_slots(request.job))
        if not model.make_room(model.sequences.estimate_to_admit(reserve, self._reusable)):
            self._again_at = len(request.generated) + _RETRY
            return False
        tokens = request.tokens
        match = model.cache.match(tokens, namespace=request.namespace)
        resume_at = model.cache.resume_at(match, limit=self._length - 1)
        lease = model.cache.lease(match, resume_at)
        try:
            live = model.sequences.start(match, resume_at, reserve=reserve)
        except Exception:
            model.cache.release(lease)
            raise
        model.memory.note_use()
        model.num_reused += resume_at
        self._following = _Following(
            sequence=DraftSequence(model.runner, live), lease=lease, plan=self._plan(resume_at, match.length)
        )
        model.sequences.measure()
        return self.is_running

    def _plan(self, resume_at: int, matched: int) -> Plan:
        prompt = self._request.job.prompt
        end = max(resume_at, len(prompt))
        layout = self._model.cache.layout
        branch_at = matched if 0 < matched < len(prompt) else None
        return make_plan(
            prompt, layout=layout, resume_at=resume_at, end=end, branch_at=branch_at, interval=self._model.interval
        )

    def _restore(self, live: LiveSequence) -> bool:
        model, request = self._model, self._request
        assert self._following is not None
        allowance = StepAllowance(model.max_stall_s, clock=model.clock)
        allowance.renew()
        tokens = request.tokens_to(self._following.plan.resume_at)
        is_there = model.sequences.restore(live, tokens, namespace=request.namespace, allowance=allowance)
        model.sequences.measure()
        return is_there and self.is_running

    def _catch_up(self, following: _Following) -> None:
        """Compute a chunk of the missing tokens, up to the next checkpoint, and store it there."""
        model, sequence = self._model, following.sequence
        start = sequence.position
        token_s = model.costs.token_s(model.drafts.costs)
        num = max(_AT_ONCE, min(model.chunk, int(_SHARE_OF_STALL * model.max_stall_s / max(token_s, _LEAST_S))))
        # The last token is fed by the drafting pass.
        stops = [position for position in following.plan.positions if position > start]
        stop = min([start + num, self._length - 1, *stops])
        if not model.make_room(sequence.growth(stop - start)):
            self.give_up()
            return
        started_s = model.clock()
        model.num_prefilled += sequence.feed(self._text(start, stop))
        seconds = model.clock() - started_s
        model.costs.note_prefill(stop - start, seconds)
        model.drafts.saved_s -= seconds
        if stop in stops:
            self._store(following, following.plan.kind_at(stop))
        model.sequences.measure()

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
        model.sequences.measure()
        return Draft(as_tokens(tokens), self.source, self.match, seconds)

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
        return tokens

    def end(self) -> None:
        self._model.leave(self)
        following = self._following
        if following is None:
            return
        try:
            if following.sequence.live.restoration is None:
                # Correct predictions are stored as well.
                following.sequence.keep(self._text(following.sequence.position, self._length))
                self._model.cache.note_answer(following.lease, len(self._request.generated))
                tokens = self._store(following, BoundaryKind.GENERATION_END)
            else:
                tokens = self._request.tokens_to(following.sequence.position)
            self._following = None
            self._model.cache.release(following.lease)
            self._model.sequences.end(following.sequence.live, tokens, namespace=self._request.namespace)
            self._model.cache.compact_path(tokens, namespace=self._request.namespace)
            self._model.sequences.measure()
        except Exception as error:
            self._following = following
            self._fail(error)

    def give_up(self) -> None:
        """Free its sequence. It may start again later in the answer."""
        following, self._following = self._following, None
        self._reusable = None
        self._again_at = len(self._request.generated) + _RETRY
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
        """The draft model failed: the answer continues without it."""
        log.error("drafting with a model failed for request %s", self._request.id, exc_info=error)
        self.give_up()
        self._again_at = self._request.job.max_tokens
        if device_memory.is_out_of_memory(error):
            self._model.give_up()
            device_memory.give_back()
