"""Which agents wait, which have ended, and how sub-agents begin: learnt of one namespace, without an engine."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from reprise.api.service.agents import Agents
from reprise.api.service.caller import UNKNOWN, Caller, caller_of, with_body
from reprise.core.job import EndedChat, Lineage
from reprise.core.prompt import Boundary, BoundaryKind, Prompt
from reprise.core.settings import Settings
from reprise.core.tokens import as_tokens
from tests.api.servers import MODEL, api, says

MAIN = Caller(session="s")
CLAUDE = "x-claude-code-"


@pytest.mark.parametrize(
    ("headers", "fields", "caller"),
    [
        ({f"{CLAUDE}session-id": "s"}, None, MAIN),
        ({f"{CLAUDE}session-id": "s", f"{CLAUDE}agent-id": "a"}, None, Caller(session="s", agent="a")),
        (
            {f"{CLAUDE}session-id": "s", f"{CLAUDE}agent-id": "a", f"{CLAUDE}parent-agent-id": "b"},
            {"user_id": "user_0_account__session_x"},
            Caller(session="s", agent="a", parent="b"),
        ),
        ({f"{CLAUDE}session-id": "s", f"{CLAUDE}request-class": "auxiliary"}, None, Caller(session="s", is_side=True)),
        ({}, {"user_id": "user_0_account__session_s"}, MAIN),
        ({}, {"user_id": json.dumps({"device_id": "0", "session_id": "s"})}, MAIN),
        ({"session_id": "s"}, None, MAIN),
        ({"session-id": "s", "thread-id": "s"}, None, MAIN),
        (
            {"session-id": "s", "thread-id": "t", "x-codex-parent-thread-id": "s"},
            None,
            Caller(session="s", agent="t"),
        ),
        (
            {"session-id": "s", "thread-id": "u", "x-codex-parent-thread-id": "t"},
            None,
            Caller(session="s", agent="u", parent="t"),
        ),
        ({}, {"session_id": "s", "thread_id": "s"}, MAIN),
        ({"x-session-id": "s"}, None, MAIN),
        ({"x-session-id": "t", "x-parent-session-id": "s"}, None, Caller(session="s", agent="t")),
        ({}, None, UNKNOWN),
        ({f"{CLAUDE}session-id": "x" * 257}, None, UNKNOWN),
        ({f"{CLAUDE}session-id": "a\x1b[2J"}, {"user_id": 5}, UNKNOWN),
        ({f"{CLAUDE}session-id": " "}, {"user_id": "{"}, UNKNOWN),
        ({}, {"user_id": "[" * 900}, UNKNOWN),
        ({}, {"user_id": '{"a":' + "[" * 1000}, UNKNOWN),
        ({}, ["session_id"], UNKNOWN),
        ({f"{CLAUDE}agent-id": "a", f"{CLAUDE}parent-agent-id": "b"}, None, UNKNOWN),
    ],
)
def test_a_client_says_which_agent_it_is(headers: dict[str, str], fields: object, caller: Caller) -> None:
    assert with_body(caller_of(Headers(headers)), fields) == caller


@pytest.mark.parametrize(("name", "field"), [("claude_code", "metadata"), ("codex_0_169", "client_metadata")])
def test_recorded_bodies_name_their_session(name: str, field: str) -> None:
    recorded: dict[str, Any] = json.loads((Path(__file__).parent / "bodies" / f"{name}.json").read_text())
    callers = {with_body(UNKNOWN, body.get(field)) for body in recorded["requests"]}
    (caller,) = callers
    assert caller.session is not None and caller.agent is None


def test_a_name_is_short_and_tells_agents_apart_that_were_started_together() -> None:
    assert Caller(session="s" * 40, agent="a" * 40).name == f"{'s' * 12} / {'a' * 12}"
    first, second = (Caller(session="ses_6fa0", agent=f"ses_6fa1b2c3dffe{end}") for end in ("PxQ7rT2uVw", "ZbK9mN4oLs"))
    assert first.name != second.name, "OpenCode's ids begin with the time"


class Client:
    """The requests of a namespace's agents, with jobs numbered from 1."""

    def __init__(self, agents: Agents | None = None, namespace: str = "") -> None:
        self.agents = Agents() if agents is None else agents
        self.namespace = namespace
        self.num = 0

    def ask(self, caller: Caller, prompt: Prompt | None = None, *, has_tools: bool = True) -> Lineage:
        self.num += 1
        return self.agents.arrive(
            caller, prompt or begins(1), job_id=str(self.num), has_tools=has_tools, namespace=self.namespace
        )

    def hear(self, caller: Caller, *tools: str, prompt: Prompt | None = None) -> list[list[int]]:
        found = self.agents.answered(caller, prompt or begins(1), tools, namespace=self.namespace)
        return [each.tokens.tolist() for each in found]


