"""Parameters of tests, of which `make test` takes some and `make test-all` the others."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, cast

import pytest
from hypothesis import settings


def now_and_later(now: Iterable[Any], later: Iterable[Any]) -> list[Any]:
    """`now` in every run: each kind of layer once. `later`: the rest of the product, with `make test-all` alone."""
    return [*now, *(pytest.param(value, marks=pytest.mark.matrix) for value in later)]


def rows_now_and_later(now: Iterable[tuple[Any, ...]], later: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The same for several parameters at once."""
    return [*now, *(pytest.param(*row, marks=pytest.mark.matrix) for row in later)]


def every_other(values: Iterable[Any], *, start: int = 0) -> list[Any]:
    """All of them; in every run every other one from `start` on, where one mechanism does the same for each."""
    return every_nth(values, 2, start=start)


def every_nth(values: Iterable[Any], num: int, *, start: int = 0) -> list[Any]:
    """All of them; in every run each `num`-th one from `start` on."""
    each = list(values)
    now = each[start::num]
    return now_and_later(now, [value for at, value in enumerate(each) if (at - start) % num != 0 or at < start])


def in_turn(values: Iterable[Any], others: Sequence[Any]) -> list[Any]:
    """All pairs: in every run each of `values` with one of `others`, its neighbours with the next ones."""
    pairs = [
        (value, other, (at - number) % len(others))
        for number, value in enumerate(values)
        for at, other in enumerate(others)
    ]
    return rows_now_and_later(
        [(value, other) for value, other, distance in pairs if distance == 0],
        [(value, other) for value, other, distance in pairs if distance > 0],
    )


def examples(num: int) -> int:
    """So many examples of a law in `make test-all`; in `make test` the share of them that its profile has of 100."""
    return max(1, num * settings().max_examples // 100)


def _is_of_models(value: object, names: frozenset[str]) -> bool:
    """Whether it is the name of a model, or of several that run together."""
    if isinstance(value, tuple):
        parts = cast("tuple[object, ...]", value)
        return len(parts) > 0 and all(_is_of_models(each, names) for each in parts)
    return isinstance(value, str) and all(name in names for name in value.split("+"))


def take_models_in_turn(items: Sequence[pytest.Item], models: Iterable[str]) -> None:
    """Mark tests that run with several models so that `make test` runs each with one, its neighbours with others.

    Those marked `every_model` are left as they are.
    """
    names = frozenset(models)
    alike: dict[tuple[object, ...], list[pytest.Item]] = defaultdict(list)
    for item in items:
        call = getattr(item, "callspec", None)
        if call is None or any(item.get_closest_marker(mark) for mark in ("every_model", "matrix", "soak", "agents")):
            continue
        others = {name: value for name, value in call.params.items() if not _is_of_models(value, names)}
        if len(others) < len(call.params):
            alike[item.path, item.parent, getattr(item, "originalname", item.name), repr(others)].append(item)
    for number, group in enumerate(alike.values()):
        for at, item in enumerate(group):
            if at != number % len(group):
                item.add_marker(pytest.mark.matrix)
