import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.core.tokens import as_tokens, common_prefix, join_tokens, own_tokens

runs = st.lists(st.integers(0, 2), max_size=12)


@given(runs, runs)
def test_the_common_prefix_is_the_longest(a: list[int], b: list[int]) -> None:
    shared = common_prefix(as_tokens(a), as_tokens(b))
    assert a[:shared] == b[:shared]
    assert shared == min(len(a), len(b)) or a[shared] != b[shared]


@pytest.mark.parametrize("differs_at", [0, 1, 1023, 1024, 1025, 5119, 5120, 5121, 19_999, 20_000])
def test_the_common_prefix_of_long_runs(differs_at: int) -> None:
    a = as_tokens(range(20_000))
    changed = np.arange(20_000, dtype=np.int32)
    changed[differs_at:] = -1
    assert common_prefix(a, as_tokens(changed)) == differs_at
    assert common_prefix(as_tokens(changed), a[: differs_at + 5]) == differs_at


def test_runs_are_compact_and_read_only() -> None:
    run = as_tokens([1, 2, 3])
    assert run.dtype == np.int32 and run.nbytes == 12
    with pytest.raises(ValueError, match="read-only"):
        run[0] = 5
    assert as_tokens(run) is run


def test_the_array_of_a_caller_stays_the_callers() -> None:
    given_run = np.array([1, 2, 3], dtype=np.int32)
    run = as_tokens(given_run)
    given_run[0] = 9
    assert run[0] == 1
    given_run[1] = 9  # It is still writeable.


def test_an_owned_run_keeps_nothing_else_alive() -> None:
    own = own_tokens(as_tokens(range(1000))[10:20])
    assert own.base is None and not own.flags.writeable and own.tolist() == list(range(10, 20))


def test_joined_runs() -> None:
    joined = join_tokens(as_tokens([1, 2]), as_tokens([]), as_tokens([3]))
    assert joined.tolist() == [1, 2, 3] and joined.base is None and not joined.flags.writeable
    assert join_tokens().tolist() == []
