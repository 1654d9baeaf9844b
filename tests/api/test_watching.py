"""What the server shows of itself: overview, tree and events, to each key what is its own."""

import asyncio
import errno
import json
import os
import re
import signal
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Never

import httpx
import pytest
from typer.testing import CliRunner

from reprise.api.http.off_loop import Stage
from reprise.api.native import overview
from reprise.api.service.exchange import Record
from reprise.api.service.records import record_body
from reprise.api.service.replay import Replayed
from reprise.api.service.service import Watcher
from reprise.api.watch.event_hub import EventHub
from reprise.api.watch.ledger import Ledger, breaker_bodies, change_bodies
from reprise.chat.reasons.explain import ComputedSpan, Explanation
from reprise.cli.main import app
from reprise.core.backend import Counts, Status
from reprise.core.errors import ShuttingDown
from reprise.core.failpoints import ACTIONS, Failpoint
from reprise.core.inspection import WHOLE_TREE, Inspection, TreePart
from reprise.core.outcome import Outcome, Reason
from reprise.core.settings import Settings
from reprise.core.sizes import Bytes
from reprise.core.tokens import Span
from reprise.loop.heartbeat import Heartbeat
from tests.api.real_server import real_server
from tests.api.servers import MODEL, api
from tests.loop.driving import PATIENCE_S

TEXT = "The tide comes in twice a day and leaves again, and nobody is asked. " * 4


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    with real_server() as client:
        for end in ("Why?", "When?", "Why?"):
            messages = [{"role": "system", "content": TEXT}, {"role": "user", "content": end}]
            client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4}).raise_for_status()
        wait_until_idle(client)
        yield client


def wait_until_idle(client: httpx.Client) -> dict[str, Any]:
    while not (health := client.get("/health").json())["idle"]:
        pass
    return health


def test_the_overview_says_what_health_and_the_records_say(server: httpx.Client) -> None:
    health, told = wait_until_idle(server), server.get("/v1/cache/overview").json()
    records = server.get("/v1/cache/requests").json()["data"]
    savings, memory = told["savings"], told["memory"]
    assert (savings["prompt"], savings["reused"], savings["computed"]) == (
        health["prompt_tokens"],
        health["reused"],
        health["prefilled"],
    )
    assert savings["saved_s"] == pytest.approx(health["saved_s"]) and savings["saved_s"] > 0
    assert savings["saved_s"] == pytest.approx(sum(record["saved_s"] for record in records))
    assert memory["parts"]["kept"] == health["bytes_kv"] and memory["budget"] == health["bytes_budget"]
    assert sum(memory["parts"].values()) - memory["untouched"] == memory["process"]
    assert told["health"]["generated"] == health["generated"]


def test_what_was_computed_is_counted_by_reason_beside_the_least(server: httpx.Client) -> None:
    records = server.get("/v1/cache/requests").json()["data"]
    told = server.get("/v1/cache/overview").json()["changes"]
    for name, field in (("computed", "prefilled"), ("at_best", "computed_at_best")):
        assert sum(each[name] for each in told) == sum(record[field] for record in records)
    assert sum(each["requests"] for each in told) == len(records)
    shown = CliRunner().invoke(app, ["top", "--once", "--url", str(server.base_url)], env={"COLUMNS": "250"}).output
    for each in told:
        row = rf"{each['reason']} +{each['requests']} +{each['computed']} +{each['at_best']}\b"
        assert re.search(row, shown), (row, shown)


def test_the_bar_of_a_request_is_its_prompt_and_its_spans_are_its_first_token(server: httpx.Client) -> None:
    for record in server.get("/v1/cache/requests").json()["data"]:
        assert sum(record["sources"].values()) == record["prompt_tokens"]
        assert record["sources"]["computed"] == record["prefilled"]
        assert 0 <= record["computed_at_best"] <= record["prefilled"]
        spans = record["spans"]
        assert sum(spans.values()) - spans["render"] == pytest.approx(record["ttft_s"])
        assert min(spans.values()) >= 0


