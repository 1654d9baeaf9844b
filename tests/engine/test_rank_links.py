"""The connections of a group: a rank that dies, hangs, goes wrong or is another's is noticed, with a sentence."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from reprise.cluster.ranks.links import (
    Address,
    LinksToFollowers,
    LinkToLeader,
    RanksFailed,
    receive_message,
    send_message,
)
from reprise.core.errors import LoadFailed

_FACTS = {"model": "m", "version of MLX": "1"}


class Pair:
    """Rank 0's links and those of the others, each in this process."""

    def __init__(self, *, num_ranks: int = 2, silent_s: float = 30.0) -> None:
        self.links = LinksToFollowers("127.0.0.1", num_ranks, silent_s=silent_s)
        self.failed = threading.Event()
        self.links.on_failure = lambda failure: self.failed.set()

    def connect(self, rank: int = 1, facts: object = _FACTS, secret: str | None = None) -> socket.socket:
        """A rank that this test plays itself."""
        address = self.links.address
        connection = socket.create_connection((address.host, address.port), timeout=30)
        send_message(connection, {"rank": rank, "secret": secret or address.secret, "facts": facts})
        return connection

    def stranger(self, sent: bytes) -> socket.socket:
        """A connection of somebody who is no rank."""
        connection = socket.create_connection((self.links.address.host, self.links.address.port), timeout=30)
        connection.sendall(sent)
        return connection

    def accept(self, within_s: float = 30.0) -> None:
        self.links.accept(_FACTS, within_s=within_s)


@pytest.fixture
def begin() -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(**options: float) -> Pair:
        pairs.append(Pair(**options))  # type: ignore[arg-type]
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.links.close()


def test_what_is_sent_arrives_in_order_and_is_answered(begin: Callable[..., Pair]) -> None:
    pair = begin(num_ranks=3)
    others = [pair.connect(rank) for rank in (1, 2)]
    pair.accept()
    for number in range(3):
        pair.links.send(["run", number])
    for rank, other in enumerate(others, 1):
        assert [receive_message(other) for _ in range(3)] == [["run", 0], ["run", 1], ["run", 2]]
        send_message(other, {"room": rank})
    assert pair.links.next_reports(within_s=30) == {1: {"room": 1}, 2: {"room": 2}}
    for other in others:
        other.close()


def test_a_rank_that_dies_is_noticed_while_nobody_sends(begin: Callable[..., Pair]) -> None:
    pair = begin()
    other = pair.connect()
    pair.accept()
    other.close()
    assert pair.failed.wait(30)
    with pytest.raises(RanksFailed, match=r"^Rank 1 has ended\. Restart the server\.$"):
        pair.links.send(["run"])


def test_a_rank_that_hangs_is_noticed(begin: Callable[..., Pair]) -> None:
    pair = begin(silent_s=0.3)
    other = pair.connect()
    pair.accept()
    pair.links.begin_watch()
    assert pair.failed.wait(30)
    assert str(pair.links.failure).startswith("Rank 1 has not answered for 0 s")
    other.close()


def test_what_went_wrong_elsewhere_is_told(begin: Callable[..., Pair]) -> None:
    pair = begin()
    other = pair.connect()
    pair.accept()
    send_message(other, ["failed", "MemoryError: no room"])
    assert pair.failed.wait(30)
    assert str(pair.links.failure) == "Rank 1: MemoryError: no room. Restart the server."
    other.close()


def test_what_the_others_have_of_memory_is_known(begin: Callable[..., Pair]) -> None:
    pair = begin(silent_s=1.0)
    other = pair.connect()
    pair.accept()
    pair.links.begin_watch()
    assert receive_message(other) == ["ping"]
    send_message(other, ["pong", 5, 100, False])
    send_message(other, {"room": 5})
    assert pair.links.next_reports(within_s=30) == {1: {"room": 5}} and pair.links.pongs == {1: [5, 100, False]}
    other.close()


def test_another_model_is_refused(begin: Callable[..., Pair]) -> None:
    pair = begin()
    other = pair.connect(facts={**_FACTS, "model": "another"})
    with pytest.raises(LoadFailed, match="Rank 1 and rank 0 differ in model"):
        pair.accept()
    other.close()


def test_who_does_not_know_the_secret_is_nobody(begin: Callable[..., Pair]) -> None:
    pair = begin()
    stranger = pair.connect(secret="guessed")
    nonsense = socket.create_connection((pair.links.address.host, pair.links.address.port))
    nonsense.sendall(b"GET / HTTP/1.1\r\n\r\n")
    nonsense.close()
    with pytest.raises(LoadFailed, match=r"Rank 1 did not connect to 127\.0\.0\.1:\d+ within 1 s"):
        pair.accept(within_s=0.6)
    stranger.close()


