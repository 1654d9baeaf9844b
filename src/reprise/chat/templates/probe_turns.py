"""Stand-ins for what is not known yet: the next turn, or another text in place of a message.

Pure functions from a request's messages to other lists of messages. Their renderings are compared with the prompt, and
what they have in common with it survives. A template may refuse a stand-in, so there are several of each kind, the
likeliest first. They look like the chat's own messages as far as possible: a name or another field that the user's
messages carry is carried on.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from reprise.chat.message_format import USUAL_IDS, content_of, content_up_to, joined_text
from reprise.chat.request import ChatRequest, Cut, Message, call_of, result_of

STAND_IN_WORDS = ("Alpha", "Bravo")
"""They begin with different letters, so what two of them share ends where they begin."""

PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "turnstile",
        "description": "Counts.",
        "parameters": {
            "type": "object",
            "properties": {"gate": {"type": "string", "description": "Which."}},
            "required": ["gate"],
        },
    },
}
"""For trying a template; its name is in no other text."""
PROBE_TOOL_NAME: str = PROBE_TOOL["function"]["name"]

_OWN_KEYS = frozenset(("role", "content", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking"))
HEAD_ROLES = ("system", "developer")
"""Roles of messages that stand before the chat proper."""
_LONG_DOCUMENT = 500
"""Characters before a question that are worth a separate checkpoint."""

Messages = tuple[Message, ...]


def head_length(messages: Sequence[Message]) -> int:
    """How many messages stand before the chat proper: the system messages at its beginning."""
    length = 0
    while length < len(messages) and messages[length].get("role") in HEAD_ROLES:
        length += 1
    return length


def last_user_at(messages: Sequence[Message]) -> int | None:
    """The index of the last user message, or None."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].get("role") == "user":
            return index
    return None


def next_user_turns(request: ChatRequest, variant: int) -> tuple[Messages, ...]:
    """The chat after an answer and the next user message: candidates, of which the first that renders counts.

    The variants 0 and 1 differ from the first letter of the answer on.
    """
    word, other = STAND_IN_WORDS[variant], STAND_IN_WORDS[1 - variant]
    plain_user = {"role": "user", "content": other}
    user = _like(request.messages, "user", other)
    answered = _answered(request, word)
    candidates = (
        (*answered, user),
        (*answered, plain_user),
        (*answered[:-1], {**answered[-1], "reasoning_content": ""}, user),
        # For a chat that ends with an assistant message although roles must alternate.
        (*request.messages, user),
        answered,
    )
    return _distinct(candidates)


def next_tool_turns(request: ChatRequest) -> tuple[Messages, ...]:
    """The chat after a tool call and its result: candidates. None if the request has no tools."""
    if not request.tools:
        return ()
    name = _tool_name(request.tools[0])
    call, result = call_of(USUAL_IDS[0], name, {"a": "b"}), result_of(USUAL_IDS[0], name, STAND_IN_WORDS[1])
    base, last = _base_and_answer(request)
    silent = {**last, "tool_calls": [call]}
    spoken = {**last, "content": _continued(last.get("content"), STAND_IN_WORDS[0]), "tool_calls": [call]}
    return tuple((*base, answer, result) for answer in (silent, spoken))


def replaced_at(messages: Sequence[Message], index: int) -> tuple[Messages, ...]:
    """The messages before `index` and then another text in the same role: candidates.

    The text begins with another letter than the message that stood there, so that what is shared ends before it.
    """
    message = messages[index]
    actual = joined_text(message.get("content")).lstrip()
    word = STAND_IN_WORDS[1] if actual.startswith(STAND_IN_WORDS[0][0]) else STAND_IN_WORDS[0]
    kept = {key: value for key, value in message.items() if key not in _OWN_KEYS or key in ("role", "tool_call_id")}
    replaced = (*messages[:index], {**kept, "content": word})
    # Where roles must alternate, an assistant message wants a user message behind it.
    return (replaced, (*replaced, _like(messages, "user", word)))


