"""Finds the place of a planted bug: by the name of a function, and by what the code there does.

Moves between files change nothing, nor do new names of variables, attributes and callees. Where a function itself has
another name, the report says which functions have the code now.
"""

import ast
import copy
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.mutants.match import Names, places, renamed
from tools.mutants.mutant import Mutant
from tools.mutants.source import SourceFunction

_MOST_NAMED = 8
"""Functions that are named as those where a bug may have gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedText:
    """Where a bug is planted: the file, and its text with the bug."""

    file: Path
    text: str


@dataclass(frozen=True, slots=True)
class Unplaced:
    """There is no such place, or it is not clear which: the list of planted bugs has to follow the source."""

    reason: str


def placed(mutant: Mutant, functions: Sequence[SourceFunction]) -> PlantedText | Unplaced:
    lost = [test for test in mutant.tests if test.startswith("tests/") and not Path(test).exists()]
    if lost:
        return Unplaced(f"no tests at {', '.join(lost)}")
    named = [function for function in functions if function.name == mutant.function]
    # A class that has another name still has its method.
    method = mutant.function.rpartition(".")[2]
    named = named or [function for function in functions if function.name.rpartition(".")[2] == method]
    if not named:
        return Unplaced(f"no function {mutant.function}{_elsewhere(mutant, functions)}")
    found = _candidates(mutant, named)
    if not found:
        return Unplaced(f"{mutant.function} has changed{_elsewhere(mutant, functions)}")
    least = min(names.num_changed for _, _, names in found)
    best = [candidate for candidate in found if candidate[2].num_changed == least]
    if len(best) > 1:
        return Unplaced(f"{mutant.function} has {len(best)} such places")
    function, nodes, names = best[0]
    text = planted(function.file.read_text(), nodes, mutant.new, names)
    return PlantedText(file=function.file, text=text)


def _candidates(
    mutant: Mutant, functions: Sequence[SourceFunction]
) -> list[tuple[SourceFunction, list[ast.AST], Names]]:
    pattern = _pattern(mutant)
    return [(function, nodes, names) for function in functions for nodes, names in places(pattern, function.node)]


def _pattern(mutant: Mutant) -> list[ast.stmt] | ast.expr:
    """An expression where both sides are one, statements otherwise."""
    old, new = (ast.parse(textwrap.dedent(text)).body for text in (mutant.old, mutant.new))
    is_expression = all(len(body) == 1 and isinstance(body[0], ast.Expr) for body in (old, new))
    first = old[0]
    return first.value if is_expression and isinstance(first, ast.Expr) else old


def _elsewhere(mutant: Mutant, functions: Sequence[SourceFunction]) -> str:
    exact = {function.name for function, _, names in _candidates(mutant, functions) if names.num_changed == 0}
    # Where very many have it, that says nothing.
    return f"; the code stands in {', '.join(sorted(exact))}" if 0 < len(exact) <= _MOST_NAMED else ""


def planted(text: str, nodes: Sequence[ast.AST], new: str, names: Names) -> str:
    """The file's text with `new` in the place of the nodes."""
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    first, last = nodes[0], nodes[-1]
    assert isinstance(first, ast.stmt | ast.expr) and isinstance(last, ast.stmt | ast.expr)
    assert last.end_lineno is not None and last.end_col_offset is not None
    tree = renamed(copy.deepcopy(ast.parse(textwrap.dedent(new))), names)
    planted = ast.unparse(tree) or "pass"
    indent = b" " * first.col_offset
    if isinstance(first, ast.expr):
        planted = f"({planted})"
    before = lines[first.lineno - 1][: first.col_offset]
    after = lines[last.end_lineno - 1][last.end_col_offset :]
    changed = before + planted.encode().replace(b"\n", b"\n" + indent) + after
    sick = b"".join([*lines[: first.lineno - 1], changed, *lines[last.end_lineno :]]).decode()
    ast.parse(sick)
    return sick
