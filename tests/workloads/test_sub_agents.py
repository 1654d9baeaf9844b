"""Coding agents with sub-agents on a real server: what their headers and bodies say of them, and its effects."""

import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from reprise.chat.answer import Answer, ToolCall
from reprise.cli.main import app
from reprise.core.events import Event, Finished, FinishReason, Progress
from reprise.core.job import Job, Purpose
from reprise.core.sizes import Bytes
from tests.matrix import now_and_later, rows_now_and_later
from tests.workloads.serving import Serving, serving
from tests.workloads.talk import prose, whole_prose

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"prompt": {"type": "string"}}}
TASK = Answer(
    content=None, reasoning="Help.", tool_calls=(ToolCall(id="c", name="Task", arguments='{"prompt": "Look."}'),)
)
DONE = Answer(content="It is done.", reasoning="So.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReply:
    """One answer over HTTP: `items` continue the history, `num_reused` of its prompt's tokens were there."""

    id: str
    items: list[dict[str, Any]]
    num_prompt: int
    num_reused: int

    @property
    def num_computed(self) -> int:
        return self.num_prompt - self.num_reused


@dataclass(eq=False, kw_only=True)
class AskingAgent:
    """One agent of a client, with its history as its API writes it. `tools`: the names of its tools."""

    server: Serving
    system: str
    tools: tuple[str, ...] = ("Task",)
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    history: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def ask(self, text: str, answer: Answer = DONE) -> AgentReply:
        """A user's words, or the result of the call that the agent waits for."""
        self.history.append(self.asked(text))
        self.server.answer = answer
        response = self.server.client.post(self.path, json={**self.body(), **self.fields}, headers=dict(self.headers))
        assert response.status_code == 200, response.text
        self.server.wait_until_idle()
        sent = self.read(response.json())
        self.history += sent.items
        return sent

    path = "/v1/chat/completions"

    def asked(self, text: str) -> dict[str, Any]:
        calls = self.history[-1].get("tool_calls") if self.history else None
        return {"role": "tool", "tool_call_id": calls[0]["id"], "content": text} if calls else said(text)

    def body(self) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in self.tools]
        messages = [{"role": "system", "content": self.system}, *self.history]
        return {"messages": messages, "max_tokens": 300, **({"tools": tools} if tools else {})}

    def read(self, told: dict[str, Any]) -> AgentReply:
        kept = {key: value for key, value in told["choices"][0]["message"].items() if value is not None}
        usage = told["usage"]
        return AgentReply(
            id=told["id"],
            items=[kept],
            num_prompt=usage["prompt_tokens"],
            num_reused=usage["prompt_tokens_details"]["cached_tokens"],
        )


class ClaudeAgent(AskingAgent):
    """As Claude Code asks."""

    path = "/v1/messages"

    def asked(self, text: str) -> dict[str, Any]:
        last: dict[str, Any] = self.history[-1]["content"][-1] if self.history else {}
        if last.get("type") != "tool_use":
            return said(text)
        result = {"type": "tool_result", "tool_use_id": last["id"], "content": text}
        return {"role": "user", "content": [result]}

    def body(self) -> dict[str, Any]:
        tools = [{"name": name, "input_schema": SCHEMA} for name in self.tools]
        asked = {"model": "tiny", "max_tokens": 300, "system": self.system, "messages": self.history}
        return {**asked, **({"tools": tools} if tools else {})}

    def read(self, told: dict[str, Any]) -> AgentReply:
        usage = told["usage"]
        reused = usage["cache_read_input_tokens"] or 0
        num_prompt = usage["input_tokens"] + reused + (usage["cache_creation_input_tokens"] or 0)
        item = {"role": "assistant", "content": told["content"]}
        return AgentReply(id=told["id"], items=[item], num_prompt=num_prompt, num_reused=reused)


