"""What a planted bug is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """In `file` (below `src/reprise`), the one place where `old` stands becomes `new`; one of `tests` must notice."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def __post_init__(self) -> None:
        assert self.old != self.new and len(self.tests) > 0, self.name


@dataclass(frozen=True, slots=True)
class NotFound:
    """The place of a planted bug is no longer there, or not once: the list has to follow the source."""

    count: int


def planted(mutant: Mutant, source: str) -> str | NotFound:
    """The file's text with the bug in it."""
    count = source.count(mutant.old)
    return source.replace(mutant.old, mutant.new) if count == 1 else NotFound(count)
