"""The workloads, held with small servers: what they computed, who leads, and when it ends."""

import json
import re
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random

import httpx
import pytest

from reprise.lab.bench.client import ClientReply, Post, send
from reprise.lab.bench.fit import SideSpeed, demand_of, fitted
from reprise.lab.bench.report import as_html, as_json, summary_lines, table_of
from reprise.lab.bench.results import BenchResult, Run
from reprise.lab.bench.run import Bench, BenchPlan
from reprise.lab.bench.server_process import ServerFailed, ServerProcess, free_port
from reprise.lab.bench.sides import OFF, ON, BenchFailed, Side, UrlSide
from reprise.lab.bench.workloads import WORKLOADS, Size
from tests.benchmark.beside import InProcess, talking

SMALL = Size(factor=0.06)
NAMES = [workload.name for workload in WORKLOADS]


def held(plan: BenchPlan, *sides: Side) -> tuple[Bench, BenchResult]:
    bench = Bench(plan=plan, sides=sides, tell=lambda text: None)
    bench.hold()
    assert bench.fit is not None
    result = BenchResult(
        head={"model": "tiny"},
        sides=tuple(side.name for side in sides),
        workloads=tuple((workload.name, workload.about) for workload in bench.fit.workloads),
        runs=tuple(bench.runs),
        memory=bench.memory,
        notes=tuple(bench.notes),
    )
    return bench, result


@pytest.fixture(scope="module")
def whole() -> tuple[InProcess, InProcess, BenchResult]:
    """All workloads once, with reuse and without, and with a server that refuses."""
    on, off = InProcess(ON), InProcess(OFF, has_prefix_cache=False)
    plan = BenchPlan(minutes=5, workloads=WORKLOADS, size=SMALL, num_repeats=1)
    with talking({"error": {"message": "no tools here"}}, status=400) as url:
        peer = UrlSide(url)
        speed = SideSpeed(prefill=1000, decode=100, chars_per_token=4)
        bench = Bench(
            plan=plan, sides=(on, off, peer), tell=lambda text: None, speeds=dict.fromkeys((ON, OFF, peer.name), speed)
        )
        bench.hold()
    assert bench.fit is not None
    names = tuple((workload.name, workload.about) for workload in bench.fit.workloads)
    sides = tuple(side.name for side in (on, off, peer))
    result = BenchResult(head={"model": "tiny"}, sides=sides, workloads=names, runs=tuple(bench.runs))
    return on, off, result


@pytest.mark.matrix
def test_every_workload_is_held_by_both_sides_with_the_same_prompts(
    whole: tuple[InProcess, InProcess, BenchResult],
) -> None:
    _, _, result = whole
    assert [name for name, _ in result.workloads] == NAMES
    for name in NAMES:
        (on,), (off,) = (result.runs_of(name, side) for side in (ON, OFF))
        assert [reply.num_prompt for reply in on.replies] == [reply.num_prompt for reply in off.replies]
        assert off.num_computed == off.num_prompt
        assert on.num_computed is not None and off.num_computed is not None
        if name != "restart":
            # Without a disk that has nothing to go on from but within its halves.
            assert on.num_computed < off.num_computed, name


@pytest.mark.matrix
def test_answers_are_compared_and_reuse_changes_none(whole: tuple[InProcess, InProcess, BenchResult]) -> None:
    rows = [row for row in whole[2].summaries() if row.side == OFF]
    assert len(rows) == len(NAMES)
    assert sum(row.num_compared for row in rows) > 20
    assert sum(row.num_different for row in rows) == 0


@pytest.mark.matrix
def test_the_numbers_are_the_servers_own(whole: tuple[InProcess, InProcess, BenchResult]) -> None:
    on, off, result = whole
    num = 0
    for run in as_json(result)["runs"]:
        if run["side"] not in (ON, OFF):
            continue
        records = on.records if run["side"] == ON else off.records
        assert run["computed"] == sum(records[request["id"]]["prefilled"] for request in run["requests"])
        for request in run["requests"]:
            record = records[request["id"]]
            assert (request["prompt"], request["cached"]) == (record["prompt_tokens"], record["reused"])
            assert request["generated"] == record["generated"]
            assert request["why"] == record["reason"]
            num += 1
    assert num > 60


@pytest.mark.matrix
def test_servers_are_restarted_for_the_restart_alone(whole: tuple[InProcess, InProcess, BenchResult]) -> None:
    on, off, _ = whole
    assert (on.num_starts, off.num_starts) == (2, 2)


@pytest.mark.matrix
def test_a_peer_that_refuses_has_a_sentence_in_place_of_numbers(
    whole: tuple[InProcess, InProcess, BenchResult],
) -> None:
    result = whole[2]
    peer = result.sides[2]
    assert result.runs_of("growing chat", peer) == []
    assert result.refusal_of("growing chat", peer) == "status 400: no tools here"
    assert "no tools here" in as_html(result)