def test_the_tree_is_told_in_pages_with_text(server: httpx.Client) -> None:
    health, whole = wait_until_idle(server), server.get("/v1/cache/tree").json()
    assert not whole["has_more"] and len(whole["data"]) == whole["totals"]["edges"]
    assert sum(node["tokens"] for node in whole["data"]) == whole["totals"]["tokens"] == health["tokens_held"]
    assert sum(node["bytes"] for node in whole["data"]) == health["bytes_kv"]
    first = server.get("/v1/cache/tree", params={"limit": 2}).json()
    rest = server.get("/v1/cache/tree", params={"skip": 2}).json()
    assert first["has_more"] and [n["id"] for n in first["data"] + rest["data"]] == [n["id"] for n in whole["data"]]
    trunk = max(whole["data"], key=lambda node: node["children"])
    below = server.get("/v1/cache/tree", params={"under": trunk["id"]}).json()["data"]
    ids = {trunk["id"]}
    for node in whole["data"]:
        ids |= {node["id"]} if node["parent"] in ids else set()
    assert below[0]["id"] == trunk["id"] and {node["id"] for node in below} == ids
    text = server.get(f"/v1/cache/tree/{trunk['id']}").json()
    assert text["text"].startswith(trunk["text"]) and TEXT[:40] in text["text"]
    part = server.get(f"/v1/cache/tree/{trunk['id']}", params={"offset": 3, "limit": 5}).json()
    assert part["text"] in text["text"] and part["has_more"]
    found = server.get("/v1/cache/tree/search", params={"q": "LEAVES AGAIN"}).json()
    assert trunk["id"] in [each["id"] for each in found["data"]]
    assert server.get("/v1/cache/tree/999999999").status_code == 404


def test_what_is_on_disk_alone_is_shown_until_it_is_read(tmp_path: Path) -> None:
    on_disk: dict[str, Any] = {"disk_bytes": Bytes(1 << 28), "disk_directory": str(tmp_path), "settles": False}
    keys: dict[str, Any] = {"api_keys": ("one", "two"), "separates_keys": True}
    one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    body = {"messages": [{"role": "user", "content": f"{TEXT} Kept."}], "max_tokens": 2}
    with real_server(**on_disk, **keys) as server:
        server.post("/v1/chat/completions", json=body, headers=one).raise_for_status()
    with real_server(**on_disk, **keys) as server:
        told = server.get("/v1/cache/tree", headers=one).json()["data"]
        (run,) = [node for node in told if not node["in_memory"]]
        assert (run["bytes"], run["parent"]) == (0, None) and run["disk_bytes"] > 0 and run["tokens"] > 50
        assert run["text"] and {at["kind"] for at in run["checkpoints"]} == {None}
        text = server.get(f"/v1/cache/tree/{run['id']}", headers=one).json()
        assert text["text"].startswith(run["text"]) and TEXT in text["text"] and text["tokens"] == run["tokens"]
        found = server.get("/v1/cache/tree/search", params={"q": "kept."}, headers=one).json()["data"]
        assert [each["id"] for each in found] == [run["id"]]
        below = server.get("/v1/cache/tree", params={"under": run["id"]}, headers=one).json()["data"]
        assert [node["id"] for node in below] == [run["id"]]
        shown = CliRunner().invoke(app, ["top", "--once", "--url", str(server.base_url), "--api-key", "one"])
        assert re.search(rf"{run['tokens']:,} tokens  [\d.]+ KiB on disk, ", shown.output), shown.output
        # It is nobody else's.
        assert not any(node["tokens"] for node in server.get("/v1/cache/tree", headers=two).json()["data"])
        assert server.get(f"/v1/cache/tree/{run['id']}", headers=two).status_code == 404
        assert server.get("/v1/cache/tree", params={"under": run["id"]}, headers=two).status_code == 404
        server.post("/v1/chat/completions", json=body, headers=one).raise_for_status()
        wait_until_idle(server)
        now = server.get("/v1/cache/tree", headers=one).json()["data"]
        assert sum(node["tokens"] for node in now if node["in_memory"]) >= run["tokens"] - 2
        for wrong in ("x", "1-2-3", f"{'0' * 64}-5-2", f"{'0' * 64}-1-2"):
            assert server.get(f"/v1/cache/tree/{wrong}", headers=one).status_code in (400, 404)


