"""Runs the model: sequences in, tokens out. The loop's only way to MLX; every call is made on the engine thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx import nn

from reprise.cache.lookup import Restore
from reprise.cache.payload import LogitsRow, SegmentPayload, Source
from reprise.core.events import FinishReason, Sampled
from reprise.core.job import Job
from reprise.core.kinds import Full, KvKind
from reprise.core.tokens import Span, Tokens
from reprise.engine.batching import TOKEN_BY_TOKEN
from reprise.engine.blueprint import Blueprint
from reprise.engine.growth import growth, most_entries
from reprise.engine.layers import KvLayer
from reprise.engine.load import LoadedModel
from reprise.engine.payloads import MovingEntries, PackedSegment, pack
from reprise.engine.restoration import COPIED_AT_ONCE, Restoration
from reprise.engine.sample_batch import Choices, accept, sample_along, sample_batch
from reprise.engine.score import SCORED_AT_ONCE, PromptScorer
from reprise.engine.sequence_batch import SequenceBatch, SequenceSource
from reprise.engine.shared_segment import SharedSegment
from reprise.engine.token_sampler import TokenSampler

SHARES_FROM = 4096
"""Shorter sequences are copied: that is quick, and their room to grow would weigh more than what sharing saves."""

_SPARE = 512
"""Room to grow, beside a sixteenth of the length, with which a sequence is still worth parking as it is."""


class LiveSequence:
    """One running sequence: its row of a batch, what it samples with, and what the cache shares of its buffers."""

    def __init__(self, rows: SequenceBatch) -> None:
        self.rows = rows
        rows.owners = [self]
        self.sampler: TokenSampler | None = None
        self.unfed: tuple[int, ...] = ()
        """Accepted tokens that the layers have not seen: a rejected draft took recurrent states back before them."""
        self.pending = 0
        """The token that is fed next, behind those, while decoding."""
        self.keeps_row = False
        """Whether the pass that samples its first token keeps the logits in `prompt_row`."""
        self.prompt_row: mx.array | None = None
        """The logits behind its prompt, shape ``(vocabulary,)``, until the cache has them."""
        self.scorer: PromptScorer | None = None
        """Who takes the log-probabilities of the prompt, where a job wants them."""
        self.shared: WeakSet[SharedSegment] = WeakSet()
        self.restoration: Restoration | None = None
        """What of its position it lacks still: it cannot run before."""
        self.moving: MovingEntries | None = None
        """The entries of full attention that it takes over, as far as its buffers do not have them yet."""

    @property
    def row(self) -> int:
        return next(i for i, owner in enumerate(self.rows.owners) if owner is self)

    @property
    def position(self) -> int:
        return self.rows.lengths[self.row]

    @property
    def ready(self) -> TokenSampler:
        """What it decodes with, after `Runner.begin_decode`."""
        assert self.sampler is not None, "a sequence decodes after begin_decode"
        return self.sampler

    @property
    def shared_nbytes(self) -> int:
        """What of its buffers is counted by the prefix cache."""
        return sum(segment.nbytes for segment in self.shared)

    def num_planes(self, kind: KvKind) -> int:
        return len(self.dtypes(kind))

    def plane(self, kind: KvKind, index: int, span: Span) -> mx.array:
        """The entries of `span` in one plane of all layers of this kind; a view."""
        layer, at = self._find(kind, index)
        if layer.planes or self.moving is None:
            return layer.read(self.row, span)[at]
        return self.moving.plane(index, span)

    def dtypes(self, kind: KvKind) -> list[mx.Dtype]:
        """The type of each plane of all layers of this kind."""
        if self.moving is not None and isinstance(kind, Full):
            return list(self.moving.dtypes)
        return [plane.dtype for layer in self.rows.layers(kind) for plane in layer.planes]

    def words(self, kind: KvKind, span: Span, planes: range) -> list[mx.array]:
        """The entries of `span` in these planes, of all that the layers of this kind have, as words; views."""
        found: list[mx.array] = []
        at = 0
        for layer in self.rows.layers(kind):
            wanted = range(max(planes.start, at), min(planes.stop, at + layer.num_planes))
            if len(wanted) > 0 and not layer.planes and self.moving is not None:
                found += self.moving.words(span, wanted)
            elif len(wanted) > 0:
                found += layer.words(self.row, span)[wanted.start - at : wanted.stop - at]
            at += layer.num_planes
        return found

    def copy(self, kind: KvKind, span: Span) -> PackedSegment:
        """A copy of the entries of `span`."""
        if self.moving is None or not isinstance(kind, Full):
            return SequenceSource(self.rows, self.row).copy(kind, span)
        return pack([self.plane(kind, index, span) for index in range(self.num_planes(kind))])

    def drop_plane(self, kind: KvKind, index: int) -> None:
        """Give up one buffer. The sequence cannot run any more."""
        layer, at = self._find(kind, index)
        if layer.planes:
            layer.planes[at] = layer.planes[at][:, :, :0, :]
            mx.eval(layer.planes[at])
        elif self.moving is not None:
            self.moving.give_up(range(index, index + 1))

    def _find(self, kind: KvKind, index: int) -> tuple[KvLayer, int]:
        """The layer that has a plane, and which one it is there."""
        for layer in self.rows.layers(kind):
            if index < layer.num_planes:
                return layer, index
            index -= layer.num_planes
        raise AssertionError((kind, index))


@dataclass(frozen=True, slots=True)
class _SharingSource(SequenceSource):
    """A source that shares full-attention entries instead of copying them."""

    live: LiveSequence

    def segment_nbytes(self, kind: KvKind, length: int) -> int:
        # Takes no room: what is counted for the cache is not counted as the sequence's own any more.
        return 0 if isinstance(kind, Full) else SequenceSource.segment_nbytes(self, kind, length)

    def segment(self, kind: KvKind, span: Span) -> SegmentPayload:
        if isinstance(kind, Full):
            return SharedSegment(self.live, kind, span, SequenceSource.segment_nbytes(self, kind, 1))
        return self.copy(kind, span)


@dataclass(frozen=True, slots=True)
class TokenResult:
    """A sequence got its next token, or several where a draft was right; `reason` is set if the last one ends it."""

    live: LiveSequence
    sampled: tuple[Sampled, ...]
    reason: FinishReason | None
    num_fed: int = 1
    """Tokens that the pass took of this sequence, a draft left out."""
    num_drafted: int = 0


@dataclass(frozen=True, slots=True)
class TokenFailure:
    """Choosing a token raised for this sequence; the others of its group have theirs."""

    live: LiveSequence
    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The bytes of a model's layer state: by kind for one position, of one snapshot, and of one row of logits."""

    by_kind: dict[KvKind, int]
    each: dict[KvKind, int]
    """Of one layer of the kind, on average."""
    snapshot: int
    logits: int

    @property
    def full(self) -> int:
        """Bytes for each further position of a long sequence."""
        return sum(nbytes for kind, nbytes in self.by_kind.items() if isinstance(kind, Full))

    def at(self, position: int) -> int:
        """Bytes of a sequence that stands at `position`."""
        entries = sum(nbytes * sum(map(len, kind.needs(position))) for kind, nbytes in self.by_kind.items())
        return entries + self.snapshot

    def live(self, position: int, *, chunk: int) -> int:
        """The most bytes of the buffers of a running sequence that has come to `position` in chunks of `chunk`.

        That is with the states from before a pass that was run ahead.
        """
        entries = sum(nbytes * most_entries(kind, position, chunk) for kind, nbytes in self.by_kind.items())
        return entries + 2 * self.snapshot

    @property
    def checkpoint(self) -> int:
        """Bytes that one more resumable position takes, far from any other."""
        windows = sum(nbytes * kind.size for kind, nbytes in self.by_kind.items() if not isinstance(kind, Full))
        return windows + self.snapshot


