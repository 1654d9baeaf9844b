from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.chat.memo import Memo


def test_the_least_recently_used_goes_first() -> None:
    memo: Memo[str, str] = Memo(nbytes=6, size=lambda _, value: len(value))
    memo.put("a", "xx")
    memo.put("b", "xx")
    memo.put("c", "xx")
    assert memo.get("a") == "xx"
    memo.put("d", "xx")
    assert [memo.get(key) for key in "abcd"] == ["xx", None, "xx", "xx"]


def test_what_is_too_large_is_not_kept_and_takes_its_place_away() -> None:
    memo: Memo[str, str] = Memo(nbytes=3, size=lambda _, value: len(value))
    memo.put("a", "x")
    memo.put("a", "xxxx")
    assert memo.get("a") is None
    assert memo.nbytes == 0


@settings(deadline=None)
@given(puts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=30))
def test_the_bound_holds_and_nothing_goes_that_has_room(puts: list[tuple[int, int]]) -> None:
    memo: Memo[int, int] = Memo(nbytes=12, size=lambda key, value: key + value)
    kept: dict[int, int] = {}
    for key, value in puts:
        memo.put(key, value)
        kept.pop(key, None)
        if key + value <= 12:
            kept[key] = value
        while sum(kept) + sum(kept.values()) > 12:
            del kept[next(iter(kept))]
        assert memo.nbytes == sum(kept) + sum(kept.values())
    assert {key: memo.get(key) for key in range(6)} == {key: kept.get(key) for key in range(6)}