class CodexAgent(AskingAgent):
    """As Codex asks."""

    path = "/v1/responses"

    def asked(self, text: str) -> dict[str, Any]:
        last = self.history[-1] if self.history else {}
        if last.get("type") != "function_call":
            return {"type": "message", **said(text)}
        return {"type": "function_call_output", "call_id": last["call_id"], "output": text}

    def body(self) -> dict[str, Any]:
        tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in self.tools]
        asked = {"instructions": self.system, "input": self.history, "store": False, "max_output_tokens": 300}
        return {**asked, **({"tools": tools} if tools else {})}

    def read(self, told: dict[str, Any]) -> AgentReply:
        usage = told["usage"]
        reused = usage["input_tokens_details"]["cached_tokens"]
        return AgentReply(id=told["id"], items=told["output"], num_prompt=usage["input_tokens"], num_reused=reused)


def said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


SESSION = "0c4a9d1e-5b7f-4a3c-9c2d-000000000001"
CHILDREN = ("a1b2c3d4e5f600001", "a1b2c3d4e5f600002")
CLAUDE = "x-claude-code-"
LEADER, SEARCHER = prose(), whole_prose()[1500:3000]


def claude(server: Serving, agent: str | None = None, **more: Any) -> ClaudeAgent:
    """The main agent of a session of Claude Code, or one that it has started."""
    headers = {f"{CLAUDE}session-id": SESSION, **({} if agent is None else {f"{CLAUDE}agent-id": agent})}
    return ClaudeAgent(server=server, system=LEADER if agent is None else SEARCHER, headers=headers, **more)


def title(server: Serving, number: int) -> ClaudeAgent:
    """A request besides the session's turns, as Claude Code marks it."""
    headers = {f"{CLAUDE}session-id": SESSION, f"{CLAUDE}request-class": "auxiliary"}
    return ClaudeAgent(
        server=server, system=f"{number}: name this session. {whole_prose()[-1200:]}", tools=(), headers=headers
    )


def codex(server: Serving, agent: str | None = None) -> CodexAgent:
    thread = SESSION if agent is None else agent
    headers = {"session-id": SESSION, "thread-id": thread}
    metadata = {"session_id": SESSION, "thread_id": thread}
    if agent is not None:
        headers["x-codex-parent-thread-id"] = metadata["parent_thread_id"] = SESSION
    system = LEADER if agent is None else SEARCHER
    fields = {"prompt_cache_key": thread, "client_metadata": metadata}
    return CodexAgent(server=server, system=system, headers=headers, fields=fields)


def opencode(server: Serving, agent: str | None = None) -> AskingAgent:
    headers = {"x-session-id": SESSION} if agent is None else {"x-session-id": agent, "x-parent-session-id": SESSION}
    return AskingAgent(server=server, system=LEADER if agent is None else SEARCHER, headers=headers)


def filler(server: Serving, number: int) -> AskingAgent:
    """A chat of another client, which says nothing of itself."""
    return AskingAgent(server=server, system=f"{number}: {whole_prose()[3000 + 97 * number :][:900]}", tools=())


@pytest.fixture(scope="module", params=["qwen3_5", "llama"])
def served(request: pytest.FixtureRequest, models: dict[str, Path]) -> Iterator[Serving]:
    with serving(models[request.param], settles=False, accepts_any_model=True) as made:
        yield made


@pytest.fixture
def server(served: Serving) -> Serving:
    served.wait_until_idle()
    served.engine.clear()
    return served


@pytest.mark.parametrize("name", ["qwen3_5", "llama"])
@pytest.mark.parametrize("has_ids", now_and_later([True], [False]))
def test_a_parent_that_waits_for_a_sub_agent_keeps_its_path(
    models: dict[str, Path], name: str, *, has_ids: bool
) -> None:
    with serving(models[name], settles=False, accepts_any_model=True, cache_bytes=Bytes(3_000_000)) as server:
        main, child = claude(server), claude(server, CHILDREN[0])
        if not has_ids:
            main.headers = child.headers = {}
        main.ask(f"Find out. {whole_prose()[:900]}", TASK)
        for number in range(6):
            child.ask(f"Look at {number}.")
            filler(server, 2 * number).ask("Hi")
            filler(server, 2 * number + 1).ask("Hi")
        assert (main.ask("Found.").num_computed < 100) is has_ids


