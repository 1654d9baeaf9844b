"""Why tokens were not reused: the part of the prompt where it left what was stored, and what stood on both sides.

Then what kind of change it was: from that part, the messages before and now, and the text on both sides.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reprise.chat.images import ImageNames, image_at, images_in, shown
from reprise.chat.message_format import joined_text
from reprise.chat.reasons.volatile_prefix import moments_in, touches_clock, touches_date
from reprise.chat.request import ChatRequest, Message
from reprise.chat.templates.probe_turns import head_length, last_user_at
from reprise.chat.templates.rendered import PartKind, PromptPart, Rendered, words_at
from reprise.chat.text_model import TextModel
from reprise.core.images import ImageFile
from reprise.core.outcome import Outcome, Reason
from reprise.core.tokens import Span, Tokens, common_prefix

_NUM_SHOWN = 32
"""How many tokens of each side an explanation shows."""

_NUM_AROUND = 24
"""Characters before a divergence that are looked at for a date or a changing value."""

_WORD = re.compile(r"\w+")
_RANDOM = re.compile(r"[0-9A-Za-z_+/=-]{4,}")
_CHANNEL_OF_THINKING = "<|channel|>analysis"
_NUM_WORDS_ALIKE = 3
"""Texts are compared by runs of this number of words: single words stand in any two texts."""
_MANY_ALIKE = 24
"""Requests of different chats are of one program if they share this many runs of words before their chats begin."""
_NUM_COMPARED = 1 << 14
"""Characters of a message that are compared."""
_MOST_COMPARED = 8
"""Messages that are compared."""
_HALF_A_TEXT, _MUCH_TEXT = 100, 400
"""Characters that half of a message, or several beginnings together, have to have to count as shared."""

ADVICE = {
    Reason.NOTHING_NEW: "",
    Reason.NEW_TOKENS: "",
    Reason.COLD: "Nothing that is stored begins with words of this prompt: a first request computes everything.",
    Reason.CACHE_OFF: "Start the server without --no-prefix-cache.",
    Reason.SYSTEM_CHANGED: "Keep the system prompt the same throughout; put what changes at the end of the chat.",
    Reason.TOOLS_CHANGED: "Send the same tools in the same order with every request of a chat.",
    Reason.TEMPLATE_OPTIONS_CHANGED: "Send the same template options (thinking, reasoning effort) throughout a chat.",
    Reason.DATE_CHANGED: "--freeze-template-date keeps the date of a chat's first request in templates that print it.",
    Reason.CLOCK_CHANGED: (
        "A time of day at the beginning changes on every request: leave it out, use only the date, or put it "
        "into the last message."
    ),
    Reason.BREAKER: "A value at the beginning changes on every request: leave it out, or put it at the end.",
    Reason.EARLIER_MESSAGE_EDITED: "The chat was edited: everything after the edit is computed again.",
    Reason.CONTEXT_CLEARED: (
        "The client took something out of the middle of the chat: everything after it is computed again. Taking out "
        "much at once and rarely costs least."
    ),
    Reason.COMPACTED: "The client replaced the chat by a summary: everything from there on is computed.",
    Reason.LAST_MESSAGE_EDITED: "The last message was edited: only what follows it is computed.",
    Reason.THINKING_STRIPPED: (
        "The template strips earlier reasoning, or the client does not send it back. Settling computes the stripped "
        "chat while the server is idle; --restore-reasoning puts back what a client drops."
    ),
    Reason.ANSWER_RENDERED_DIFFERENTLY: "Send answers back exactly as they came, with reasoning and tool calls.",
    Reason.TEMPLATE_RERENDERED: "The chat template moves text as the chat grows; settling computes that while idle.",
    Reason.IMAGE_CHANGED: (
        "Another image stands here, so everything behind it is computed again. Send an image that is not new byte for "
        "byte as before: clients that encode their screenshots again on each request change them."
    ),
    Reason.IMAGE_DROPPED: (
        "An image was left out of the middle of the chat, so everything behind it is computed again. A client that "
        "keeps only its latest images pays for that on each request: keep all, or drop many of them at once and rarely."
    ),
    Reason.BRANCHED: "",
    Reason.NO_SNAPSHOT: "This model resumes only at snapshots, and none that is kept is nearer.",
    Reason.PROMPT_LOGPROBS: "The request asked for log-probabilities of the prompt, so all of it is computed.",
    Reason.SLOWER_TO_READ: "A faster --disk-cache, or more memory, would save this.",
    Reason.EVICTED: "The cache was full: a larger --cache-bytes keeps more chats.",
    Reason.CANCELLED: (
        "An earlier request with this text was cancelled before all of it was computed. What it had computed was "
        "reused: a client that waits longer, or sends it again, gets further each time."
    ),
    Reason.NOT_STORED: (
        "An earlier request had this text, but it failed, was still running, or what it stored was cleared since."
    ),
}


_MISSING = frozenset({Reason.EVICTED, Reason.SLOWER_TO_READ})
_AVOIDABLE = frozenset({*_MISSING, Reason.NO_SNAPSHOT, Reason.NOT_STORED, Reason.CANCELLED})
"""What is computed for these reasons was there before: whoever keeps everything would have had it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedSpan:
    """Why the tokens of `span` were computed."""

    span: Span
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a request computed what it did.

    `reason` is that of the largest account; the accounts together cover the computed tokens. At `diverged_at` (None:
    nothing stored was left behind) the prompt, in `part`, continues with `actual_text` after `shared_text`, while what
    was stored continues with `expected_text`.
    """

    reason: Reason
    accounts: tuple[ComputedSpan, ...]
    advice: str
    diverged_at: int | None = None
    part: PromptPart | None = None
    shared_text: str = ""
    expected_text: str = ""
    actual_text: str = ""

    @property
    def num_at_best(self) -> int:
        """The tokens that a server computes which keeps everything and resumes anywhere: what no prompt had before."""
        return sum(len(one.span) for one in self.accounts if one.reason not in _AVOIDABLE)

    @property
    def change(self) -> Reason:
        """What the prompt is to what was there before, whatever the cache lacked of it."""
        return self.accounts[-1].reason


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Divergence:
    """The prompt `rendered` left the stored path at token `position`, which is character `char`, in `part`.

    `previous` is the earlier rendering that ends or continues otherwise there, if one is known.
    """

    rendered: Rendered
    previous: Rendered | None
    position: int
    char: int
    part: PromptPart | None
    shared_text: str
    expected_text: str
    actual_text: str

    @property
    def messages(self) -> tuple[Message, Message] | None:
        """The message at this place, before and now; None: not both requests have one."""
        if self.part is None or self.part.index is None or self.previous is None:
            return None
        before, now = self.previous.request.messages, self.rendered.request.messages
        return None if self.part.index >= len(before) else (before[self.part.index], now[self.part.index])


def explain(
    rendered: Rendered,
    outcome: Outcome,
    *,
    earlier: Iterable[Rendered],
    text_model: TextModel,
    names: ImageNames | None = None,
) -> Explanation:
    """The explanation of a request with this outcome. `earlier`: what it may continue, the likeliest first.

    `names`: of the images that may have stood there.

    The computed tokens are ``[reused, matched)``, for which the state was missing, ``[matched, known)``, which the
    previous request had and the cache has not, and ``[known, prompt)``, where the prompt is another.
    """
    tokens = rendered.prompt.tokens
    length = len(tokens)
    if outcome.reason is Reason.CACHE_OFF:
        return _of((ComputedSpan(span=Span(0, length), reason=Reason.CACHE_OFF),))
    reused, matched = outcome.num_reused, max(outcome.num_reused, outcome.num_matched)
    if reused >= length - 1:
        return _of((ComputedSpan(span=Span(min(reused, length), length), reason=Reason.NOTHING_NEW),))
    previous = next((each for each in earlier if is_continued(each.request, rendered.request)), None)
    shared = 0 if previous is None else common_prefix(previous.prompt.tokens, tokens)
    # Where the earlier prompt is not known, what was evicted is what the cache takes for its path.
    evicted = matched + outcome.num_evicted
    known = max(matched, shared) if previous is not None else min(evicted, length)
    missing = outcome.reason if outcome.reason in _MISSING else Reason.NO_SNAPSHOT
    evicted = min(evicted, known)
    absent = Reason.CANCELLED if outcome.reason is Reason.CANCELLED else Reason.NOT_STORED
    accounts = [
        ComputedSpan(span=Span(reused, matched), reason=missing),
        ComputedSpan(span=Span(matched, evicted), reason=Reason.EVICTED),
        ComputedSpan(span=Span(evicted, known), reason=absent),
    ]
    divergence = _divergence(
        rendered, outcome, previous, known=known, shared=shared, text_model=text_model, names=names
    )
    if divergence is None or (divergence.previous is None and not _shares_words(divergence)):
        fresh = Reason.COLD if known == 0 or divergence is not None else Reason.NEW_TOKENS
        if known >= length - 1:
            fresh = Reason.NOTHING_NEW
        accounts.append(ComputedSpan(span=Span(known, length), reason=fresh))
        return _of(tuple(accounts))
    accounts.append(ComputedSpan(span=Span(known, length), reason=classify(divergence, text_model)))
    return _of(tuple(accounts), divergence)


def _divergence(
    rendered: Rendered,
    outcome: Outcome,
    previous: Rendered | None,
    *,
    known: int,
    shared: int,
    text_model: TextModel,
    names: ImageNames | None,
) -> Divergence | None:
    """The place where the prompt diverges from the known ones, or None if it only extends one."""
    tokens = rendered.prompt.tokens
    if known >= len(tokens):
        return None
    expected: Tokens | None = None
    if outcome.num_matched == known and outcome.stored_next is not None and len(outcome.stored_next) > 0:
        # What was stored shows more than the previous prompt does: the answer to it, too.
        expected = outcome.stored_next
    elif previous is not None and shared == known and known < len(previous.prompt):
        expected = previous.prompt.tokens[known : known + _NUM_SHOWN]
    if expected is None:
        return None
    char = rendered.char_at(known, text_model.decode)
    return Divergence(
        rendered=rendered,
        # A previous rendering that parted earlier is not the path that was stored here.
        previous=previous if shared == known or (previous is not None and shared == len(previous.prompt)) else None,
        position=known,
        char=char,
        part=rendered.part_at_char(char),
        shared_text=_shown(rendered, max(0, known - _NUM_SHOWN), known, text_model),
        expected_text=shown(
            expected[:_NUM_SHOWN],
            text_model.decode,
            start=known,
            images=() if previous is None or shared != known else previous.prompt.images,
            names=names,
        ),
        actual_text=_shown(rendered, known, min(len(tokens), known + _NUM_SHOWN), text_model),
    )


def _of(accounts: Sequence[ComputedSpan], divergence: Divergence | None = None) -> Explanation:
    shown = tuple(account for account in accounts if len(account.span) > 0) or tuple(accounts[-1:])
    # Of accounts of one size the later one: it is what the request brought, the others are what the cache lacked.
    main = max(reversed(shown), key=lambda account: len(account.span))
    if divergence is None:
        return Explanation(reason=main.reason, accounts=shown, advice=ADVICE[main.reason])
    return Explanation(
        reason=main.reason,
        accounts=shown,
        advice=_advice(main.reason, divergence),
        diverged_at=divergence.position,
        part=divergence.part,
        shared_text=divergence.shared_text,
        expected_text=divergence.expected_text,
        actual_text=divergence.actual_text,
    )


def _advice(reason: Reason, divergence: Divergence) -> str:
    """The advice about a divergence: with the sizes of two images, where one stands in the other's place."""
    now = image_at(divergence.rendered.prompt.images, divergence.position)
    previous = divergence.previous
    stood = None if previous is None else image_at(previous.prompt.images, divergence.position)
    if reason is not Reason.IMAGE_CHANGED or now is None or stood is None:
        return ADVICE[reason]
    (width, height), before = ((each.image.width, each.image.height) for each in (now, stood))
    if (width, height) != before:
        return (
            f"Another image ({width} x {height}) stands where {before[0]} x {before[1]} stood, so everything behind it "
            "is computed again."
        )
    return (
        f"Another image of {width} x {height} stands where one of this size stood, so everything behind it is computed "
        "again. If it is the same picture, the client encodes it again on each request: it should send the same bytes."
    )


