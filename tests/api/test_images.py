"""Images and files with a model that reads text only: they never end a chat, and nothing is computed again for them."""

from typing import Any

import httpx
import pytest

from reprise.api.service.unread import newest_question_at
from reprise.core.job import Purpose
from reprise.core.settings import Settings
from tests.api.servers import MODEL, Api, api
from tests.chat.text_models import text_model

pytestmark = pytest.mark.anyio

PIXEL = "iVBORw0KGgo="
LEFT_OUT = "[image omitted: this model reads text only]"
NOTE = "left out, since this model reads text only: parts of kind image: 1"

CHAT_IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
ITEM_IMAGE = {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"}
BLOCK_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
IMAGES = {"chat": CHAT_IMAGE, "responses": ITEM_IMAGE, "messages": BLOCK_IMAGE}


def words(api_name: str, text: str) -> dict[str, Any]:
    return {"type": "input_text" if api_name == "responses" else "text", "text": text}


def asks(api_name: str, *parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def answers(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def looks(api_name: str, *seen: dict[str, Any]) -> list[dict[str, Any]]:
    """A tool call, and what its result shows."""
    match api_name:
        case "chat":
            function = {"name": "view", "arguments": '{"path": "a.png"}'}
            return [
                {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": function}]},
                {"role": "tool", "tool_call_id": "call_1", "content": list(seen)},
            ]
        case "responses":
            return [
                {"type": "function_call", "call_id": "call_1", "name": "view", "arguments": '{"path": "a.png"}'},
                {"type": "function_call_output", "call_id": "call_1", "output": list(seen)},
            ]
        case _:
            use = {"type": "tool_use", "id": "toolu_1", "name": "view", "input": {"path": "a.png"}}
            result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": list(seen)}
            return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]


async def send(a: Api, api_name: str, chat: list[dict[str, Any]]) -> tuple[int, str, list[str]]:
    """Status, what the engine was given (or what is wrong), and the record's notes."""
    url = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}[api_name]
    body = {"input": chat} if api_name == "responses" else {"messages": chat}
    response = await a.client.post(url, json={**body, **({"max_tokens": 8} if api_name == "messages" else {})})
    if response.status_code != 200:
        return response.status_code, response.json()["error"]["message"], []
    await a.until_idle()
    listed = (await a.client.get("/v1/cache/requests")).json()
    job = a.backend.of(Purpose.GENERATE)[-1]
    notes = next(record["notes"] for record in listed["data"] if record["id"] == job.id)
    return 200, text_model().decode(job.prompt.tokens.tolist()), notes


@pytest.mark.parametrize("name", IMAGES)
async def test_an_image_in_a_tool_result_is_a_short_text(name: str) -> None:
    question = asks(name, words(name, "Look."))
    seen = looks(name, words(name, "a.png:"), IMAGES[name])
    async with api() as a:
        status, text, notes = await send(a, name, [*question, *seen])
        assert status == 200
        assert "a.png:" in text
        assert LEFT_OUT in text
        assert PIXEL not in text
        assert NOTE in notes
        # The next turn begins with the same text, and so does a compaction's.
        later = [*question, *seen, *answers("A cat."), *asks(name, words(name, "Summarize."))]
        status, then, notes = await send(a, name, later)
        assert status == 200
        common = text[: text.index(LEFT_OUT) + len(LEFT_OUT)]
        assert then.startswith(common)
        assert NOTE in notes


@pytest.mark.parametrize("name", IMAGES)
async def test_an_image_in_the_newest_question_is_refused_and_in_an_older_one_is_not(name: str) -> None:
    question = asks(name, words(name, "What is this?"), IMAGES[name])
    async with api() as a:
        status, sentence, _ = await send(a, name, question)
        assert status == 400
        assert "reads text only" in sentence
        # A client that keeps the refused message asks again behind it.
        status, text, notes = await send(a, name, [*question, *asks(name, words(name, "Never mind."))])
        assert (status, LEFT_OUT in text, NOTE in notes) == (200, True, True)
        after = [*question, *answers("I cannot say."), *asks(name, words(name, "Why?"))]
        status, text, _ = await send(a, name, after)
        assert (status, LEFT_OUT in text) == (200, True)
        late = [*after, *answers("Because."), *question]
        assert (await send(a, name, late))[0] == 400


def also_says(api_name: str, question: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The question with what the user wrote next in the same message."""
    return asks(api_name, *question[0]["content"], words(api_name, text))


@pytest.mark.parametrize("name", IMAGES)
async def test_a_refused_image_joined_with_the_next_message_does_not_end_the_chat(name: str) -> None:
    # Claude Code and others keep the refused message, and join what the user writes next to it.
    question = asks(name, words(name, "What is this?"), IMAGES[name])
    joined = also_says(name, question, "Never mind.")
    async with api() as a:
        assert (await send(a, name, joined))[0] == 400, "nothing was refused before: this is what the user asks"
    async with api() as a:
        for _ in range(2):
            assert (await send(a, name, question))[0] == 400
        status, text, notes = await send(a, name, joined)
        assert (status, LEFT_OUT in text, "Never mind." in text, NOTE in notes) == (200, True, True, True)
        # Once more, with another image: that one is asked about.
        other = {**IMAGES[name], "detail": "low"}
        assert (await send(a, name, asks(name, *joined[0]["content"], other)))[0] == 400
        later = [*joined, *answers("Fine."), *asks(name, words(name, "Thanks."))]
        status, then, _ = await send(a, name, later)
        assert status == 200
        assert then.startswith(text[: text.index("Never mind.")])


async def test_a_refused_image_of_ollama_does_not_end_the_chat_either() -> None:
    async def ask(text: str) -> httpx.Response:
        message = {"role": "user", "content": text, "images": [PIXEL]}
        return await a.client.post("/api/chat", json={"model": MODEL, "messages": [message], "stream": False})

    async with api() as a:
        assert (await ask("What is this?")).status_code == 400
        assert (await ask("What is this?")).status_code == 400
        assert (await ask("Who is this?")).status_code == 400
        assert (await ask("Who is this?\nNever mind.")).status_code == 200
        assert LEFT_OUT in text_model().decode(a.backend.of(Purpose.GENERATE)[-1].prompt.tokens.tolist())


async def test_another_key_does_not_see_what_was_refused() -> None:
    keys = {key: {"authorization": f"Bearer {key}"} for key in ("one-secret-key", "another-secret-key")}
    question = asks("chat", words("chat", "What is this?"), CHAT_IMAGE)
    joined = also_says("chat", question, "Never mind.")
    async with api(settings=Settings(model=MODEL, api_keys=tuple(keys))) as a:

        async def ask(key: str, chat: list[dict[str, Any]]) -> int:
            response = await a.client.post("/v1/chat/completions", json={"messages": chat}, headers=keys[key])
            return response.status_code

        assert await ask("one-secret-key", question) == 400
        assert await ask("another-secret-key", joined) == 400
        assert await ask("one-secret-key", joined) == 200


@pytest.mark.parametrize("name", IMAGES)
async def test_an_image_that_follows_a_tool_result_belongs_to_it(name: str) -> None:
    chat = [*asks(name, words(name, "Look.")), *looks(name, words(name, "see below")), *asks(name, IMAGES[name])]
    if name == "messages":
        # Anthropic's clients send both in one message.
        image = chat.pop()
        chat[-1] = {"role": "user", "content": [*chat[-1]["content"], *image["content"]]}
    async with api() as a:
        status, text, _ = await send(a, name, chat)
    assert (status, LEFT_OUT in text) == (200, True)


@pytest.mark.parametrize(
    ("name", "part", "kind"),
    [
        ("chat", {"type": "input_audio", "input_audio": {"data": PIXEL, "format": "wav"}}, "audio"),
        ("chat", {"type": "file", "file": {"file_id": "f"}}, "file"),
        ("chat", {"type": "video_url", "video_url": {"url": "x"}}, "video"),
        ("responses", {"type": "input_file", "filename": "a.pdf", "file_data": PIXEL}, "file"),
        ("messages", {"type": "document", "source": {"type": "base64", "data": PIXEL}, "title": "a.pdf"}, "file"),
        ("messages", {"type": "web_search_tool_result", "content": []}, "web_search_tool_result"),
    ],
)
async def test_other_parts_too(name: str, part: dict[str, Any], kind: str) -> None:
    async with api() as a:
        chat = [*asks(name, words(name, "Read.")), *looks(name, part)]
        status, text, notes = await send(a, name, chat)
        assert status == 200
        assert f"[{kind} omitted: this model reads text only]" in text
        assert f"left out, since this model reads text only: parts of kind {kind}: 1" in notes
        assert (await send(a, name, asks(name, part)))[0] == 400


async def test_an_assistants_parts_of_thinking_are_its_reasoning() -> None:
    said = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "Deep "}, {"type": "text", "text": "thought"}]},
        {"type": "text", "text": "Blue."},
    ]
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    chat = [
        *asks("chat", words("chat", "Sky?")),
        {"role": "assistant", "content": said, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": None},
    ]
    async with api(template="keeps_everything") as a:
        status, text, _ = await send(a, "chat", chat)
    assert status == 200
    assert "<think>\nDeep thought\n</think>" in text
    assert "Blue." in text


def test_who_is_asked() -> None:
    assert newest_question_at(["system", "user"]) == 1
    assert newest_question_at(["user", "assistant", "user", "system"]) == 2
    assert newest_question_at(["user", "user", "assistant"]) == 1
    assert newest_question_at(["user", "assistant", "tool"]) is None
    assert newest_question_at(["user", "assistant", "tool", "user"]) is None
    assert newest_question_at(["user", "assistant", "tool", "assistant", "user"]) == 4
    assert newest_question_at([]) is None
