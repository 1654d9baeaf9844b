"""Which model steps, and whose weights come and go: a table, and a simulation in which nobody starves."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.schedule.models import ModelLimits, ModelState, ModelStep, decide_models, room_for

NOW_S = 100.0
LIMITS = ModelLimits(most_nbytes=10, turn_s=10, arrival_s=2)


def loaded(name: str, **facts: object) -> ModelState:
    return replace(ModelState(name=name, nbytes=6, is_loaded=True, num_asked=1, loaded_s=0, asked_s=50), **facts)  # pyright: ignore[reportArgumentType]


def wanted(name: str, since_s: float = NOW_S - 1, nbytes: int = 6) -> ModelState:
    return ModelState(name=name, nbytes=nbytes, waits_since_s=since_s)


@pytest.mark.parametrize(
    ("why", "models", "expected"),
    [
        ("there is room", [loaded("a"), wanted("b", nbytes=4)], ModelStep(load="b")),
        ("who is not used goes", [loaded("a"), wanted("b")], ModelStep(unload=("a",), load="b")),
        (
            "the least recently asked goes",
            [loaded("a", nbytes=4), loaded("c", nbytes=4, asked_s=40), wanted("b", nbytes=4)],
            ModelStep(unload=("c",), load="b"),
        ),
        (
            "who was kept for long enough goes first",
            [loaded("a", nbytes=4, keep_alive_s=60), loaded("c", nbytes=4, asked_s=40), wanted("b", nbytes=4)],
            ModelStep(unload=("c",), load="b", wakes_in_s=10),
        ),
        (
            "what an adapter shares with its base counts once",
            [loaded("a", base=1, shared_nbytes=6), replace(wanted("b", nbytes=8), base=1, shared_nbytes=6)],
            ModelStep(load="b"),
        ),
        (
            "a base below an adapter that stays makes no room",
            [
                loaded("a", base=1, shared_nbytes=6, asked_s=30),
                loaded("b", nbytes=7, base=1, shared_nbytes=6, asked_s=60, is_pinned=True),
                loaded("c", nbytes=2, asked_s=40),
                wanted("d", nbytes=2),
            ],
            ModelStep(unload=("c",), load="d"),
        ),
        ("nobody waits, and its time is over", [loaded("a", keep_alive_s=50)], ModelStep(unload=("a",))),
        ("nobody waits", [loaded("a", keep_alive_s=60)], ModelStep(wakes_in_s=10)),
        ("it stays whatever happens", [loaded("a", is_pinned=True), wanted("b", since_s=0)], ModelStep()),
        (
            "it has its turn",
            [loaded("a", num_running=1, has_requests=True), wanted("b")],
            ModelStep(run="a", wakes_in_s=9),
        ),
        (
            "it had its turn, and ends what runs",
            [loaded("a", num_running=1, has_requests=True), wanted("b", since_s=80)],
            ModelStep(run="a", closed=frozenset("a")),
        ),
        (
            "it had its turn, and nothing runs",
            [loaded("a", waits_since_s=99, has_requests=True), wanted("b", since_s=80)],
            ModelStep(unload=("a",), load="b"),
        ),
        (
            "what it was loaded for is to come",
            [loaded("a", num_asked=0, loaded_s=99, asked_s=0), wanted("b")],
            ModelStep(wakes_in_s=1),
        ),
        ("one at a time", [ModelState(name="a", nbytes=1, is_loading=True), wanted("b", nbytes=1)], ModelStep()),
        (
            "who waited longest",
            [loaded("a"), wanted("b", since_s=90), wanted("c", since_s=80)],
            ModelStep(unload=("a",), load="c"),
        ),
        (
            "what would not fit all the same sends nobody away",
            [loaded("a", nbytes=4), loaded("c", nbytes=6, is_pinned=True), wanted("b")],
            ModelStep(),
        ),
        (
            "asked to",
            [loaded("a", is_dismissed=True, num_running=1, has_requests=True)],
            ModelStep(run="a", closed=frozenset("a")),
        ),
        ("asked to, and nothing runs", [loaded("a", is_dismissed=True, is_pinned=True)], ModelStep(unload=("a",))),
        (
            "they take turns",
            [
                loaded("a", nbytes=5, num_running=1, has_requests=True, last_step=4),
                loaded("b", nbytes=5, num_running=1, has_requests=True, last_step=3),
                loaded("c", nbytes=0, has_idle_work=True, last_step=1),
            ],
            ModelStep(run="b"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_whose_weights_come_and_go(why: str, models: list[ModelState], expected: ModelStep) -> None:
    step = decide_models(models, LIMITS, now_s=NOW_S)
    assert replace(step, wakes_in_s=expected.wakes_in_s) == expected, why
    if expected.wakes_in_s is not None:
        assert step.wakes_in_s == pytest.approx(expected.wakes_in_s), why


def test_what_stays_leaves_less_room_for_others() -> None:
    models = [loaded("a", is_pinned=True), loaded("b", nbytes=3), wanted("c")]
    assert (room_for("c", models, LIMITS), room_for("a", models, LIMITS)) == (4, 10)
    assert room_for("c", models, ModelLimits()) is None


@dataclass
class _Model:
    """A model of the simulation: jobs are the seconds that each still runs."""

    name: str
    nbytes: int
    waiting: list[float] = field(default_factory=list[float])
    """When each came."""
    running: list[float] = field(default_factory=list[float])
    is_loaded: bool = False
    loaded_s: float = 0.0
    asked_s: float = 0.0
    num_asked: int = 0


RUNS_S = 3.0
"""How long each job runs."""


@given(
    sizes=st.lists(st.integers(1, 10), min_size=2, max_size=4),
    arrivals=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3)), max_size=40),
)
def test_nobody_waits_for_longer_than_the_others_have_turns(sizes: list[int], arrivals: list[tuple[int, int]]) -> None:
    models = [_Model(name=str(index), nbytes=nbytes) for index, nbytes in enumerate(sizes)]
    # Everybody else has a turn first, ends what runs, and may be loaded for somebody who does not come.
    longest_s = len(models) * (LIMITS.turn_s + LIMITS.arrival_s + RUNS_S + 3)
    now_s = 0.0
    while now_s <= 60 or any(model.waiting or model.running for model in models):
        for at_s, index in arrivals:
            if at_s == now_s:
                model = models[index % len(models)]
                model.waiting.append(now_s)
                model.asked_s, model.num_asked = now_s, model.num_asked + 1
        step = decide_models([_state(model) for model in models], LIMITS, now_s=now_s)
        for model in models:
            if model.name in step.unload:
                assert not model.running, "what runs is never cut off"
                model.is_loaded = False
            if model.name == step.load:
                model.is_loaded, model.loaded_s, model.num_asked = True, now_s, 0
            if model.is_loaded and model.name not in step.closed:
                assert all(now_s - since_s <= longest_s for since_s in model.waiting), (now_s, models)
                model.running += [RUNS_S for _ in model.waiting]
                model.waiting.clear()
            model.running = [left - 1 for left in model.running if left > 1]
        assert sum(model.nbytes for model in models if model.is_loaded) <= 10, "they fit"
        assert now_s < 60 + 20 * longest_s, "somebody starves"
        now_s += 1


def _state(model: _Model) -> ModelState:
    return ModelState(
        name=model.name,
        nbytes=model.nbytes,
        is_loaded=model.is_loaded,
        waits_since_s=min(model.waiting, default=None),
        num_running=len(model.running),
        num_asked=model.num_asked,
        loaded_s=model.loaded_s,
        asked_s=model.asked_s,
        has_requests=bool(model.waiting or model.running),
    )