def _shown(rendered: Rendered, start: int, stop: int, text_model: TextModel) -> str:
    prompt = rendered.prompt
    return shown(prompt.tokens[start:stop], text_model.decode, start=start, images=prompt.images)


def classify(divergence: Divergence, text_model: TextModel) -> Reason:
    """The reason for a divergence."""
    previous = divergence.previous
    of_image = _classify_image(divergence)
    if of_image is not None:
        return of_image
    if _is_in_head(divergence):
        return _classify_head(divergence, previous)
    if (
        previous is not None
        and previous.request.template_options != divergence.rendered.request.template_options
        and not _is_edited(divergence)
    ):
        return Reason.TEMPLATE_OPTIONS_CHANGED
    part = divergence.part
    if part is None or part.index is None:
        is_thought = _is_thinking_lost(divergence, text_model)
        return Reason.THINKING_STRIPPED if is_thought else Reason.BRANCHED
    role = "assistant" if _is_behind_an_empty_answer(divergence) else part.role
    if role == "assistant" and _is_thinking_lost(divergence, text_model) and not _is_edited(divergence):
        return Reason.THINKING_STRIPPED
    return _classify_message(divergence, part.index, role)


def _classify_head(divergence: Divergence, previous: Rendered | None) -> Reason:
    rendered = divergence.rendered
    if previous is not None:
        heads_differ = _head(previous) != _head(rendered)
        tools_differ = previous.request.tools != rendered.request.tools
        if tools_differ and (not heads_differ or _is_tools(divergence)):
            return Reason.TOOLS_CHANGED
        if not heads_differ and previous.dates != rendered.dates:
            return _classify_dates(previous.dates, rendered.dates)
        if not heads_differ and not tools_differ:
            options_differ = previous.request.template_options != rendered.request.template_options
            return Reason.TEMPLATE_OPTIONS_CHANGED if options_differ else Reason.TEMPLATE_RERENDERED
    before = divergence.shared_text[-_NUM_AROUND:]
    expected, actual = before + divergence.expected_text, before + divergence.actual_text
    at = len(before)
    # The later of the two counts: in `2026-03-01 9:41` the minutes alone change from one request to the next.
    if touches_clock(expected, at) and touches_clock(actual, at):
        return Reason.CLOCK_CHANGED
    if touches_date(expected, at) and touches_date(actual, at):
        return Reason.DATE_CHANGED
    if _has_random_word(expected, len(before)) and _has_random_word(actual, len(before)):
        return Reason.BREAKER
    if previous is None and not _is_half_shared(divergence):
        return Reason.BRANCHED
    return Reason.TOOLS_CHANGED if _is_tools(divergence) else Reason.SYSTEM_CHANGED


