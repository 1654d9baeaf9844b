"""A chat with a model: its history, and its turns."""

import json
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, cast

from pydantic import ValidationError

from reprise.api.http.body import invalid_body, plain
from reprise.api.openai.chat_body import ChatBody
from reprise.api.openai.chat_reply import message_of
from reprise.api.openai.chat_request import service_request_of
from reprise.api.service.exchange import AnswerDelta, AnswerEnd, EndReason, Record, ServiceRequest
from reprise.api.service.records import record_body, record_lines
from reprise.api.service.served import Asked
from reprise.api.service.service import new_request_id
from reprise.chat.answer import Answer, ContentDelta, Delta, ReasoningDelta, ToolCall, ToolCallDelta
from reprise.core.errors import BadRequest, ChatBusy
from reprise.library.image import Content, Image, parts_of
from reprise.library.replies import Replies, ReplyStream

_NOT_OPTIONS = frozenset(
    {
        "add_generation_prompt",
        "continue_final_message",
        "logprobs",
        "messages",
        "modalities",
        "model",
        "n",
        "n_predict",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "stream",
        "stream_options",
        "tools",
        "top_logprobs",
    }
)
OPTIONS = frozenset(ChatBody.model_fields) - _NOT_OPTIONS
"""The options of a turn: named, meant and checked like the fields of `POST /v1/chat/completions`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPiece:
    """A piece of an answer as it comes: one of content, reasoning, or a tool call; the others are empty."""

    text: str = ""
    """Content."""
    reasoning: str = ""
    tool_call: ToolCallDelta | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUsage:
    """The tokens of one turn. `prompt_tokens` counts the whole chat as it was rendered.

    `cached_tokens` of them were reused; the rest was prefilled. `reasoning_tokens` are part of `completion_tokens`.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatAnswer:
    """A whole answer. `text` is its content, "" where there is none beside reasoning or tool calls.

    `finish_reason` is `"stop"`, `"length"` (cut at `max_tokens` or the context's end) or `"tool_calls"`. `ttft_s`: the
    seconds from the request's arrival to its first token.
    """

    text: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: EndReason
    usage: TokenUsage
    ttft_s: float | None
    record: Future[Record]
    """The request's record, as the server keeps them; made in the moment after the answer."""

    @property
    def why(self) -> str:
        """Why not more of the prompt was reused: the reason, where the prompt diverged, and what to do about it.

        Waits for the record, which takes some milliseconds.
        """
        record = self.record.result()
        explanation = record.explanation
        if explanation is None:
            return str(record.outcomes[0].reason)
        where = "" if explanation.diverged_at is None else f" at token {explanation.diverged_at:,}"
        part = "" if explanation.part is None else f", in {explanation.part}"
        advice = "" if explanation.advice == "" else f". {explanation.advice}"
        return f"{explanation.reason}{where}{part}{advice}"

    def explain(self) -> str:
        """All that `reprise explain` prints about a request, in several lines. Waits like `why`."""
        return "\n".join(record_lines(record_body(self.record.result())))


