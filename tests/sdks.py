"""Other people's packages that few tests use, each imported when it is first used.

Together they take 4 s of CPU to import, and every process that runs tests imports every test file. Annotations that
name them have to stay text (`from __future__ import annotations`).
"""

import importlib.util
import sys
from types import ModuleType


def _imported_later(name: str) -> ModuleType:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None, f"{name} is not installed"
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


anthropic = _imported_later("anthropic")
openai = _imported_later("openai")
schemathesis = _imported_later("schemathesis")
