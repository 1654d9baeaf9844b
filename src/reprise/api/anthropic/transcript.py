"""From Anthropic's messages to the messages that chat templates take, with the places that `cache_control` marks.

As in Anthropic's API, consecutive messages of one role are one message, and tool results come before the text that is
sent with them. Blocks of text are lines of their own, except in assistant messages, whose text has to be what it was.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from reprise.api.anthropic.body import AnthropicMessage, Block, CacheControl
from reprise.api.service.reasoning_signature import is_signed
from reprise.api.service.unread import Speaker, UnreadParts
from reprise.chat.message_format import content_of, joined_lines, joined_text, text_runs
from reprise.chat.request import Cut, Message
from reprise.core.errors import BadRequest

Run = str | Mapping[str, Any]
"""A text, or an image."""
Unread = Callable[[Block, str], Run]
"""What stands for a block that is no text, which is at this place in the body; or it raises."""


def block_runs(block: Block, where: str, unread: Unread) -> list[Run]:
    """What a block says and shows. Raises BadRequest for a block without what its type needs."""
    match block.type:
        case "text" if block.text is not None:
            return [block.text]
        case "text":
            raise BadRequest("A text block needs `text`.", param=f"{where}.text")
        case "document":
            return [*_titles(block), *_document_runs(block, where, unread)]
        case "search_result" if block.content is not None:
            source = [block.source] if isinstance(block.source, str) and block.source else []
            return [*_titles(block), *source, *content_runs(block.content, f"{where}.content", unread)]
        case _:
            return [unread(block, f"{where}.type")]


def content_runs(content: str | list[Block] | None, where: str, unread: Unread) -> list[Run]:
    """What content says and shows; blocks are lines of their own."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    return [run for at, block in enumerate(content) for run in block_runs(block, f"{where}[{at}]", unread)]


def _document_runs(block: Block, where: str, unread: Unread) -> list[Run]:
    source = block.source
    if isinstance(source, dict):
        kind, text, inner = source.get("type"), source.get("data"), source.get("content")
        if kind == "text" and isinstance(text, str):
            return [text]
        if kind == "content" and isinstance(inner, str):
            return [inner]
        if kind == "content" and isinstance(inner, list):
            blocks = [Block.model_validate(entry) for entry in cast(list[object], inner) if isinstance(entry, dict)]
            return content_runs(blocks, f"{where}.source.content", unread)
    return [unread(block, f"{where}.source")]


def _titles(block: Block) -> list[Run]:
    return [line for line in (block.title, block.context) if line is not None]


_TTL_S = {None: 300.0, "5m": 300.0, "1h": 3600.0}
"""How long a mark keeps its place in the cache."""
_MAX_MARKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """The messages, and the marks in them as `ChatRequest.breakpoints` and `.cuts`. `pin_for_s` None: no mark."""

    messages: tuple[Message, ...]
    breakpoints: tuple[int, ...]
    cuts: tuple[Cut, ...]
    pin_for_s: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """The place after that many characters and images of the message before number `num_messages`."""

    num_messages: int
    num_chars: int
    num_images: int


