"""`reprise.Engine` and its chats on tiny models of three kinds: what is reused, why not more, and what a chat keeps."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest

import reprise
from tests.api.real_server import real_server
from tests.models.tiny import tiny_model

KINDS = ("llama", "gemma3_text", "qwen3_5")
"""Full attention; windows beside it; recurrent layers beside it. All of them think, and the template drops thoughts."""
BRIEF: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "thinking_budget": 6}
SYSTEM = "You are brief, and you answer in one sentence."
QUESTIONS = ("Who are you?", "What can you do for me?", "Thank you!")


def weather(city: Literal["Rome", "Oslo"], days: Literal[1, 2] = 1) -> str:
    """The weather in a city."""
    return f"{city}: rain for {days} days"


@pytest.fixture(scope="module", params=KINDS)
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(architecture: str) -> Iterator[reprise.Engine]:
    with reprise.Engine(tiny_model(architecture), settles=False) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_cached(request: pytest.FixtureRequest) -> None:
    if "engine" in request.fixturenames:
        made: reprise.Engine = request.getfixturevalue("engine")
        assert made.wait_idle(60)
        made.clear()


def computed(answer: reprise.ChatAnswer) -> int:
    return answer.usage.prompt_tokens - answer.usage.cached_tokens


def test_every_turn_reuses_what_the_server_would(architecture: str, engine: reprise.Engine):
    chat = engine.chat(SYSTEM, **BRIEF)
    ours = [chat.send(question) for question in QUESTIONS]
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    with real_server(architecture, settles=False) as client:
        for question, answer in zip(QUESTIONS, ours, strict=True):
            messages.append({"role": "user", "content": question})
            told = client.post("/v1/chat/completions", json={"messages": messages, **BRIEF}).json()
            messages.append({key: value for key, value in told["choices"][0]["message"].items() if value is not None})
            usage = told["usage"]
            assert answer.usage.cached_tokens == usage["prompt_tokens_details"]["cached_tokens"]
            assert answer.usage.prompt_tokens == usage["prompt_tokens"]
            assert answer.usage.completion_tokens == usage["completion_tokens"]
            assert (answer.text, answer.reasoning) == (messages[-1]["content"], messages[-1]["reasoning_content"])
            assert answer.finish_reason == told["choices"][0]["finish_reason"]
    assert [message["content"] for message in chat.messages] == [message["content"] for message in messages]
    assert ours[0].usage.cached_tokens == 0
    assert all(answer.usage.cached_tokens > 0 for answer in ours[1:])


def test_why_says_what_explain_says(engine: reprise.Engine):
    system = "You are kind, and you say why."
    chat = engine.chat(system, **BRIEF)
    first, second = (chat.send(question) for question in QUESTIONS[:2])
    assert second.why.startswith("thinking stripped at token ")
    assert "reason: thinking stripped" in second.explain()
    assert f"{second.usage.cached_tokens:,} reused" in second.explain()
    edited = engine.chat(system.replace("kind", "rude"), **BRIEF).send(QUESTIONS[0])
    assert edited.why.startswith("system prompt changed at token ")
    assert first.ttft_s is not None and first.ttft_s > 0


def test_pieces_make_the_answer(engine: reprise.Engine):
    chat = engine.chat(**BRIEF)
    pieces = list(chat.stream(QUESTIONS[0]))
    assert "".join(piece.text for piece in pieces) == chat.last.text
    assert "".join(piece.reasoning for piece in pieces) == chat.last.reasoning
    assert chat.messages[-1]["content"] == chat.last.text


def test_a_fork_computes_what_differs(engine: reprise.Engine):
    chat = engine.chat(SYSTEM, **BRIEF)
    chat.send(QUESTIONS[0])
    chat.send(QUESTIONS[1])
    branch = chat.fork()
    assert computed(chat.send(QUESTIONS[2])) > 2
    # The same words again: nothing.
    assert computed(branch.send(QUESTIONS[2])) == 0
    assert branch.messages == chat.messages
    branch.send("Bye.")
    assert len(branch.messages) == len(chat.messages) + 2


def test_regenerating_and_editing(engine: reprise.Engine):
    chat = engine.chat(SYSTEM, **BRIEF)
    first = chat.send(QUESTIONS[0])
    again = chat.regenerate()
    assert (again.text, computed(again)) == (first.text, 0)
    assert len(chat.messages) == 3
    chat.send(QUESTIONS[1])
    chat.edit(1, "Who am I?")
    assert [message["role"] for message in chat.messages] == ["system", "user"]
    edited = chat.send()
    assert 0 < edited.usage.cached_tokens < edited.usage.prompt_tokens
    assert "in message 1 (user)" in edited.why
    chat.edit(0, "Be rude.")
    assert [message["content"] for message in chat.messages[:2]] == ["Be rude.", "Who am I?"]
    assert len(chat.messages) == 3


def test_a_closed_stream_keeps_its_work_and_leaves_the_chat(engine: reprise.Engine):
    chat = engine.chat(SYSTEM, **BRIEF)
    before = chat.messages
    stream = chat.stream(QUESTIONS[0], max_tokens=2000, thinking_budget=1000, ignore_eos=True)
    next(stream)
    with pytest.raises(reprise.ChatBusy):
        chat.send(QUESTIONS[1])
    stream.close()
    assert chat.messages == before
    assert engine.wait_idle(60)
    assert engine.stats.counts.num_cancelled > 0
    assert computed(chat.send(QUESTIONS[0])) == 0


def test_tools(engine: reprise.Engine):
    chat = engine.chat(tools=[weather], **BRIEF)
    asked = chat.send("How is the weather?", tool_choice="required", max_tokens=400, seed=3, parallel_tool_calls=False)
    assert asked.finish_reason == "tool_calls"
    (call,) = asked.tool_calls
    assert call.name == "weather" and set(json.loads(call.arguments)) <= {"city", "days"}
    chat.tool_result(call, {"rain": True})
    answer = chat.send()
    assert chat.messages[2] == {
        "role": "tool", "tool_call_id": call.id, "name": "weather", "content": '{"rain": true}'
    }  # fmt: skip
    assert chat.messages[3]["reasoning_content"] == answer.reasoning
    assert answer.usage.cached_tokens > 0
    with pytest.raises(reprise.BadRequest, match="awaits a result"):
        chat.tool_result(call, "again")


@pytest.mark.matrix
def test_chats_in_threads_are_as_alone(engine: reprise.Engine):
    def talk(name: str) -> list[str]:
        chat = engine.chat(f"You are {name}.", **BRIEF)
        return ["".join(piece.text for piece in chat.stream(question)) for question in QUESTIONS]

    names = [f"number {number}" for number in range(4)]
    alone = [talk(name) for name in names]
    with ThreadPoolExecutor(max_workers=4) as pool:
        assert list(pool.map(talk, names)) == alone


@pytest.fixture(scope="module")
def one() -> Iterator[reprise.Engine]:
    with reprise.Engine(str(tiny_model("llama")), max_context=400) as made:
        yield made


def test_mistakes_are_told_and_leave_the_chat(one: reprise.Engine):
    chat = one.chat("Be brief.", **BRIEF)
    before = chat.messages
    with pytest.raises(TypeError, match="Unknown option 'temprature'"):
        chat.send("Hello!", temprature=1)
    with pytest.raises(reprise.BadRequest, match="`temperature`") as refused:
        chat.send("Hello!", temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(reprise.ContextTooLong):
        chat.send("Hello! " * 500)
    with pytest.raises(reprise.BadRequest, match="nothing to answer"):
        chat.send()
    with pytest.raises(reprise.BadRequest, match="no user message"):
        chat.regenerate()
    with pytest.raises(LookupError):
        _ = chat.last
    with pytest.raises(TypeError, match="has no name"):
        one.chat(tools=[lambda city: city])
    with pytest.raises(TypeError, match="no JSON schema"):
        one.chat(tools=[ord])
    assert chat.messages == before
    assert chat.send("Hello!").text == chat.messages[-1]["content"]


def test_idle_is_when_the_next_turn_is_settled(one: reprise.Engine):
    chat = one.chat("Settle for this.", **BRIEF)
    chat.send(QUESTIONS[0])
    assert one.wait_idle(60)
    assert one.stats.counts.num_settled > 0
    last = chat.send(QUESTIONS[1])
    assert "were computed while idle" in last.explain()
    assert last.why.startswith("new tokens")


def test_what_a_chat_gives_out_is_its_callers(one: reprise.Engine):
    chat = one.chat(messages=[{"role": "user", "content": "Hello!"}], **BRIEF)
    chat.messages[0]["content"] = "Bye!"
    assert chat.messages[0]["content"] == "Hello!"


def test_closing_ends_what_runs():
    before = set(threading.enumerate())
    engine = reprise.Engine(tiny_model("llama"))
    stream = engine.chat().stream("Hello!", max_tokens=4000, ignore_eos=True)
    next(stream)
    engine.close()
    with pytest.raises((reprise.ShuttingDown, reprise.RequestCancelled)):
        list(stream)
    with pytest.raises(reprise.ShuttingDown):
        engine.chat().send("Hello!")
    engine.close()
    # Threads that have nothing to do any more end by themselves.
    left = set(threading.enumerate()) - before
    for thread in left:
        thread.join(60)
    assert not any(thread.is_alive() for thread in left)


def test_a_restart_finds_the_disk(tmp_path_factory: pytest.TempPathFactory):
    folder = str(tmp_path_factory.mktemp("disk"))
    options: dict[str, Any] = {"disk_directory": folder, "disk_bytes": "100MB", "settles": False}
    for is_restarted in (False, True):
        with reprise.Engine(tiny_model("qwen3_5"), **options) as engine:
            answer = engine.chat(SYSTEM * 20, **BRIEF).send("Hello!")
            assert (answer.usage.cached_tokens > 0) == is_restarted
            assert answer.why.startswith("cold") == (not is_restarted)


def test_options_out_of_range():
    with pytest.raises(TypeError, match="Unknown engine option 'port'"):
        reprise.Engine("unused", port=80)
    wrong: list[dict[str, Any]] = [{"max_batch": 0}, {"cache_bytes": -1}, {"cache_bytes": "much"}, {"settles": 3}]
    for options in wrong:
        (name,) = options
        with pytest.raises(ValueError, match=f"{name} must be"):
            reprise.Engine("unused", **options)


def test_a_model_that_is_not_there():
    with pytest.raises(reprise.LoadFailed):
        reprise.Engine("./no-such-folder")


def test_a_cut_answer_is_resumed_as_one(engine: reprise.Engine) -> None:
    chat = engine.chat(temperature=0, thinking_budget=1)
    with pytest.raises(reprise.BadRequest, match="no answer to continue"):
        list(chat.resume())
    half = chat.send("Hello!", max_tokens=12).text
    rest = "".join(piece.text for piece in chat.resume(max_tokens=8))
    assert rest != "" and chat.last.text == rest
    assert [message["content"] for message in chat.messages] == ["Hello!", half + rest]