@pytest.mark.matrix
def test_the_report_needs_nothing_from_elsewhere(whole: tuple[InProcess, InProcess, BenchResult]) -> None:
    page = as_html(whole[2])
    assert not re.search(r"<script|<link|<img|src=|href=|url\(|@import|https?:", page)
    assert page.count("<svg") >= 2 * len(NAMES)
    assert "prefers-color-scheme: dark" in page
    for name in NAMES:
        assert name in page
    assert table_of(whole[2]).row_count > 2 * len(NAMES)
    assert any(OFF in line and "all the same" in line for line in summary_lines(whole[2]))


@pytest.mark.matrix
def test_one_server_at_a_time_is_asked_what_the_first_was_asked() -> None:
    growing = tuple(workload for workload in WORKLOADS if workload.name == "growing chat")
    plan = BenchPlan(minutes=5, workloads=growing, size=SMALL, num_repeats=2, takes_turns=False)
    _, result = held(plan, InProcess(ON), InProcess(OFF, has_prefix_cache=False))
    (first, second) = (result.runs_of("growing chat", side) for side in (ON, OFF))
    assert len(first) == len(second) == 2
    asked = [[[reply.num_prompt for reply in run.replies] for run in runs] for runs in (first, second)]
    assert asked[0] == asked[1]
    assert {row.num_different for row in result.summaries()} == {0}


SPEED = SideSpeed(prefill=500, decode=40, chars_per_token=4, start_s=5)


@dataclass
class BenchClock:
    now_s: float = 0.0


class Paced(Side):
    """A server that exists on paper: what it does takes time on a clock of its own. `slower`: than it was measured."""

    def __init__(self, name: str, clock: BenchClock, *, slower: float = 1.0) -> None:
        super().__init__(name)
        self._clock, self._slower = clock, slower

    def start(self) -> None:
        super().start()
        self._clock.now_s += SPEED.start_s
        self.start_s = SPEED.start_s

    def _connect(self, running: ExitStack) -> httpx.Client:
        return running.enter_context(httpx.Client())

    def ask(self, posts: Sequence[Post], *, timeout_s: float) -> list[ClientReply]:
        del timeout_s
        replies: list[ClientReply] = []
        for post in posts:
            num_prompt, sent_s = int(post.num_chars / SPEED.chars_per_token), self._clock.now_s
            first_s = sent_s + num_prompt / SPEED.prefill * self._slower
            self._clock.now_s = first_s + post.body["max_tokens"] / SPEED.decode * self._slower
            reply = ClientReply(
                id="",
                content=f"I am {self.name}.",
                reasoning="",
                calls=(),
                num_prompt=num_prompt,
                num_cached=0,
                num_generated=post.body["max_tokens"],
                sent_s=sent_s,
                first_s=first_s,
                ended_s=self._clock.now_s,
            )
            replies.append(reply)
        return replies


@pytest.mark.matrix
def test_it_is_over_in_the_minutes_it_was_given() -> None:
    for minutes in (2, 5, 30):
        clock = BenchClock()
        sides = (Paced(ON, clock), Paced(OFF, clock))
        bench = Bench(plan=BenchPlan(minutes=minutes, workloads=WORKLOADS), sides=sides, tell=print)
        bench.clock = lambda: clock.now_s  # noqa: B023
        bench.hold()
        assert 0.5 * minutes < clock.now_s / 60 < minutes
        assert {run.workload for run in bench.runs} == set(NAMES)
        assert bench.notes == []


def test_a_machine_that_turns_out_slower_ends_in_time_and_says_what_is_missing() -> None:
    clock = BenchClock()
    side = Paced(ON, clock, slower=3)
    bench = Bench(plan=BenchPlan(minutes=5, workloads=WORKLOADS), sides=(side,), tell=print, speeds={ON: SPEED})
    bench.clock = lambda: clock.now_s
    bench.hold()
    assert 4 < clock.now_s / 60 < 5.5
    assert any("ran 1 of 3 times" in note or "not run" in note for note in bench.notes)


def test_answers_in_other_words_are_counted_and_the_first_sides_stand_in_the_history() -> None:
    clock = BenchClock()
    growing = tuple(workload for workload in WORKLOADS if workload.name == "growing chat")
    plan = BenchPlan(minutes=5, workloads=growing, size=SMALL, num_repeats=1)
    _, result = held(plan, Paced(ON, clock), Paced(OFF, clock))
    (first, second) = result.summaries()
    assert (first.num_different, second.num_different, second.num_compared) == (0, 3, 3)
    asked = [[reply.num_prompt for reply in run.replies] for run in result.runs]
    assert asked[0] == asked[1]


def test_a_server_that_is_slower_and_computes_no_more_says_what_its_own_work_takes() -> None:
    def run(side: str, *, total_s: float, cpu_s: float | None, computed: int = 5) -> Run:
        reply = ClientReply(
            id="",
            content="",
            reasoning="",
            calls=(),
            num_prompt=9,
            num_cached=9 - computed,
            num_generated=1,
            sent_s=0.0,
            first_s=0.1,
            ended_s=total_s,
        )
        return Run(workload="chat", repeat=0, side=side, waves=((reply,), (reply,)), cpu_s=cpu_s)

    def lines(*runs: Run) -> list[str]:
        result = BenchResult(head={}, sides=(ON, "peer"), workloads=(("chat", "about"),), runs=runs)
        return [line for line in summary_lines(result) if "processor time" in line]

    slow, fast = run(ON, total_s=0.3, cpu_s=0.06), run("peer", total_s=0.2, cpu_s=0.04)
    (line,) = lines(slow, fast)
    assert "30.0 ms of processor time" in line and "20.0 ms in peer" in line
    assert lines(run(ON, total_s=0.1, cpu_s=0.06), fast) == []
    # Who computes more has another reason, and what is not known is not said.
    assert lines(run(ON, total_s=0.3, cpu_s=0.06, computed=6), fast) == []
    assert lines(slow, run("peer", total_s=0.2, cpu_s=None)) == []


