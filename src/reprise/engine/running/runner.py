"""Runs the model: sequences in, tokens out. Used on the engine thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx import nn

from reprise.cache.lookup import Restore
from reprise.cache.payload import Payload, SegmentPayload, Source
from reprise.core.events import FinishReason, Sampled
from reprise.core.failpoints import Failpoint, reach
from reprise.core.images import ImageFile
from reprise.core.job import Job
from reprise.core.kinds import Footprint, Full, KvKind
from reprise.core.pass_price import price_of_tower
from reprise.core.tokens import Span, Tokens
from reprise.engine import memory as device_memory
from reprise.engine.models.headed import GuessingModel, GuessRequest, blueprint_with_head
from reprise.engine.models.load import LoadedModel
from reprise.engine.models.vision import blank_image
from reprise.engine.running.batching import TOKEN_BY_TOKEN
from reprise.engine.running.image_features import FeatureCache, inputs_of
from reprise.engine.running.live_sequence import LiveSequence, SharedSegment
from reprise.engine.running.sampler import SampledBatch, TokenSampler, accept, sample_along, sample_batch
from reprise.engine.running.score import SCORED_AT_ONCE
from reprise.engine.states.blueprint import Blueprint
from reprise.engine.states.layers import MOST_WAITING
from reprise.engine.states.payloads import EntryTransfer, PackedSegment
from reprise.engine.states.restoration import COPIED_AT_ONCE, Restoration
from reprise.engine.states.seeing import ImageFeatures, PassInputs, SeeingModel
from reprise.engine.states.sequence_batch import SequenceBatch, SequenceSource, growth, most_entries
from reprise.memory import Memory

SHARES_FROM = 4096
"""Shorter sequences are copied: that is quick, and their spare capacity would outweigh what sharing saves."""

_TRIED_SIDES = (256, 384)
"""Pixels, of the images with which the tower's memory is measured: large enough that its attention shows."""

_SPARE = 512
"""Spare entries, besides a sixteenth of the length, with which a sequence is still worth keeping idle."""


@dataclass(frozen=True, slots=True)
class _SharingSource(SequenceSource):
    """A source that shares full-attention entries instead of copying them."""

    live: LiveSequence

    def segment_nbytes(self, kind: KvKind, length: int) -> int:
        # Takes no additional memory: its bytes move from the sequence's account to the cache's.
        return 0 if isinstance(kind, Full) else SequenceSource.segment_nbytes(self, kind, length)

    def segment(self, kind: KvKind, span: Span) -> SegmentPayload:
        if isinstance(kind, Full):
            return SharedSegment(self.live, kind, span, SequenceSource.segment_nbytes(self, kind, 1))
        return self.copy(kind, span)


@dataclass(frozen=True, slots=True)
class TokenResult:
    """A sequence's next token, or several if a draft was accepted; `reason` is set if the last one ends the answer."""

    live: LiveSequence
    sampled: tuple[Sampled, ...]
    reason: FinishReason | None
    num_drafted: int = 0


@dataclass(frozen=True, slots=True)
class TokenFailure:
    """Sampling raised for this sequence; the others of its group have their tokens."""

    live: LiveSequence
    error: Exception