class TranscriptWriter:
    """Writes a transcript, message by message. Raises BadRequest for what the model cannot read."""

    def __init__(self, unread: UnreadParts) -> None:
        self._unread = unread
        self._message_at: int | None = None
        self._messages: list[dict[str, Any]] = []
        self._marks: list[_Mark] = []
        self._ttls: list[float] = []
        self._tool_names: dict[str, str] = {}
        self._num_foreign = 0
        self._num_unreadable = 0

    def add_tool_marks(self, marks: Sequence[CacheControl | None]) -> None:
        """The marks on the tools, which stand before all messages."""
        for mark in marks:
            self._mark(mark)

    def add_system(self, system: str | list[Block]) -> None:
        """The system prompt."""
        blocks = [Block(type="text", text=system)] if isinstance(system, str) else system
        for at, block in enumerate(blocks):
            self._add("system", block_runs(block, f"system[{at}]", self._other), joiner="\n")
            self._mark(block.cache_control)

    def add_message(self, message: AnthropicMessage, message_at: int) -> None:
        self._message_at = message_at
        content, where = message.content, f"messages[{message_at}]"
        blocks = [Block(type="text", text=content)] if isinstance(content, str) else content
        places = [f"{where}.content[{at}]" for at in range(len(blocks))]
        match message.role:
            case "assistant":
                self._add_assistant(blocks, places)
            case "user":
                self._add_user(blocks, places, where)
            case "system":
                # The chat's own system prompt ends before the first message.
                said = joined_lines(content_runs(content, f"{where}.content", self._other), "\n")
                self._messages.append({"role": "system", "content": said})
                for block in blocks:
                    self._mark(block.cache_control)

    def finish(self, last_mark: CacheControl | None) -> Transcript:
        """The transcript; `last_mark` is the mark that stands for the end of the last message."""
        self._mark(last_mark)
        if len(self._ttls) > _MAX_MARKS:
            raise BadRequest(f"There are {len(self._ttls)} `cache_control` marks; at most {_MAX_MARKS} are accepted.")
        breakpoints: set[int] = set()
        cuts: set[Cut] = set()
        for mark in self._marks:
            place = self._place(mark)
            if isinstance(place, Cut):
                cuts.add(place)
            else:
                breakpoints.add(place)
        return Transcript(
            messages=tuple(self._messages),
            breakpoints=tuple(sorted(breakpoints)),
            cuts=tuple(sorted(cuts)),
            pin_for_s=max(self._ttls, default=None),
            notes=self._notes(),
        )

    def _place(self, mark: _Mark) -> int | Cut:
        if mark.num_messages == 0:
            return 0
        index = mark.num_messages - 1
        is_at_end = (mark.num_chars, mark.num_images) == _length(self._messages[index])
        return mark.num_messages if is_at_end else Cut(index, mark.num_chars, mark.num_images)

    def _notes(self) -> tuple[str, ...]:
        notes: list[str] = []
        if self._num_foreign > 0:
            notes.append(f"thinking blocks signed by another server, accepted unchecked: {self._num_foreign}")
        if self._num_unreadable > 0:
            notes.append(f"thinking blocks without readable text, left out: {self._num_unreadable}")
        return (*notes, *self._unread.notes)

    def _other(self, block: Block, where: str) -> Run:
        fields = {} if block.source is None else {"source": block.source}
        return self._unread.part(block.type, fields, message_at=self._message_at, where=where)

    def _mark(self, mark: CacheControl | None) -> None:
        if mark is None:
            return
        self._ttls.append(_TTL_S[mark.ttl])
        num_chars, num_images = _length(self._messages[-1]) if self._messages else (0, 0)
        self._marks.append(_Mark(num_messages=len(self._messages), num_chars=num_chars, num_images=num_images))

    def _add(self, role: str, runs: Sequence[Run], *, joiner: str) -> None:
        last = self._messages[-1] if self._messages else None
        if last is None or last["role"] != role:
            self._messages.append({"role": role, "content": joined_lines(runs, joiner)})
        else:
            last["content"] = joined_lines([*text_runs(last["content"]), *runs], joiner)

    def _add_user(self, blocks: Sequence[Block], places: Sequence[str], where: str) -> None:
        if not blocks:
            raise BadRequest("A user message needs content.", param=f"{where}.content")
        for block, place in zip(blocks, places, strict=True):
            if block.type == "tool_result":
                self._add_result(block, place)
        for block, place in zip(blocks, places, strict=True):
            if block.type != "tool_result":
                self._add("user", block_runs(block, place, self._other), joiner="\n")
                self._mark(block.cache_control)

    def _add_result(self, block: Block, place: str) -> None:
        if block.tool_use_id is None:
            raise BadRequest("A tool result needs the `tool_use_id` of its call.", param=f"{place}.tool_use_id")
        content = joined_lines(content_runs(block.content, f"{place}.content", self._other), "\n")
        if block.is_error is True and not joined_text(content).lower().startswith("error"):
            # Templates have no other place for it.
            content = joined_lines(["Error: ", *text_runs(content)], "")
        result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        name = self._tool_names.get(block.tool_use_id)
        self._messages.append(result if name is None else {**result, "name": name})
        self._mark(block.cache_control)

    def _add_assistant(self, blocks: Sequence[Block], places: Sequence[str]) -> None:
        last = self._messages[-1] if self._messages else None
        if last is None or last["role"] != "assistant" or "tool_calls" in last:
            self._messages.append({"role": "assistant", "content": None})
        message = self._messages[-1]
        for block, place in zip(blocks, places, strict=True):
            match block.type:
                case "thinking":
                    self._add_thinking(message, block)
                case "redacted_thinking":
                    self._num_unreadable += 1
                case "tool_use":
                    message.setdefault("tool_calls", []).append(self._call(block, place))
                    self._mark(block.cache_control)
                case _:
                    runs = block_runs(block, place, self._other)
                    message["content"] = content_of([*text_runs(message["content"]), *runs])
                    self._mark(block.cache_control)
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""

    def _add_thinking(self, message: dict[str, Any], block: Block) -> None:
        if block.thinking is None or block.thinking == "":
            self._num_unreadable += 1
            return
        # Without a signature it is a client's own; with another's, a chat that began elsewhere.
        if block.signature and not is_signed(block.thinking, block.signature):
            self._num_foreign += 1
        before = message.get("reasoning_content")
        message["reasoning_content"] = block.thinking if before is None else f"{before}\n{block.thinking}"

    def _call(self, block: Block, place: str) -> dict[str, Any]:
        if block.id is None or block.name is None:
            raise BadRequest("A tool use needs its `id` and `name`.", param=place)
        self._tool_names[block.id] = block.name
        function = {"name": block.name, "arguments": {} if block.input is None else block.input}
        return {"id": block.id, "type": "function", "function": function}


def _length(message: Message) -> tuple[int, int]:
    """The characters and images of a message."""
    runs = text_runs(message["content"])
    return len("".join(run for run in runs if isinstance(run, str))), sum(not isinstance(run, str) for run in runs)


def speaker_of(message: AnthropicMessage) -> Speaker:
    """Who says a message: one with tool results is the tool's, whatever else the user's client put into it."""
    has_result = isinstance(message.content, list) and any(block.type == "tool_result" for block in message.content)
    return "tool" if message.role == "user" and has_result else message.role