def _framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


_NOISE = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "a secret that is not ASCII": _framed('{"rank": 1, "secret": "ü", "facts": {}}'.encode()),
    "a secret that is no text": _framed(b'{"rank": 1, "secret": "\\ud800", "facts": {}}'),
    "deep": _framed(b"[" * 4000),
    "no object": _framed(b"[]"),
    "empty": _framed(b""),
    "not UTF-8": _framed(b"\xff\xfe\xff"),
}


@pytest.mark.parametrize("noise", _NOISE.values(), ids=_NOISE)
def test_noise_at_the_port_of_rank_0_keeps_no_group_from_forming(begin: Callable[..., Pair], noise: bytes) -> None:
    pair = begin()
    stranger = pair.stranger(noise)
    other = pair.connect()
    pair.accept()
    with stranger, other:
        assert _is_closed(stranger)


def test_silent_connections_do_not_delay_a_group(begin: Callable[..., Pair]) -> None:
    pair = begin()
    strangers = [pair.stranger(b"") for _ in range(100)]
    other = pair.connect()
    # One after the other they would take 200 s; and no more than some are held.
    pair.accept(within_s=20)
    other.close()
    for stranger in strangers:
        stranger.close()


def test_a_stranger_has_little_time_and_may_send_little(begin: Callable[..., Pair]) -> None:
    pair = begin(silent_s=0.2)
    silent, large = pair.stranger(b"\x01"), pair.stranger(struct.pack("<I", 4097))
    accepting = threading.Thread(target=pair.accept)
    accepting.start()
    with silent, large:
        assert _is_closed(large) and _is_closed(silent)
    assert accepting.is_alive()
    other = pair.connect()
    accepting.join()
    other.close()


def test_who_sends_much_or_was_the_first_of_many_is_sent_away_at_once(begin: Callable[..., Pair]) -> None:
    pair = begin()
    accepting = threading.Thread(target=pair.accept)
    accepting.start()
    with pair.stranger(struct.pack("<I", 4097)) as large:
        began_s = time.monotonic()
        assert _is_closed(large)
    strangers = [pair.stranger(b"") for _ in range(65)]
    assert _is_closed(strangers[0])
    # A stranger has 2 s.
    assert time.monotonic() - began_s < 1.8
    other = pair.connect()
    accepting.join()
    for connection in (other, *strangers):
        connection.close()


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_follower_hears_what_rank_0_says_and_that_it_has_gone(begin: Callable[..., Pair]) -> None:
    pair = begin()
    gone = threading.Event()
    accepting = threading.Thread(target=pair.accept)
    accepting.start()
    link = LinkToLeader(Address.parse(str(pair.links.address)), 1, _FACTS, silent_s=30, on_end=gone.set)
    accepting.join()
    pair.links.send(["load"])
    assert link.receive() == ["load"] and not gone.is_set()
    link.send({"room": 5})
    assert pair.links.next_reports(within_s=30) == {1: {"room": 5}}
    pair.links.close()
    # An announced end is not an unexpected one.
    assert link.receive() == ["end"] and not gone.is_set()


def test_a_follower_ends_when_rank_0_dies() -> None:
    gone = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address("127.0.0.1", listener.getsockname()[1], "secret")
        LinkToLeader(address, 1, _FACTS, silent_s=30, on_end=gone.set)
        connection, _ = listener.accept()
        connection.close()
        assert gone.wait(30)


def test_a_follower_ends_when_rank_0_falls_silent() -> None:
    gone = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address("127.0.0.1", listener.getsockname()[1], "secret")
        LinkToLeader(address, 1, _FACTS, silent_s=0.2, on_end=gone.set)
        connection, _ = listener.accept()
        with connection:
            # While the weights are read nobody says anything.
            assert not gone.wait(0.5)
            send_message(connection, ["ping"])
            assert gone.wait(30)


def test_a_rank_that_takes_nothing_is_noticed(begin: Callable[..., Pair]) -> None:
    pair = begin(silent_s=0.3)
    other = pair.connect()
    pair.accept()
    due_s = time.monotonic() + 60
    with suppress(RanksFailed):
        while time.monotonic() < due_s:
            pair.links.send(["run", "x" * 1_000_000])
    assert str(pair.links.failure).startswith("Rank 1 no longer accepts messages")
    other.close()
