"""Other people's packages that few tests use, each imported when it is first used.

Together they take 4 s of CPU to import, and every process that runs tests imports every test file. Annotations that
name them have to stay text (`from __future__ import annotations`).
"""

import importlib
from typing import Any

import pytest

NAMES = ("anthropic", "openai", "schemathesis")
IMPORTED = pytest.StashKey[frozenset[str]]()
"""Which of them had been imported when all test files were collected."""


class _ImportedLater:
    """Stands for a package, and is none: pytest asks whatever a test file has for names with an underscore."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


anthropic, openai, schemathesis = (_ImportedLater(name) for name in NAMES)