class Runner:
    """A loaded model and the sequences that run on it."""

    def __init__(self, loaded: LoadedModel, *, can_batch: bool, shares_from: int = SHARES_FROM) -> None:
        """Sequences of at least `shares_from` positions share their buffers with the prefix cache."""
        self.loaded = loaded
        self.can_batch = can_batch and loaded.blueprint.joins
        self.footprint = footprint_of(loaded.model, loaded.blueprint)
        self.shares_from = shares_from
        self._resumes_anywhere = loaded.blueprint.layout.resumes_anywhere
        self._joins = loaded.blueprint.joins
        self._lives: list[LiveSequence] = []
        self.features = FeatureCache(Memory())

    @property
    def num_sequences(self) -> int:
        """Number of running and idle sequences."""
        return len(self._lives)

    def most_live_nbytes(self, position: int, *, chunk: int, footprint: Footprint | None = None) -> int:
        """The most bytes of the buffers of a running sequence that has reached `position` in chunks of `chunk`.

        Includes the states saved before a pass that was run ahead. `footprint`: of this model with other entries.
        """
        footprint = self.footprint if footprint is None else footprint
        entries = sum(nbytes * most_entries(kind, position, chunk) for kind, nbytes in footprint.by_kind.items())
        return entries + 2 * footprint.snapshot + MOST_WAITING * footprint.waiting

    @property
    def why_never_verifies(self) -> str | None:
        """Why the model cannot verify drafts; None: passes over several tokens are correct and can be undone."""
        if not self.loaded.blueprint.can_undo:
            return "a layer of an unknown class cannot undo tokens"
        return TOKEN_BY_TOKEN.get(self.loaded.architecture)

    @property
    def live_nbytes(self) -> int:
        """Bytes of all running and idle sequences, including spare capacity, less what is charged to the cache."""
        distinct = {id(live.rows): live.rows for live in self._lives}
        rows_kept = [array for live in self._lives for array in (live.prompt_row, live.unfed_hidden)]
        logits = sum(array.nbytes for array in rows_kept if array is not None)
        shared = sum(live.shared_nbytes for live in self._lives)
        coming = sum(live.restoration.nbytes for live in self._lives if live.restoration is not None)
        moving = sum(live.moving.nbytes for live in self._lives if live.moving is not None)
        return sum(rows.nbytes for rows in distinct.values()) + logits + coming + moving - shared

    def growth(self, lives: Sequence[LiveSequence], num: int) -> int:
        """Bytes by which buffers will grow when these sequences are fed `num` tokens each, together."""
        parts = {id(live.rows): live.rows for live in lives}
        fresh = sum(self.footprint.snapshot for live in lives if live.position == 0)
        return fresh + growth(parts, frozenset(map(id, lives)), num, self.footprint.each)

    def growth_to_decode(self, lives: Sequence[LiveSequence], num: int = 2) -> int:
        """Like `growth`, for a pass of `decode`, which may run another pass ahead and saves states for that.

        For `verify`, `num` is the number of tokens fed.
        """
        kept = sum(self.footprint.snapshot for live in lives if live.rows.ahead is None)
        kept += num * self.footprint.waiting * len(lives)
        kept += sum(self.footprint.logits for live in lives if live.keeps_row)
        return kept + self.growth(lives, num)

    def begin(self) -> LiveSequence:
        """A new, empty sequence."""
        live = LiveSequence(SequenceBatch(self.loaded.blueprint))
        self._lives.append(live)
        return live

    def begin_restore(self, live: LiveSequence, position: int, *, reserve: int, keeps_full: bool = False) -> None:
        """Put a sequence at `position`; it can run once `restore_part` has copied all of its state.

        `keeps_full`: it was at a later position and has the full-attention entries; past `position` none are shared.
        """
        reach(Failpoint.BEGIN_RESTORE, position, keeps_full)
        live.rows.reserve(reserve)
        restoration = Restoration(live.rows, position, keeps_full=keeps_full)
        live.restoration = None if restoration.is_over else restoration

    def begin_move(self, live: LiveSequence, segments: Sequence[tuple[Span, PackedSegment]]) -> list[SharedSegment]:
        """Move these full-attention segments, without other references, into a sequence being restored.

        Returns the shared segments with which the cache must replace them; `restore_part` does the copying.
        """
        assert live.restoration is not None and live.moving is None, live
        live.moving = EntryTransfer(segments)
        return [SharedSegment(live, Full(), span, self.footprint.full) for span, _ in segments]

    def restore_part(self, live: LiveSequence, restore: Restore, *, at_most: int = COPIED_AT_ONCE) -> int:
        """Copy the next pieces of `restore`, see `Restoration.advance`. Returns the bytes."""
        assert live.restoration is not None, live
        if live.moving is not None and live.moving.is_packed:
            return live.moving.unpack(at_most=at_most)
        if live.moving is None:
            nbytes = live.restoration.advance(restore, at_most=at_most)
        else:
            # One piece at a time: what is evaluated together is in memory twice.
            nbytes = live.restoration.advance(restore, at_most=at_most, num_pieces=1)
            live.moving.give_up(range(live.restoration.num_full_planes))
        if live.restoration.is_over:
            live.restoration = live.moving = None
        return nbytes

    def share(self, live: LiveSequence, kind: KvKind, span: Span) -> SharedSegment:
        """The entries of `span`, which the sequence has or is being filled with, as a shared segment."""
        return SharedSegment(live, kind, span, self.footprint.by_kind[kind])

    def stop(self, live: LiveSequence) -> None:
        """End the sequence and free its state."""
        rows = live.rows
        rows.step_back()
        rest = [i for i, owner in enumerate(rows.owners) if owner is not live]
        self.drop(live)
        if rest:
            rows.keep_rows(rest)
            mx.eval(rows.arrays())

    def drop(self, live: LiveSequence) -> None:
        """Forget a sequence whose state is unusable or already freed."""
        self._lives = [other for other in self._lives if other is not live]
        # Break the reference cycle with the batch, so that buffers are freed now.
        live.rows.owners = [None if owner is live else owner for owner in live.rows.owners]

    def source(self, live: LiveSequence, *, shares: bool = False) -> Source:
        """The sequence as a source for commits: by copies, or sharing its buffers if it is long or `shares`."""
        live.rows.step_back()
        if live.rows.hidden is not None:
            live.rows.write_waiting()
            mx.async_eval(live.rows.arrays())
        if shares or live.position >= self.shares_from:
            return _SharingSource(live.rows, live.row, live)
        return SequenceSource(live.rows, live.row)

    def is_worth_keeping(self, live: LiveSequence) -> bool:
        """Whether to keep the sequence idle: it is not batched, and the cache shares most of its buffers."""
        if live.rows.num_rows > 1 or len(live.shared) == 0:
            return False
        # Spare capacity and uncommitted entries are of no use to other requests meanwhile.
        shared = live.shared_nbytes // self.footprint.full
        full = [layer for layer in live.rows.layers(Full()) if layer.planes]
        return all(layer.planes[0].shape[2] - shared <= shared // 16 + _SPARE for layer in full)

    def keep_idle(self, live: LiveSequence) -> None:
        """Keep an ended sequence's buffers for what the cache shares and for its next turn."""
        live.rows.step_back()
        # Layers without full attention are rebuilt when it is reopened, so an incomplete restoration does not matter.
        live.sampler = live.prompt_row = live.restoration = None
        # What an answer that failed has left there is not for the next one.
        live.unfed, live.unfed_hidden = (), None

    def pause(self, live: LiveSequence) -> TokenSampler | None:
        """Take the sampler of a sequence that is about to be stopped, for `resume_decode`; None before decoding."""
        sampler, live.sampler = live.sampler, None
        return sampler

    def resume_decode(self, live: LiveSequence, sampler: TokenSampler, *, pending: int) -> None:
        """Continue to decode, at the position of a paused sequence, with its sampler; `pending` is fed next."""
        live.sampler, live.pending = sampler, pending

    def encode(self, image: ImageFile, *, holder: str | None = None) -> ImageFeatures:
        """Run the tower on an image. Raises BadRequest for a file that cannot be decoded."""
        model, vision = self.loaded.model, self.loaded.vision
        assert isinstance(model, SeeingModel) and vision is not None, "a model that does not see gets no image"
        prepared = vision.reader.prepare(image)
        num = len(prepared.places)
        self.features.make_room(num)
        with self.features.running_tower(num):
            features = model.encode(prepared)
        self.features.keep(image, features, holder=holder)
        return features

    def try_tower(self) -> None:
        """Measure what the tower takes at its peak, with blank images of two sizes, before any request comes."""
        model, vision = self.loaded.model, self.loaded.vision
        assert isinstance(model, SeeingModel) and vision is not None, "a model that does not see has no tower"
        runs: dict[int, int] = {}
        for side in _TRIED_SIDES:
            prepared = vision.reader.prepare(blank_image(side, side))
            before = device_memory.watch_peak()
            model.encode(prepared)
            runs[len(prepared.places)] = device_memory.read_peak(before).least
        self.features.tower = price_of_tower(runs)
        if len(runs) > 1:
            self.features.pixels_per_row = max(_TRIED_SIDES) ** 2 // max(runs)

    def prefill(self, lives: Sequence[LiveSequence], chunks: Sequence[Tokens]) -> None:
        """Feed each sequence its chunk, all of the same length; returns when it is computed."""
        reach(Failpoint.PREFILL, lives)
        rows = self._gather(lives)
        order = {id(live): chunk for live, chunk in zip(lives, chunks, strict=True)}
        tokens = np.stack([order[id(owner)] for owner in rows.owners])
        scorers = [owner.scorer if isinstance(owner, LiveSequence) else None for owner in rows.owners]
        if all(scorer is None for scorer in scorers):
            self._advance(rows, tokens)
            mx.eval(rows.arrays())
            return
        # In parts: the logits of a whole chunk would take too much memory.
        for start in range(0, tokens.shape[1], SCORED_AT_ONCE):
            positions = list(rows.lengths)
            logits = self._feed(rows, tokens[:, start : start + SCORED_AT_ONCE])
            for row, scorer in enumerate(scorers):
                if scorer is not None:
                    scorer.take(positions[row], logits[row])
            mx.eval(rows.arrays())

    def logits(self, live: LiveSequence, chunk: Tokens) -> mx.array:
        """Feed one sequence a chunk; returns the logits after each token, shape ``(n, vocabulary)``."""
        reach(Failpoint.LOGITS, chunk, False)
        return self.logits_together([live], [chunk])[0]

    def logits_undone(self, live: LiveSequence, chunk: Tokens) -> mx.array:
        """Like `logits`, of a pass as it verifies a draft: the sequence is as before."""
        reach(Failpoint.LOGITS, chunk, True)
        rows = self._gather([live])
        logits = self._feed(rows, np.asarray(chunk)[None], may_be_undone=True)[0]
        mx.eval(logits, rows.arrays())
        self._undo(rows, [len(chunk)])
        return logits

    def logits_together(self, lives: Sequence[LiveSequence], chunks: Sequence[Tokens]) -> mx.array:
        """Feed sequences chunks of the same length; returns the logits, shape ``(rows, n, vocabulary)``."""
        rows = self._gather(lives)
        order = {id(live): chunk for live, chunk in zip(lives, chunks, strict=True)}
        logits = self._feed(rows, np.stack([order[id(owner)] for owner in rows.owners]))
        mx.eval(logits, rows.arrays())
        return logits

    def begin_decode(self, live: LiveSequence, job: Job, *, keeps_row: bool = False, is_audited: bool = False) -> None:
        """Start to decode a sequence near its prompt's end: the next pass takes what is left. Raises BadRequest."""
        live.sampler = TokenSampler(job, vocab_size=self.loaded.vocab_size)
        live.sampler.is_audited = is_audited
        *unfed, live.pending = job.prompt.tokens[min(live.position, len(job.prompt) - 1) :].tolist()
        live.unfed, live.unfed_hidden = tuple(unfed), None
        live.keeps_row = keeps_row

    def sample_from(
        self, live: LiveSequence, job: Job, row: Payload, *, is_audited: bool = False
    ) -> TokenResult | TokenFailure:
        """Sample the first token of a sequence at the end of its prompt from the stored logits `row`."""
        assert isinstance(row, mx.array) and live.position == len(job.prompt), (live.position, len(job.prompt))
        self.begin_decode(live, job, is_audited=is_audited)
        (result,) = _results([live], sample_batch([live.ready], row[None]))
        return result

    def decode(
        self, lives: Sequence[LiveSequence], *, drafts: Sequence[Sequence[int]] = (), may_run_ahead: bool = True
    ) -> list[TokenResult | TokenFailure]:
        """One pass over these sequences: each gets a token, or fails without affecting the others.

        If no sampler must see a token before the next is chosen, the next pass is started before this one's tokens are
        read, so that the device is never idle.

        `drafts`: of each sequence, if any has one. They are verified, and a sequence gets the accepted tokens and one
        more. If a pass was run ahead, its tokens are taken instead.
        `may_run_ahead`: whether the next pass may be started.
        """
        reach(Failpoint.DECODE, lives)
        if any(drafts) and all(live.rows.ahead is None for live in lives):
            return self.verify(lives, drafts)
        if len(lives) > 1:
            self.catch_up(lives)
        rows = self._gather(lives)
        members = [owner for owner in rows.owners if isinstance(owner, LiveSequence)]
        samplers = [live.ready for live in members]
        choices = rows.take_ahead()
        if choices is None:
            fed = np.array([[*live.unfed, live.pending] for live in members], dtype=np.int32)
            logits = self._feed(rows, fed)
            choices = sample_batch(samplers, logits[:, -1, :])
            for row, live in enumerate(members):
                live.unfed, live.unfed_hidden = (), None
                if live.keeps_row:
                    live.keeps_row, live.prompt_row = False, mx.array(logits[row, -1])
            new = [live.prompt_row for live in members if live.prompt_row is not None]
            if new:
                # They are about to be stored.
                rows.write_waiting()
            mx.async_eval(choices.arrays(), rows.arrays(), new)
        # If a recurrent state is about to be saved at the end of the prompt, a pass ahead would be undone at once.
        is_saved_next = not self._resumes_anywhere and any(live.prompt_row is not None for live in members)
        is_free = may_run_ahead and not any(drafts) and not is_saved_next and not choices.broken
        if is_free and self._may_run_ahead(rows) and all(sampler.can_sample_ahead(1) for sampler in samplers):
            rows.run_ahead(
                self.loaded.model,
                choices.tokens[:, None].astype(mx.int32),
                lambda logits: sample_batch(samplers, logits, num_pending=1),
            )
            assert rows.ahead is not None
            mx.async_eval(rows.ahead.choices.arrays(), rows.arrays())
        results = _results(members, choices)
        for result in results:
            # Where the next token is forced, a pass run ahead does not count.
            if isinstance(result, TokenFailure) or result.reason is not None or result.live.ready.forced() is not None:
                rows.step_back()
        return results

    def verify(
        self, lives: Sequence[LiveSequence], drafts: Sequence[Sequence[int]]
    ) -> list[TokenResult | TokenFailure]:
        """Verify a draft of each sequence in one pass: each gets the tokens that it would have sampled without one.

        Each position is sampled as usual, from logits given the tokens before it; the first token that differs from the
        draft is the last one taken. What was fed after it is undone, and so is what makes shorter lines as long as
        the longest.
        """
        rows = self._gather(lives)
        rows.step_back()
        by_live = {id(live): draft for live, draft in zip(lives, drafts, strict=True)}
        members = [owner for owner in rows.owners if isinstance(owner, LiveSequence)]
        fed = [[*live.unfed, live.pending] for live in members]
        lines = [[*known, *by_live[id(live)]] for live, known in zip(members, fed, strict=True)]
        num = max(map(len, lines))
        padded = np.array([[*line, *[line[-1]] * (num - len(line))] for line in lines], dtype=np.int32)
        logits = self._feed(rows, padded, may_be_undone=True)
        hidden = None if rows.hidden is None else rows.hidden.recent
        mx.async_eval(logits, rows.arrays())
        results: list[TokenResult | TokenFailure] = []
        undone: list[int] = []
        for row, (live, known) in enumerate(zip(members, fed, strict=True)):
            draft = by_live[id(live)]
            try:
                taken, reason = sample_along(live.ready, logits[row, len(known) - 1 : len(lines[row])], draft)
            except Exception as error:
                results.append(TokenFailure(live, error))
                undone.append(num)
                continue
            num_right = len(known) + len(taken) - 1
            live.unfed, live.unfed_hidden = (), None
            if num_right == num or self.loaded.blueprint.rewinds:
                undone.append(num - num_right)
            else:
                undone.append(num)
                live.unfed = tuple(lines[row][:num_right])
                # A copy: a slice would keep those of the whole pass.
                kept = None if hidden is None else hidden[row : row + 1, :num_right]
                live.unfed_hidden = None if kept is None else mx.contiguous(kept)
            live.pending = taken[-1].token
            results.append(TokenResult(live, tuple(taken), reason, num_drafted=len(draft)))
        self._undo(rows, undone)
        return results

    def guess(self, live: LiveSequence, num: int) -> list[int]:
        """`num` tokens that may follow the pending one of a sequence that decodes, by the model's head or companion.

        Each is chosen as the sequence's sampler would, with the same noise, so that both agree more often. The states
        stay as they are: the pass that verifies the tokens writes them.
        """
        model, rows = self.loaded.model, self._gather([live])
        rows.step_back()
        assert isinstance(model, GuessingModel), "nothing guesses for this model"
        fed = [*live.unfed, live.pending]
        request = GuessRequest(
            tokens=fed,
            num=num,
            choose=live.ready.guess,
            hidden=live.unfed_hidden,
            positions=rows.positions(len(fed) + num - 1),
        )
        guessed = model.guess(request, rows.caches)
        tokens = [int(token) for token in cast(list[int], guessed.tolist())]
        reach(Failpoint.GUESSED, live, tokens)
        return tokens

    def catch_up(self, lives: Sequence[LiveSequence]) -> None:
        """Feed the tokens that rejected drafts left unfed, so that the layers are at the answers' positions.

        Of a batch, as few at once as one of its rows has; rows that have none are fed as many and returned.
        """
        while behind := [live for live in lives if live.unfed]:
            rows = behind[0].rows
            rows.step_back()
            of_batch = [live for live in behind if live.rows is rows]
            num = min(len(live.unfed) for live in of_batch)
            fed = {id(live): live.unfed[:num] for live in of_batch}
            tokens = [fed.get(id(owner), (0,) * num) for owner in rows.owners]
            self._feed(rows, np.array(tokens, dtype=np.int32), may_be_undone=len(of_batch) < rows.num_rows)
            self._undo(rows, [0 if id(owner) in fed else num for owner in rows.owners])
            for live in of_batch:
                live.unfed, live.unfed_hidden = live.unfed[num:], None
            mx.eval(rows.arrays())

    def _may_run_ahead(self, rows: SequenceBatch) -> bool:
        context = self.loaded.context
        may = self._joins and self.loaded.may_run_ahead
        return may and (context is None or max(rows.lengths) < context)

    def _feed(
        self,
        rows: SequenceBatch,
        tokens: npt.NDArray[np.int32],
        *,
        may_be_undone: bool = False,
    ) -> mx.array:
        """One pass over tokens of shape ``(rows, n)``; gives logits ``(rows, n, vocabulary)``, lazy.

        `may_be_undone`: `_undo` follows.
        """
        rows.before = rows.save_recurrent() if may_be_undone else None
        logits = rows.forward(self.loaded.model, mx.array(tokens), self._inputs(rows, tokens))
        if not may_be_undone:
            rows.keep_last_pass()
        return logits

    def _inputs(self, rows: SequenceBatch, tokens: npt.NDArray[np.int32]) -> PassInputs | None:
        """What a pass is told beside its tokens; None if no placeholder is among them."""
        if tokens.min() >= 0:
            return None
        assert isinstance(self.loaded.model, SeeingModel), "ids below 0 reach no model"
        return inputs_of(self.loaded.model, rows, tokens, lambda image: self.features.find(image) or self.encode(image))

    def _advance(self, rows: SequenceBatch, tokens: npt.NDArray[np.int32]) -> None:
        """One pass whose logits nobody reads."""
        self._feed(rows, tokens)

    def _undo(self, rows: SequenceBatch, nums: Sequence[int]) -> None:
        """Undo the last tokens of the last pass, so many of each row; none: it stays as it is."""
        if any(nums):
            assert rows.before is not None, "who undoes a pass says so before it"
            rows.undo_last(nums, rows.before)
        rows.keep_last_pass()

    def _gather(self, lives: Sequence[LiveSequence]) -> SequenceBatch:
        """A batch of exactly these sequences: others are joined to the largest, and foreign rows split off."""
        wanted = {id(live) for live in lives}
        together = {id(live.rows): live.rows for live in lives}
        if len(together) == 1 and len(lives) == lives[0].rows.num_rows:
            return lives[0].rows
        parts: list[SequenceBatch] = []
        for rows in together.values():
            rows.step_back()
            strangers = [i for i, owner in enumerate(rows.owners) if id(owner) not in wanted]
            if not strangers:
                parts.append(rows)
                continue
            members = [i for i, owner in enumerate(rows.owners) if id(owner) in wanted]
            mine = rows.copy_rows(members)
            rows.keep_rows(strangers)
            parts.append(mine)
        base, *others = sorted(parts, key=lambda rows: rows.num_rows * max(rows.lengths), reverse=True)
        if others:
            base.join(others)
        for owner in base.owners:
            assert isinstance(owner, LiveSequence)
            owner.rows = base
        return base


def _results(lives: Sequence[LiveSequence], choices: SampledBatch) -> list[TokenResult | TokenFailure]:
    """Give each sequence its token, which is fed next."""
    results: list[TokenResult | TokenFailure] = []
    for live, taken in zip(lives, accept([live.ready for live in lives], choices), strict=True):
        if isinstance(taken, Exception):
            results.append(TokenFailure(live, taken))
            continue
        sampled, reason = taken
        live.pending = sampled.token
        results.append(TokenResult(live, (sampled,), reason))
    return results


NO_STATE = Footprint(by_kind={}, each={}, snapshot=0, logits=0)
"""Of an embedder."""


def quantised_footprint(model: nn.Module, plain: Footprint) -> Footprint | None:
    """The footprint with `--kv-bits 8`; None where that would take no less than `plain`, or not work."""
    try:
        quantised = footprint_of(model, blueprint_with_head(model, kv_bits=8))
    except Exception:
        # A model's code may raise anything when it gets a tuple instead of an array.
        return None
    return quantised if quantised.full < plain.full else None


def footprint_of(model: nn.Module, blueprint: Blueprint) -> Footprint:
    """Measured on the states of a sequence of two tokens: shapes follow from the model's code.

    Nothing is evaluated, so no weights are needed.
    """
    if not blueprint.specs:
        return NO_STATE
    rows = SequenceBatch(blueprint)
    logits = rows.forward(model, mx.array([[0, 0]]))
    if rows.hidden is not None:
        rows.forward(model, mx.array([[0]]))
    source = SequenceSource(rows, 0)
    layout = blueprint.layout
    by_kind = {kind: source.segment_nbytes(kind, 1) for kind in layout.kinds}
    return Footprint(
        by_kind=by_kind,
        each={kind: -(-nbytes // len(rows.layers(kind))) for kind, nbytes in by_kind.items()},
        snapshot=source.snapshot_nbytes() if layout.has_snapshots else 0,
        logits=logits.shape[-1] * logits.dtype.size,
        waiting=0 if rows.hidden is None else rows.hidden.waiting_nbytes,
    )
