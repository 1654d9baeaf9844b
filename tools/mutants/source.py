"""The functions of the source, by name."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, eq=False)
class SourceFunction:
    """A function of the source. `name` is qualified within its module: ``Window.needs``."""

    file: Path
    name: str
    node: ast.FunctionDef | ast.AsyncFunctionDef


def functions_below(folder: Path) -> list[SourceFunction]:
    files = sorted(folder.rglob("*.py"))
    return [found for file in files for found in _functions_in(file, ast.parse(file.read_text()), ())]


def _functions_in(file: Path, node: ast.AST, path: tuple[str, ...]) -> Iterator[SourceFunction]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions_in(file, child, (*path, child.name))
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield SourceFunction(file, ".".join([*path, child.name]), child)
            yield from _functions_in(file, child, (*path, child.name))
        else:
            yield from _functions_in(file, child, path)
