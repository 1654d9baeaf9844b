"""A rendered prompt: its tokens and the positions where its parts end."""

from dataclasses import dataclass
from enum import StrEnum

from reprise.core.tokens import Tokens


class BoundaryKind(StrEnum):
    """Why a position is worth a checkpoint. The order is the order of worth, best first."""

    STABLE = "stable"
    """What is before it survives the next turn."""
    SYSTEM = "system"
    """The system prompt and the tool list end here: shared by all chats."""
    LAST_USER = "last-user"
    """The last user message begins here: where a regenerate with an edit resumes."""
    EXPLICIT = "explicit"
    """The client asked for it (`cache_control`)."""
    BRANCH = "branch"
    """This prompt leaves another one here, stored or running."""
    INTERVAL = "interval"
    """Every N tokens of a long prefill."""
    PROMPT_END = "prompt-end"
    """All but the last token of the prompt, and all of it where its logits are kept: where an exact repeat resumes."""
    GENERATION_END = "generation-end"
    """Prompt plus output."""


@dataclass(frozen=True, slots=True, order=True)
class Boundary:
    """A position where a part of the prompt ends, and what kind of part."""

    position: int
    kind: BoundaryKind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """The tokens of a request, shape ``(length,)``, with the boundaries that the template gave, sorted."""

    tokens: Tokens
    boundaries: tuple[Boundary, ...] = ()

    def __post_init__(self) -> None:
        assert all(0 <= b.position <= len(self.tokens) for b in self.boundaries), self.boundaries
        assert list(self.boundaries) == sorted(self.boundaries), self.boundaries

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def stable_at(self) -> int | None:
        """What is before this position survives the next turn; None if that is not known."""
        return max((b.position for b in self.boundaries if b.kind is BoundaryKind.STABLE), default=None)