def _classify_dates(before: tuple[str, ...], now: tuple[str, ...]) -> Reason:
    """What of the dates that the template itself writes is another."""
    days = [[moment.text for moment in moments_in(" ".join(texts)) if not moment.is_clock] for texts in (before, now)]
    return Reason.CLOCK_CHANGED if days[0] == days[1] else Reason.DATE_CHANGED


def _classify_message(divergence: Divergence, index: int, role: str | None) -> Reason:
    previous, messages = divergence.previous, divergence.rendered.request.messages
    if previous is None or index >= len(previous.request.messages):
        return Reason.ANSWER_RENDERED_DIFFERENTLY if role == "assistant" else Reason.BRANCHED
    before = previous.request.messages
    if _said(before[index]) == _said(messages[index]):
        if previous.request.tools != divergence.rendered.request.tools:
            # Some templates write the tools beside the last message.
            return Reason.TOOLS_CHANGED
        # The same message ends otherwise: the chat went on from it in another way, or the template rewrote it.
        is_last = index in (len(before) - 1, len(messages) - 1)
        return Reason.BRANCHED if is_last and len(before) == len(messages) else Reason.TEMPLATE_RERENDERED
    if previous.request.agent != divergence.rendered.request.agent:
        return Reason.BRANCHED
    if not _is_same_chat(before, messages, index):
        return Reason.COMPACTED if _is_summarised(divergence, previous) else Reason.BRANCHED
    last_user = last_user_at(messages)
    is_last = last_user is not None and index >= last_user
    return Reason.LAST_MESSAGE_EDITED if is_last else _classify_edit(divergence, previous)


