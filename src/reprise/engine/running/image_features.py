"""What the tower made of images, kept by their digests, and what a pass over their placeholders is told.

Features can be computed again, so they are the first to go where memory is short. Those that a request holds stay until
it ends, as a part of what it was admitted with: if it is preempted or audited, its images are not encoded again. Only
where a request is alone and has no room do they go, but for those that it has still to be prefilled with.

While a tower runs it takes more than it leaves. It takes an image whole, so that, unlike a pass, it cannot be cut
where that does not fit: others make room, and an image that never fits is refused before it is encoded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import contextmanager

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from reprise.core.images import ImageFile, PromptImage
from reprise.core.pass_price import PassPrice, price_of_tower
from reprise.core.tokens import Span
from reprise.engine import memory as device_memory
from reprise.engine.states.seeing import Embedded, ImageFeatures, PassInputs, SeeingModel
from reprise.engine.states.sequence_batch import SequenceBatch
from reprise.memory import Account, Memory

MOST_KEPT_NBYTES = 256 << 20
"""Of features that no request needs."""


class FeatureCache:
    """Features by the digests of their images, least recently used first. Charged to `Account.IMAGES`."""

    def __init__(self, memory: Memory, *, most_nbytes: int = MOST_KEPT_NBYTES, row_nbytes: int = 0) -> None:
        """`row_nbytes`: of the features of a placeholder, as far as it is known."""
        self._memory = memory
        self._most_nbytes = most_nbytes
        self._kept: OrderedDict[bytes, ImageFeatures] = OrderedDict()
        self._holders: dict[bytes, set[str]] = {}
        self._row_nbytes = row_nbytes
        self.num_encoded = 0
        """Runs of the tower."""
        self.tower = PassPrice()
        """What a run takes at its peak beside the features, by placeholders."""
        self.pixels_per_row = 0
        """Of an image, for each of its placeholders; 0: unknown, or images of all sizes have as many."""

    @property
    def nbytes(self) -> int:
        return sum(features.nbytes for features in self._kept.values())

    def find(self, image: ImageFile, *, holder: str | None = None) -> ImageFeatures | None:
        """The features of an image, if they are kept; `holder`: the request that needs them."""
        features = self._kept.get(image.digest)
        if features is not None:
            self._kept.move_to_end(image.digest)
            self._hold(image, holder)
        return features

    def has(self, image: ImageFile) -> bool:
        """Whether the features of an image are kept."""
        return image.digest in self._kept

    @property
    def held_nbytes(self) -> int:
        """Bytes of what requests hold."""
        return sum(self._kept[digest].nbytes for digest in self._holders if digest in self._kept)

    def nbytes_to_hold(self, images: Iterable[PromptImage]) -> int:
        """Upper bound of what `held_nbytes` grows by if a request holds all of these, as far as sizes are known."""
        nums = {each.image.digest: len(each.span) for each in images}
        held = self._holders.keys() & self._kept.keys()
        return self._row_nbytes * sum(num for digest, num in nums.items() if digest not in held)

    def hold(self, images: Iterable[PromptImage], *, holder: str) -> None:
        """Keep what there is of these images for the request that needs them."""
        for each in images:
            self.find(each.image, holder=holder)

    def most_nbytes_of_one(self, spans: Iterable[Span]) -> int:
        """Upper bound of the features of the largest of these images, as far as their size is known."""
        return self._row_nbytes * max(map(len, spans), default=0)

    def tower_nbytes(self, num_rows: int) -> int:
        """What the tower takes of the budget at its peak for an image of `num_rows` placeholders."""
        return 0 if num_rows == 0 else self._memory.of_pass(self.tower.of(num_rows, 0))

    def make_room(self, num_rows: int) -> bool:
        """Reclaim memory to encode an image of `num_rows` placeholders. False if it does not fit."""
        return self._memory.reserve(num_rows * self._row_nbytes + self.tower_nbytes(num_rows))

    @contextmanager
    def running_tower(self, num_rows: int) -> Generator[None]:
        """Charge what the tower takes for an image of `num_rows` placeholders while it runs, and learn from it."""
        before = device_memory.watch_peak()
        with self._memory.charged_for_pass(self.tower.of(num_rows, 0)):
            yield
        reading = device_memory.read_peak(before)
        is_known = self.tower.expected(num_rows, 0) > 0
        # Features are made at the end of a run, so nothing but them has grown at its peak.
        first = price_of_tower({num_rows: reading.least})
        self.tower = self.tower.after_pass(num_rows, 0, reading) if is_known else first

    def keep(self, image: ImageFile, features: ImageFeatures, *, holder: str | None = None) -> None:
        """Keep what the tower has just made of an image."""
        self.num_encoded += 1
        self._row_nbytes = features.nbytes // len(features.places)
        self._drop(image.digest)
        self._kept[image.digest] = features
        self._memory.charge(Account.IMAGES, features.nbytes)
        self._hold(image, holder)
        self._trim()

    def let_go(self, holder: str) -> None:
        """A request has ended."""
        for digest in [digest for digest, holders in self._holders.items() if holder in holders]:
            self._holders[digest].discard(holder)
            if not self._holders[digest]:
                del self._holders[digest]
        self._trim()

    def release_one(self) -> bool:
        """Drop the least recently used features that no request needs. False if there are none."""
        free = next((digest for digest in self._kept if digest not in self._holders), None)
        if free is not None:
            self._drop(free)
        return free is not None

    def release_unneeded(self) -> None:
        """Drop all features that no request needs."""
        while self.release_one():
            pass

    def release_held(self, needed: Collection[ImageFile]) -> bool:
        """Drop features of a request's image that is none of `needed`: where nothing else is left to free."""
        digests = {image.digest for image in needed}
        free = next((digest for digest in self._kept if digest not in digests), None)
        if free is not None:
            self._drop(free)
        return free is not None

    def clear(self) -> None:
        """Drop all features."""
        for digest in list(self._kept):
            self._drop(digest)

    def check(self) -> None:
        """AssertionError unless the account is right."""
        self._memory.check({Account.IMAGES: self.nbytes})

    def _hold(self, image: ImageFile, holder: str | None) -> None:
        if holder is not None:
            self._holders.setdefault(image.digest, set()).add(holder)

    def _trim(self) -> None:
        free = [digest for digest in self._kept if digest not in self._holders]
        nbytes = sum(self._kept[digest].nbytes for digest in free)
        for digest in free:
            if nbytes <= self._most_nbytes:
                return
            nbytes -= self._kept[digest].nbytes
            self._drop(digest)

    def _drop(self, digest: bytes) -> None:
        features = self._kept.pop(digest, None)
        if features is not None:
            self._memory.charge(Account.IMAGES, -features.nbytes)


