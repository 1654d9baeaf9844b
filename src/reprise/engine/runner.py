"""Runs the model: sequences in, tokens out. The loop's only way to MLX; every call is made on the engine thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

import mlx.core as mx
import numpy as np

from reprise.cache.payload import SegmentPayload, Source
from reprise.cache.store import Restore
from reprise.core.events import FinishReason, Sampled
from reprise.core.job import Job
from reprise.core.kinds import Full, KvKind
from reprise.core.spans import Span
from reprise.core.tokens import Tokens
from reprise.engine.decode import Choice, Decoder
from reprise.engine.load import LoadedModel
from reprise.engine.loans import Loan
from reprise.engine.payloads import Segment
from reprise.engine.rows import Rows, RowSource

LENDS_FROM = 4096
"""Shorter sequences are copied: that is quick, and their room to grow would weigh more than what lending saves."""

_SPARE = 512
"""Room to grow, beside a sixteenth of the length, with which a sequence is still worth parking as it is."""


class Live:
    """One running sequence: its rows, what it decodes with, and what it lends to the prefix cache."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        rows.owners = [self]
        self.decoder: Decoder | None = None
        self.pending = 0
        """The token that is fed next, while decoding."""
        self.loans: WeakSet[Loan] = WeakSet()

    @property
    def row(self) -> int:
        return next(i for i, owner in enumerate(self.rows.owners) if owner is self)

    @property
    def position(self) -> int:
        return self.rows.lengths[self.row]

    @property
    def lent_nbytes(self) -> int:
        """What of its buffers is counted by the prefix cache."""
        return sum(loan.nbytes for loan in self.loans)

    def num_planes(self, kind: KvKind) -> int:
        return sum(len(layer.planes) for layer in self.rows.layers(kind))

    def plane(self, kind: KvKind, index: int, span: Span) -> mx.array:
        """The entries of `span` in one plane of all layers of this kind; a view."""
        for layer in self.rows.layers(kind):
            if index < len(layer.planes):
                return layer.read(self.row, span)[index]
            index -= len(layer.planes)
        raise AssertionError((kind, index))

    def copy(self, kind: KvKind, span: Span) -> Segment:
        return RowSource(self.rows, self.row).segment(kind, span)

    def drop_plane(self, kind: KvKind, index: int) -> None:
        """Give up one buffer. The sequence cannot run any more."""
        for layer in self.rows.layers(kind):
            if index < len(layer.planes):
                layer.planes[index] = layer.planes[index][:, :, :0, :]
                mx.eval(layer.planes[index])
                return
            index -= len(layer.planes)


@dataclass(frozen=True, slots=True)
class _LendingSource(RowSource):
    """A source that lends full-attention entries instead of copying them."""

    live: Live

    def segment(self, kind: KvKind, span: Span) -> SegmentPayload:
        if isinstance(kind, Full):
            return Loan(self.live, kind, span, self.segment_nbytes(kind, 1))
        return RowSource.segment(self, kind, span)


@dataclass(frozen=True, slots=True)
class Picked:
    """A sequence got its next token; `reason` is set if it was the last."""

    live: Live
    sampled: Sampled
    reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Broken:
    """Choosing a token raised for this sequence; the others of its group have theirs."""

    live: Live
    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The bytes of a model's layer state: by kind for one position, and of one snapshot."""

    by_kind: dict[KvKind, int]
    snapshot: int

    @property
    def full(self) -> int:
        """Bytes for each further position of a long sequence."""
        return sum(nbytes for kind, nbytes in self.by_kind.items() if isinstance(kind, Full))

    def at(self, position: int) -> int:
        """Bytes of a sequence that stands at `position`."""
        entries = sum(nbytes * sum(map(len, kind.needs(position))) for kind, nbytes in self.by_kind.items())
        return entries + self.snapshot

    @property
    def checkpoint(self) -> int:
        """Bytes that one more resumable position takes, far from any other."""
        windows = sum(nbytes * kind.size for kind, nbytes in self.by_kind.items() if not isinstance(kind, Full))
        return windows + self.snapshot


