"""What is kept of agents' paths when everything but their ends' snapshots is free."""

from bench.informed_sessions import Latest, reused
from reprise.core.prompt import Prompt
from reprise.core.tokens import as_tokens
from reprise.replay.request import Request


def asked(at_s: float, agent: str, *tokens: int) -> Request:
    prompt = Prompt(tokens=as_tokens(list(tokens)))
    return Request(prompt=prompt, num_tokens=len(tokens), shareable=len(tokens), at_s=at_s, agent=agent)


def by_last_use(_: int, agent: str, latest: Latest) -> tuple[float, int]:
    return 0.0, latest[agent]


ONE, OTHER = tuple(range(10)), tuple(range(100, 110))


def test_what_does_not_fit_beside_the_others_is_cut_from_the_end() -> None:
    trace = [asked(0, "one", *ONE), asked(1, "other", *OTHER), asked(2, "one", *ONE)]
    assert reused(trace, room=30, snapshot=1, step=1, order=by_last_use) == 10
    assert reused(trace, room=18, snapshot=1, step=1, order=by_last_use) == 6, "18 less 10 and two snapshots"
    assert reused(trace, room=18, snapshot=1, step=4, order=by_last_use) == 4, "no snapshot but at multiples of 4"
    assert reused(trace, room=18, snapshot=1, step=4, order=by_last_use, pays=True) == 4, "10, 4 and 1 + 2 snapshots"
    assert reused(trace, room=17, snapshot=1, step=4, order=by_last_use, pays=True) == 0, "no room for that"
    assert reused(trace, room=18, snapshot=4, step=1, order=by_last_use) == 0, "not worth its own snapshot"


def test_the_path_that_runs_is_cut_where_it_has_room() -> None:
    trace = [asked(0, "one", *ONE), asked(1, "one", *ONE)]
    assert reused(trace, room=8, snapshot=1, step=4, order=by_last_use, pays=True) == 6, "and two snapshots"


def test_with_full_attention_every_position_that_is_kept_is_one_to_resume_from() -> None:
    trace = [asked(0, "one", *ONE), asked(1, "other", *ONE[:4], 7)]
    assert reused(trace, room=99, snapshot=0, step=1, order=by_last_use) == 4
    assert reused(trace, room=99, snapshot=1, step=1, order=by_last_use) == 0
    assert reused(trace, room=99, snapshot=1, step=2, order=by_last_use, pays=True) == 4, "a snapshot below the end"


def test_an_agent_that_begins_like_another_resumes_where_something_that_was_kept_ends() -> None:
    trace = [asked(0, "one", *ONE), asked(1, "other", *ONE, 5, 6), asked(2, "third", *ONE[:4], 7)]
    assert reused(trace, room=99, snapshot=1, step=1, order=by_last_use) == 10, "the third finds no end in its own path"
