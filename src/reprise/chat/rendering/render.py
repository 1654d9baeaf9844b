"""The renderer: chat requests to tokens and boundaries, and answers to the beginning of the next prompt."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache, partial
from itertools import count
from threading import Lock
from typing import Any, Literal, Protocol, cast

from reprise.chat.answer import Answer
from reprise.chat.answers.markup import is_harmony
from reprise.chat.images import SeenImages, images_in, shown, with_images
from reprise.chat.memo import Memo
from reprise.chat.message_format import joined_text
from reprise.chat.messages.compaction import Answered, Compactions
from reprise.chat.messages.history import ReasoningMemory, argument_texts, as_message, completed
from reprise.chat.messages.system_placement import Placement
from reprise.chat.reasons.explain import Explanation, explain
from reprise.chat.reasons.volatile_prefix import head_notes, normalize, reencoded_images, reordered_tools
from reprise.chat.rendering.abridged import AbridgedChat
from reprise.chat.rendering.boundaries import find_boundaries
from reprise.chat.request import ChatRequest, Message
from reprise.chat.scan import common_length
from reprise.chat.templates.piecewise_tokenizer import PieceTokenizer, Spelled, TokenizedText
from reprise.chat.templates.probe_turns import (
    STAND_IN_WORDS,
    Messages,
    first_user_turns,
    head_length,
    known_results,
    known_turns,
)
from reprise.chat.templates.rendered import Rendered, find_parts
from reprise.chat.templates.template import ChatTemplate, RenderContext
from reprise.chat.text_model import TextModel, refuse_if_parts_too_long, refuse_if_too_long
from reprise.core.backend import StoredRun
from reprise.core.errors import BadRequest
from reprise.core.images import outside
from reprise.core.outcome import Outcome
from reprise.core.prompt import Boundary, BoundaryKind, Prompt
from reprise.core.tokens import Tokens, common_prefix

Branch = Literal["user", "tool"]
"""The messages after an answer: a user message, or the results of its tool calls."""

_NUM_FROZEN_CHATS = 4096
_NUM_LATEST, _NUM_LIKELY = 64, 4
"""How many chats an unknown prompt is compared with, and with how many of them in words."""
_GENERATION_PROMPTS_NBYTES = 1 << 20
_MOST_COMPACTED_NBYTES = 4 << 20
"""Of images in a chat whose summary is looked for: the latest of these chats are held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderSettings:
    """How requests are rendered.

    `has_canonical_tokens`: always the tokenizer's own spelling, never the one that was sampled. `freezes_date`: a chat
    keeps the day of its first request. `restores_reasoning`: put back reasoning that a client dropped. `normalizes`:
    what changes with every request and means nothing is left out, the rest is named; `sorts_tools` also sorts tools.
    """

    has_canonical_tokens: bool = False
    freezes_date: bool = False
    restores_reasoning: bool = False
    normalizes: bool = True
    sorts_tools: bool = False
    context: int | None = None
    """Tokens of prompt and answer together; a text that cannot be so few is refused before it is tokenized."""
    token_memory_nbytes: int = 64 << 20
    recent_nbytes: int = 64 << 20