@pytest.mark.parametrize(("name", "room"), rows_now_and_later([("llama", 3_200_000)], [("qwen3_5", 3_300_000)]))
@pytest.mark.parametrize("has_ids", now_and_later([True], [False]))
def test_what_a_sub_agent_that_has_ended_left_goes_before_older_chats(
    models: dict[str, Path], name: str, room: int, *, has_ids: bool
) -> None:
    with serving(models[name], settles=False, accepts_any_model=True, cache_bytes=Bytes(room)) as server:
        main, child, next_child = claude(server), claude(server, CHILDREN[0]), claude(server, CHILDREN[1])
        if not has_ids:
            main.headers = child.headers = next_child.headers = {}
        older = [filler(server, number) for number in range(3)]
        main.ask(f"Find out. {whole_prose()[:900]}", TASK)
        for chat in older:
            chat.ask("Hi")
        for number in range(3):
            child.ask(f"Look at {number}. {whole_prose()[500 * number + 1000 :][:500]}")
        main.ask("Found.", TASK)
        for number in range(3):
            filler(server, 10 + number).ask("Hi")
        computed = [chat.ask("And?").num_computed for chat in older]
        assert max(computed) < 100 or not has_ids, computed
        begun = next_child.ask("Look, too.")
        assert begun.num_computed < 40, "how all of them begin is still there"
        ended = child.ask("And now?")
        assert (ended.num_computed > 400) is has_ids


@pytest.mark.parametrize("name", ["qwen3_5", "llama"])
@pytest.mark.parametrize("says", now_and_later(["its session alone"], ["which request it is", "nothing"]))
def test_titles_never_push_a_chat_out(models: dict[str, Path], name: str, says: str) -> None:
    with serving(models[name], settles=False, accepts_any_model=True, cache_bytes=Bytes(2_000_000)) as server:
        main = claude(server)
        main.ask(f"Find out. {whole_prose()[:900]}")
        for number in range(12):
            beside = title(server, number)
            if says == "which request it is":
                # With tools it could be a turn of the session.
                beside.tools = ("Task",)
            else:
                beside.headers = {f"{CLAUDE}session-id": SESSION} if says == "its session alone" else {}
            beside.ask("What is it called?")
        assert (main.ask("Go on.").num_computed < 100) is (says != "nothing")


@pytest.mark.parametrize("is_another_key", now_and_later([True], [False]))
def test_no_id_reaches_into_the_namespace_of_another_key(models: dict[str, Path], *, is_another_key: bool) -> None:
    options: Any = {"settles": False, "accepts_any_model": True, "cache_bytes": Bytes(2_600_000)}
    with serving(models["qwen3_5"], api_keys=("one", "two"), separates_keys=False, **options) as server:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        main, child, forged = claude(server), claude(server, CHILDREN[0]), claude(server)
        main.headers, child.headers = {**main.headers, **one}, {**child.headers, **one}
        forged.headers = {**forged.headers, **(two if is_another_key else one)}
        main.ask("Find out.", TASK)
        for number in range(3):
            child.ask(f"Look at {number}. {whole_prose()[500 * number + 1000 :][:500]}")
        # As if the sub-agent had ended.
        forged.ask("Find out.")
        for number in range(4):
            other = filler(server, number)
            other.headers = one
            other.ask("Hi")
        assert (child.ask("And now?").num_computed < 100) is is_another_key


@pytest.fixture
def settling(models: dict[str, Path]) -> Iterator[Serving]:
    """A server that has seen a sub-agent of `Task`, and has lost all that it had stored."""
    with serving(models["qwen3_5"], accepts_any_model=True, prefill_chunk=64) as made:
        claude(made).ask("Find out.", TASK)
        claude(made, CHILDREN[0]).ask("Look.")
        made.engine.clear()
        made.engine.served.clear()
        yield made


def test_what_sub_agents_begin_with_is_computed_behind_the_answer_that_starts_them(settling: Serving) -> None:
    claude(settling).ask("Find out again.", TASK)
    begun = next(each for each in settling.engine.of(Purpose.SETTLE) if "agent" in each.job.id)
    assert begun.outcome.num_prefilled == len(begun.job.prompt)
    child = claude(settling, CHILDREN[1]).ask("Look, too.")
    assert child.num_reused == len(begun.job.prompt)
    assert settling.record(child.id)["settled"] == len(begun.job.prompt)
    claude(settling).ask("Find out once more.", TASK)
    computed = [each.outcome.num_prefilled for each in settling.engine.of(Purpose.SETTLE) if "agent" in each.job.id]
    assert sum(computed) == len(begun.job.prompt), "what is there is not computed again"


