"""How long the long runs are: `SOAK=10 make test-all` makes each ten times as long."""

import os

_FACTOR = float(os.environ.get("SOAK", "1"))


def times(num: int) -> int:
    """`num`, as many times as was asked for. By default all of `make test-all` takes half an hour on two busy cores."""
    return max(1, round(num * _FACTOR))