def test_what_would_go_next_goes_and_other_budgets_are_replayed(server: httpx.Client) -> None:
    told = server.get("/v1/cache/evictions", params={"bytes": 1}).json()
    assert len(told["data"]) == 1 and told["bytes"] == told["data"][0]["bytes"] > 0
    assert server.get("/v1/cache/evictions").json()["bytes"] <= wait_until_idle(server)["bytes_held"]
    replayed = server.get("/v1/cache/budgets").json()
    assert [each["factor"] for each in replayed["data"]] == [0.5, 1, 2, 4]
    assert replayed["requests"] == 3 and replayed["data"][1]["saved_s"] == 0
    assert all(0 < each["reused"] < each["prompt"] for each in replayed["data"])


@pytest.mark.anyio
async def test_one_search_or_replay_runs_at_a_time_and_no_record_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go = threading.Event()

    def wait(*_: object) -> list[Replayed]:
        assert may_go.wait(60)
        return []

    monkeypatch.setattr(overview, "replay", wait)
    async with api() as served, asyncio.timeout(30):
        get = served.client.get
        replaying = asyncio.create_task(get("/v1/cache/budgets"))
        while served.service.threads.num_open(Stage.SURVEY) < 2:
            await asyncio.sleep(0.001)
        for path in ("/v1/cache/budgets", "/v1/cache/tree/search?q=tide"):
            refused = await get(path)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1"), refused.text
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
        answer = (await served.client.post("/v1/chat/completions", json=body)).json()
        assert (await get(f"/v1/cache/requests/{answer['id']}")).status_code == 200
        assert (await get("/v1/cache/tree")).status_code == 200
        assert not replaying.done()
        may_go.set()
        assert (await replaying).status_code == 200
        assert (await get("/v1/cache/tree/search?q=tide")).status_code == 200