def begins(*trunk: int) -> Prompt:
    """A prompt whose system prompt and tools are these tokens, and a question."""
    return Prompt(tokens=as_tokens([*trunk, 7, 8]), boundaries=(Boundary(len(trunk), BoundaryKind.SYSTEM),))


def sub(name: str, parent: str | None = None) -> Caller:
    return Caller(session="s", agent=name, parent=parent)


def test_a_sub_agent_has_ended_once_its_parent_went_on_after_its_last_word() -> None:
    client = Client()
    client.ask(MAIN)
    client.hear(MAIN, "Task")
    assert client.ask(sub("a")) == Lineage(awaited=("1",))
    client.hear(sub("a"), "Read")
    assert client.ask(MAIN).ended == (), "it waits for a tool of its own: its parent went on beside it"
    client.ask(sub("a"))
    assert client.ask(MAIN).ended == (), "its answer is being written"
    client.hear(sub("a"))
    assert client.ask(MAIN).ended == (EndedChat(first_job="2", last_job="4"),)
    assert client.ask(MAIN).ended == (), "said once"
    assert client.ask(sub("a")) == Lineage(awaited=("7",))


def test_all_that_wait_are_named_nearest_first_and_circles_end() -> None:
    client = Client()
    client.ask(MAIN)
    client.ask(sub("a"))
    assert client.ask(sub("b", "a")).awaited == ("2", "1")
    client.ask(sub("c", "d"))
    assert client.ask(sub("d", "c")).awaited == ("4",)
    assert client.ask(sub("c", "d")).awaited == ("5",)
    assert client.ask(sub("e", "c")).awaited == ("6", "5")
    assert client.ask(sub("f", "f")).awaited == ()


def test_ids_mean_nothing_to_another_key() -> None:
    agents = Agents()
    client, other = Client(agents, "one"), Client(agents, "two")
    client.ask(MAIN)
    client.ask(sub("a"))
    client.hear(sub("a"))
    assert other.ask(MAIN) == Lineage()
    assert other.ask(sub("b")) == Lineage(awaited=("1",)), "its own"
    assert client.ask(MAIN).ended != ()


def test_a_session_without_its_tools_is_a_side_request() -> None:
    client = Client()
    assert not client.ask(MAIN, has_tools=False).is_side, "not before it is known to have some"
    client.ask(MAIN)
    client.hear(MAIN, "Task")
    assert client.ask(MAIN, has_tools=False).is_side
    assert client.ask(sub("a")).awaited == ("2",), "a side request is none of the chat's turns"
    assert client.ask(Caller(is_side=True)).is_side


def test_agents_are_forgotten_before_there_are_too_many() -> None:
    client = Client()
    for n in range(2000):
        client.ask(sub(str(n)))
        client.hear(sub(str(n)))
    assert len(client.ask(MAIN).ended) <= 256


