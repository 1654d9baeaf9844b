"""The price of a prefill pass: an upper bound by the model's dimensions, then what passes were seen to take."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.core.kinds import Chunk, Full, KvKind, Layout, Window
from reprise.core.pass_price import PassPrice, PassReading, beyond, price_of_tower

MB = 1 << 20


def price(*kinds: KvKind, has_snapshots: bool = False) -> PassPrice:
    layout = Layout(kinds=kinds, has_snapshots=has_snapshots)
    return PassPrice(layout=layout, fixed=1000, per_token=100, per_key=2)


@pytest.mark.parametrize(
    ("kinds", "keys"),
    [
        ((Full(),), 10_500),
        ((Window(512),), 1012),
        ((Chunk(4096),), 4596),
        ((Window(512), Full()), 10_500),
        ((), 0),
    ],
)
def test_the_layer_that_sees_the_most_keys_sets_the_price(kinds: tuple[KvKind, ...], keys: int) -> None:
    assert price(*kinds).of(500, 10_000) == 1000 + 500 * 100 + 500 * keys * 2


def test_a_recurrent_layer_takes_as_much_at_any_depth() -> None:
    recurrent = price(has_snapshots=True)
    assert recurrent.of(500, 0) == recurrent.of(500, 100_000) == 1000 + 500 * 100 + 500 * 256 * 2


def test_a_pass_that_took_more_or_less_is_believed() -> None:
    known = price(Full())
    before = known.of(500, 2000)
    more = known.after_pass(500, 2000, PassReading(least=3 * before, most=4 * before))
    assert more.of(500, 2000) == pytest.approx(3 * before * 1.25, abs=1)
    less = known.after_pass(500, 2000, PassReading(least=0, most=before // 2))
    assert less.of(500, 2000) == pytest.approx(before // 2 * 1.25, abs=1)


def seen(known: PassPrice, num: int, position: int, nbytes: int) -> PassPrice:
    return known.after_pass(num, position, PassReading(least=nbytes, most=nbytes))


def test_a_deeper_pass_is_priced_by_the_nearest_that_was_seen_and_grows_as_the_dimensions_say() -> None:
    known = price(Full())
    half, other = known.expected(512, 4096) / 2, known.expected(512, 100) / 4
    known = seen(seen(known, 512, 100, int(other)), 512, 4096, int(half))
    assert known.of(512, 20_000) == pytest.approx(known.expected(512, 20_000) / 2 * 1.25, rel=1e-3)


def test_a_shallower_pass_is_priced_no_lower_per_token_and_no_higher_than_the_dimensions_say() -> None:
    known = price(Full())
    deep = int(known.expected(512, 4096))
    known = seen(known, 512, 8191, deep // 8)
    assert known.of(512, 4096) == pytest.approx(deep // 8 * 1.25, abs=2), "the same depth in bits"
    assert known.of(512, 3000) == pytest.approx(deep // 8 * 1.25, abs=2)
    assert seen(price(Full()), 512, 8191, deep).of(512, 0) == price(Full()).of(512, 0)


def test_what_another_thread_allocates_meanwhile_teaches_nothing() -> None:
    known = price(Full())
    reading = PassReading.of(before=10 * MB, peak=900 * MB, after=895 * MB)
    taken = known.of(2048, 4096)
    assert reading.least < taken < reading.most
    assert known.after_pass(2048, 4096, reading).of(2048, 4096) == taken


def test_a_pass_of_a_few_tokens_teaches_nothing() -> None:
    known = price(Full())
    assert known.after_pass(15, 0, PassReading(least=MB, most=MB)) == known


@given(
    st.lists(
        st.tuples(st.integers(16, 4096), st.integers(0, 200_000), st.integers(0, 1 << 34), st.integers(0, 1 << 34)),
        min_size=1,
        max_size=12,
    )
)
def test_whatever_was_read_the_same_pass_is_priced_at_what_it_took_at_least(
    passes: list[tuple[int, int, int, int]],
) -> None:
    known = price(Full(), Window(512))
    for num, position, a, b in passes:
        reading = PassReading(least=min(a, b), most=max(a, b))
        before = known.of(num, position)
        known = known.after_pass(num, position, reading)
        after = known.of(num, position)
        assert after >= reading.least - 1
        assert after <= max(before, 1.25 * reading.least) + 1
        assert after >= min(before, reading.most) - 1


@dataclass(frozen=True)
class Device:
    """A device on which the dearest operation of a pass takes so much."""

    token: float
    key: float

    def peak(self, num: int, position: int) -> int:
        return int(max(self.token * num, self.key * num * (num + position)))


@given(st.floats(10, 400), st.floats(0.0, 8.0), st.sampled_from([256, 512, 1024]), st.integers(0, 400_000))
def test_a_prompt_that_was_seen_once_is_priced_at_what_it_takes_and_soon_at_little_more(
    token: float, key: float, chunk: int, grown: int
) -> None:
    """Chunk after chunk of a prompt of 16k, wrong dimensions or right ones, the first time with states that grow."""
    device, known = Device(token, key), price(Full())
    for walk in range(3):
        for position in range(0, 16_384, chunk):
            taken = device.peak(chunk, position)
            if walk > 1:
                assert known.of(chunk, position) >= taken - 1
            more = grown if walk == 0 else 0
            known = known.after_pass(
                chunk, position, PassReading.of(before=MB, peak=MB + taken + more, after=MB + more)
            )
    # What is shallower is priced like the deepest of as many bits.
    for position in range(1024, 16_384, chunk):
        assert known.of(chunk, position) <= 3 * device.peak(chunk, position)


@pytest.mark.parametrize(("each", "slope"), [(150_000, 300), (150_000, 0), (0, 300)])
def test_a_tower_is_priced_at_any_size_by_images_of_two(each: int, slope: int) -> None:
    def taken(num: int) -> int:
        return each * num + slope * num * num

    known = price_of_tower({64: taken(64), 144: taken(144)})
    for num in (1, 64, 100, 144, 1000, 16_384):
        assert known.of(num, 0) == pytest.approx(1.25 * taken(num), rel=1e-6)
    more = seen(known, 16_384, 0, 2 * taken(16_384))
    assert more.of(16_384, 0) == pytest.approx(2.5 * taken(16_384), rel=1e-6)


def test_a_tower_that_takes_less_for_each_token_of_a_larger_image_is_never_priced_below_what_was_seen() -> None:
    known = price_of_tower({64: 64 * 900, 144: 144 * 600})
    assert known.of(64, 0) == pytest.approx(1.25 * 64 * 900)
    assert known.of(144, 0) > 144 * 600
    assert price_of_tower({256: 256 * 700}).of(256, 0) == pytest.approx(1.25 * 256 * 700)


def test_entries_that_are_copied_count_for_rows_that_decode() -> None:
    known = replace(price(Full()), per_entry=3)
    assert known.of(4, 1000, num_decoding=2) == known.of(4, 1000) + 3 * 2 * 1000 == price(Full()).of(4, 1000) + 6000


def test_tokens_whose_logits_are_computed_cost_more() -> None:
    assert replace(price(Full()), per_output=7).of(4, 1000, num_outputs=3) == price(Full()).of(4, 1000) + 21


def test_only_what_exceeds_what_is_kept_counts() -> None:
    assert [beyond(100, 40), beyond(100, 140), beyond(0, 40), beyond(None, 40)] == [0, 40, 40, 0]
