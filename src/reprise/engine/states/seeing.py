"""What passes of a model that sees are told beside tokens: where their tokens stand, and what images look like.

Where tokens stand is a function of the prompt's images (`reprise.core.images.grid_positions`) and given in every pass,
so that no model has to remember it. What an image looks like to the model are rows, one for each of its placeholders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx import nn

from reprise.chat.text_model import TextModel
from reprise.core.images import ImageFile, ImageReader
from reprise.core.kinds import KvKind
from reprise.core.tokens import Span


class Positions(StrEnum):
    """How a model knows where the tokens of a pass stand."""

    OWN = "own"
    """It asks its layer states."""
    INDEX = "index"
    """Every pass says it, in three axes with the same numbers."""
    GRID = "grid"
    """Every pass says it, in three axes that differ in images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """Facts of a model that sees.

    `source`: what runs it ("mlx-vlm 0.7.10"). `both_ways`: the kinds of layers in which the placeholders of an image
    see each other both ways. `files`: a digest of the files from which its processor was made. `row_nbytes`: of the
    features of a placeholder, as a trial found.
    """

    source: str
    positions: Positions
    both_ways: frozenset[type[KvKind]] = frozenset()
    files: str = ""
    row_nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedImage:
    """An image as a model's processor leaves it: `inputs` by name, the tokens among them.

    `first`: where in these tokens the image's run begins. `places`: where in the run the placeholders stand.
    """

    inputs: Mapping[str, Any]
    first: int
    places: npt.NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        return sum(int(getattr(each, "nbytes", 0)) for each in self.inputs.values())


class PreparingReader(ImageReader, Protocol):
    """The image side of a model, as the engine sees it."""

    def prepare(self, image: ImageFile) -> PreparedImage:
        """The image as the tower takes it. Raises BadRequest for a file that cannot be decoded."""
        ...

    def forget_prepared(self) -> None:
        """Drop what was prepared of images that nobody has encoded: they are prepared again if they are needed."""
        ...

    def for_template_of(self, text: TextModel) -> ImageReader | None:
        """The same for another template of the model; None if that has no place for images."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Vision:
    """What a loaded model that sees has beside its layers: facts, and what reads images for it."""

    sight: Sight
    reader: PreparingReader


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageFeatures:
    """What the tower makes of an image.

    `rows`: shape ``(placeholders, width)``, in place of token embeddings. `deep`: for each of the first layers, rows
    that are added behind it. `places`: where in the image's run of tokens the placeholders stand.
    """

    rows: mx.array
    deep: tuple[mx.array, ...]
    places: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        assert all(len(each) == len(self.places) for each in (self.rows, *self.deep)), self

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.rows, *self.deep))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Embedded:
    """Tokens as a model embeds them, shape ``(rows, n, width)``; `per_layer`: what some have for each layer beside."""

    embeds: mx.array
    per_layer: mx.array | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassInputs:
    """A pass with images in it.

    `is_placeholder`: shape ``(rows, n)``. `deep`: for each of the first layers, the rows of all placeholders in their
    order. `blocks`: of each row, the positions whose placeholders are neighbours.
    """

    embedded: Embedded
    is_placeholder: npt.NDArray[np.bool_]
    deep: tuple[mx.array, ...]
    blocks: Sequence[Sequence[Span]]


class SeeingModel(nn.Module):
    """A model that sees, from whatever source. Its parameters include the tower's."""

    sight: Sight

    def make_cache(self) -> list[Any]:
        """Caches of its language model, by which its layers are recognised."""
        raise NotImplementedError

    def embed(self, tokens: mx.array) -> Embedded:
        """Embed tokens; ids below zero are placeholders, whose embeddings nobody uses."""
        raise NotImplementedError

    def encode(self, prepared: PreparedImage) -> ImageFeatures:
        """What an image looks like, evaluated."""
        raise NotImplementedError

    def __call__(
        self, tokens: mx.array, *, cache: list[Any], positions: mx.array | None = None, inputs: PassInputs | None = None
    ) -> mx.array:
        """The logits of a pass. `positions`: shape ``(3, rows, n)``, None if it knows them by itself."""
        raise NotImplementedError

    def with_hidden(
        self, tokens: mx.array, *, cache: list[Any], positions: mx.array | None = None, inputs: PassInputs | None = None
    ) -> tuple[mx.array, mx.array]:
        """A pass, as above: its logits, and its hidden states behind the last norm, shape ``(rows, n, width)``."""
        raise NotImplementedError

    def logits(self, hidden: mx.array) -> mx.array:
        """The output for hidden states behind the last norm."""
        raise NotImplementedError

    def head_layers(self, changes: Mapping[str, Any]) -> list[nn.Module]:
        """The layers of its language model under a changed configuration, for a head. Raises LoadFailed."""
        raise NotImplementedError