class ServerEvents:
    """The events of a server, one after the other."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.iter_lines()
        self.last_id = ""

    def next(self) -> tuple[str, dict[str, Any]]:
        name = ""
        for line in self._lines:
            field, _, value = line.partition(": ")
            if field == "id":
                self.last_id = value
            elif field == "event":
                name = value
            elif field == "data":
                return name, json.loads(value)
        raise AssertionError("the stream has ended")

    def until(self, name: str) -> dict[str, Any]:
        while True:
            found, body = self.next()
            if found == name:
                return body


def test_events_tell_requests_tree_and_counters_and_go_on_where_they_were_left(server: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": f"{TEXT} Again."}], "max_tokens": 3}
    with server.stream("GET", "/v1/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        stream = ServerEvents(response)
        name, snapshot = stream.next()
        assert name == "snapshot" and snapshot["counters"]["requests"] == wait_until_idle(server)["requests"]
        made = server.post("/v1/chat/completions", json=body).json()
        ended = stream.until("request.ended")
        assert ended == server.get(f"/v1/cache/requests/{made['id']}").json()
        assert stream.until("tree")["tokens"] > snapshot["trees"][0]["tokens"]
        left_at = stream.last_id
    again = server.post("/v1/chat/completions", json=body).json()
    with server.stream("GET", "/v1/events", headers={"last-event-id": left_at}) as response:
        assert ServerEvents(response).until("request.ended")["id"] == again["id"]
    for unknown in ("other-5", left_at.replace("-", "-0"), left_at.replace("-", "-+")):
        with server.stream("GET", "/v1/events", headers={"last-event-id": unknown}) as response:
            assert ServerEvents(response).next()[0] == "snapshot"


@pytest.mark.matrix
def test_watching_an_idle_server_is_no_event(server: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    # An inspection is something to do, so the time may be read while it is above 0.
    times = count()
    monkeypatch.setattr(Heartbeat, "stalled_s", property(lambda _: next(times) / 1e6))
    traces = {"stalled_s", "busy_s", "inspections", "inspection_s"}
    body = {"messages": [{"role": "user", "content": f"{TEXT} Once more."}], "max_tokens": 3}
    wait_until_idle(server)
    with server.stream("GET", "/v1/events") as response:
        stream = ServerEvents(response)
        _, snapshot = stream.next()
        counters = [snapshot["counters"]]
        while server.get("/health").json()["inspections"] < counters[0]["inspections"] + 4:
            pass
        server.post("/v1/chat/completions", json=body).raise_for_status()
        while (event := stream.next())[0] != "request.ended":
            if event[0] == "counters":
                counters.append(event[1])
    for before, after in pairwise(counters):
        assert any(before[name] != after[name] for name in after.keys() - traces), after


@pytest.mark.anyio
async def test_watchers_that_enter_together_share_one_looker(monkeypatch: pytest.MonkeyPatch) -> None:
    async with api() as served:
        registered: list[Watcher] = []
        monkeypatch.setattr(served.service, "watch", registered.append)
        monkeypatch.setattr(served.service, "unwatch", registered.remove)
        looked, inspect = asyncio.Event(), served.service.inspections

        async def inspections(part: TreePart = WHOLE_TREE) -> Mapping[str, Inspection]:
            await looked.wait()
            return await inspect(part)

        monkeypatch.setattr(served.service, "inspections", inspections)
        hub = EventHub(served.service)
        entering = [asyncio.create_task(hub.__aenter__()) for _ in range(2)]
        await asyncio.sleep(0.01)
        assert registered == [hub] and not any(task.done() for task in entering)
        looked.set()
        await asyncio.gather(*entering)
        assert registered == [hub] and hub.is_watched


@pytest.mark.anyio
async def test_who_cannot_look_is_no_watcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused one that is counted keeps the hub looking at the engine after all others have left."""
    sleep = asyncio.sleep

    async def no_sleep(seconds: float) -> None:
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", no_sleep)
    async with api() as served:
        hub = EventHub(served.service, clock=count(step=100).__next__)
        with monkeypatch.context() as refusing:
            refusing.setattr(served.backend, "inspect", raise_shutting_down)
            with pytest.raises(ShuttingDown):
                await hub.__aenter__()
        async with hub:
            assert hub.is_watched
        async with asyncio.timeout(10):
            while hub.is_watched:
                await sleep(0)


def raise_shutting_down(**_: object) -> Never:
    raise ShuttingDown("The server is shutting down.")


def ahead_of(client: httpx.Client, key: dict[str, str]) -> int:
    return client.get("/v1/cache/overview", headers=key).json()["savings"]["prefilled_ahead"]


def test_what_is_prefilled_while_one_types_is_prefilled_ahead(server: httpx.Client) -> None:
    before, ahead = wait_until_idle(server), ahead_of(server, {})
    body = {"messages": [{"role": "user", "content": "Half of a senten"}], "partial": True}
    made = server.post("/v1/prefill", json=body).raise_for_status().json()
    after = wait_until_idle(server)
    assert ahead_of(server, {}) - ahead == made["prefilled_tokens"] == after["prefilled"] - before["prefilled"] > 0


