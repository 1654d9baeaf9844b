"""Recorded bodies, broken at random: the server answers each, never with a failure, and the next request is fine."""

import copy
import json
from collections.abc import Generator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reprise.core.settings import Settings
from tests.api.servers import MODEL, running_server
from tests.api.test_bodies import NAMES, session
from tests.matrix import examples
from tests.soak.lengths import times

FINE = {"messages": [{"role": "user", "content": "Hi"}]}
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    # Made anew each time: what is put into itself has no JSON.
    st.builds(list),
    st.builds(dict),
    st.builds(lambda: [{"type": "text", "text": "x"}]),
    st.sampled_from(["user", "assistant", "system", "tool", "text", "tool_use", "tool_result", "x" * 3000]),
)


@pytest.fixture(scope="module")
def client() -> Generator[httpx.Client]:
    with (
        running_server(settings=Settings(model=MODEL, accepts_any_model=True)) as server,
        httpx.Client(base_url=server.url, timeout=120) as made,
    ):
        yield made


def places_in(value: Any) -> list[tuple[Any, ...]]:
    """The paths of all values within a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, item in items for path in [(key,), *((key, *rest) for rest in places_in(item))]]


@st.composite
def mutated(draw: st.DrawFn, body: dict[str, Any]) -> bytes:
    """The body with one to three values replaced, removed or doubled, and perhaps cut short."""
    changed = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        places = places_in(changed)
        if not places:
            break
        *parents, key = draw(st.sampled_from(places))
        holder = changed
        for parent in parents:
            holder = holder[parent]
        match draw(st.sampled_from(["replace", "remove", "double"])):
            case "remove":
                del holder[key]
            case "double" if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            case _:
                holder[key] = draw(VALUES)
    text = json.dumps(changed).encode()
    return text[: draw(st.integers(0, len(text)))] if draw(st.integers(0, 9)) == 0 else text


def check(client: httpx.Client, name: str, *, num_cases: int) -> None:
    recorded = session(name)
    # The words of this server are given: where a grammar forces others, its script would break it, and not the body.
    plain = [request for request in recorded["requests"] if "json_schema" not in json.dumps(request)]

    @settings(max_examples=num_cases, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def ask(data: st.DataObject) -> None:
        body = data.draw(mutated(data.draw(st.sampled_from(plain))))
        response = client.post(recorded["path"], content=body, headers={"content-type": "application/json"})
        assert response.status_code < 500, response.text
        assert "api_error" not in response.text
        assert "server_error" not in response.text

    ask()
    assert client.post("/v1/chat/completions", json=FINE).status_code == 200


@pytest.mark.parametrize("name", NAMES)
def test_no_broken_body_makes_the_server_fail(name: str, client: httpx.Client):
    check(client, name, num_cases=examples(16))


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_many_broken_bodies(name: str, client: httpx.Client):
    check(client, name, num_cases=times(160))
