"""How long reading takes, as told from the reads so far."""

import pytest

from reprise.disk.store.link import LinkSpeed, StartedRead


def fitted(reads: list[tuple[int, float]]) -> LinkSpeed:
    link = LinkSpeed()
    for nbytes, seconds in reads:
        link.note(nbytes, seconds)
    return link


def test_nothing_is_told_before_a_few_reads() -> None:
    assert fitted([(100, 1.0), (200, 2.0)]).estimate_s([100]) is None
    assert fitted([(100, 1.0), (200, 2.0), (300, 3.0)]).estimate_s([100]) is not None


def test_latency_and_bytes_are_told_apart() -> None:
    link = fitted([(nbytes, 0.05 + nbytes / 10**7) for nbytes in (10**5, 10**6, 10**7, 10**4, 10**6)])
    assert link.estimate_s([10**4] * 100) == pytest.approx(100 * 0.051, rel=0.01)
    assert link.estimate_s([10**8]) == pytest.approx(10.05, rel=0.01)
    assert link.estimate_s([]) == 0


def test_records_of_one_size_are_told_from_each_other() -> None:
    assert fitted([(10**6, 0.2)] * 5).estimate_s([10**6] * 3) == pytest.approx(0.6)
    assert fitted([(0, 0.2)] * 5).estimate_s([0, 0]) == pytest.approx(0.4)


def overlapping(reads: list[tuple[float, float, int]]) -> LinkSpeed:
    """Reads with the times of their begin and end, and their bytes."""
    link, begun = LinkSpeed(), dict[int, StartedRead]()
    events = sorted((at_s, number) for number, (start_s, end_s, _) in enumerate(reads) for at_s in (start_s, end_s))
    for at_s, number in events:
        if number in begun:
            link.end(begun[number], at_s, nbytes=reads[number][2])
        else:
            begun[number] = link.begin(at_s)
    return link


def test_reads_at_once_share_the_bytes_and_not_the_wait() -> None:
    # 50 ms, and 10 MB/s for all together: four at a time take four times as long for their bytes.
    alike = [
        (start, start + 0.05 + 4 * nbytes / 10**7, nbytes) for start, nbytes in ((0, 10**5), (10, 10**6), (20, 10**4))
    ]
    link = overlapping([read for read in alike for _ in range(4)])
    assert link.estimate_s([10**4] * 80, at_once=8) == pytest.approx(10 * 0.05 + 0.08, rel=0.02)
    assert link.estimate_s([10**4] * 80) == pytest.approx(80 * 0.05 + 0.08, rel=0.02)
    assert link.estimate_s([10**7], at_once=8) == pytest.approx(1.05, rel=0.02)


def test_records_of_one_size_read_at_once_are_as_fast_as_they_were_together() -> None:
    link = overlapping([(0.0, 0.2, 10**6)] * 8)
    assert link.estimate_s([10**6] * 80, at_once=8) == pytest.approx(2.0)


def test_a_read_that_failed_tells_nothing() -> None:
    link = LinkSpeed()
    for _ in range(5):
        link.end(link.begin(1.0), 9.0, nbytes=None)
    assert link.estimate_s([1]) is None


@pytest.mark.parametrize("reads", [[(10, 5.0), (10**6, 0.1), (10**7, 0.1)], [(10, 0.0), (10**6, 0.1), (10**7, 9.0)]])
def test_nothing_is_told_to_take_less_than_no_time(reads: list[tuple[int, float]]) -> None:
    for sizes in ([10], [10**9], [10] * 1000):
        seconds = fitted(reads).estimate_s(sizes)
        assert seconds is not None and seconds >= 0


def test_the_latest_reads_count_most() -> None:
    seconds = fitted([(10**6, 10.0)] * 20 + [(10**6, 0.1)] * 40).estimate_s([10**6])
    assert seconds is not None and seconds < 0.3