class Runner:
    """A loaded model and the sequences that run on it."""

    def __init__(self, loaded: LoadedModel, *, can_batch: bool, lends_from: int = LENDS_FROM) -> None:
        """Sequences of `lends_from` positions and more lend to the prefix cache instead of being copied."""
        self.loaded = loaded
        self.can_batch = can_batch and loaded.blueprint.joins
        self.footprint = _footprint(loaded)
        self._lends_from = lends_from
        self._lives: list[Live] = []

    @property
    def live_nbytes(self) -> int:
        """The bytes of all live and parked sequences, room to grow included, less what the cache counts."""
        distinct = {id(live.rows): live.rows for live in self._lives}
        return sum(rows.nbytes for rows in distinct.values()) - sum(live.lent_nbytes for live in self._lives)

    def start(self, restore: Restore, *, reserve: int) -> Live:
        """A sequence that stands where `restore` says and will grow to about `reserve` positions."""
        live = Live(Rows.restored(self.loaded.blueprint, restore, reserve=reserve))
        self._lives.append(live)
        return live

    def stop(self, live: Live) -> None:
        """The sequence is over; its state is given up."""
        self._lives.remove(live)
        rows = live.rows
        rest = [i for i, owner in enumerate(rows.owners) if owner is not live]
        if rest:
            rows.keep_rows(rest)
            mx.eval(rows.arrays())

    def drop(self, live: Live) -> None:
        """The sequence broke in the middle of a pass with all of its group: nothing of it can be used."""
        self._lives.remove(live)

    def source(self, live: Live) -> Source:
        """The sequence as a source for commits: a long one lends, a short one is copied."""
        if live.position >= self._lends_from:
            return _LendingSource(live.rows, live.row, live)
        return RowSource(live.rows, live.row)

    def can_park(self, live: Live) -> bool:
        """Whether the sequence has buffers of its own, most of which the cache counts."""
        if live.rows.num_rows > 1 or len(live.loans) == 0:
            return False
        full = [layer for layer in live.rows.layers(Full()) if layer.planes]
        return all(layer.planes[0].shape[2] - n <= n // 16 + _SPARE for layer in full for n in layer.lengths)

    def park(self, live: Live) -> None:
        """The sequence has ended, and keeps its buffers for what the cache has on loan, or for its next turn."""
        live.decoder = None

    def adopt(self, live: Live, restore: Restore, *, reserve: int) -> None:
        """A parked sequence goes on, from where `restore` says. Nothing of it is lent behind that position."""
        live.rows.reserve(reserve)
        live.rows.rewind(restore)

    def prefill(self, lives: Sequence[Live], chunks: Sequence[Tokens]) -> tuple[()]:
        """Feed each sequence its chunk; the chunks have one length. Returns when it is computed: nobody has a token."""
        rows = self._gather(lives)
        order = {id(live): chunk for live, chunk in zip(lives, chunks, strict=True)}
        tokens = np.stack([order[id(owner)] for owner in rows.owners])
        rows.forward(self.loaded.model, mx.array(tokens))
        mx.eval(rows.arrays())
        return ()

    def begin_decode(self, live: Live, job: Job) -> None:
        """The sequence stands before its last prompt token, which starts the decode. Raises BadRequest."""
        live.decoder = Decoder(job, vocab_size=self.loaded.vocab_size)
        live.pending = int(job.prompt.tokens[-1])

    def decode(self, lives: Sequence[Live]) -> list[Picked | Broken]:
        """One pass over these sequences: each gets a token, or breaks alone."""
        rows = self._gather(lives)
        members = [owner for owner in rows.owners if isinstance(owner, Live)]
        logits = rows.forward(self.loaded.model, mx.array([[live.pending] for live in members]))[:, -1, :]
        choices, broken = _choose(members, logits)
        arrays = [a for choice in choices.values() for a in (choice.token, choice.logprobs)]
        mx.eval(arrays, rows.arrays())
        results: list[Picked | Broken] = list(broken)
        for live, choice in choices.items():
            results.append(_accept(live, choice))
        return results

    def _gather(self, lives: Sequence[Live]) -> Rows:
        """Rows of exactly these sequences: those that are together already stay, others join, strangers leave."""
        wanted = {id(live) for live in lives}
        parts: list[Rows] = []
        for rows in {id(live.rows): live.rows for live in lives}.values():
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
            assert isinstance(owner, Live)
            owner.rows = base
        return base


def _choose(members: Sequence[Live], logits: mx.array) -> tuple[dict[Live, Choice], list[Broken]]:
    choices: dict[Live, Choice] = {}
    broken: list[Broken] = []
    plain = [live for live in members if live.decoder is not None and live.decoder.is_plain]
    greedy = mx.argmax(logits, axis=-1) if plain else None
    for i, live in enumerate(members):
        assert live.decoder is not None, "a sequence decodes after begin_decode"
        try:
            forced = live.decoder.forced()
            if greedy is not None and live.decoder.is_plain:
                token = greedy[i] if forced is None else mx.array(forced)
                choices[live] = Choice(token, logits[i])
                continue
            choice = live.decoder.choose(logits[i])
            choices[live] = choice if forced is None else Choice(mx.array(forced), choice.logprobs)
        except Exception as error:
            broken.append(Broken(live, error))
    return choices, broken


def _accept(live: Live, choice: Choice) -> Picked | Broken:
    decoder = live.decoder
    assert decoder is not None
    try:
        token = int(choice.token.item())
        wants_logprobs = decoder.job.sampling.logprobs is not None
        logprobs = np.array(choice.logprobs) if wants_logprobs else None
        sampled, reason = decoder.accept(token, logprobs)
    except Exception as error:
        return Broken(live, error)
    live.pending = token
    return Picked(live, sampled, reason)


def _footprint(loaded: LoadedModel) -> Footprint:
    """Measured on a sequence of two tokens: shapes follow from the model's code, not from its configuration."""
    rows = Rows(loaded.blueprint)
    rows.forward(loaded.model, mx.array([[0, 0]]))
    mx.eval(rows.arrays())
    source = RowSource(rows, 0)
    layout = loaded.blueprint.layout
    return Footprint(
        by_kind={kind: source.segment_nbytes(kind, 1) for kind in layout.kinds},
        snapshot=source.snapshot_nbytes() if layout.has_snapshots else 0,
    )