class Runner:
    """A loaded model and the sequences that run on it."""

    def __init__(self, loaded: LoadedModel, *, can_batch: bool, shares_from: int = SHARES_FROM) -> None:
        """Sequences of `shares_from` positions and more share their buffers with the prefix cache."""
        self.loaded = loaded
        self.can_batch = can_batch and loaded.blueprint.joins
        self.footprint = footprint_of(loaded.model, loaded.blueprint)
        self.shares_from = shares_from
        self._resumes_anywhere = loaded.blueprint.layout.resumes_anywhere
        self._lives: list[LiveSequence] = []

    @property
    def num_sequences(self) -> int:
        """Running and idle ones."""
        return len(self._lives)

    @property
    def can_verify(self) -> bool:
        """Whether a pass over several tokens is right for this model, and can be undone."""
        return self.loaded.blueprint.forgets and self.loaded.architecture not in TOKEN_BY_TOKEN

    @property
    def live_nbytes(self) -> int:
        """The bytes of all running and idle sequences, room to grow included, less what the cache counts."""
        distinct = {id(live.rows): live.rows for live in self._lives}
        logits = sum(live.prompt_row.nbytes for live in self._lives if live.prompt_row is not None)
        shared = sum(live.shared_nbytes for live in self._lives)
        coming = sum(live.restoration.nbytes for live in self._lives if live.restoration is not None)
        moving = sum(live.moving.nbytes for live in self._lives if live.moving is not None)
        return sum(rows.nbytes for rows in distinct.values()) + logits + coming + moving - shared

    def growth(self, lives: Sequence[LiveSequence], num: int) -> int:
        """Bytes by which the buffers will grow when these sequences are fed `num` tokens each, together."""
        parts = {id(live.rows): live.rows for live in lives}
        fresh = sum(self.footprint.snapshot for live in lives if live.position == 0)
        return fresh + growth(parts, frozenset(map(id, lives)), num, self.footprint.each)

    def growth_to_decode(self, lives: Sequence[LiveSequence], num: int = 2) -> int:
        """The same for one pass of `decode`, which may run another one ahead and keeps the states from before it.

        For `verify`, `num` is how many tokens it feeds.
        """
        kept = sum(self.footprint.snapshot for live in lives if live.rows.ahead is None)
        kept += sum(self.footprint.logits for live in lives if live.keeps_row)
        return kept + self.growth(lives, num)

    def start(self, restore: Restore, *, reserve: int) -> LiveSequence:
        """A sequence that stands where `restore` says and will grow to about `reserve` positions."""
        live = self.begin()
        try:
            self.begin_restore(live, restore.position, reserve=reserve)
            while live.restoration is not None:
                self.restore_part(live, restore)
        except Exception:
            self.drop(live)
            raise
        return live

    def begin(self) -> LiveSequence:
        """A sequence that holds nothing yet, to be filled."""
        live = LiveSequence(SequenceBatch(self.loaded.blueprint))
        self._lives.append(live)
        return live

    def begin_restore(self, live: LiveSequence, position: int, *, reserve: int, keeps_full: bool = False) -> None:
        """Put a sequence at `position`, where it can run when `restore_part` has copied all that it lacks there.

        `keeps_full`: it comes from further on, so that it has the entries of full attention. Nothing of it is shared
        behind that position.
        """
        live.rows.reserve(reserve)
        restoration = Restoration(live.rows, position, keeps_full=keeps_full)
        live.restoration = None if restoration.is_over else restoration

    def begin_move(self, live: LiveSequence, segments: Sequence[tuple[Span, PackedSegment]]) -> list[SharedSegment]:
        """Have a restoring sequence take over these segments of full attention, which nobody else is to hold.

        Gives what the cache has in their places from now on; `restore_part` does the work.
        """
        assert live.restoration is not None and live.moving is None, live
        live.moving = MovingEntries(segments)
        return [SharedSegment(live, Full(), span, self.footprint.full) for span, _ in segments]

    def restore_part(self, live: LiveSequence, restore: Restore, *, at_most: int = COPIED_AT_ONCE) -> int:
        """Copy the next pieces of `restore`: see `Restoration.advance`. Gives the bytes."""
        assert live.restoration is not None, live
        if live.moving is not None and live.moving.is_packed:
            return live.moving.unpack(at_most=at_most)
        if live.moving is None:
            nbytes = live.restoration.advance(restore, at_most=at_most)
        else:
            # What is evaluated together is held twice.
            nbytes = live.restoration.advance(restore, at_most=at_most, num_pieces=1)
            live.moving.give_up(range(live.restoration.num_full_planes))
        if live.restoration.is_over:
            live.restoration = live.moving = None
        return nbytes

    def share(self, live: LiveSequence, kind: KvKind, span: Span) -> SharedSegment:
        """The entries of `span`, which the sequence holds or is about to be filled with, as a shared segment."""
        return SharedSegment(live, kind, span, self.footprint.by_kind[kind])

    def stop(self, live: LiveSequence) -> None:
        """The sequence is over; its state is given up."""
        rows = live.rows
        rows.step_back()
        rest = [i for i, owner in enumerate(rows.owners) if owner is not live]
        self.drop(live)
        if rest:
            rows.keep_rows(rest)
            mx.eval(rows.arrays())

    def drop(self, live: LiveSequence) -> None:
        """Nothing of the sequence can be used, or it is given up already: forget it."""
        self._lives = [other for other in self._lives if other is not live]
        # Batches and sequences refer to each other: buffers are to go now, and not when Python finds the circle.
        live.rows.owners = [None if owner is live else owner for owner in live.rows.owners]

    def source(self, live: LiveSequence, *, shares: bool = False) -> Source:
        """The sequence as a source for commits: copied, unless it is long or `shares`: then it shares its buffers."""
        live.rows.step_back()
        if shares or live.position >= self.shares_from:
            return _SharingSource(live.rows, live.row, live)
        return SequenceSource(live.rows, live.row)

    def is_worth_keeping(self, live: LiveSequence) -> bool:
        """Whether the sequence has buffers of its own, most of which the cache counts."""
        if live.rows.num_rows > 1 or len(live.shared) == 0:
            return False
        # Room to grow, and what was computed but is not in the cache: nobody else can have it meanwhile.
        shared = live.shared_nbytes // self.footprint.full
        full = [layer for layer in live.rows.layers(Full()) if layer.planes]
        return all(layer.planes[0].shape[2] - shared <= shared // 16 + _SPARE for layer in full)

    def keep_idle(self, live: LiveSequence) -> None:
        """The sequence has ended, and keeps its buffers for what the cache shares, and for its next turn."""
        live.rows.step_back()
        # What it lacks of other layers than full attention is made anew in any case when it is reopened.
        live.sampler = live.prompt_row = live.restoration = None

    def pause(self, live: LiveSequence) -> TokenSampler | None:
        """What the sequence decodes with, for `go_on`; None if it does not decode yet. It is to be stopped then."""
        sampler, live.sampler = live.sampler, None
        return sampler

    def resume_decode(self, live: LiveSequence, sampler: TokenSampler, *, pending: int) -> None:
        """The sequence stands where a paused one did, before the token `pending`, and decodes with what that had."""
        live.sampler, live.pending = sampler, pending

    def prefill(self, lives: Sequence[LiveSequence], chunks: Sequence[Tokens]) -> tuple[()]:
        """Feed each sequence its chunk; the chunks have one length. Returns when it is computed: nobody has a token."""
        rows = self._gather(lives)
        order = {id(live): chunk for live, chunk in zip(lives, chunks, strict=True)}
        tokens = np.stack([order[id(owner)] for owner in rows.owners])
        scorers = [owner.scorer if isinstance(owner, LiveSequence) else None for owner in rows.owners]
        if all(scorer is None for scorer in scorers):
            rows.forward(self.loaded.model, mx.array(tokens))
            mx.eval(rows.arrays())
            return ()
        # Logits of a whole chunk would take more memory than anything else: they are looked at a piece at a time.
        for start in range(0, tokens.shape[1], SCORED_AT_ONCE):
            positions = list(rows.lengths)
            logits = rows.forward(self.loaded.model, mx.array(tokens[:, start : start + SCORED_AT_ONCE]))
            for row, scorer in enumerate(scorers):
                if scorer is not None:
                    scorer.take(positions[row], logits[row])
            mx.eval(rows.arrays())
        return ()

    def logits(self, live: LiveSequence, chunk: Tokens) -> mx.array:
        """Feed a sequence that is alone its chunk; gives the logits behind each token, shape ``(n, vocabulary)``."""
        rows = self._gather([live])
        logits = rows.forward(self.loaded.model, mx.array(np.asarray(chunk)[None]))[0]
        mx.eval(logits, rows.arrays())
        return logits

    def begin_decode(self, live: LiveSequence, job: Job, *, keeps_row: bool = False, is_audited: bool = False) -> None:
        """The sequence stands before its last prompt token, which starts the decode. Raises BadRequest."""
        live.sampler = TokenSampler(job, vocab_size=self.loaded.vocab_size)
        live.sampler.is_audited = is_audited
        live.pending = int(job.prompt.tokens[-1])
        live.keeps_row = keeps_row

    def sample_from(
        self, live: LiveSequence, job: Job, row: LogitsRow, *, is_audited: bool = False
    ) -> TokenResult | TokenFailure:
        """The sequence stands behind its whole prompt, and `row` is what the model said there: its first token."""
        assert isinstance(row, mx.array) and live.position == len(job.prompt), (live.position, len(job.prompt))
        self.begin_decode(live, job, is_audited=is_audited)
        (result,) = _results([live], sample_batch([live.ready], row[None]))
        return result

    def decode(self, lives: Sequence[LiveSequence], *, draft: Sequence[int] = ()) -> list[TokenResult | TokenFailure]:
        """One pass over these sequences: each gets a token, or breaks alone.

        Where nobody has to look at a token before the one after it, the next pass is begun before this one's tokens
        are read, so that the device does not wait for us.

        `draft`: what one sequence that decodes alone may go on with. It is verified, and the sequence gets as many
        tokens as are right. Where its next token was chosen ahead already, that is taken, and nothing more is.
        """
        if len(lives) == 1 and lives[0].rows.ahead is None and (draft or lives[0].unfed):
            return [self.verify(lives[0], draft)]
        for live in lives:
            self.catch_up(live)
        rows = self._gather(lives)
        members = [owner for owner in rows.owners if isinstance(owner, LiveSequence)]
        samplers = [live.ready for live in members]
        choices = rows.take_ahead()
        if choices is None:
            logits = rows.forward(self.loaded.model, mx.array([[live.pending] for live in members]))
            choices = sample_batch(samplers, logits[:, -1, :])
            for row, live in enumerate(members):
                if live.keeps_row:
                    live.keeps_row, live.prompt_row = False, mx.array(logits[row, -1])
            new = [live.prompt_row for live in members if live.prompt_row is not None]
            mx.async_eval(choices.arrays(), rows.arrays(), new)
        # Where recurrent state is about to be saved behind the prompt, a pass ahead would be undone at once.
        is_saved_next = not self._resumes_anywhere and any(live.prompt_row is not None for live in members)
        may_run_ahead = not draft and not is_saved_next and not choices.broken and self._may_run_ahead(rows)
        if may_run_ahead and all(sampler.foresees(1) for sampler in samplers):
            rows.run_ahead(
                self.loaded.model,
                choices.tokens[:, None].astype(mx.int32),
                lambda logits: sample_batch(samplers, logits, num_pending=1),
            )
            assert rows.ahead is not None
            mx.async_eval(rows.ahead.choices.arrays(), rows.arrays())
        results = _results(members, choices)
        if any(
            isinstance(result, TokenFailure) or result.reason is not None or _is_forced(result) for result in results
        ):
            rows.step_back()
        return results

    def verify(self, live: LiveSequence, draft: Sequence[int]) -> TokenResult | TokenFailure:
        """One pass over a draft of what comes next: the sequence gets the tokens that it would have sampled without it.

        Each position is sampled as always, from logits that the tokens before it led to; the first token that is not
        the draft's is the last one taken. What was fed behind it is undone.
        """
        rows = self._gather([live])
        rows.step_back()
        fed = [*live.unfed, live.pending]
        tokens = [*fed, *draft]
        before = rows.save_recurrent()
        logits = rows.forward(self.loaded.model, mx.array([tokens]))[0, len(fed) - 1 :]
        mx.async_eval(logits, rows.arrays())
        try:
            taken, reason = sample_along(live.ready, logits, draft)
        except Exception as error:
            rows.forget_last(len(tokens), before)
            return TokenFailure(live, error)
        num_right = len(taken) - 1
        if num_right == len(draft):
            live.unfed = ()
        elif self.loaded.blueprint.rewinds:
            rows.forget_last(len(draft) - num_right, before)
            live.unfed = ()
        else:
            rows.forget_last(len(tokens), before)
            live.unfed = (*fed, *draft[:num_right])
        live.pending = taken[-1].token
        return TokenResult(live, tuple(taken), reason, num_fed=len(fed), num_drafted=len(draft))

    def exact_sizes(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Of these sizes of a pass, those whose logits equal single steps' to the last bit, on a short sequence."""
        tokens = np.arange(64 + max(sizes)) % self.loaded.vocab_size

        def logits(step: int) -> npt.NDArray[np.float32]:
            rows = SequenceBatch(self.loaded.blueprint)
            rows.forward(self.loaded.model, mx.array(tokens[None, :64]))
            starts = range(64, len(tokens), step)
            passes = [rows.forward(self.loaded.model, mx.array(tokens[None, at : at + step])) for at in starts]
            return np.array(mx.concatenate(passes, axis=1).astype(mx.float32))

        single = logits(1)
        return tuple(size for size in sizes if size == 1 or np.array_equal(logits(size), single))

    def catch_up(self, live: LiveSequence) -> None:
        """Feed what a rejected draft left behind, so that the layers stand where the answer does."""
        if live.unfed:
            live.rows.forward(self.loaded.model, mx.array([live.unfed]))
            live.unfed = ()
            mx.eval(live.rows.arrays())

    def _may_run_ahead(self, rows: SequenceBatch) -> bool:
        context = self.loaded.context
        return self.loaded.blueprint.joins and (context is None or max(rows.lengths) < context)

    def _gather(self, lives: Sequence[LiveSequence]) -> SequenceBatch:
        """A batch of exactly these sequences: those that are together already stay, others join, strangers leave."""
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


def _results(lives: Sequence[LiveSequence], choices: Choices) -> list[TokenResult | TokenFailure]:
    """Give each sequence its choice, which it feeds next."""
    results: list[TokenResult | TokenFailure] = []
    for live, taken in zip(lives, accept([live.ready for live in lives], choices), strict=True):
        if isinstance(taken, Exception):
            results.append(TokenFailure(live, taken))
            continue
        sampled, reason = taken
        live.pending = sampled.token
        results.append(TokenResult(live, (sampled,), reason))
    return results


def _is_forced(result: TokenResult) -> bool:
    """Whether the sequence's next token is given, and not that of a pass that was run ahead."""
    return result.live.ready.forced() is not None


def footprint_of(model: nn.Module, blueprint: Blueprint) -> Footprint:
    """Read off the states of a sequence of two tokens: shapes follow from the model's code, not from its configuration.

    They are known before anything is computed, so nothing is: the weights need not be there.
    """
    rows = SequenceBatch(blueprint)
    logits = rows.forward(model, mx.array([[0, 0]]))
    source = SequenceSource(rows, 0)
    layout = blueprint.layout
    by_kind = {kind: source.segment_nbytes(kind, 1) for kind in layout.kinds}
    return Footprint(
        by_kind=by_kind,
        each={kind: -(-nbytes // len(rows.layers(kind))) for kind, nbytes in by_kind.items()},
        snapshot=source.snapshot_nbytes() if layout.has_snapshots else 0,
        logits=logits.shape[-1] * logits.dtype.size,
    )
