"""What `import reprise` offers: all of it is listed, found, documented, and loaded only when it is used."""

import ast
import inspect
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import reprise

SOURCE = ast.parse(Path(reprise.__file__).read_text(encoding="utf-8"))


def test_all_is_what_type_checkers_see():
    imported = {
        alias.asname or alias.name
        for node in SOURCE.body
        if isinstance(node, ast.If)
        for inner in node.body
        if isinstance(inner, ast.ImportFrom)
        for alias in inner.names
    }
    assert imported | {"__version__"} == set(reprise.__all__)
    assert list(reprise.__all__) == sorted(reprise.__all__)
    assert set(reprise.__all__) <= set(dir(reprise))


@pytest.mark.parametrize("name", [name for name in reprise.__all__ if name != "__version__"])
def test_all_of_it_is_documented(name: str):
    thing = getattr(reprise, name)
    assert thing.__module__.startswith("reprise.")
    assert thing.__doc__ and not thing.__doc__.startswith(f"{name}("), name
    if isinstance(thing, type) and not issubclass(thing, Exception | Enum):
        for member, value in vars(thing).items():
            if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property | classmethod)):
                assert inspect.getdoc(value), f"{name}.{member}"


@pytest.mark.parametrize(
    "given",
    [reprise.Engine.chat, reprise.Chat.send, reprise.ChatAnswer, reprise.PrefixCache.match, reprise.PrefixCache.lease],
)
def test_what_a_program_is_given_can_be_named(given: object):
    hints = get_type_hints(given)
    types = hints.values() if isinstance(given, type) else [hints["return"]]
    named = {inner for kind in types for inner in (kind, *get_args(kind)) if isinstance(inner, type)}
    ours = {kind.__name__ for kind in named if kind.__module__.startswith("reprise.")}
    assert ours <= set(reprise.__all__)


def test_no_other_names():
    with pytest.raises(AttributeError, match="Engin"):
        _ = reprise.Engin


def test_the_import_alone_loads_nothing():
    program = (
        "import sys, reprise; assert 'Engine' in dir(reprise); "
        "print(', '.join(n for n in sys.modules if n.partition('.')[0] in "
        "('mlx', 'mlx_lm', 'numpy', 'pydantic', 'fastapi', 'transformers') or n.startswith('reprise.')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("\n", "")
