"""What a planted bug is."""

import ast
import textwrap
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """In `function`, the one place that reads as `old` becomes `new`; one of `tests` must notice.

    `function` is a name without its module (``Window.needs``), so that it may move between files. `old` and `new` are
    an expression, or statements; `new` may be empty. How a place is found is `place.py`'s.
    """

    name: str
    function: str
    old: str
    new: str
    tests: tuple[str, ...]

    def __post_init__(self) -> None:
        assert self.old != self.new and len(self.tests) > 0, self.name
        ast.parse(textwrap.dedent(self.old))
        ast.parse(textwrap.dedent(self.new))
