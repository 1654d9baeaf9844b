"""The draft model: a small model that drafts where no earlier text continues like the answer.

It has its own sequences and prefix cache within the shared memory budget, so it does not compute a chat twice. Its
memory is freed before any request has to wait; answers then continue without drafts. Everything runs on the engine
thread: during the decode steps of the requests that it drafts for, and, for what is known of next turns, while the
server is idle.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from reprise.cache.node import SegmentSizes
from reprise.cache.prefix_cache import PrefixCache
from reprise.core.allowance import StepAllowance
from reprise.core.backend import DraftModelStatus, DraftSource
from reprise.core.clock import Clock
from reprise.core.errors import DiskUnusable
from reprise.core.kinds import Footprint
from reprise.disk.ports import RestoreTarget
from reprise.disk.store.cache import DiskCache
from reprise.disk.tier import DiskTier
from reprise.drafts.benefit import DraftCosts
from reprise.drafts.drafter import Drafts
from reprise.engine.models.load import LoadedModel
from reprise.engine.running.records import RecordEncoder
from reprise.engine.running.runner import Runner
from reprise.loop.draft_following import DraftAccount, FollowedAnswer, FollowedText, SettledPrefix
from reprise.loop.requests import RunningRequest
from reprise.loop.sequences import SequencePool
from reprise.memory import Account, Memory
from reprise.plan.checkpoints import interval_tokens

log = logging.getLogger("reprise.loop")

_CHUNK = 512


class OpenDisk(Protocol):
    """`reprise.loop.disk.open_disk`, with some settings."""

    def __call__(self, loaded: LoadedModel, footprint: Footprint, *, share: float) -> DiskCache | None: ...


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
        max_settle: int,
        max_stall_s: float,
        shares_from: int,
        is_on: bool,
        open_disk: OpenDisk,
        allowance: StepAllowance,
        wake: Callable[[], None],
        clock: Clock,
    ) -> None:
        """`target`: the model that it drafts for; `beside`: that model's memory.

        `chunk`: the most tokens per pass; `max_settle`: of a next turn's prefix to compute while idle. `max_stall_s`:
        the largest inter-token gap. `is_on`: whether there is a prefix cache; without one nothing is stored.
        `open_disk`: opens the disk cache of a model, which may take a share of the directory: that of its weights in
        both models', as that is about its share of the time that records save. `allowance`: for what a step decodes of
        its records. `wake`: see `Worker`.
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
        self.max_settle = max_settle
        self.max_stall_s = max_stall_s
        self.clock = clock
        self.context = loaded.context
        self.is_loaded = True
        self.is_on = is_on
        self.num_reused = self.num_loaded = self.num_prefilled = self.num_settled = 0
        self._followed: list[FollowedText] = []
        footprint = self.runner.footprint
        self.account = DraftAccount()
        self.interval = interval_tokens(checkpoint_nbytes=footprint.checkpoint, kv_nbytes_per_token=footprint.full)
        self.disk = DiskTier(
            _opened(open_disk, loaded, footprint, share=share_of_disk(loaded, target)),
            self.cache,
            footprint=footprint,
            sequences=_SparingSequences(self),
            new_encoder=RecordEncoder.new,
            allowance=allowance,
            prefill_s=self._prefill_s,
            wake=wake,
        )

    def follow(self, request: RunningRequest) -> FollowedAnswer:
        """Draft for the answer to this request."""
        followed = FollowedAnswer(self, request)
        self._followed.append(followed)
        return followed

    def settle(self, request: RunningRequest) -> SettledPrefix | None:
        """What is left to compute of the prompt of a settling job.

        None if that is nothing, or too much, or if drafts for an answer would not be worth their passes.
        """
        if not (self.is_on and self.is_loaded and self.has_context(len(request.job.prompt)) and self._pays):
            return None
        settled = SettledPrefix(self, request)
        if settled.is_in_memory or settled.lacking > self.max_settle:
            return None
        self._followed.append(settled)
        return settled

    def leave(self, followed: FollowedText) -> None:
        """Stop following a text: its request has ended."""
        self._followed = [other for other in self._followed if other is not followed]

    def has_context(self, length: int) -> bool:
        """Whether it can draft behind so many tokens."""
        return self.context is None or length + max(self.drafts.sizes) <= self.context

    @property
    def _pays(self) -> bool:
        """Whether its drafts are worth their passes, for greedy or sampled answers, as far as that was measured."""
        drafts = self.drafts
        if not drafts.costs.is_known or self.account.is_overdrawn:
            return False
        step_s, most = self.costs.step_s(drafts.costs), max(drafts.sizes)
        best = (drafts.best_length(most, DraftSource.DRAFT_MODEL, m, num_fed=1, step_s=step_s) for m in (0, 1))
        return any(each.length > 0 for each in best)

    def _prefill_s(self, start: int, stop: int) -> float | None:
        passes = self.drafts.costs
        return (stop - start) * self.costs.token_s(passes) if passes.is_known else None

    # Memory.

    def make_room(self, nbytes: int) -> bool:
        """Make room for `nbytes` by evicting, here or elsewhere, but stop nothing that runs. False if that fails."""
        while not self.memory.fits(nbytes):
            if not self.memory.evict_from_others(None) and not self.cache.evict_one():
                return False
        return True

    def give_up(self) -> bool:
        """Free what is held for running requests, which continue without drafts. False if nothing is held."""
        held = [followed for followed in self._followed if followed.is_running]
        for followed in held:
            followed.give_up()
        return self.disk.give_up_reads() or len(held) > 0

    def clear(self, namespace: str | None = None, *, owner: str | None = None) -> Future[None] | None:
        """Drop everything that no running answer uses, of one namespace or of all.

        Gives when all of it has gone from the disk; None: there is no disk.
        """
        cleared = self.disk.clear(namespace)
        self.cache.clear(namespace, owner=owner)
        return cleared

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
        self.disk.close()
        self.reset()
        self.memory.disconnect()
        self.memory.leave()

    def status(self) -> DraftModelStatus:
        return DraftModelStatus(
            name=self.runner.loaded.name,
            weights_nbytes=self.weights_nbytes,
            state_nbytes=self.memory.held,
            num_reused=self.num_reused,
            num_loaded=self.num_loaded,
            num_prefilled=self.num_prefilled,
            num_settled=self.num_settled,
        )

    def check(self) -> None:
        """AssertionError unless all accounts are right."""
        self.cache.check()
        self.memory.check({Account.SEQUENCES: self.runner.live_nbytes})


