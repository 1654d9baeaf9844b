"""Parameters of tests, of which `make test` takes some and `make test-all` the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def now_and_later(now: Iterable[Any], later: Iterable[Any]) -> list[Any]:
    """`now` in every run: each kind of layer once. `later`: the rest of the product, with `make test-all` alone."""
    return [*now, *(pytest.param(value, marks=pytest.mark.matrix) for value in later)]