def _classify_edit(divergence: Divergence, previous: Rendered) -> Reason:
    """What an edit before the end did to the chat: one that has gone on and got shorter lost something on the way."""
    if _is_halved(divergence, previous):
        return Reason.COMPACTED
    has_gone_on = len(divergence.rendered.request.messages) > len(previous.request.messages)
    is_shorter = len(divergence.rendered.prompt) < len(previous.prompt)
    return Reason.CONTEXT_CLEARED if has_gone_on and is_shorter else Reason.EARLIER_MESSAGE_EDITED


def _is_summarised(divergence: Divergence, previous: Rendered) -> bool:
    """Whether a chat that begins otherwise is the one before, told in fewer words.

    It quotes an answer that was a summary, or the client says that it is the same agent, whose chat had begun.
    """
    had_begun = any(message.get("role") == "assistant" for message in previous.request.messages)
    is_named = divergence.rendered.request.agent is not None and had_begun
    return (divergence.rendered.follows_summary or is_named) and _is_halved(divergence, previous)


def _is_halved(divergence: Divergence, previous: Rendered) -> bool:
    """Whether less than half as much follows the divergence as did before."""
    replaced, now = (len(each.prompt) - divergence.position for each in (previous, divergence.rendered))
    return 2 * now < replaced


def _classify_image(divergence: Divergence) -> Reason | None:
    """What became of the images of the message at the divergence, where only they are others; None: nothing."""
    previous = divergence.previous
    if divergence.messages is None or previous is None:
        return None
    before, now = divergence.messages
    there = images_in(divergence.rendered.request.messages)
    if all(image in there for image in images_in([before])):
        return None
    # Who leaves an image out may say so in its place.
    is_same_text = joined_text(before.get("content")).strip() in joined_text(now.get("content"))
    if not is_same_text and image_at(previous.prompt.images, divergence.position) is None:
        return None
    stood = images_in(previous.request.messages)
    is_new = any(image not in stood for image in images_in([now]))
    return Reason.IMAGE_CHANGED if is_new else Reason.IMAGE_DROPPED


def _is_in_head(divergence: Divergence) -> bool:
    part = divergence.part
    return part is not None and (
        part.kind in (PartKind.HEAD, PartKind.SYSTEM, PartKind.TOOLS)
        or (part.index is not None and part.index < head_length(divergence.rendered.request.messages))
    )


def _is_tools(divergence: Divergence) -> bool:
    return divergence.part is not None and divergence.part.kind is PartKind.TOOLS


def _is_thinking_lost(divergence: Divergence, text_model: TextModel) -> bool:
    """Whether what was stored thinks here, and the prompt does not, or has an empty block in its place."""
    start = divergence.part.chars.start if divergence.part is not None else divergence.char
    text = divergence.rendered.text
    stop = divergence.part.chars.stop if divergence.part is not None else len(text)
    stored = text[start : divergence.char] + divergence.expected_text
    actual = text[start:stop]
    opening = text_model.think_start or _CHANNEL_OF_THINKING
    closing = text_model.think_end
    for marker in dict.fromkeys((opening, _CHANNEL_OF_THINKING)):
        if marker not in stored:
            continue
        if marker not in actual:
            return True
        thought = actual.split(marker, 1)[1]
        if closing is not None and thought.split(closing, 1)[0].strip() == "" and closing in thought:
            return True
    return False


def _is_behind_an_empty_answer(divergence: Divergence) -> bool:
    """Whether the answer to the previous request should stand here, and the template writes nothing of it."""
    part, previous = divergence.part, divergence.previous
    if part is None or part.index is None or previous is None:
        return False
    messages, answered_at = divergence.rendered.request.messages, len(previous.request.messages)
    if part.index <= answered_at or messages[answered_at].get("role") != "assistant":
        return False
    return all(other.index != answered_at for other in divergence.rendered.parts)


def _is_edited(divergence: Divergence) -> bool:
    """Whether the message at the divergence, which both requests have, has another text now."""
    return divergence.messages is not None and _said(divergence.messages[0]) != _said(divergence.messages[1])


def _is_same_chat(before: tuple[Message, ...], now: tuple[Message, ...], index: int) -> bool:
    """Whether two chats that differ at `index` are one chat, edited: they agree on a message of the chat elsewhere."""
    head = head_length(now)
    pairs = zip(before, now, strict=False)
    return any(_said(a) == _said(b) and _said(a)[1] != "" for n, (a, b) in enumerate(pairs) if n >= head and n != index)


def is_continued(before: ChatRequest, now: ChatRequest) -> bool:
    """Whether `now` continues the chat of `before`, or is of the same program, by the words of both.

    What a template writes around it does not count. Requests whose chats begin with the same message are of one chat if
    they agree in half of what they say up to where the shorter one ends; others are of one program if they agree in
    half of their system prompts, and in no few words.
    """
    is_same_start = _chat_start(before) == _chat_start(now)
    if _system_texts(before) == _system_texts(now) and before.tools == now.tools:
        return is_same_start or len(now.tools) > 0 or _system_texts(now) != []
    heads = [_runs(_system_texts(each)) for each in (before, now)]
    with_tools = [head | _runs(map(_json, each.tools)) for head, each in zip(heads, (before, now), strict=True)]
    if not is_same_start:
        return _are_alike(*heads) and _are_alike(*with_tools) and len(with_tools[0] & with_tools[1]) >= _MANY_ALIKE
    bodies = [each.messages[head_length(each.messages) :][:_MOST_COMPARED] for each in (before, now)]
    num = min(map(len, bodies))
    runs = [_runs(joined_text(message.get("content")) for message in body[:num]) for body in bodies]
    return _are_alike(with_tools[0] | runs[0], with_tools[1] | runs[1])


def _chat_start(request: ChatRequest) -> tuple[Any, str, str] | None:
    messages = request.messages[head_length(request.messages) :]
    # A chat with another image is one whose image was changed.
    return _said(messages[0])[:3] if messages else None


def _system_texts(request: ChatRequest) -> list[str]:
    texts = (
        joined_text(message.get("content")).strip() for message in request.messages[: head_length(request.messages)]
    )
    return [text for text in texts if text != ""]


def _runs(texts: Iterable[str]) -> set[tuple[str, ...]]:
    """The runs of words in these texts; of a shorter text all its words."""
    found: set[tuple[str, ...]] = set()
    for text in texts:
        words = _WORD.findall(text[:_NUM_COMPARED])
        last = max(1, len(words) - _NUM_WORDS_ALIKE + 1)
        found.update(tuple(words[at : at + _NUM_WORDS_ALIKE]) for at in range(last))
    return found - {()}


def _are_alike(one: set[tuple[str, ...]], other: set[tuple[str, ...]]) -> bool:
    """Whether both have half of what the larger one has; nothing is like nothing."""
    return 2 * len(one & other) >= max(len(one), len(other))


def _json(tool: Mapping[str, Any]) -> str:
    return json.dumps(tool, default=str)


def _shares_words(divergence: Divergence) -> bool:
    """Whether the prompt agrees with what was stored in the request's words, and not just in the template's.

    That is a whole message, the tools, a good half of either, or much text.
    """
    spans = [_own_words(divergence.rendered, part) for part in divergence.rendered.parts]
    shared = [0 if span is None else max(0, min(span.stop, divergence.char) - span.start) for span in spans]
    is_whole = any(
        span is not None and part.chars.stop <= divergence.char
        for part, span in zip(divergence.rendered.parts, spans, strict=True)
    )
    return is_whole or sum(shared) >= _MUCH_TEXT or _is_half_shared(divergence)


def _is_half_shared(divergence: Divergence) -> bool:
    """Whether half of the message or the tools at the divergence, and no short text, stands before it."""
    span = None if divergence.part is None else _own_words(divergence.rendered, divergence.part)
    return span is not None and divergence.char - span.start >= max(_HALF_A_TEXT, len(span) // 2)


def _own_words(rendered: Rendered, part: PromptPart) -> Span | None:
    """Where in this part the request's own words stand; None if there are none."""
    if part.kind is PartKind.TOOLS:
        return part.chars
    return (
        None if part.index is None else words_at(rendered.request.messages[part.index], rendered.text, (), part.chars)
    )


def _said(message: Message) -> tuple[Any, str, str, list[ImageFile]]:
    text = joined_text(message.get("content")).strip()
    return message.get("role"), text, repr(message.get("tool_calls")), images_in([message])


def _head(rendered: Rendered) -> list[tuple[Any, str, str, list[ImageFile]]]:
    messages = rendered.request.messages
    return [_said(message) for message in messages[: head_length(messages)]]


def _has_random_word(text: str, at: int) -> bool:
    """Whether the word at `at` looks drawn by lot: letters and digits mixed, or many digits."""
    for found in _RANDOM.finditer(text):
        if found.start() <= at <= found.end():
            word = found.group()
            digits = sum(character.isdigit() for character in word)
            return digits >= 6 or 0 < digits < len(word)
    return False