class _SparingSequences:
    """The draft model's sequences for its disk tier: nothing that runs is stopped for what is read."""

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self.estimate_to_admit = model.sequences.estimate_to_admit
        self.keep_restored = model.sequences.keep_restored
        self.measure = model.sequences.measure

    def restore_target(self, position: int, num_prompt: int, *, is_whole: bool) -> RestoreTarget:
        """See `SequencePool.restore_target`."""
        model = self._model
        nbytes = model.sequences.estimate(num_prompt) + model.runner.footprint.checkpoint
        is_whole = is_whole and model.make_room(nbytes)
        return model.sequences.restore_target(position, num_prompt, is_whole=is_whole)


def share_of_disk(loaded: LoadedModel, target: LoadedModel) -> float:
    """The share of the disk cache that the records of a draft model of `target` may take."""
    if loaded.fingerprint == target.fingerprint:
        return 1.0  # They share their records, too.
    return loaded.nbytes / max(1, loaded.nbytes + target.nbytes)


def _opened(open_disk: OpenDisk, loaded: LoadedModel, footprint: Footprint, *, share: float) -> DiskCache | None:
    try:
        return open_disk(loaded, footprint, share=share)
    except DiskUnusable as error:
        log.warning("prefixes of the draft model %s are not stored on disk: %s", loaded.name, error)
        return None


def _nothing() -> bool:
    """Stands for the reclaimers that a model's memory has before the others."""
    return False
