"""Boundaries of a prompt, found by rendering: what a prompt shares with stand-ins for the next turn will survive."""

from collections.abc import Sequence
from dataclasses import dataclass

from reprise.chat.rendering.abridged import AbridgedChat
from reprise.chat.request import ChatRequest
from reprise.chat.templates.piecewise_tokenizer import PieceTokenizer, TokenizedText
from reprise.chat.templates.probe_turns import (
    Messages,
    cut_at,
    first_user_turns,
    head_length,
    last_user_at,
    next_tool_turns,
    next_user_turns,
    question_of,
    replaced_at,
)
from reprise.core.prompt import Boundary, BoundaryKind


def find_boundaries(
    chat: AbridgedChat, request: ChatRequest, tokenizer: PieceTokenizer, prompt: TokenizedText
) -> tuple[tuple[Boundary, ...], tuple[str, ...]]:
    """The stable, last-user, system and explicit boundaries of `prompt`, the request's rendering; and what has none.

    Renders two whole stand-in chats, one that ends before the last user message, and one that is short. A boundary is
    the end of the longest common prefix in tokens, not only in text, so a token that would merge with the next one
    stands behind it. A long document at the head of the last user message ends at a branch boundary: where this prompt
    will leave the next one about the same document is known before there is one.
    """
    search = _Search(chat=chat, request=request, tokenizer=tokenizer, prompt=prompt)
    stable = search.stable()
    system, last_user = search.system(), search.last_user()
    explicit = [search.explicit(num_before, stable) for num_before in request.breakpoints]
    explicit += [search.shared(cut_at(request.messages, cut)) for cut in request.cuts]
    positions = [
        *((BoundaryKind.STABLE, position) for position in stable),
        (BoundaryKind.SYSTEM, system),
        (BoundaryKind.LAST_USER, last_user),
        (BoundaryKind.BRANCH, search.question()),
        *((BoundaryKind.EXPLICIT, position) for position in explicit),
    ]
    # Nothing can be kept for position 0.
    boundaries = {Boundary(position, kind) for kind, position in positions if position is not None and position > 0}
    notes = () if stable else ("no stable boundary: the chat template refuses every stand-in for the next turn",)
    return tuple(sorted(boundaries)), notes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    chat: AbridgedChat
    request: ChatRequest
    tokenizer: PieceTokenizer
    prompt: TokenizedText

    def stable(self) -> tuple[int, ...]:
        """What survives the next user turn, and what survives a tool call: one position if it is the same.

        Without tools, a second user turn that begins with another letter stands in for the tool call.
        """
        request = self.request
        user = [self.shared(next_user_turns(request, 0))]
        if not request.tools or request.continue_final:
            user.append(self.shared(next_user_turns(request, 1)))
        survives_user = [position for position in user if position is not None]
        survives_tool = self.shared(next_tool_turns(request))
        found = {min(survives_user)} if survives_user else set[int]()
        if survives_tool is not None:
            found.add(survives_tool)
        return tuple(sorted(found))

    def system(self) -> int | None:
        request = self.request
        return self.shared(first_user_turns(request, head_length(request.messages)))

    def last_user(self) -> int | None:
        index = last_user_at(self.request.messages)
        return None if index is None else self.shared(replaced_at(self.request.messages, index))

    def question(self) -> int | None:
        """Where the last user message turns from a long document to what is asked about it."""
        messages = self.request.messages
        index = last_user_at(messages)
        question = question_of(messages[index]) if index is not None else None
        return None if question is None else self.prompt.token_at_last(question, self.tokenizer.canonical)

    def explicit(self, num_before: int, stable: Sequence[int]) -> int | None:
        """The end of the first `num_before` messages."""
        messages = self.request.messages
        head = head_length(messages)
        if num_before >= len(messages):
            return min(stable, default=None)
        if num_before == head:
            return self.system()
        if num_before < head:
            # With a user message first: a system message alone is no chat to many templates.
            return self.shared(replaced_at(messages, num_before)[::-1])
        return self.shared(replaced_at(messages, num_before))

    def shared(self, candidates: Sequence[Messages]) -> int | None:
        """How many tokens the prompt shares with the first candidate that renders; None if none does."""
        for messages in candidates:
            text = self.chat.compared_text(messages)
            if text is not None:
                return self.tokenizer.shared(self.prompt, text)
        return None
