"""A running or idle sequence, and segments of the prefix cache that are spans of its buffers.

Otherwise, a long conversation's KV would be held twice, by the cache and by the running sequence, and copied twice per
turn. So a long sequence shares: a commit takes a `SharedSegment` instead of a copy, and when its request ends the
sequence stays idle with its buffers. The next turn continues in them without a copy. Other requests copy the entries;
before any of them is evicted, an idle sequence is closed and the cache gets copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

import mlx.core as mx

from reprise.cache.payload import SegmentPayload, SharedPayload
from reprise.core.failpoints import Failpoint, reach
from reprise.core.images import PromptImage
from reprise.core.kinds import Full, KvKind
from reprise.core.tokens import Span
from reprise.engine.running.sampler import TokenSampler
from reprise.engine.running.score import PromptScorer
from reprise.engine.states.layers import KvLayer
from reprise.engine.states.payloads import EntryTransfer, PackedSegment, pack
from reprise.engine.states.restoration import Restoration
from reprise.engine.states.sequence_batch import SequenceBatch, SequenceSource


class SharedSegment(SharedPayload):
    """The entries of `span` (absolute positions) of one layer kind, in the buffers of a live sequence."""

    def __init__(self, live: LiveSequence, kind: KvKind, span: Span, nbytes_each: int) -> None:
        self._live = live
        self.kind = kind
        self.span = span
        self._nbytes_each = nbytes_each
        live.shared.add(self)

    @property
    def sequence(self) -> LiveSequence:
        return self._live

    @property
    def nbytes(self) -> int:
        return self._nbytes_each * len(self.span)

    @property
    def length(self) -> int:
        return len(self.span)

    def cut(self, start: int, stop: int) -> SharedSegment:
        at = self.span.start
        return SharedSegment(self._live, self.kind, Span(at + start, at + stop), self._nbytes_each)

    def join(self, others: Sequence[SegmentPayload]) -> SegmentPayload:
        # Only segments in the same buffers are joined: others would have to be copied.
        shared = [other for other in others if isinstance(other, SharedSegment) and other.sequence is self._live]
        assert len(shared) == len(others), self
        return SharedSegment(
            self._live, self.kind, Span(self.span.start, [self, *shared][-1].span.stop), self._nbytes_each
        )

    @property
    def dtypes(self) -> list[mx.Dtype]:
        return self._live.dtypes(self.kind)

    def words(self, start: int, stop: int, planes: range) -> list[mx.array]:
        """Like `PackedSegment.words`: views of the live buffers."""
        at = self.span.start
        return self._live.words(self.kind, Span(at + start, at + stop), planes)

    def owned(self) -> PackedSegment:
        """A copy that owns its bytes."""
        return self._live.copy(self.kind, self.span)


class LiveSequence:
    """One sequence: its row of a batch, its sampler, and what the cache shares of its buffers."""

    def __init__(self, rows: SequenceBatch) -> None:
        self.rows = rows
        rows.owners = [self]
        self.sampler: TokenSampler | None = None
        self.unfed: tuple[int, ...] = ()
        """Tokens before `pending` that the next pass takes with it: the last of its prompt, or accepted ones, since a
        rejected draft reset recurrent states to before them."""
        self.unfed_hidden: mx.array | None = None
        """The hidden states behind `unfed`, shape ``(1, n, width)``, for the model's head."""
        self.pending = 0
        """The token to feed next, after `unfed`, while decoding."""
        self.keeps_row = False
        """Whether the pass that samples its first token stores the logits in `prompt_row`."""
        self.prompt_row: mx.array | None = None
        """The logits after its prompt, shape ``(vocabulary,)``, until the cache has them."""
        self.scorer: PromptScorer | None = None
        """Collects the log-probabilities of the prompt if the job asks for them."""
        self.shared: WeakSet[SharedSegment] = WeakSet()
        self.restoration: Restoration | None = None
        """Set while its state is being restored; it cannot run until then."""
        self.moving: EntryTransfer | None = None
        """Full-attention entries moving into its buffers, those that have not arrived yet."""

    @property
    def row(self) -> int:
        return self.rows.owners.index(self)

    @property
    def position(self) -> int:
        return self.rows.lengths[self.row]

    @property
    def images(self) -> tuple[PromptImage, ...]:
        """The images of its prompt."""
        return self.rows.images[self.row]

    def see(self, images: Sequence[PromptImage]) -> None:
        """Continue with a prompt that has these images."""
        self.rows.images[self.row] = tuple(images)

    @property
    def ready(self) -> TokenSampler:
        """Its sampler, after `Runner.begin_decode`."""
        assert self.sampler is not None, "a sequence decodes after begin_decode"
        return self.sampler

    @property
    def shared_nbytes(self) -> int:
        """Bytes of its buffers that are charged to the prefix cache."""
        return sum(segment.nbytes for segment in self.shared)

    def num_planes(self, kind: KvKind) -> int:
        return len(self.dtypes(kind))

    def plane(self, kind: KvKind, index: int, span: Span) -> mx.array:
        """The entries of `span` in one of the planes of all layers of this kind; a view."""
        layer, at = self._find(kind, index)
        if layer.planes or self.moving is None:
            return layer.read(self.row, span)[at]
        return self.moving.plane(index, span)

    def dtypes(self, kind: KvKind) -> list[mx.Dtype]:
        """The dtype of each plane of all layers of this kind."""
        if self.moving is not None and isinstance(kind, Full):
            return list(self.moving.dtypes)
        return [plane.dtype for layer in self.rows.layers(kind) for plane in layer.planes]

    def words(self, kind: KvKind, span: Span, planes: range) -> list[mx.array]:
        """The entries of `span` in these of the planes of all layers of this kind, as words; views."""
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

    def copy_out(self, segments: Sequence[SharedSegment]) -> list[PackedSegment]:
        """Copies of everything that this idle sequence shares, in the order of `segments`; its buffers are freed.

        Plane by plane, freeing each buffer before copying the next, so that the entries are never held twice.
        """
        reach(Failpoint.COPY_OUT, self)
        copies: list[list[mx.array]] = [[] for _ in segments]
        for kind in {segment.kind for segment in segments}:
            for index in range(self.num_planes(kind)):
                for place, segment in enumerate(segments):
                    if segment.kind == kind:
                        copies[place].append(mx.array(self.plane(kind, index, segment.span)))
                mx.eval([planes[-1] for planes in copies if planes])
                self.drop_plane(kind, index)
        places = [tuple((index, 0) for index in range(len(planes))) for planes in copies]
        return [PackedSegment(tuple(planes), place) for planes, place in zip(copies, places, strict=True)]

    def drop_plane(self, kind: KvKind, index: int) -> None:
        """Free one buffer. The sequence can no longer run."""
        layer, at = self._find(kind, index)
        if layer.planes:
            layer.planes[at] = layer.planes[at][:, :, :0, :]
            mx.eval(layer.planes[at])
        elif self.moving is not None:
            self.moving.give_up(range(index, index + 1))

    def _find(self, kind: KvKind, index: int) -> tuple[KvLayer, int]:
        """The layer that has a plane, and the plane's index in the layer."""
        for layer in self.rows.layers(kind):
            if index < layer.num_planes:
                return layer, index
            index -= layer.num_planes
        raise AssertionError((kind, index))
