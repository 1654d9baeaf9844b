"""Whole simulations: bounds, policies against each other, the command."""

import json
import re
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from bench.made_traces import (
    Shape,
    agent_loops,
    chats_among_scans,
    chats_in_turn,
    uniform_documents,
    zipf_chats,
)
from reprise.cli.main import app
from reprise.core.errors import BadRequest
from reprise.core.prompt import Prompt
from reprise.core.tokens import as_tokens
from reprise.lab.simulate.offline import FutureKnown
from reprise.lab.simulate.report import count_text, draw, nbytes_text, table_of
from reprise.lab.simulate.run import BELADY, UNBOUNDED, Result, run_simulation
from reprise.replay.payloads import Sizes
from reprise.replay.request import Request
from reprise.replay.store import Replay
from tests.api.real_server import real_server
from tests.matrix import examples, now_and_later, rows_now_and_later

SHAPE = Shape(system=400, user=60, answer=80)


def request_of(ids: list[int], answer: list[int] | None = None) -> Request:
    prompt, said = Prompt(tokens=as_tokens(ids)), None if answer is None else as_tokens(answer)
    return Request(prompt=prompt, num_tokens=len(ids) + 1, shareable=len(ids), block=1, answer=said)


def best_of_all(requests: list[tuple[list[int], list[int]]], room: int) -> int:
    """The most blocks of prompts that any order of eviction can reuse, by trying all of them."""
    states: dict[frozenset[tuple[int, ...]], int] = {frozenset(): 0}
    for prompt, answer in requests:
        whole = prompt + answer
        path = [tuple(whole[: n + 1]) for n in range(len(whole))]
        after: dict[frozenset[tuple[int, ...]], int] = {}
        for held, gained in states.items():
            hit = next((n for n, block in enumerate(path) if block not in held), len(path))
            total = gained + min(hit, len(prompt))
            for kept in _subsets(sorted(held | set(path)), room):
                after[kept] = max(after.get(kept, 0), total)
        states = after
    return max(states.values())


def _subsets(blocks: list[tuple[int, ...]], room: int) -> list[frozenset[tuple[int, ...]]]:
    found = [frozenset[tuple[int, ...]]()]
    for block in blocks:
        found += [chosen | {block} for chosen in found if len(chosen) < room]
    return found


@settings(max_examples=examples(40), deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.sampled_from([[1], [1, 2], [1, 3], [1, 2, 4], [5], [5, 6]]), st.sampled_from([[], [], [2], [4], [9]])
        ),
        min_size=1,
        max_size=6,
    ),
    room=st.integers(1, 3),
)
def test_belady_is_the_best_of_all(requests: list[tuple[list[int], list[int]]], room: int) -> None:
    future = FutureKnown(block=1)
    for prompt, answer in requests:
        future.add(request_of(prompt, answer))
    assert future.reused_within(room) == best_of_all(requests, room)


def test_beside_what_a_model_with_snapshots_reuses_there_is_one() -> None:
    chats = list(chats_in_turn(num_chats=6, num_turns=4))
    sizes = Sizes(full=1, snapshot=3000)
    for budget in (2000, 6000, 12000):
        results = run_simulation("t", chats, budgets=(budget,), policies=("lru", "cost", "belady"), sizes=sizes)
        reused = {result.policy: result.reused for result in results}
        future = FutureKnown(block=chats[0].block)
        for request in chats:
            future.add(request)
        assert max(reused["lru"], reused["cost"]) <= reused["belady"]
        assert reused["belady"] == future.reused_within(max(0, budget - 3000))


def test_a_block_that_an_answer_computes_again_is_not_held_for_it() -> None:
    future = FutureKnown(block=1)
    for prompt, answer in [([1, 2], [4]), ([1, 3], []), ([1, 3], []), ([1], [2]), ([1, 2, 4], [])]:
        future.add(request_of(prompt, answer))
    assert future.reused_within(3) == 7, "2 goes while 4 stays"


def test_what_an_answer_stored_can_be_reused_with_the_future_known() -> None:
    requests = [request_of([1, 2], [3, 4]), request_of([1, 2, 3, 4, 5])]
    future = FutureKnown(block=1)
    for request in requests:
        future.add(request)
    assert future.reused_within(100) == 4