def cut_at(messages: Sequence[Message], cut: Cut) -> tuple[Messages, ...]:
    """The messages up to a place within one, and then another text in the same message: candidates."""
    message = messages[cut.message]
    text, content = joined_text(message.get("content")), message.get("content")
    word = STAND_IN_WORDS[1] if text[cut.num_chars :].lstrip().startswith(STAND_IN_WORDS[0][0]) else STAND_IN_WORDS[0]
    said = content_of([*content_up_to(content, num_chars=cut.num_chars, num_images=cut.num_images), word])
    begun = (*messages[: cut.message], {**message, "content": said})
    followed = (*begun, _like(messages, "user", word))
    # A system message alone is no chat to many templates.
    return (followed, begun) if message.get("role") in HEAD_ROLES else (begun, followed)


def question_of(message: Message) -> str | None:
    """The end of a long user message behind what may be a document: its last part, paragraph or line.

    Others may ask something else about the same document. None if what stands before it is short or there is nothing.
    """
    content = message.get("content")
    texts = [joined_text([part]) for part in cast(list[Any], content)] if isinstance(content, list) else []
    question_text = joined_text(content).strip()
    if len(texts) > 1:
        question = texts[-1].strip()
    else:
        at = question_text.rfind("\n\n")
        question = question_text[at + 2 :] if at >= 0 else question_text[question_text.rfind("\n") + 1 :]
    is_long = len(question_text) - len(question) >= _LONG_DOCUMENT
    return question if question != "" and is_long else None


def first_user_turns(request: ChatRequest, head: int) -> tuple[Messages, ...]:
    """The first `head` messages and then a user message other than the request's: candidates."""
    messages = request.messages
    if head < len(messages) and messages[head].get("role") == "user":
        return replaced_at(messages, head)[:1]
    return ((*messages[:head], _like(messages, "user", STAND_IN_WORDS[0])),)


def known_turns(request: ChatRequest, answer: Message, variant: int) -> Messages:
    """The chat with the answer that was given, and the next user message still unknown.

    The variants 0 and 1 differ from the first letter of the unknown part on.
    """
    return (*answered_with(request, answer), _like(request.messages, "user", STAND_IN_WORDS[variant]))


def known_results(request: ChatRequest, answer: Message, variant: int) -> Messages:
    """The chat with the tool calls that were made, and the result of each still unknown."""
    calls = cast(Sequence[Mapping[str, Any]], answer.get("tool_calls") or ())
    results = [result_of(call["id"], call["function"]["name"], STAND_IN_WORDS[variant]) for call in calls]
    return (*answered_with(request, answer), *results)


def answered_with(request: ChatRequest, answer: Message) -> Messages:
    """The chat and its answer, which extends the last message where that is to be continued."""
    if not request.continue_final:
        return (*request.messages, answer)
    begun = request.messages[-1]
    content = _continued(begun.get("content"), joined_text(answer.get("content")))
    return (*request.messages[:-1], {**begun, **answer, "content": content})


def _base_and_answer(request: ChatRequest) -> tuple[Messages, dict[str, Any]]:
    """The messages before the answer, and what of the answer stands already."""
    if request.continue_final:
        return request.messages[:-1], dict(request.messages[-1])
    return request.messages, _like(request.messages, "assistant", None)


def _answered(request: ChatRequest, word: str) -> Messages:
    base, answer = _base_and_answer(request)
    return (*base, {**answer, "content": _continued(answer.get("content"), word)})


def _continued(content: Any, word: str) -> Any:
    if isinstance(content, list):
        return [*cast(list[Any], content), {"type": "text", "text": word}]
    return (content or "") + word


def _like(messages: Sequence[Message], role: str, content: str | None) -> dict[str, Any]:
    """A message with the fields that the chat's latest message of this role has beside its own words."""
    extras: dict[str, Any] = {}
    for message in reversed(messages):
        if message.get("role") == role:
            extras = {key: value for key, value in message.items() if key not in _OWN_KEYS}
            break
    return {"role": role, "content": content, **extras}


def _tool_name(tool: Mapping[str, Any]) -> str:
    function: Any = tool.get("function", tool)
    name: Any = cast(Mapping[str, Any], function).get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else "tool"


def _distinct(candidates: Sequence[Messages]) -> tuple[Messages, ...]:
    return tuple(candidate for n, candidate in enumerate(candidates) if candidate not in candidates[:n])
