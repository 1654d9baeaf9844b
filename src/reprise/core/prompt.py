"""A rendered prompt: its tokens and the positions where its parts end."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from reprise.core.images import PromptImage, outside
from reprise.core.tokens import Span, Tokens, own_tokens


class BoundaryKind(StrEnum):
    """Why to store a checkpoint at a position, most useful first."""

    STABLE = "stable"
    """The next turn repeats everything before it."""
    SYSTEM = "system"
    """The end of the system prompt and the tool list, which chats share."""
    LAST_USER = "last-user"
    """The start of the last user message, where an edited message resumes."""
    EXPLICIT = "explicit"
    """Requested by the client (`cache_control`)."""
    BRANCH = "branch"
    """This prompt diverges here from another one, stored or running."""
    INTERVAL = "interval"
    """Every N tokens of a long prefill."""
    PROMPT_END = "prompt-end"
    """Before the last token of the prompt, or after it if its logits are kept: where an exact repeat resumes."""
    GENERATION_END = "generation-end"
    """The end of the answer."""


@dataclass(frozen=True, slots=True, order=True)
class Boundary:
    """A position where a part of the prompt ends, and the kind of part."""

    position: int
    kind: BoundaryKind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """The tokens of a request, shape ``(length,)``, with the boundaries found by its template, sorted.

    `images` in their order; where their placeholders stand, `tokens` has ids below zero (`core/images.py`).
    """

    tokens: Tokens
    boundaries: tuple[Boundary, ...] = ()
    images: tuple[PromptImage, ...] = ()

    def __post_init__(self) -> None:
        stops = [0, *(each.span.stop for each in self.images)]
        assert all(stop <= each.span.start for stop, each in zip(stops, self.images, strict=False)), self.images
        assert stops[-1] <= len(self.tokens), self.images
        assert all(0 <= b.position <= len(self.tokens) for b in self.boundaries), self.boundaries
        assert list(self.boundaries) == sorted(self.boundaries), self.boundaries

    def __len__(self) -> int:
        return len(self.tokens)

    def up_to(self, position: int, boundaries: Iterable[Boundary] | None = None) -> "Prompt":
        """Its first `position` tokens as a separate prompt, or fewer where that would cut an image.

        With its own boundaries up to there, or these.
        """
        end = outside(position, self.spans)
        kept = [b for b in (self.boundaries if boundaries is None else boundaries) if b.position <= end]
        images = tuple(each for each in self.images if each.span.stop <= end)
        return Prompt(tokens=own_tokens(self.tokens[:end]), boundaries=tuple(sorted(kept)), images=images)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Where its images stand."""
        return tuple(each.span for each in self.images)

    @property
    def stable_at(self) -> int | None:
        """The next turn repeats everything before this position; None if not known."""
        return max((b.position for b in self.boundaries if b.kind is BoundaryKind.STABLE), default=None)