def test_it_is_computed_while_the_rest_of_the_call_is_written(settling: Serving) -> None:
    engine, order = settling.engine, list[tuple[str, Event]]()
    engine.holds = lambda job, event: bool(order.append((job.id, event)))
    call = ToolCall(id="c", name="Task", arguments=json.dumps({"prompt": whole_prose()[:900]}))
    settling.answer = Answer(content=None, reasoning="Help.", tool_calls=(call,))
    main = opencode(settling)
    main.history.append(said("Find out again."))
    body = {**main.body(), "stream": True, "max_tokens": 900}
    with settling.client.stream("POST", main.path, json=body, headers=dict(main.headers)) as response:
        assert call.name in response.read().decode()
    settling.wait_until_idle()
    ended = [job_id for job_id, event in order if isinstance(event, Finished)]
    (begun,) = [each for each in engine.of(Purpose.SETTLE) if "call0" in each.job.id]
    (answer,) = engine.of(Purpose.GENERATE)
    assert ended.index(begun.job.id) < ended.index(answer.job.id)
    assert begun.outcome.num_prefilled == len(begun.job.prompt)
    assert answer.reason is FinishReason.STOP
    assert claude(settling, CHILDREN[1]).ask("Look, too.").num_reused == len(begun.job.prompt)


def test_a_request_has_the_beginning_of_sub_agents_given_up_and_it_goes_on_behind(settling: Serving) -> None:
    engine = settling.engine
    held = threading.Event()

    def hold(job: Job, event: Event) -> bool:
        is_first = "agent" in job.id and isinstance(event, Progress) and not held.is_set()
        if is_first:
            held.set()
        return is_first

    def arrive(job: Job) -> None:
        if held.is_set() and job.purpose is Purpose.GENERATE:
            engine.go_on.set()

    engine.holds, engine.submitted = hold, arrive
    with ThreadPoolExecutor() as pool:
        leading = pool.submit(claude(settling).ask, "Find out again.", TASK)
        assert held.wait(60)
        filler(settling, 0).ask("Hi")
        leading.result()
    first, *rest = [each for each in engine.of(Purpose.SETTLE) if "agent" in each.job.id]
    assert first.reason is FinishReason.CANCELLED
    assert 0 < first.outcome.num_prefilled < len(first.job.prompt)
    (again,) = rest
    assert first.outcome.num_prefilled + again.outcome.num_prefilled == len(first.job.prompt)


@pytest.mark.parametrize("name", ["qwen3_5", "llama"])
def test_siblings_that_arrive_together_compute_their_beginning_once(models: dict[str, Path], name: str) -> None:
    with serving(models[name], settles=False, accepts_any_model=True, prefill_chunk=64) as server:
        children = [claude(server, child) for child in CHILDREN]
        with ThreadPoolExecutor() as pool:
            asked = [pool.submit(child.ask, f"Look at part {part}.") for part, child in enumerate(children)]
            sent = [each.result() for each in asked]
        first, second = sorted(sent, key=lambda each: each.num_reused)
        assert second.num_computed < 150
        assert first.num_computed + second.num_computed < first.num_prompt + 150


@pytest.mark.parametrize("client", [claude, codex, opencode])
def test_records_the_page_and_top_name_session_and_agent(server: Serving, client: Any) -> None:
    main, child = client(server), client(server, CHILDREN[0])
    asked = [main.ask("Find out.", TASK), child.ask("Look."), main.ask("Found.")]
    names = [SESSION[:12], f"{SESSION[:12]} / {CHILDREN[0][-12:]}", SESSION[:12]]
    records = [server.record(each.id) for each in asked]
    assert [record["chat"] for record in records] == names
    assert [record["session"] for record in records] == [SESSION] * 3
    assert [record["agent"] for record in records] == [None, CHILDREN[0], None]
    shown = CliRunner().invoke(app, ["top", "--once", "--url", str(server.client.base_url)], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert names[0] in shown.output and names[1] in shown.output
    assert "running requests, at most" in shown.output
