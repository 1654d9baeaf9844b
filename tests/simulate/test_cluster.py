"""A trace over several replicas: what routing and a shared store are worth, against what can be said without a run."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.made_traces import Shape, chats_in_turn
from reprise.cli.main import app
from reprise.core.errors import BadRequest
from reprise.lab.simulate.cluster import ROUTINGS, ClusterResult, compare_clusters
from reprise.lab.simulate.run import run_simulation
from reprise.lab.simulate.traces import read_trace
from reprise.replay.payloads import Sizes
from reprise.replay.request import Request
from tests.matrix import now_and_later

REQUESTS = list(chats_in_turn(num_chats=16, num_turns=6, shape=Shape(system=400, user=60, answer=80)))
PROMPT = sum(request.num_tokens for request in REQUESTS)


def run(routing: str, *, num: int = 4, is_shared: bool = False, budget: int = 10**6) -> ClusterResult:
    one = compare_clusters("chats", REQUESTS, replicas=[num], budgets=[budget], sizes=Sizes(), routings=[routing])
    return next(each for each in one[1:] if each.is_shared == is_shared)


@pytest.mark.matrix
def test_one_replica_is_what_a_simulation_of_one_server_says() -> None:
    (alone,) = run_simulation("chats", REQUESTS, budgets=(8_000,), policies=("cost",), sizes=Sizes())
    assert {run(routing, num=1, budget=8_000).computed for routing in ROUTINGS} == {alone.computed}


@pytest.mark.matrix
@pytest.mark.parametrize("budget", now_and_later([20_000], [10**6]))
def test_lookup_computes_little_more_than_one_large_server_and_random_much_more(budget: int) -> None:
    one = run("random", num=1, budget=4 * budget).computed
    found = {routing: run(routing, budget=budget) for routing in ROUTINGS}
    assert found["lookup"].computed <= 1.1 * one + 3 * 400, "each replica computes the system prompt once"
    assert found["random"].computed > 1.5 * found["lookup"].computed
    assert 1.0 <= found["lookup"].balance < 2.5


@pytest.mark.matrix
def test_with_a_shared_store_every_routing_computes_what_is_new() -> None:
    unbounded = run("random", num=1, budget=10**9).computed
    for routing in ROUTINGS:
        result = run(routing, is_shared=True, budget=5_000)
        assert result.computed == unbounded and 0 < result.loaded < result.prompt == PROMPT
    assert run("lookup", is_shared=True).loaded < run("random", is_shared=True).loaded


@pytest.mark.matrix
def test_the_command_compares_them(tmp_path: Path) -> None:
    dialogues = [{"messages": [{"role": "system", "content": "s" * 400}, *_turns(number)]} for number in range(6)]
    trace = tmp_path / "dialogues.json"
    trace.write_text(json.dumps(dialogues))
    options = ["simulate", str(trace), "--replicas", "2,3", "--tokens", "0.01M", "--at-once", "6"]
    told = CliRunner().invoke(app, options)
    assert told.exit_code == 0 and told.output.count("lookup") == 4
    found = json.loads(CliRunner().invoke(app, [*options, "--json"]).stdout)
    assert len(found) == 2 * (1 + 2 * len(ROUTINGS)) and {each["requests"] for each in found} == {18}
    assert CliRunner().invoke(app, [*options[:3], "0,x"]).exit_code != 0


def _turns(number: int) -> list[dict[str, str]]:
    said = [("user", f"question {number} {turn} " * 9) for turn in range(3)]
    return [{"role": role, "content": text} for user in said for role, text in (user, ("assistant", user[1][::-1]))]


def test_dialogues_are_under_way_together(tmp_path: Path) -> None:
    trace = tmp_path / "dialogues.json"
    trace.write_text(json.dumps([{"messages": _turns(number)} for number in range(3)]))

    def lengths(num_at_once: int) -> list[int]:
        return [request.num_tokens for request in read_trace(trace, num_at_once=num_at_once)]

    first, second, third = (lengths(1)[at : at + 3] for at in (0, 3, 6))
    assert lengths(2) == [first[0], second[0], first[1], second[1], first[2], second[2], *third]


def test_what_cannot_be_run_is_refused() -> None:
    with pytest.raises(BadRequest, match="random, round-robin, text, lookup"):
        run("best")
    with pytest.raises(BadRequest, match="no requests"):
        compare_clusters("none", list[Request](), replicas=(2,), budgets=(10,), sizes=Sizes())