def test_a_workload_is_given_up_when_the_time_is_over() -> None:
    clock = BenchClock()
    side = Paced(ON, clock, slower=40)
    bench = Bench(plan=BenchPlan(minutes=2, workloads=WORKLOADS), sides=(side,), tell=print, speeds={ON: SPEED})
    bench.clock = lambda: clock.now_s
    bench.hold()
    assert {run.workload for run in bench.runs} == {"growing chat"}
    assert "agent loop: not run, since the time was up. Raise --minutes." in bench.notes


def test_a_time_in_which_nothing_is_held_is_one_sentence() -> None:
    clock = BenchClock()
    bench = Bench(plan=BenchPlan(minutes=0.1, workloads=WORKLOADS), sides=(Paced(ON, clock),), tell=print)
    bench.clock = lambda: clock.now_s
    with pytest.raises(BenchFailed, match="no workload finished"):
        bench.hold()


def test_more_time_is_a_larger_size_and_too_little_leaves_out_the_restart() -> None:
    speeds = {ON: SPEED, OFF: SPEED}
    sizes = [fitted(WORKLOADS, speeds, seconds=60 * minutes, context=None).size.factor for minutes in (3, 5, 20, 60)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
    short = fitted(WORKLOADS, speeds, seconds=30, context=None)
    assert [workload.name for workload in short.workloads] == NAMES[:-1]


def test_no_prompt_is_longer_than_the_context() -> None:
    fit = fitted(WORKLOADS, {ON: SPEED}, seconds=36_000, context=2048)
    longest = max(demand_of(workload, fit.size).most_chars for workload in fit.workloads)
    assert longest / SPEED.chars_per_token < 2048


def test_another_seed_shares_no_beginning() -> None:
    for workload in WORKLOADS:
        first, second = (next(workload.script(SMALL, Random(seed))) for seed in (1, 2))
        assert isinstance(first, tuple) and isinstance(second, tuple)
        assert first[0].body["messages"][0] != second[0].body["messages"][0]


def test_a_server_that_dies_is_one_sentence_with_its_last_words() -> None:
    port = free_port()
    script = (
        "import http.server, sys\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(200); self.end_headers()\n"
        "    def do_POST(self): print('out of memory', flush=True); import os; os._exit(9)\n"
        f"http.server.HTTPServer(('127.0.0.1', {port}), H).serve_forever()\n"
    )

    class Dying(UrlSide):
        def check_runs(self) -> None:
            for _ in range(1000):
                process.check_runs()
                time.sleep(0.01)

    with ServerProcess((sys.executable, "-c", script), url=f"http://127.0.0.1:{port}") as process:
        side = Dying(f"http://127.0.0.1:{port}", model="one")
        side.start()
        with pytest.raises(BenchFailed, match=r"exited with status 9:(.|\n)*out of memory"):
            side.ask((Post(body={}),), timeout_s=10)
        side.stop()


def test_a_port_in_use_is_said_in_the_servers_own_words() -> None:
    with talking({}) as url:
        port = url.rpartition(":")[2]
        command = (sys.executable, "-m", "http.server", port, "--bind", "127.0.0.1")
        with pytest.raises(ServerFailed, match="in use"):
            ServerProcess(command)


def test_a_stream_is_read_as_the_standard_says() -> None:
    text = "one\u2028two\x85three"
    chunk = json.dumps({"id": "a", "choices": [{"delta": {"content": text}}]}, ensure_ascii=False)
    stream = f": hello\n\nid: 1\ndata: {chunk}\n\n: still here\n\ndata: [DONE]\n\n"
    headers = {"content-type": "text/event-stream"}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, headers=headers, text=stream))
    reply = send(httpx.Client(transport=transport, base_url="http://other"), Post(body={}))
    assert (reply.id, reply.content) == ("a", text)


def test_addresses_that_are_none_keys_and_models() -> None:
    with pytest.raises(BenchFailed, match="No server answers"):
        UrlSide(f"http://127.0.0.1:{free_port()}").start()
    with pytest.raises(BenchFailed, match="Invalid URL"):
        UrlSide("nonsense").start()
    with talking({}, models=("one", "two")) as url:
        with pytest.raises(BenchFailed, match=r"--vs-model\. It has one, two"):
            UrlSide(url).start()
        side = UrlSide(f"{url}/v1/", model="two")
        side.start()
        assert side.adapted(Post(body={"model": "other"})).body["model"] == "two"
        side.stop()