class Chat:
    """A history and what the model says to it. `Engine.chat` makes one; several may run at once, each in its thread.

    Options of a turn are named and checked like the fields of `POST /v1/chat/completions`: `temperature`, `top_p`,
    `top_k`, `min_p`, `seed`, `max_tokens`, `stop` (a list), penalties, `logit_bias`, `thinking_budget`,
    `enable_thinking`, `reasoning_effort`, `tool_choice`, `response_format`, `chat_template_kwargs`, … Those given to a
    turn come before those of the chat. An unknown name is a TypeError; a wrong value, a BadRequest with `param`.

    A turn that does not end (it raised, or its stream was closed) leaves `messages` and `last` as they were, and what
    it computed in the cache. While a stream is being read its chat refuses other turns and changes with ChatBusy.
    """

    def __init__(
        self,
        replies: Replies,
        *,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> None:
        _check_names(options)
        self._replies = replies
        self._messages = _copy(messages)
        self._tools = tuple(tools)
        self._options = dict(options)
        self._last: ChatAnswer | None = None
        self._turn = threading.Lock()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """A copy of the history, in OpenAI's form; answers have their `reasoning_content` and `tool_calls`."""
        return _copy(self._messages)

    @property
    def last(self) -> ChatAnswer:
        """The latest whole answer. Raises LookupError before the first."""
        if self._last is None:
            raise LookupError("This chat has no answer yet.")
        return self._last

    # Turns.

    def stream(self, text: Content | None = None, **options: Any) -> Generator[ChatPiece]:
        """Send `text` and iterate over the answer; without `text`, answer the current history.

        A list of texts and images is one message: `chat.stream(["What is this?", reprise.Image("a.png")])`.

        The turn begins with the first step of the iteration. Closing the generator cancels it within one step of the
        engine. Raises BadRequest (ContextTooLong, TemplateFailed), QueueFull, ShuttingDown, OutOfMemory, EngineFailed,
        ChatBusy.
        """
        _check_names(options)
        return self._stream(lambda: self._messages if text is None else [*self._messages, _said(text)], options)

    def resume(self, **options: Any) -> Generator[ChatPiece]:
        """Continue the answer at the end of the history, which was cut, and iterate over the rest of it.

        `messages` has it as one answer afterwards, `last` the rest alone. Raises like `stream`.
        """
        _check_names(options)
        return self._stream(lambda: self._messages, options, is_resumed=True)

    def send(self, text: Content | None = None, **options: Any) -> ChatAnswer:
        """Like `stream`, and return the whole answer."""
        return self._whole(self.stream(text, **options))

    def regenerate(self, **options: Any) -> ChatAnswer:
        """Answer the last user message again, replacing its answer and all tool calls after it.

        Raises like `stream`. If the chat has a `seed`, the answer would be the same: pass another one.
        """
        _check_names(options)
        return self._whole(self._stream(self._before_answer, options))

    def prefill(self, text: Content = "") -> Future[Any]:
        """Start to compute the history and `text`, the beginning of a message that the user is still typing.

        Returns at once. What is computed does not depend on how the message continues; a turn sent meanwhile waits
        for no more than it would compute itself. Cancelling the future stops it; what was done stays in the cache.
        """
        history = [*self._messages, _said(text)]
        fields = {**self._options, "messages": history, "tools": list(self._tools) or None}
        return self._replies.prefill(lambda: _request_of(fields, self._replies))

    def tool_result(self, call: ToolCall | str, result: Any) -> None:
        """Add a tool's result to the history: text and images as they are, anything else as JSON.

        `call`: the call, or its id.

        `send()` or `stream()` without a text continues once all calls have results. Raises BadRequest for a call
        that the last answer did not make or that has a result, TypeError for what JSON cannot hold.
        """
        call_id = call if isinstance(call, str) else call.id
        is_content = isinstance(result, str | Image) or _shows_images(result)
        content = parts_of(result) if is_content else json.dumps(result, ensure_ascii=False)
        with self._owned():
            name = _open_calls(self._messages).get(call_id)
            if name is None:
                raise BadRequest(f"The last answer has no call {call_id!r} that awaits a result.", param="call")
            message = {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}
            self._messages = [*self._messages, message]

    def edit(self, index: int, text: Content) -> None:
        """Change the text of a message and drop everything after it; after a system message the chat stays.

        `index` counts `messages`, from the end if negative. `send()` or `stream()` without a text then answers an
        edited question. Raises IndexError, and BadRequest for the result of a tool.
        """
        with self._owned():
            message = self._messages[index]
            index %= len(self._messages)
            if message["role"] == "tool":
                raise BadRequest("Tool results cannot be edited. Edit the question before them.", param="index")
            rest = self._messages[index + 1 :] if message["role"] in ("system", "developer") else []
            edited = {"role": message["role"], "content": parts_of(text)}
            self._messages = [*self._messages[:index], edited, *rest]

    def fork(self) -> "Chat":
        """A new chat with this history, tools and options, independent from here on.

        Computes nothing: both share what the cache has. During a turn, the fork starts from before it.
        """
        made = Chat(self._replies, messages=self._messages, tools=self._tools, options=self._options)
        made._last = self._last
        return made

    def _before_answer(self) -> list[dict[str, Any]]:
        last = max((at for at, message in enumerate(self._messages) if message["role"] == "user"), default=None)
        if last is None:
            raise BadRequest("There is no user message to answer again.", param="messages")
        return self._messages[: last + 1]

    def _whole(self, pieces: Generator[ChatPiece]) -> ChatAnswer:
        for _ in pieces:
            pass
        return self.last

    def _stream(
        self,
        history_of: Callable[[], list[dict[str, Any]]],
        options: Mapping[str, Any],
        *,
        is_resumed: bool = False,
    ) -> Generator[ChatPiece]:
        with self._owned():
            history = history_of()
            last_role = history[-1]["role"] if history else None
            if is_resumed and (last_role != "assistant" or history[-1].get("tool_calls")):
                raise BadRequest("There is no answer to continue.", param="messages")
            if not is_resumed and last_role not in ("user", "tool"):
                raise BadRequest("There is nothing to answer. Send a text, or regenerate().", param="messages")
            fields = {**self._options, **options, "messages": history, "tools": list(self._tools) or None}
            if is_resumed:
                fields |= {"continue_final_message": True, "add_generation_prompt": False}
            reply = self._replies.begin(lambda: _request_of(fields, self._replies))
            ended: AnswerEnd | None = None
            try:
                for event in reply:
                    if isinstance(event, AnswerDelta):
                        yield from map(_piece_of, event.deltas)
                    elif isinstance(event, AnswerEnd):
                        ended = event
            finally:
                reply.cancel()
            assert ended is not None
            message = _message_of(ended.answer)
            if is_resumed:
                *history, half = history
                message = {**half, **message, "content": f"{half['content']}{message['content']}"}
            self._messages = [*history, message]
            self._last = _answer_of(ended, reply)

    @contextmanager
    def _owned(self) -> Generator[None]:
        if not self._turn.acquire(blocking=False):
            raise ChatBusy(
                "An answer of this chat is still being read. Read it to the end, close its stream, or fork()."
            )
        try:
            yield
        finally:
            self._turn.release()


def _request_of(fields: Mapping[str, Any], replies: Replies) -> ServiceRequest:
    try:
        body = ChatBody.model_validate(plain(fields))
    except ValidationError as error:
        found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        raise invalid_body(fields, found) from error
    service = replies.service
    request = service_request_of(body, Asked(served=service.served, limits=service.limits))
    return replace(request, id=new_request_id("chat"))


def _answer_of(ended: AnswerEnd, reply: ReplyStream) -> ChatAnswer:
    usage = reply.usage
    assert usage is not None
    return ChatAnswer(
        text=ended.answer.content or "",
        reasoning=ended.answer.reasoning,
        tool_calls=ended.answer.tool_calls,
        finish_reason=ended.reason,
        usage=TokenUsage(
            prompt_tokens=usage.num_prompt,
            cached_tokens=usage.num_cached,
            completion_tokens=usage.num_completion,
            reasoning_tokens=usage.num_reasoning,
        ),
        ttft_s=ended.outcome.ttft_s,
        record=reply.record,
    )


def _piece_of(delta: Delta) -> ChatPiece:
    match delta:
        case ContentDelta():
            return ChatPiece(text=delta.text)
        case ReasoningDelta():
            return ChatPiece(reasoning=delta.text)
        case ToolCallDelta():
            return ChatPiece(tool_call=delta)


def _said(text: Content) -> dict[str, Any]:
    return {"role": "user", "content": parts_of(text)}


def _shows_images(result: Any) -> bool:
    """Whether a tool's result is a list of texts and images, with an image in it."""
    if not isinstance(result, list | tuple):
        return False
    parts = cast(Sequence[Any], result)
    return any(isinstance(part, Image) for part in parts) and all(isinstance(part, str | Image) for part in parts)


def _message_of(answer: Answer) -> dict[str, Any]:
    return {"content": "", **plain(message_of(answer))} if not answer.tool_calls else plain(message_of(answer))


def _open_calls(messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The calls at the end of a history that have no result yet: names by id."""
    answered: set[str] = set()
    for message in reversed(messages):
        if message["role"] != "tool":
            calls = cast(Sequence[Mapping[str, Any]], message.get("tool_calls") or ())
            return {call["id"]: call["function"]["name"] for call in calls if call["id"] not in answered}
        answered.add(message["tool_call_id"])
    return {}


def _copy(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [deepcopy(dict(message)) for message in messages]


def _check_names(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in OPTIONS:
            raise TypeError(f"Unknown option {name!r} of a turn. The options are {', '.join(sorted(OPTIONS))}.")