@pytest.mark.matrix
@pytest.mark.parametrize(("seed", "settles"), rows_now_and_later([(2, True)], [(0, False), (1, False)]))
def test_nobody_beats_who_knows_the_future(seed: int, *, settles: bool) -> None:
    # Sizes that are no multiples of a block: prompts part, and end, in the midst of one.
    shape = Shape(system=401, user=59, answer=83, opening=3, thinking=70 if settles else 0)
    requests = list(zipf_chats(num_requests=80, num_chats=15, shape=shape, seed=seed))
    results = run_simulation("zipf", requests, budgets=(2_000, 8_000, 10**9), sizes=Sizes(), settles=settles)
    by = {(r.policy, r.budget): r.reused for r in results}
    infinite = by[UNBOUNDED, None]
    for budget in (2_000, 8_000, 10**9):
        assert max(by["lru", budget], by["cost", budget]) <= by[BELADY, budget] <= infinite
    assert by["lru", 10**9] == by[BELADY, 10**9] == infinite, "with room for all there is nothing to know"


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("requests", "budget", "ratio"),
    rows_now_and_later(
        [
            (lambda: chats_in_turn(num_chats=24, num_turns=10, shape=SHAPE), 8_000, 1.3),
        ],
        [
            (lambda: chats_among_scans(num_requests=200, num_chats=8), 30_000, 1.2),
            (lambda: agent_loops(num_loops=12, num_steps=8, at_once=4), 20_000, 0.98),
            (lambda: zipf_chats(num_requests=300, num_chats=60, shape=SHAPE), 6_000, 1.0),
            (lambda: uniform_documents(num_requests=400, num_documents=20), 40_000, 0.98),
        ],
    ),
    ids=["chats-in-turn", "chats-among-scans", "agent-loops", "zipf-chats", "uniform-documents"],
)
@pytest.mark.parametrize("layout", now_and_later(["hybrid"], ["full", "window"]))
def test_the_default_is_never_below_lru(requests, budget: int, ratio: float, layout: str) -> None:
    sizes = {
        "full": Sizes(),
        "hybrid": Sizes(full=1, snapshot=800),
        "window": Sizes(full=1, window=1, window_tokens=128),
    }[layout]
    factor = {"full": 1, "hybrid": 3, "window": 2}[layout]
    results = run_simulation("t", requests(), budgets=(factor * budget,), policies=("lru", "cost"), sizes=sizes)
    lru, cost = (next(r for r in results if r.policy == policy) for policy in ("lru", "cost"))
    assert cost.reused >= ratio * lru.reused


@pytest.mark.matrix
def test_a_long_trace_grows_nothing_but_the_store() -> None:
    replay = Replay(policy="cost", budget=3_000, sizes=Sizes())
    numbers = np.random.default_rng(0)
    sizes: list[int] = []
    for at in range(2_000):
        start = int(numbers.integers(1 << 30))
        tokens = as_tokens(np.arange(start, start + 200, dtype=np.int32))
        replay.take(Request(prompt=Prompt(tokens=tokens), num_tokens=200, shareable=200))
        if at % 500 == 499:
            order = replay.cache.order
            sizes.append(order.num_entries)
            assert replay.cache.stats.num_tokens <= 3_000
    replay.cache.check()
    assert max(sizes) <= 2 * (4 * 20 + 64) + 8


def test_an_empty_trace_and_an_unknown_policy_are_refused() -> None:
    with pytest.raises(BadRequest, match="no request"):
        run_simulation("nothing", [], budgets=(1,))
    with pytest.raises(BadRequest, match="fifo"):
        run_simulation("t", [request_of([1])], budgets=(1,), policies=("fifo",))


def test_hashes_and_tokens_in_one_trace_are_refused_where_they_count_differently(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"tokens": [1, 2]}\n{"hash_ids": [1], "input_length": 5}\n')
    done = CliRunner().invoke(app, ["simulate", str(path), "--tokens", "1k"])
    assert done.exit_code == 2
    assert "request 2" in done.stderr and "--granularity token" in done.stderr
    done = CliRunner().invoke(app, ["simulate", str(path), "--tokens", "1k", "--granularity", "token"])
    assert done.exit_code == 0, done.output


def test_amounts_as_text() -> None:
    assert [count_text(n) for n in (0, 9_999, 12_345, 144_793_823)] == ["0", "9999", "12.3k", "144.79M"]
    assert [nbytes_text(n) for n in (999, 2_000_000_000, 3 * 10**12)] == ["999 B", "2 GB", "3 TB"]


def result(policy: str, budget: int | None, reused: int) -> Result:
    return Result(trace="t", policy=policy, budget=budget, requests=2, prompt=100, reused=reused)


def test_a_plot_is_a_page(tmp_path: Path) -> None:
    draw([result("lru", 10**9, 5), result("cost", 10**9, 7), result("infinite", None, 9)], tmp_path / "p.html")
    assert (tmp_path / "p.html").read_text(encoding="utf-8").count("<polyline") == 3


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    ids = [[0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4]]
    path.write_text("\n".join(json.dumps({"input_length": 512 * len(i), "hash_ids": i}) for i in ids))
    return path