@pytest.mark.parametrize("separates", [False, True])
def test_a_key_sees_its_own_alone(separates: bool) -> None:
    with real_server(api_keys=("one", "two"), separates_keys=separates) as client:
        one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        body = {"messages": [{"role": "user", "content": f"{TEXT} A secret."}], "max_tokens": 2}
        with client.stream("GET", "/v1/events", headers=two) as response:
            stream = ServerEvents(response)
            stream.next()
            client.post("/v1/chat/completions", json=body, headers=one).raise_for_status()
            mine = client.post("/v1/chat/completions", json=body, headers=two).json()
            assert stream.until("request.ended")["id"] == mine["id"]
        wait_until_idle(client)
        assert client.get("/v1/cache/tree").status_code == 401
        overview = client.get("/v1/cache/overview", headers=two).json()
        assert overview["savings"]["prompt"] == mine["usage"]["prompt_tokens"]
        assert overview["shows_text"] is separates
        health = client.get("/health", headers=two).json()
        assert health["settled"] == sum(ahead_of(client, key) for key in (one, two)) > ahead_of(client, two)
        told = client.get("/v1/cache/tree", headers=two).json()
        tree = told["data"]
        assert sum(node["tokens"] for node in tree) == told["totals"]["tokens"] and len(tree) == told["totals"]["edges"]
        sought = client.get("/v1/cache/tree/search", params={"q": "secret"}, headers=two)
        if separates:
            assert "secret" in "".join(each["text"] for each in sought.json()["data"])
            other = client.get("/v1/cache/tree", headers=one).json()["data"]
            assert not {node["id"] for node in tree} & {node["id"] for node in other}
            assert health["tokens_held"] == told["totals"]["tokens"] + sum(node["tokens"] for node in other)
            edge = client.get(f"/v1/cache/tree/{other[-1]['id']}", headers=two)
            assert edge.status_code == 404
        else:
            # Whose text it is nobody knows any more: it is shown to none.
            assert sought.status_code == 400 and not any(node["text"] for node in tree)


def test_what_broke_prefixes_is_ranked_by_seconds() -> None:
    days = [date(2026, 1, 1)]
    ledger = Ledger(Status, today=lambda: days[0])

    def ended(*accounts: tuple[int, int, Reason], saved_s: float = 0.0, prefill_s: float = 1.0) -> None:
        told = tuple(ComputedSpan(span=Span(start, stop), reason=reason) for start, stop, reason in accounts)
        explanation = Explanation(reason=told[-1].reason, accounts=told, advice="", expected_text="a", actual_text="b")
        outcome = Outcome(num_prompt=100, num_reused=0, num_prefilled=100, prefill_s=prefill_s, saved_s=saved_s)
        ledger.request_ended(
            Record(
                id="r",
                api="chat",
                model="m",
                created=0.0,
                namespace="",
                ended="stop",
                outcomes=(outcome,),
                explanation=explanation,
            )
        )

    ended((0, 30, Reason.EVICTED), (30, 100, Reason.DATE_CHANGED), saved_s=5.0)
    ended((0, 100, Reason.TOOLS_CHANGED), prefill_s=3.0)
    ended((0, 100, Reason.NEW_TOKENS))
    savings = ledger.of("")
    assert [(b["reason"], b["tokens"], round(b["seconds"], 6)) for b in breaker_bodies(savings)] == [
        ("tools changed", 100, 3.0),
        ("date changed", 70, 0.7),
        ("evicted", 30, 0.3),
    ]
    assert [tuple(each.values()) for each in change_bodies(savings)] == [
        ("date changed", 1, 100, 70),
        ("tools changed", 1, 100, 100),
        ("new tokens", 1, 100, 100),
    ], "the requests of each kind, what was computed of them, and what is computed where nothing was evicted"
    assert (savings.lost, round(savings.lost_s, 6), savings.saved_s) == (30, 0.3, 5.0)
    assert savings.today.today(savings.saved_s) == 5.0
    days[0] = date(2026, 1, 2)
    ended((0, 100, Reason.NEW_TOKENS), saved_s=2.0)
    assert savings.today.today(savings.saved_s) == 2.0


@pytest.mark.anyio
async def test_the_page_is_for_browsers_and_lets_nothing_in() -> None:
    async with api(settings=Settings(model=MODEL, api_keys=("one",))) as a:
        page = await a.client.get("/", headers={"accept": "text/html,*/*"})
        line = await a.client.get("/", headers={"accept": "*/*"})
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert line.text == "Reprise is running"
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        for name in ("app.py", "..%2fapi%2fauth.py", "nothing.js"):
            assert (await a.client.get(f"/page/{name}")).status_code == 404


