"""Shepherd Model Gateway before two real servers: chats outlive a replica that is killed, and move with their cache."""

import httpx
import pytest

from reprise.demo import cluster
from tests.agents.packages import python_with

pytestmark = pytest.mark.agents

VERSION = "1.13.0"


def test_nobody_loses_more_than_the_answer_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    smg = str(python_with("smg", [f"smg=={VERSION}"]).parent / "smg")
    workers: list[list[str]] = []
    hold = cluster.hold_chats

    def looking(chats, client: httpx.Client, **how) -> None:
        hold(chats, client, **how)
        if how["victim"] is not None:
            assert client.get("/health").status_code == 200
            workers.append([worker["status"] for worker in client.get("/workers").json()["workers"]])

    monkeypatch.setattr(cluster, "hold_chats", looking)
    alone, shared, apart = cluster.hold_all(smg, num_chats=4, num_turns=12)
    assert shared.num_right == alone.num_right >= 45 and shared.num_lost <= 4
    assert shared.num_computed_then <= alone.num_computed_then + 4 < apart.num_computed_then
    assert all(each.count("ready") == 1 for each in workers), "the gateway has noticed"
