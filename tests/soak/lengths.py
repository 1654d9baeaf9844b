"""How long the long runs are: `SOAK=10 make test-soak` makes each ten times as long.

A cell (one test with one kind of layers and one amount of room) is there for what only that pair can do wrong, so
all of them always run. What each has of bursts, seeds and operations is what `make test-all` has time for: eight
minutes for all on two idle cores. A bug that needs a longer life is found with a larger `SOAK`.
"""

import os

_FACTOR = float(os.environ.get("SOAK", "1"))


def times(num: int) -> int:
    """`num`, as many times as was asked for."""
    return max(1, round(num * _FACTOR))
