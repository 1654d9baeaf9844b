"""Which replica a request goes to."""

import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.cluster.replicas.forwarded import ForwardedRequest
from reprise.cluster.replicas.routing import (
    MAX_ASKED,
    REFUSED,
    ChatMemory,
    Offer,
    Sent,
    SentWork,
    chat_keys,
    ranked,
    to_ask,
    wait_s,
)
from reprise.cluster.replicas.scaling import replicas_wanted


def offer(ttft_s: float, *, num_computed: int = 100, num_requests: int = 0, prefill_s: float = 0.0) -> Offer:
    return Offer(ttft_s=ttft_s, prefill_s=prefill_s, num_computed=num_computed, num_requests=num_requests)


def order(offers: dict[str, Offer | None], **sent: Sent) -> list[list[str]]:
    return ranked(offers, sent, Random(1))


def test_the_least_time_to_the_first_token_goes_first() -> None:
    assert order({"a": offer(2.0), "b": offer(0.5), "c": offer(1.0)}) == [["b"], ["c"], ["a"]]


def test_reuse_is_not_worth_a_long_queue() -> None:
    has_it = offer(9.0, num_computed=10, num_requests=8)
    assert order({"has it": has_it, "idle": offer(3.0, num_computed=5000)})[0] == ["idle"]


def test_what_was_sent_meanwhile_counts() -> None:
    offers: dict[str, Offer | None] = {"a": offer(1.0), "b": offer(1.4)}
    assert order(offers)[0] == ["a"]
    assert order(offers, a=Sent(work_s=0.5, num=1))[0] == ["b"]


def test_alike_times_leave_it_to_reuse_among_evenly_busy_replicas() -> None:
    alike = {"a": offer(0.010, num_computed=80), "b": offer(0.011, num_computed=20, num_requests=1)}
    assert order({**alike}) == [["b"], ["a"]]
    assert order({**alike}, b=Sent(num=1)) == [["a"], ["b"]]
    # Nothing tells them apart: Ray takes the shorter queue.
    assert order({"a": offer(0.01), "b": offer(0.012)}) == [["a", "b"]]


def test_alike_means_alike_to_the_best_of_them() -> None:
    near = {"a": offer(1.0, num_computed=30), "b": offer(1.04, num_computed=20), "c": offer(1.08, num_computed=10)}
    assert order({**near}) == [["b"], ["a"], ["c"]]


def test_whoever_says_nothing_is_tried_last() -> None:
    assert order({"a": None, "b": offer(60.0), "c": None}) in ([["b"], ["a", "c"]], [["b"], ["c", "a"]])


def test_whoever_would_refuse_is_tried_after_those_that_say_nothing() -> None:
    assert order({"a": REFUSED, "b": None, "c": offer(60.0)}) == [["c"], ["b"], ["a"]]
    assert order({"a": REFUSED}) == [["a"]]


def test_a_bad_offer_is_worth_waiting_for_a_better_one() -> None:
    assert wait_s([offer(0.0)], 0.05, 2.0) == pytest.approx(0.15)
    assert wait_s([offer(1.0), None], 0.05, 2.0) == pytest.approx(0.65)
    # An error of one replica says nothing of the others.
    assert wait_s([offer(15.0)], 0.05, 2.0) == wait_s([REFUSED], 0.05, 2.0) == wait_s([], 0.05, 2.0) == 1.95


def test_without_offers_it_is_two_at_random() -> None:
    names = [f"r{number}" for number in range(20)]
    chosen = [ranked(dict.fromkeys(names), {}, Random(seed)) for seed in range(100)]
    assert all(len(groups) == 1 and len(set(groups[0])) == 2 for groups in chosen)
    assert {name for groups in chosen for name in groups[0]} == set(names)
    assert ranked({}, {}, Random(1)) == [] and ranked({"only": None}, {}, Random(1)) == [["only"]]


offers = st.builds(offer, st.floats(0, 100), num_computed=st.integers(0, 10_000), num_requests=st.integers(0, 50))