def test_the_command_prints_a_table(trace: Path) -> None:
    done = CliRunner().invoke(app, ["simulate", str(trace), "--tokens", "2k,1M"], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    assert "4 requests" in done.output and "belady" in done.output and "infinite" in done.output


def test_a_table_of_long_figures_fits_a_terminal() -> None:
    each = [
        Result(trace="t", policy=p, budget=999 * 10**9, requests=10**6, prompt=10**9, reused=123_456_789)
        for p in ("lru", "greedy-dual", "cost", BELADY)
    ]
    console = Console(width=80, record=True, file=StringIO())
    console.print(table_of(each, bytes_per_token=20_480))
    shown = console.export_text()
    assert "greedy-dual" in shown and "…" not in shown


@pytest.mark.parametrize(("to", "says"), [("p.png", "ends in .html, not p.png"), ("nowhere/p.html", "no directory")])
def test_a_plot_that_cannot_be_is_refused_before_anything_is_simulated(
    trace: Path, tmp_path: Path, to: str, says: str
) -> None:
    done = CliRunner().invoke(app, ["simulate", str(trace), "--plot", str(tmp_path / to)])
    assert done.exit_code == 2
    assert says in done.stderr and done.stdout == ""


def test_a_plot_that_fails_to_be_written_is_one_sentence(trace: Path, tmp_path: Path) -> None:
    # A name that no file can have, found when it is opened.
    to = tmp_path / (300 * "x" + ".html")
    done = CliRunner().invoke(app, ["simulate", str(trace), "--tokens", "2k", "--plot", str(to)])
    assert done.exit_code == 2
    assert "Cannot write" in done.stderr and "2000" in done.stdout


def test_a_recorded_trace_says_what_more_memory_would_save(tmp_path: Path) -> None:
    trace, page = tmp_path / "requests.jsonl", tmp_path / "more.html"
    with real_server("qwen3_5", record_file=str(trace), settles=False) as client:
        for turn in (0, 1, 0, 1):
            system = {"role": "system", "content": f"Case {turn}. " + "Answer in plain words. " * 30}
            messages = [system, {"role": "user", "content": "Hello!"}]
            client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2}).raise_for_status()
    first = json.loads(trace.read_text().splitlines()[0])
    # One prompt with its snapshots, and then some; both of them.
    one = first["token_nbytes"] * first["input_length"] + 3 * first["snapshot_nbytes"]
    budgets = f"{one},{4 * one}"
    arguments = ["simulate", str(trace), "--budgets", budgets, "--plot", str(page)]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    bars = [line for line in done.stdout.splitlines() if "if the future were known" in line]
    shares = [float(line.split("%")[0].split()[-1]) for line in bars]
    assert len(shares) == 2 and shares[0] > shares[1] > 40
    assert "no bound" in done.stdout
    text = page.read_text()
    assert text.count("<polyline") == 4 and not re.search(r"<script|<link|src=|href=|url\(|https?:", text)


@pytest.mark.parametrize("layout", ["full", "hybrid", "window"])
def test_the_command_gives_json(trace: Path, layout: str) -> None:
    options = [
        "--json",
        "--cache-bytes",
        "1GB",
        "--layout",
        layout,
        "--policy",
        "cost,infinite",
        "--granularity",
        "token",
    ]
    done = CliRunner().invoke(app, ["simulate", str(trace), *options])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [(row["policy"], row["requests"], row["prompt"]) for row in rows] == [
        ("cost", 4, 5632),
        ("infinite", 4, 5632),
    ]
    assert rows[0]["reused"] == rows[1]["reused"] > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--tokens", "many"], "'many'"),
        (["--tokens", "infM"], "'infM'"),
        (["--tokens", "1M,,2M"], "''"),
        (["--cache-bytes", "50%"], "50%"),
        (["--cache-bytes", "x"], "Invalid size"),
        (["--layout", "round"], "'round'"),
        (["--policy", "fifo"], "'fifo'"),
    ],
)
def test_what_cannot_be_simulated_is_one_sentence(trace: Path, options: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["simulate", str(trace), *options])
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_of_a_recording_of_several_models_one_is_simulated(tmp_path: Path) -> None:
    """They share no cache, even if their prompts have the same hashes; aliases of one model do."""
    trace = tmp_path / "requests.jsonl"
    same = {"input_length": 1024, "hash_ids": [1, 2], "block_tokens": 512, "snapshot_nbytes": 0}
    large = {**same, "engine": "large", "model": "large", "token_nbytes": 1000}
    lines = [large, {**same, "engine": "small", "model": "small", "token_nbytes": 10}, {**large, "model": "alias"}]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def simulated(*options: str) -> tuple[dict[str, float], str]:
        done = CliRunner().invoke(
            app, ["simulate", str(trace), "--budgets", "1GB", "--policy", "lru", "--json", *options]
        )
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)[0], done.stderr

    result, told = simulated()
    assert result["requests"] == 2 and result["hit_share"] > 0.4
    assert "large or alias (2), small (1)" in told
    assert simulated("--model", "alias") == (result, "")
    result, _ = simulated("--model", "small")
    assert (result["requests"], result["hit_share"]) == (1, 0)
    refused = CliRunner().invoke(app, ["simulate", str(trace), "--model", "other"])
    assert refused.exit_code == 2 and "no requests of other" in refused.stderr