def inputs_of(
    model: SeeingModel,
    rows: SequenceBatch,
    tokens: npt.NDArray[np.int32],
    features_of: Callable[[ImageFile], ImageFeatures],
) -> PassInputs:
    """What a pass over `tokens`, shape ``(rows, n)``, is told where there are placeholders (ids below 0) among them."""
    embedded, num = model.embed(mx.array(tokens)), tokens.shape[1]
    embeds, deep = embedded.embeds, list[tuple[mx.array, ...]]()
    shown = np.zeros(tokens.shape, dtype=np.bool_)
    for row, (low, images) in enumerate(zip(rows.lengths, rows.images, strict=True)):
        for each in images:
            part = each.span.clip(low, low + num)
            if part is None:
                continue
            assert part == each.span or not rows.blueprint.whole_images, "a pass holds an image whole"
            features, start = features_of(each.image), each.span.start
            first, last = np.searchsorted(features.places, [part.start - start, part.stop - start]).tolist()
            at = features.places[first:last] + (start - low)
            embeds[row, mx.array(at)] = features.rows[first:last].astype(embeds.dtype)
            deep.append(tuple(layer[first:last] for layer in features.deep))
            shown[row, at] = True
    assert np.array_equal(shown, tokens < 0), "each placeholder is one of an image's, in its place"
    return PassInputs(
        embedded=Embedded(embeds=embeds, per_layer=embedded.per_layer),
        is_placeholder=shown,
        deep=tuple(mx.concatenate(layer) for layer in zip(*deep, strict=True)),
        blocks=[_runs(row, low) for row, low in zip(shown, rows.lengths, strict=True)],
    )


def _runs(is_placeholder: npt.NDArray[np.bool_], low: int) -> list[Span]:
    """Where placeholders are neighbours, counted from `low`."""
    edges = np.flatnonzero(np.diff(is_placeholder, prepend=False, append=False)) + low
    return [Span(start, stop) for start, stop in edges.reshape(-1, 2).tolist()]