def test_how_sub_agents_begin_is_learnt_from_the_tool_that_starts_them() -> None:
    client = Client()
    client.ask(MAIN)
    assert client.hear(MAIN, "Read") == []
    client.ask(MAIN)
    assert client.hear(MAIN, "Task") == []
    client.ask(sub("a"), begins(2, 3))
    client.hear(sub("a"))
    client.ask(MAIN)
    assert client.hear(MAIN, "Read") == []
    client.ask(MAIN)
    assert client.hear(MAIN, "Task") == [[2, 3]]
    assert Client(client.agents, "another").hear(MAIN, "Task") == []
    client.agents.forget("")
    assert client.hear(MAIN, "Task") == []


def test_a_tool_that_rarely_starts_one_is_not_followed() -> None:
    client = Client()
    for n in range(5):
        client.ask(MAIN)
        client.hear(MAIN, "Bash")
        if n == 0:
            client.ask(sub("a"), begins(2, 3))
    assert client.hear(MAIN, "Bash") == []


def test_without_ids_it_takes_two_that_came_right_behind_the_calls() -> None:
    client, found = Client(), list[list[list[int]]]()
    for _ in range(3):
        client.ask(UNKNOWN, begins(1))
        found.append(client.hear(UNKNOWN, "task", prompt=begins(1)))
        client.ask(UNKNOWN, begins(2, 3))
        client.ask(UNKNOWN, begins(2, 3))
        client.ask(UNKNOWN, begins(1))
        client.ask(UNKNOWN, begins(4, 5))
    assert found == [[], [], [[2, 3]]], "what comes once the chat has gone on belongs to nobody"


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "task", "parameters": {"type": "object", "properties": {}}},
}
CALLS = '<tool_call>\n{"name": "task", "arguments": {}}\n</tool_call>'


def chat_body(*texts: str, system: str = "You lead.") -> dict[str, Any]:
    roles: Sequence[str] = ("user", "assistant")
    said = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"messages": [{"role": "system", "content": system}, *said], "tools": [TOOL]}


@pytest.mark.anyio
async def test_the_common_beginning_of_sub_agents_is_settled_behind_the_answer_that_starts_them() -> None:
    main, child = {"x-session-id": "s"}, {"x-session-id": "t", "x-parent-session-id": "s"}
    async with api(says(CALLS)) as a:
        first = await a.client.post("/v1/chat/completions", json=chat_body("Go."), headers=main)
        assert first.json()["choices"][0]["finish_reason"] == "tool_calls"
        await a.until_idle()
        await a.client.post("/v1/chat/completions", json=chat_body("Look.", system="You search."), headers=child)
        await a.until_idle()
        (begun,) = [job for job in a.backend.jobs if job.chat == "s / t" and "settle" not in job.id]
        asked = await a.client.post("/v1/chat/completions", json=chat_body("Go.", "Well.", "Again."), headers=main)
        await a.until_idle()
        settled = [job for job in a.backend.jobs if asked.json()["id"] in job.id and "settle" in job.id]
        trunk = settled[0].prompt.tokens
        assert "agent" in settled[0].id, "before the next turn of the chat itself"
        (system_at,) = [b.position for b in begun.prompt.boundaries if b.kind is BoundaryKind.SYSTEM]
        assert trunk.tolist() == begun.prompt.tokens[:system_at].tolist()


@pytest.mark.anyio
async def test_records_name_session_and_agent_to_their_own_key_alone() -> None:
    settings = Settings(model=MODEL, api_keys=("one", "two"))
    async with api(settings=settings) as a:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        ids = {f"{CLAUDE}session-id": "5e55", f"{CLAUDE}agent-id": "a9e7", f"{CLAUDE}parent-agent-id": "0"}
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
        answer = await a.client.post("/v1/messages", json=body, headers={**one, **ids})
        assert answer.status_code == 200, answer.text
        (told,) = (await a.client.get("/v1/cache/requests", headers=one)).json()["data"]
        names = [told[name] for name in ("chat", "session", "agent", "parent_agent")]
        assert names == ["5e55 / a9e7", "5e55", "a9e7", "0"]
        assert (await a.client.get("/v1/cache/requests", headers=two)).json()["data"] == []
        assert a.backend.jobs[0].chat == "5e55 / a9e7"
