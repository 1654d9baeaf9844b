"""The house rules that a machine can keep."""

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from tests.sdks import IMPORTED

_ROOT = Path(__file__).parents[1]
_SETTERS = frozenset({"setattr", "getattr", "delattr", "hasattr", "object"})
"""Functions that take a name as text; `patch.object` is one."""


@pytest.mark.matrix
def test_tests_go_through_public_names() -> None:
    """Names of the source with an underscore are its own: a test that uses one is in the way of every change."""
    private = _private_names()
    # Few files have any such word, and only these are read as programs.
    texts = {path: path.read_text() for path in sorted((_ROOT / "tests").rglob("*.py"))}
    found = [
        f"{path.relative_to(_ROOT)}:{line}: {name}"
        for path, text in texts.items()
        if not private.isdisjoint(re.findall(r"\b_[^\W_]\w*", text))
        for line, name in _uses(ast.parse(text))
        if name in private
    ]
    assert found == []


@pytest.mark.matrix
def test_a_class_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in (
        path for folder in ("src", "bench", "tools", "tests") for path in sorted((_ROOT / folder).rglob("*.py"))
    ):
        if path.is_relative_to(_ROOT / "tests" / "agents" / "clients"):
            # Programs that run by themselves: the name is what the model is asked for.
            continue
        for name in re.findall(r"^ *class _?(\w+)\b[(:[]", path.read_text(), re.MULTILINE):
            places[name].append(str(path.relative_to(_ROOT)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


@pytest.mark.matrix
def test_modules_import_each_other_in_no_circle() -> None:
    """Also for types alone; an import within a function counts too."""
    graph = grimp.build_graph("reprise")
    # The command's first module imports the rest of the program once Ctrl-C ends it.
    graph.remove_import(importer="reprise.cli.entry", imported="reprise.cli.main")
    TopologicalSorter({module: graph.find_modules_directly_imported_by(module) for module in graph.modules}).prepare()


@pytest.mark.matrix
def test_the_map_of_the_house_names_what_is_there() -> None:
    """Every file and every `Class.member` of ARCHITECTURE.md exists."""
    text = (_ROOT / "ARCHITECTURE.md").read_text()
    paths = set(re.findall(r"`((?:\w+/)+\w+\.\w+|\w+\.py)[`:]", text))
    folders = [_ROOT / folder for folder in ("src", "tests", "bench", "tools", "docs", "examples")]
    files = [str(path.relative_to(_ROOT)) for folder in folders for path in folder.rglob("*")]
    assert [path for path in sorted(paths) if not any(f"/{file}".endswith(f"/{path}") for file in files)] == []
    members = _members()
    named = set(re.findall(r"`([A-Z]\w+)\.(\w+)(?:\(\))?`", text))
    assert {name for name in named if not name[0].isupper() and name[1] not in members.get(name[0], ())} == set()


@pytest.mark.matrix
def test_modules_that_the_pages_name_are_there() -> None:
    pages = (*_ROOT.glob("*.md"), *(_ROOT / "docs").glob("*.md"), _ROOT / "Makefile", _ROOT / "Dockerfile")
    text = "\n".join(page.read_text() for page in pages if page.name != "CHANGELOG.md")
    named = set(re.findall(r"(?:python -m |\b(?=reprise\.\w+(?:\.\w+)*:\w))([a-z_]+(?:\.[a-z_]+)*)", text))
    paths = {name: name.replace(".", "/") for name in named - {"pip", "venv", "pytest", "mkdocs"}}
    found = (_ROOT, _ROOT / "src")
    assert "reprise.cluster.replicas" in paths
    assert [
        name
        for name, path in sorted(paths.items())
        if not any((root / f"{path}.py").is_file() or (root / path).is_dir() for root in found)
    ] == []


def test_collecting_the_tests_imports_no_sdk(request: pytest.FixtureRequest) -> None:
    """Each process that runs tests would take seconds longer to begin."""
    assert request.config.stash[IMPORTED] == set()


@functools.cache
def _source() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted((_ROOT / "src").rglob("*.py"))}


def _members() -> dict[str, set[str]]:
    """What the classes of the source have: methods, fields, and attributes that their methods set."""
    found: dict[str, set[str]] = defaultdict(set)
    for tree in _source().values():
        for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            for node in ast.walk(cls):
                match node:
                    case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                        found[cls.name].add(name)
                    case ast.AnnAssign(target=ast.Name(id=name) | ast.Attribute(attr=name)):
                        found[cls.name].add(name)
                    case ast.Assign(targets=[ast.Attribute(attr=name)]):
                        found[cls.name].add(name)
                    case _:
                        pass
    return found


def _private_names() -> set[str]:
    """What is defined somewhere in the source under a name of its own: functions, classes, constants, attributes."""
    names: set[str] = set()
    for tree in _source().values():
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    names.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                    names.add(name)
                case _:
                    pass
    return {name for name in names if _is_private(name)}


def _uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Names of others: attributes of what is neither `self` nor `cls`, imports, and names in `setattr` and the like."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name) if not _is_own(value):
                yield node.lineno, name
            case ast.ImportFrom(module=module, names=names) if (module or "").startswith("reprise"):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.Call(
                func=ast.Attribute(attr=setter) | ast.Name(id=setter), args=[_, ast.Constant(value=str(name)), *_]
            ):
                if setter in _SETTERS:
                    yield node.lineno, name
            case _:
                pass


def _is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls", "other")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"
