"""Every computed token has a reason, and the right one: random chats over all templates, on a model with snapshots.

The renderer, the planner and the prefix cache are the real ones; no model runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.offline import OfflineServer, ReplayedRequest
from reprise.chat.answer import Answer, ToolCall
from reprise.chat.messages.history import as_message
from reprise.chat.reasons.explain import Explanation
from reprise.chat.rendering.render import Renderer
from reprise.chat.request import ChatRequest, Message
from reprise.core.errors import BadRequest
from reprise.core.outcome import Reason
from tests.chat.replay import spoken
from tests.chat.shapes import SEARCH, WEATHER, system, tool, user
from tests.chat.test_explain import check_accounts as check_cover
from tests.chat.text_models import template_names, template_source, text_model
from tests.matrix import examples

QUESTIONS = ("What is the weather?", "And tomorrow?", "Is it far away?", "Thank you, that will do.")
THOUGHT = "They ask for something that I have to think about for a while."
CALL = ToolCall(id="call00001", name="get_weather", arguments='{"city": "Paris"}')
SYSTEMS = ("You are a helpful assistant. Answer briefly and say what you do not know.", "Be kind, whatever is asked.")

# What may stand between a request and what was stored, beside what the step itself changes: the step before it left
# thoughts and calls that the template drops or writes in another way.
_OF_TEMPLATES = {
    Reason.NEW_TOKENS,
    Reason.NOTHING_NEW,
    Reason.THINKING_STRIPPED,
    Reason.ANSWER_RENDERED_DIFFERENTLY,
    Reason.TEMPLATE_RERENDERED,
    Reason.NO_SNAPSHOT,
}
# What is nearest may have the same system prompt and other tools, or the other way round.
_HEADS = {Reason.SYSTEM_CHANGED, Reason.TOOLS_CHANGED, Reason.NO_SNAPSHOT}
ALLOWED: Mapping[str, set[Reason]] = {
    "repeat": {Reason.NOTHING_NEW},
    "next": _OF_TEMPLATES,
    "edit": {Reason.LAST_MESSAGE_EDITED, Reason.BRANCHED, Reason.NO_SNAPSHOT, *_OF_TEMPLATES},
    "system": {*_HEADS, Reason.TEMPLATE_RERENDERED, Reason.COLD, Reason.BRANCHED},
    "tools": _HEADS,
}


@dataclass
class ExplainedChat:
    """One chat with a server that forgets nothing."""

    template: str
    settles: bool
    drops_reasoning: bool
    tools: tuple[Mapping[str, Any], ...]
    messages: list[Message] = field(default_factory=list[Message])

    def __post_init__(self) -> None:
        self.text = text_model(self.template)
        self.server = OfflineServer(Renderer(self.text), settles=self.settles)
        self.messages = [system(SYSTEMS[0])]

    @property
    def head(self) -> str:
        """The system prompt and the tools."""
        return repr((self.messages[0], self.tools))

    def ask(self, answer: Answer) -> tuple[ReplayedRequest, Explanation]:
        """One request with the messages as they stand; the answer is not taken into the chat."""
        asked = self.server.ask(ChatRequest(messages=tuple(self.messages), tools=self.tools))
        explanation = self.server.renderer.explain(asked.rendered, asked.outcome)
        check_accounts(asked, explanation)
        text = spoken(answer, asked.rendered, has_channels=self.template == "channels")
        self.server.answer(asked.rendered, self.text.encode(text), answer)
        return asked, explanation

    def answered(self, answer: Answer) -> None:
        self.messages.append(as_message(answer, has_reasoning=not self.drops_reasoning))
        if answer.tool_calls:
            self.messages.append(tool("sunny, 20 degrees"))


def check_accounts(asked: ReplayedRequest, explanation: Explanation) -> None:
    """The counts add up, and the accounts cover the computed tokens without a gap."""
    outcome = asked.outcome
    assert outcome.num_reused + outcome.num_prefilled == outcome.num_prompt == len(asked.rendered.prompt)
    check_cover(explanation, outcome)
    if explanation.diverged_at is not None:
        assert outcome.num_reused <= explanation.diverged_at < outcome.num_prompt
        assert explanation.expected_text != explanation.actual_text


def answers(*, calls: bool) -> st.SearchStrategy[Answer]:
    plain = st.builds(
        Answer,
        content=st.sampled_from(("It is sunny.", "It will rain.\n", "I do not know, sorry.")),
        reasoning=st.sampled_from((THOUGHT, None)),
    )
    return plain | st.just(Answer(content=None, reasoning=THOUGHT, tool_calls=(CALL,))) if calls else plain


TEMPLATES = [name for name in template_names() if name not in ("single_turn", "plain_text", "wants_fields")]


@pytest.mark.parametrize("template", TEMPLATES)
@given(chosen=st.data())
@settings(max_examples=examples(8), deadline=None)
def test_every_computed_token_has_the_right_reason(template: str, chosen: st.DataObject) -> None:
    # `alternates` writes tools but takes no results; another template writes none.
    has_tools = template != "alternates" and "tools" in template_source(template) and chosen.draw(st.booleans())
    client = ExplainedChat(
        template=template,
        settles=chosen.draw(st.booleans()),
        drops_reasoning=chosen.draw(st.booleans()),
        tools=(WEATHER, SEARCH) if has_tools else (),
    )
    client.messages.append(user(QUESTIONS[0]))
    answer = chosen.draw(answers(calls=has_tools))
    _, explanation = client.ask(answer)
    assert explanation.reason is Reason.COLD
    seen = {client.head}
    for number in range(3):
        step = chosen.draw(st.sampled_from(sorted(ALLOWED)))
        if step == "next":
            client.answered(answer)
            if not answer.tool_calls:
                client.messages.append(user(QUESTIONS[1 + number]))
        elif step == "edit" and client.messages[-1]["role"] == "user":
            client.messages[-1] = user(f"Never mind: how is number {number}?")
        elif step == "system":
            client.messages[0] = system(SYSTEMS[1 - SYSTEMS.index(client.messages[0]["content"])])
        elif step == "tools" and has_tools:
            client.tools = client.tools[::-1]
        else:
            step = "repeat"
        previous, answer = answer, chosen.draw(answers(calls=has_tools))
        try:
            _, explanation = client.ask(answer)
        except BadRequest:
            assert template == "alternates"
            return
        # A system prompt or an order of tools that comes back finds what it left.
        if step not in ("system", "tools") or client.head not in seen:
            assert explanation.reason in ALLOWED[step], (step, previous, explanation)
        seen.add(client.head)


@pytest.mark.parametrize("settles", [False, True])
def test_tools_that_a_template_writes_beside_the_last_message_changed(*, settles: bool) -> None:
    client = ExplainedChat(template="moves_tools", settles=settles, drops_reasoning=False, tools=(WEATHER, SEARCH))
    client.messages.append(user(QUESTIONS[0]))
    client.ask(Answer(content=None, reasoning=THOUGHT, tool_calls=(CALL,)))
    client.answered(Answer(content=None, reasoning=THOUGHT, tool_calls=(CALL,)))
    client.ask(Answer(content="It is sunny.", reasoning=THOUGHT))
    client.answered(Answer(content="It is sunny.", reasoning=THOUGHT))
    client.messages.append(user(QUESTIONS[2]))
    client.ask(Answer(content=None, reasoning=THOUGHT, tool_calls=(CALL,)))
    client.tools = client.tools[::-1]
    _, explanation = client.ask(Answer(content="Near.", reasoning=None))
    assert explanation.reason is Reason.TOOLS_CHANGED