@given(st.dictionaries(st.integers(0, 9), st.none() | offers), st.integers())
def test_everybody_with_an_offer_is_tried_once_and_the_first_is_alike_to_the_best(
    said: dict[int, Offer | None], seed: int
) -> None:
    groups = ranked(said, {}, Random(seed))
    tried = [replica for group in groups for replica in group]
    assert len(tried) == len(set(tried)) and set(tried) <= set(said)
    known = {replica: each for replica, each in said.items() if each is not None}
    assert set(known) <= set(tried) and len(tried) - len(known) == min(2, len(said) - len(known))
    if known:
        least = min(each.ttft_s for each in known.values())
        assert all(known[replica].ttft_s <= max(1.05 * least, least + 0.005) for replica in groups[0])


def test_many_replicas_are_not_all_asked() -> None:
    few, many = list(range(MAX_ASKED)), list(range(50))
    assert to_ask(few, None, Random(1)) == few
    asked = to_ask(many, 42, Random(1))
    assert asked[0] == 42 and len(set(asked)) == MAX_ASKED
    assert len(set(to_ask(many, None, Random(1)))) == len(set(to_ask(many, 99, Random(1)))) == MAX_ASKED


def test_only_what_was_sent_since_the_question_is_added_to_the_answer() -> None:
    sent: SentWork[str] = SentWork()
    for at_s in (1.0, 5.0, 6.0):
        sent.add("a", 2.0, now_s=at_s)
    assert sent.since(5.5, "a") == Sent(work_s=2.0, num=1)
    # It may have been on its way then.
    assert sent.since(5.05, "a") == Sent(work_s=4.0, num=2)
    assert sent.since(0.0, "b") == Sent()
    sent.keep_only({"b"})
    assert sent.since(0.0, "a") == Sent()


def chat(*texts: str, key: str = "one") -> list[bytes]:
    body = json.dumps({"messages": [{"role": "user", "content": text} for text in texts]}).encode()
    headers = ((b"authorization", key.encode()),)
    request = ForwardedRequest(method="POST", path="/v1/chat/completions", query=b"", headers=headers, body=body)
    return chat_keys(request)


def test_a_chat_is_remembered_by_its_longest_beginning() -> None:
    memory: ChatMemory[str] = ChatMemory()
    memory.note(chat("system", "hello"), "a")
    memory.note(chat("system", "hello", "answer", "more"), "b")
    memory.note(chat("system", "good day"), "c")
    assert memory.replica_of(chat("system", "hello", "other")) == "b"
    assert memory.replica_of(chat("system", "hello", "answer", "more", "x", "y")) == "b"
    assert memory.replica_of(chat("system", "good day", "x")) == "c"
    # What all chats share says nothing, and neither does another key's chat.
    assert memory.replica_of(chat("system", "x")) is None
    assert memory.replica_of(chat("system", "hello", key="two")) is None
    assert memory.replica_of([]) is None


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"prompt": "x"}', b'{"messages": 3}', b"\xff"])
def test_a_body_without_messages_has_no_keys(body: bytes) -> None:
    request = ForwardedRequest(method="POST", path="/v1/completions", query=b"", headers=(), body=body)
    assert chat_keys(request) == []


def wanted(num_requests: float, memory: list[float], *, num_now: int = 2) -> float:
    return replicas_wanted(num_requests=num_requests, per_replica=8, memory=memory, target_memory=0.8, num_now=num_now)


def test_replicas_follow_the_queue_and_the_memory() -> None:
    assert wanted(32, [0.1, 0.1]) == 4
    assert wanted(2, [0.8, 0.8]) == pytest.approx(2) and wanted(2, [1.0, 1.0]) == pytest.approx(2.5)
    # A replica that has not reported is taken to be like the others.
    assert wanted(2, [0.8], num_now=3) == pytest.approx(3)
    assert wanted(4, []) == 0.5
    assert wanted(0, [], num_now=0) == 0 and wanted(1, [], num_now=0) == 1