def test_a_record_of_many_sources_adds_up() -> None:
    outcome = Outcome(num_prompt=100, num_reused=60, num_loaded=30, num_settled=50, num_awaited=10, num_prefilled=40)
    record = Record(
        id="r", api="chat", model="m", created=0.0, namespace="", ended="stop", outcomes=(outcome,), render_s=0.5
    )
    body = record_body(record)
    assert body["sources"] == {"memory": 0, "disk": 30, "ahead": 20, "shared": 10, "computed": 40}
    assert body["spans"] is None


def test_the_terminal_shows_the_same(server: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    health = wait_until_idle(server)
    secret = "red \x1b[31m and \u202ebackwards"
    body = {"messages": [{"role": "user", "content": secret}], "max_tokens": 2}
    server.post("/v1/chat/completions", json=body).raise_for_status()
    health = wait_until_idle(server)
    shown = CliRunner().invoke(app, ["top", "--once", "--url", str(server.base_url)])
    assert shown.exit_code == 0, shown.output
    savings = server.get("/v1/cache/overview").json()["savings"]
    assert f"reused {savings['reused']:,}" in shown.output and f"computed {savings['computed']:,}" in shown.output
    assert f"prefilled ahead {savings['prefilled_ahead']:,}" in shown.output
    assert f"{health['tokens_held']:,} tokens in" in shown.output
    assert "red ·[31m and ·backwards" in shown.output
    assert "\x1b[31m" not in shown.output and "\u202e" not in shown.output
    # A long reason beside them does not take the room of numbers.
    server.post("/v1/chat/completions", content="{}")
    wait_until_idle(server)
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, ["top", "--once", "--url", str(server.base_url)])
    assert re.search(r"^\d\d:\d\d:\d\d +chat +`messages`: Field", shown.output, re.MULTILINE), shown.output
    assert re.search(r"^\d\d:\d\d:\d\d +chat +[\d,]+ +\S+ +[\d,]+ +[\d.]+ m?s +\S", shown.output, re.MULTILINE), (
        shown.output
    )


def test_a_disk_that_takes_no_more_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> Never:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setitem(ACTIONS, Failpoint.DISK_FILL, full)
    with real_server("llama", disk_directory=str(tmp_path)) as client:
        body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}
        client.post("/v1/chat/completions", json=body).raise_for_status()
        deadline_s = time.monotonic() + PATIENCE_S
        while (trouble := client.get("/health").json()["disk"]["trouble"]) is None:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        assert os.strerror(errno.ENOSPC) in trouble
        assert client.get("/v1/cache/overview").json()["disk"]["trouble"] == trouble
        shown = CliRunner().invoke(app, ["top", "--once", "--url", str(client.base_url)], env={"COLUMNS": "200"}).output
        assert os.strerror(errno.ENOSPC) in re.sub(r"\s+", " ", shown)


@contextmanager
def at_most_s(seconds: float) -> Generator[None]:
    """Fail a coroutine that never lets the event loop go on, too."""

    def fail(number: int, frame: object) -> None:
        raise AssertionError("the event loop stands still")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.anyio
async def test_who_is_behind_an_emptied_ring_gets_a_snapshot_and_stops_nobody() -> None:
    now_s = 0.0
    async with api() as served:
        hub = EventHub(served.service, clock=lambda: now_s)
        async with hub:
            events = hub.tell("", None)
            assert "event: snapshot" in await anext(events)
            # The counters change, and the ring has an event that this one has not read.
            served.backend.counts = Counts(num_requests=7)
        now_s = 1000.0
        while hub.is_watched:
            now_s += 1000.0
            await asyncio.sleep(0.01)
        with at_most_s(5):
            assert "event: snapshot" in await anext(events)


@pytest.mark.anyio
async def test_a_look_that_fails_is_not_the_last(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with api() as served, EventHub(served.service) as hub:
        events = hub.tell("", None)
        await anext(events)
        inspect = served.backend.inspect
        monkeypatch.setattr(served.backend, "inspect", lambda **how: 1 / 0)
        with at_most_s(10):
            while "cannot look at the engine" not in caplog.text:
                await asyncio.sleep(0.01)
            monkeypatch.setattr(served.backend, "inspect", inspect)
            served.backend.counts = Counts(num_requests=7)
            assert "event: counters" in await anext(events)