class Renderer:
    """Renders the requests of one model. Safe to use from several threads; keeps bounded memories, no other state."""

    def __init__(
        self,
        text_model: TextModel,
        settings: RenderSettings | None = None,
        *,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.settings = settings or RenderSettings()
        self._text_model = text_model
        self._clock = clock
        self._images = None if text_model.images is None else SeenImages(text_model.images)
        self._template = ChatTemplate(text_model, self._images)
        self._placement = Placement(self._template, text_model)
        self._tokenizer = PieceTokenizer(
            text_model,
            images=self._images,
            is_faithful=not self.settings.has_canonical_tokens,
            nbytes=self.settings.token_memory_nbytes,
        )
        # System prompts are long, and each turn of a chat has the same.
        self._head_notes = lru_cache(maxsize=16)(head_notes)
        self._reasoning = ReasoningMemory()
        self._first_moments: Memo[int, datetime] = Memo(nbytes=_NUM_FROZEN_CHATS, size=lambda _key, _moment: 1)
        self._prompt_texts: Memo[str, str] = Memo(
            nbytes=_GENERATION_PROMPTS_NBYTES, size=lambda key, text: 200 + 2 * (len(key) + len(text))
        )
        self.compactions = Compactions()
        self._recent: Memo[int, Rendered] = Memo(nbytes=self.settings.recent_nbytes, size=_rendered_nbytes)
        self._latest: dict[int, tuple[tuple[str, str] | None, int]] = {}
        """The keys of the latest chats in `_recent`, in the order of their last requests: who sent them, and the keys
        of what stands before them."""
        self._numbers = count(1)
        self._lock = Lock()

    def render(self, request: ChatRequest, *, is_final: bool = True) -> Rendered:
        """The prompt of a request. One that is not final is not compared with later prompts.

        Raises BadRequest (nothing to render, no template), ContextTooLong, and TemplateFailed with the template's own
        sentence.
        """
        whole, done = completed(request.messages)
        request = replace(request, messages=self._seen(whole))
        # Now: a call is written several times on the way to a prompt.
        refuse_if_parts_too_long(argument_texts(request.messages), self._text_model, context=self.settings.context)
        notes = [*request.notes, *done, *(_tool_notes(self._text_model) if request.tools else ())]
        if self.settings.normalizes:
            normalized = normalize(request, sorts_tools=self.settings.sorts_tools, notes_of=self._head_notes)
            request = normalized.request
            notes += normalized.notes
        if self.settings.restores_reasoning:
            messages, num_restored = self._reasoning.restored(request.messages)
            if num_restored > 0:
                request = replace(request, messages=messages)
                notes.append(f"reasoning put back into messages: {num_restored}")
        moment = self._moment(request.messages, is_final=is_final)
        history = request.messages
        placed = self._placement.open(request, moment)
        context, text, request = placed.context, placed.text, placed.context.request
        notes += placed.notes
        refuse_if_too_long(self.plain(text), self._text_model, context=self.settings.context)
        tokenized = self._tokenizer.tokenize(text)
        boundaries, missed = find_boundaries(self._abridged(context, text), request, self._tokenizer, tokenized)
        dates = self._template.dates
        if dates.has_dates and not dates.is_controlled and self.settings.freezes_date:
            notes.append("the chat template computes its date format, so its date cannot be frozen")
        prompt_at = self._generation_prompt_at(context, text)
        parts_of = partial(find_parts, request, tokenized, self._text_model.eos, text=text, prompt_at=prompt_at)
        # What a message to be continued has opened is in that message; else only the generation prompt can open.
        begun = parts_of()[-1:] if request.continue_final else ()
        from_char = begun[0].chars.start if begun else prompt_at
        previous = self._previous(request)
        if self.settings.normalizes and previous is not None:
            notes += reordered_tools(previous.request.tools, request.tools)
            notes += reencoded_images(previous.history, history)
        rendered = Rendered(
            context=context,
            history=history,
            prompt=tokenized.prompt(boundaries=boundaries),
            text=text,
            tokenized=tokenized,
            is_thinking_open=self._text_model.opens_thinking(text[from_char:]),
            is_thinking_over=self._text_model.ends_thinking(text[from_char:]),
            parts_of=parts_of,
            notes=(*notes, *missed),
            dates=dates.texts(moment),
            previous=previous,
            number=next(self._numbers),
        )
        if is_final:
            self._keep(rendered)
            if _files_nbytes(rendered) <= _MOST_COMPACTED_NBYTES:
                rendered = replace(rendered, follows_summary=self.compactions.observe(_as_sent(rendered)))
        return rendered

    def _seen(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """The messages with their images as they stand in a prompt. Raises BadRequest for one that cannot be read."""
        return messages if self._images is None else with_images(messages, self._images.see)

    def recall(self, runs: Iterable[StoredRun]) -> None:
        """Learn from prompts that an earlier server stored how it spelled them. Each run follows its parent."""
        ends: dict[str | None, Spelled] = {None: Spelled()}
        inner: set[str | None] = {None}
        for run in runs:
            ends[run.name] = self._tokenizer.recall(ends[run.parent], run.tokens.tolist())
            inner.add(run.parent)
        for name, spelled in ends.items():
            if name not in inner:
                self._tokenizer.recall_end(spelled)

    def learn(self, rendered: Rendered, sampled: Sequence[int], answer: Answer | None = None) -> None:
        """A request was answered with these tokens, which mean this answer. Call it before `next_turn`."""
        self._tokenizer.learn(rendered.tokenized, sampled)
        if answer is not None and answer.content is not None and _files_nbytes(rendered) <= _MOST_COMPACTED_NBYTES:
            self.compactions.note(_answered(rendered, answer.content))
        if answer is not None and self.settings.restores_reasoning:
            self._reasoning.remember(rendered.history, as_message(answer))

    def next_turn(self, rendered: Rendered, answer: Answer, *, branch: Branch) -> Prompt | None:
        """What the next request of this chat will begin with, as far as it is known after the answer.

        None if that is no more than what the prompt holds already, or if the template refuses the stand-ins.
        """
        if branch == "tool" and not answer.tool_calls:
            return None
        summarised = self._after_summary(rendered, answer)
        if summarised is not None:
            return summarised
        # From what the client sent: what was rewritten for the template is no longer in the client's shape.
        request = replace(rendered.request, messages=rendered.history, breakpoints=(), cuts=())
        message = as_message(answer, has_reasoning=self._returns_reasoning(request))
        turns = known_turns if branch == "user" else known_results
        common = self._common_run(rendered, request, [turns(request, message, variant) for variant in (0, 1)])
        if common is None:
            return None
        run, length = common
        return _begun(run, length) if length > common_prefix(run.tokens[:length], rendered.prompt.tokens) else None

    def _common_run(
        self, rendered: Rendered, request: ChatRequest, chats: Sequence[Messages]
    ) -> tuple[TokenizedText, int] | None:
        """The first of two variants of this chat, and how many tokens both begin with; None if one is refused."""
        variant = self._abridged(rendered.context, rendered.text)
        first, second = (
            variant.try_text(self._placement.rewritten(replace(request, messages=chat))[0].messages) for chat in chats
        )
        if first is None or second is None:
            return None
        run = self._tokenizer.tokenize(first)
        return run, self._tokenizer.shared(run, second)

    def _abridged(self, context: RenderContext, text: str) -> AbridgedChat:
        return AbridgedChat(self._placement, context, text, think_end=self._text_model.think_end)

    def _after_summary(self, rendered: Rendered, answer: Answer) -> Prompt | None:
        """The chat that follows this answer, if it is a summary of a known form."""
        if answer.content is None:
            return None
        predicted = self.compactions.predict(_answered(rendered, answer.content))
        if predicted is None:
            return None
        try:
            if predicted.is_whole:
                return self.render(predicted.request, is_final=False).prompt
            return self.typed(predicted.request, ends_in_word=False)
        except BadRequest:
            return None  # The template refuses what is expected; the real request will be another.

    def typed(self, request: ChatRequest, *, ends_in_word: bool = True) -> Prompt:
        """The beginning of the prompt that no continuation of the last user message changes: it is still being typed.

        A word at its end may become another, so it is left out. Raises what `render` raises, and BadRequest where no
        user message stands at the end.
        """
        rendered = self.render(request, is_final=False)
        last = rendered.history[-1] if rendered.history else None
        if last is None or last.get("role") != "user":
            raise BadRequest("Only a user message at the end of the chat can be partial.", param="partial")
        content: Any = last.get("content")
        parts = cast(list[Any], content) if isinstance(content, list) else []
        text = cast(Any, parts[-1].get("text") if parts else content)
        known = text if isinstance(text, str) else ""
        last_word = known.rsplit(maxsplit=1)[-1:]
        if ends_in_word and last_word:
            known = known[: len(known) - len(last_word[0])].rstrip() + " "
        chats: list[tuple[Message, ...]] = []
        for word in STAND_IN_WORDS:
            begun = known.lstrip() + word if ends_in_word else known + word
            whole = [*parts[:-1], {**parts[-1], "text": begun}] if parts and isinstance(text, str) else begun
            chats.append((*rendered.history[:-1], {**last, "content": whole}))
        request = replace(rendered.request, breakpoints=(), cuts=())
        common = self._common_run(rendered, request, chats)
        if common is None:
            return rendered.prompt
        run, length = common
        same = common_prefix(run.tokens[:length], rendered.prompt.tokens)
        return _begun(run, length, (each for each in rendered.prompt.boundaries if each.position <= same))

    def explain(self, rendered: Rendered, outcome: Outcome) -> Explanation:
        """Why the tokens behind the resume position of this request had to be computed."""
        earlier, names = self._earlier(rendered), self._images.names if self._images is not None else None
        return explain(rendered, outcome, earlier=earlier, text_model=self._text_model, names=names)

    def plain(self, text: str) -> str:
        """A rendered text as the model has it; of an image its marker alone."""
        return self._template.plain(text)

    def shown(self, tokens: Tokens) -> str:
        """The text of tokens for people: of an image its size, where it is known."""
        names = None if self._images is None else self._images.names
        return shown(tokens, self._text_model.decode, names=names)

    def see(self, messages: Sequence[Message]) -> None:
        """Find out what the images of these messages are in a prompt. Raises BadRequest for one that cannot be read."""
        self._seen(tuple(messages))

    def _earlier(self, rendered: Rendered) -> Iterator[Rendered]:
        """What this request may continue, the likeliest first: other chats' prompts that begin as it does at last.

        Not those that came while it was answered.
        """
        if rendered.previous is not None:
            yield rendered.previous
        with self._lock:
            keys = tuple(self._latest)
        tokens = rendered.prompt.tokens
        known = [each for key in keys if (each := self._recent.get(key)) is not None and each.number < rendered.number]
        others = [each for each in known if each.text != rendered.text]
        yield from sorted(others, key=lambda each: common_prefix(each.prompt.tokens, tokens), reverse=True)[
            :_NUM_LIKELY
        ]

    def _moment(self, messages: Sequence[Message], *, is_final: bool) -> datetime:
        """The present, or with frozen dates the moment of the chat's first request."""
        now = self._clock()
        if not self.settings.freezes_date:
            return now
        key = _start_key(messages, has_head=True)
        first = self._first_moments.get(key)
        if first is None and is_final:
            self._first_moments.put(key, now)
        return now if first is None else first

    def _generation_prompt_at(self, context: RenderContext, text: str) -> int:
        """The character at which the generation prompt begins: `len(text)` if there is none.

        It is found in the shortest chat that has one and remembered, and where `text` ends otherwise, in the chat.
        """
        request = context.request
        if request.continue_final:
            return len(text)
        short = first_user_turns(request, head_length(request.messages))[0]
        key = _json((short, request.tools, request.documents, request.template_options, str(context.form)))
        known = self._prompt_texts.get(key)
        if known is None:
            known = self._generation_prompt(context, short)
            if known is not None:
                self._prompt_texts.put(key, known)
        if known is None or known == "" or not text.endswith(known):
            known = self._generation_prompt(context, request.messages)
        return len(text) - len(known) if known is not None and text.endswith(known) else len(text)

    def _generation_prompt(self, context: RenderContext, messages: Sequence[Message]) -> str | None:
        with_prompt = self._template.try_text(context, messages)
        without = self._template.try_text(context, messages, has_prompt=False)
        if with_prompt is None or without is None:
            return None
        return with_prompt[common_length(with_prompt, without) :]

    def _returns_reasoning(self, request: ChatRequest) -> bool:
        """Whether this client sends reasoning back, going by the answers in its history; yes if there are none."""
        answers = [message for message in request.messages if message.get("role") == "assistant"]
        if self.settings.restores_reasoning or not answers:
            return True
        return any(message.get("reasoning_content") is not None for message in answers)

    def _previous(self, request: ChatRequest) -> Rendered | None:
        by_chat = self._recent.get(_start_key(request.messages, has_head=False))
        if by_chat is not None:
            return by_chat
        head = _head_key(request)
        if request.agent is not None:
            with self._lock:
                latest = tuple(self._latest.items())
            own = next((key for key, sender in reversed(latest) if sender == (request.agent, head)), None)
            if own is not None and (found := self._recent.get(own)) is not None:
                return found
        has_head = head_length(request.messages) > 0 or len(request.tools) > 0
        return self._recent.get(head) if has_head else None

    def _keep(self, rendered: Rendered) -> None:
        alone, key = replace(rendered, previous=None), _start_key(rendered.request.messages, has_head=False)
        head = _head_key(rendered.request)
        self._recent.put(key, alone)
        with self._lock:
            self._latest.pop(key, None)
            self._latest[key] = (rendered.request.agent, head)
            if len(self._latest) > _NUM_LATEST:
                del self._latest[next(iter(self._latest))]
        self._recent.put(head, alone)


class StoredChats(Protocol):
    """What servers leave to the next one, as in `Backend`."""

    def stored_runs(self, namespace: str) -> Sequence[StoredRun]: ...
    def read_note(self, namespace: str) -> str | None: ...
    def keep_note(self, namespace: str, text: str) -> None: ...


class Renderers:
    """Renderers by namespace, made when they are first needed. Safe to use from several threads.

    There are no more of them than API keys, which bounds their memory. `shared` is that of the namespace "", and sets
    how all of them render.
    """

    def __init__(
        self,
        text_model: TextModel,
        *,
        shared: Renderer,
        stored: StoredChats,
    ) -> None:
        self._text_model = text_model
        self._stored = stored
        self._settings = shared.settings
        self._by_namespace = {"": shared}
        self._lock = Lock()
        self._recall(shared, "")

    def of(self, namespace: str) -> Renderer:
        """The renderer of this namespace.

        The first call tries out the tokenizer, which takes some milliseconds, and reads what is stored.
        """
        with self._lock:
            known = self._by_namespace.get(namespace)
        if known is not None:
            return known
        made = Renderer(self._text_model, self._settings)
        self._recall(made, namespace)
        with self._lock:
            return self._by_namespace.setdefault(namespace, made)

    def save(self, namespace: str) -> None:
        """Leave to the next server what was learnt of this namespace's chats since the last time. Waits for a file."""
        compactions = self.of(namespace).compactions
        if compactions.is_saved:
            return
        # What other servers have left there since stays.
        note = self._stored.read_note(namespace)
        if note is not None:
            compactions.restore(note)
        text = compactions.save()
        if text is not None:
            self._stored.keep_note(namespace, text)

    def _recall(self, renderer: Renderer, namespace: str) -> None:
        renderer.recall(self._stored.stored_runs(namespace))
        note = self._stored.read_note(namespace)
        if note is not None:
            renderer.compactions.restore(note)


def _begun(run: TokenizedText, length: int, boundaries: Iterable[Boundary] = ()) -> Prompt:
    """The first `length` tokens as a prompt, or those before an image that they end in, with a boundary at its end."""
    whole = run.prompt()
    length = outside(length, whole.spans)
    return whole.up_to(length, {*boundaries, Boundary(length, BoundaryKind.STABLE)})


def _tool_notes(text_model: TextModel) -> tuple[str, ...]:
    """What a request with tools should know of this model."""
    calls = text_model.calls
    if not calls.shows_tools:
        return ("the chat template does not show the tools to the model",)
    is_read = calls.format is not None or text_model.parse_tool_call is not None or is_harmony(text_model)
    return () if is_read else ("the format of this model's tool calls is unknown: calls are returned as text",)


def _as_sent(rendered: Rendered) -> ChatRequest:
    return replace(rendered.request, messages=rendered.history, breakpoints=(), cuts=(), notes=())


def _answered(rendered: Rendered, text: str) -> Answered:
    previous = None if rendered.previous is None else _as_sent(rendered.previous)
    return Answered(request=_as_sent(rendered), previous=previous, text=text)


def _start_key(messages: Sequence[Message], *, has_head: bool) -> int:
    """A hash of a chat's beginning: of its first user message, and the system messages before it if `has_head`."""
    head = head_length(messages)
    opening = [(m.get("role"), joined_text(m.get("content"))) for m in messages[0 if has_head else head : head + 1]]
    return hash(("start", *opening))


def _head_key(request: ChatRequest) -> int:
    head = request.messages[: head_length(request.messages)]
    return hash(("head", _json((head, request.tools))))


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _rendered_nbytes(_key: int, rendered: Rendered) -> int:
    return 4 * len(rendered.text) + 2 * rendered.prompt.tokens.nbytes + _files_nbytes(rendered) + 1000


def _files_nbytes(rendered: Rendered) -> int:
    """Bytes of the files of a chat's images."""
    return sum(len(image.content) for image in images_in(rendered.history))
