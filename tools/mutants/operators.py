"""Random planted bugs: what a small slip of the hand makes of one expression or statement."""

import ast
import copy
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from random import Random

from tools.mutants.match import Names
from tools.mutants.mutant import Mutant
from tools.mutants.place import PlantedText, planted
from tools.mutants.source import SourceFunction

_COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_COUNTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
}
_LEAST_OF = {"min": "max", "max": "min", "any": "all", "all": "any", "sum": "len"}

TESTS = {
    "api": ("tests/api",),
    "cache": ("tests/cache",),
    "chat": ("tests/chat",),
    "cli": ("tests/cli",),
    "core": ("tests/core",),
    "disk": ("tests/disk",),
    "drafts": ("tests/drafts", "tests/loop/test_drafts.py"),
    "engine": ("tests/engine", "tests/loop"),
    "library": ("tests/library",),
    "loop": ("tests/loop",),
    "memory.py": ("tests/cache", "tests/loop/test_memory.py"),
    "plan": ("tests/plan", "tests/schedule"),
    "replay": ("tests/simulate",),
    "schedule": ("tests/schedule",),
}
"""The tests that should notice a bug in a package."""


Slip = tuple[ast.stmt | ast.expr, ast.stmt | ast.expr]
"""What stands in the source, and what stands there instead."""


def random_mutants(
    functions: Sequence[SourceFunction],
    source: Path,
    *,
    num: int,
    seed: int,
    below: str,
    changed: Mapping[Path, Set[int]] | None = None,
) -> dict[str, tuple[Mutant, PlantedText]]:
    """At most `num` bugs by name, drawn evenly from all places in the files whose path begins with `below`.

    `changed`: only those that begin in these lines of these files.
    """
    found = [
        (function, old, new)
        for function in functions
        if str(function.file.relative_to(source)).startswith(below)
        and function.file.relative_to(source).parts[0] in TESTS
        for old, new in slips(function.node)
        if changed is None or old.lineno in changed.get(function.file.relative_to(source), ())
    ]
    drawn = [_drawn(*each, source) for each in Random(seed).sample(found, min(num, len(found)))]
    return {mutant.name: (mutant, place) for mutant, place in drawn}


def _drawn(
    function: SourceFunction, old: ast.stmt | ast.expr, new: ast.stmt | ast.expr, source: Path
) -> tuple[Mutant, PlantedText]:
    where, before, after = function.file.relative_to(source), ast.unparse(old), ast.unparse(new)
    mutant = Mutant(
        name=f"{where}:{old.lineno}:{old.col_offset}: {before.splitlines()[0]} -> {after.splitlines()[0]}",
        function=function.name,
        old=before,
        new=after,
        tests=TESTS[where.parts[0]],
    )
    text = planted(function.file.read_text(), [old], after, Names())
    return mutant, PlantedText(file=function.file, text=text)


def slips(
    function: ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[tuple[ast.stmt | ast.expr, ast.stmt | ast.expr]]:
    """Every pair of a place in the function and what a slip makes of it. Asserts, docstrings and types stay."""
    for statement in function.body:
        yield from _below(statement)


def _below(node: ast.AST) -> Iterator[Slip]:
    if isinstance(node, ast.Assert | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Raise):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield node, ast.copy_location(ast.Pass(), node)
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield from _decided(node.test)
    if isinstance(node, ast.comprehension):
        yield from (each for test in node.ifs for each in _decided(test))
    if isinstance(node, ast.Return) and node.value is not None:
        yield from _decided(node.value) if isinstance(node.value, ast.Compare | ast.BoolOp) else ()
    if isinstance(node, ast.expr):
        yield from ((node, new) for new in _slips_of(node))
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "ctx", "returns"):
            continue
        # Parts of an f-string are text.
        for child in [] if isinstance(node, ast.JoinedStr) else value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _below(child)


def _decided(test: ast.expr) -> Iterator[Slip]:
    for value in (True, False):
        yield test, ast.copy_location(ast.Constant(value), test)


def _slips_of(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.Compare(ops=[operator]):
            for other in _COMPARED.get(type(operator), ()):
                yield _with(node, ops=[other()])
        case ast.BinOp(op=operator) if type(operator) in _COUNTED:
            yield _with(node, op=_COUNTED[type(operator)]())
        case ast.BoolOp(op=operator, values=values):
            yield _with(node, op=ast.Or() if isinstance(operator, ast.And) else ast.And())
            for i in range(len(values)):
                left = [*values[:i], *values[i + 1 :]]
                yield left[0] if len(left) == 1 else _with(node, values=left)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool() as value):
            yield _with(node, value=not value)
        case ast.Constant(value=int() as value):
            yield _with(node, value=value + 1)
        case ast.IfExp(test=test):
            yield _with(node, test=ast.UnaryOp(op=ast.Not(), operand=test))
        case ast.Call(func=ast.Name(id=name)) if name in _LEAST_OF:
            yield _with(node, func=ast.Name(id=_LEAST_OF[name], ctx=ast.Load()))
        case _:
            return


def _with(node: ast.expr, **fields: object) -> ast.expr:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed
