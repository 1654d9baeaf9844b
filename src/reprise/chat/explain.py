"""Why tokens were not reused: the part of the prompt where it left what was stored, and what stood on both sides."""

from collections.abc import Sequence
from dataclasses import dataclass

from reprise.chat.divergence import Divergence, classify
from reprise.chat.rendered import PromptPart, Rendered
from reprise.chat.text_model import TextModel
from reprise.core.outcome import Outcome, Reason
from reprise.core.tokens import Span, Tokens, common_prefix

_NUM_SHOWN = 32
"""How many tokens of each side an explanation shows."""

ADVICE = {
    Reason.NOTHING_NEW: "",
    Reason.NEW_TOKENS: "",
    Reason.COLD: "No earlier request was similar: the first request computes everything.",
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
    Reason.LAST_MESSAGE_EDITED: "The last message was edited: only what follows it is computed.",
    Reason.THINKING_STRIPPED: (
        "The template strips earlier reasoning, or the client does not send it back. Settling computes the stripped "
        "chat while the server is idle; --restore-reasoning puts back what a client drops."
    ),
    Reason.ANSWER_RENDERED_DIFFERENTLY: "Send answers back exactly as they came, with reasoning and tool calls.",
    Reason.TEMPLATE_RERENDERED: "The chat template moves text as the chat grows; settling computes that while idle.",
    Reason.BRANCHED: "",
    Reason.NO_SNAPSHOT: "This model resumes only at snapshots; more memory keeps more of them.",
    Reason.PROMPT_LOGPROBS: "The request asked for log-probabilities of the prompt, so all of it is computed.",
    Reason.SLOWER_TO_READ: "A faster --disk-cache, or more memory, would save this.",
    Reason.EVICTED: "The cache was full: a larger --cache-bytes keeps more chats.",
}


_MISSING = frozenset({Reason.EVICTED, Reason.SLOWER_TO_READ})


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedSpan:
    """Why the tokens of `span` were computed."""

    span: Span
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a request computed what it did.

    `reason` is that of the largest account; the accounts together cover the computed tokens. At `diverged_at` (None:
    nothing stored was left behind) the prompt, in `part`, goes on with `actual_text` after `shared_text`, while what
    was stored goes on with `expected_text`.
    """

    reason: Reason
    accounts: tuple[ComputedSpan, ...]
    advice: str
    diverged_at: int | None = None
    part: PromptPart | None = None
    shared_text: str = ""
    expected_text: str = ""
    actual_text: str = ""


def explain(rendered: Rendered, outcome: Outcome, *, previous: Rendered | None, text_model: TextModel) -> Explanation:
    """The explanation of a request with this outcome; `previous` is the rendering of an earlier request of its chat.

    The computed tokens are ``[reused, matched)``, for which the state was missing, ``[matched, known)``, which the
    previous request had and the cache has no more, and ``[known, prompt)``, where the prompt is another.
    """
    tokens = rendered.prompt.tokens
    length = len(tokens)
    if outcome.reason is Reason.CACHE_OFF:
        return _of((ComputedSpan(span=Span(0, length), reason=Reason.CACHE_OFF),))
    reused, matched = outcome.num_reused, max(outcome.num_reused, outcome.num_matched)
    if reused >= length - 1:
        return _of((ComputedSpan(span=Span(min(reused, length), length), reason=Reason.NOTHING_NEW),))
    shared = 0 if previous is None else common_prefix(previous.prompt.tokens, tokens)
    known = max(matched, shared)
    missing = outcome.reason if outcome.reason in _MISSING else Reason.NO_SNAPSHOT
    accounts = [
        ComputedSpan(span=Span(reused, matched), reason=missing),
        ComputedSpan(span=Span(matched, known), reason=Reason.EVICTED),
    ]
    divergence = _divergence(rendered, outcome, previous, known=known, shared=shared, text_model=text_model)
    if divergence is None:
        fresh = Reason.COLD if known == 0 else Reason.NEW_TOKENS
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
) -> Divergence | None:
    """Where the prompt leaves what was known, or None if it only goes on from there."""
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
        shared_text=_decoded(tokens[max(0, known - _NUM_SHOWN) : known], text_model),
        expected_text=_decoded(expected[:_NUM_SHOWN], text_model),
        actual_text=_decoded(tokens[known : known + _NUM_SHOWN], text_model),
    )


def _of(accounts: Sequence[ComputedSpan], divergence: Divergence | None = None) -> Explanation:
    told = tuple(account for account in accounts if len(account.span) > 0) or tuple(accounts[-1:])
    # Of accounts of one size the later one: it is what the request brought, the others are what the cache lacked.
    main = max(reversed(told), key=lambda account: len(account.span))
    if divergence is None:
        return Explanation(reason=main.reason, accounts=told, advice=ADVICE[main.reason])
    return Explanation(
        reason=main.reason,
        accounts=told,
        advice=ADVICE[main.reason],
        diverged_at=divergence.position,
        part=divergence.part,
        shared_text=divergence.shared_text,
        expected_text=divergence.expected_text,
        actual_text=divergence.actual_text,
    )


def _decoded(tokens: Tokens, text_model: TextModel) -> str:
    return text_model.decode(tokens.tolist()) if len(tokens) > 0 else ""
