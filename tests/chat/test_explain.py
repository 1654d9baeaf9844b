"""Why tokens were not reused: every reason, and an account of every computed token."""

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from reprise.chat.answer import Answer
from reprise.chat.messages.history import as_message
from reprise.chat.reasons.explain import ADVICE, ComputedSpan, Explanation
from reprise.chat.rendering.compare_requests import compare_requests
from reprise.chat.rendering.render import Renderer
from reprise.chat.request import ChatRequest, Message
from reprise.chat.templates.rendered import PartKind, Rendered
from reprise.core.outcome import Outcome, Reason
from reprise.core.tokens import Span, Tokens, as_tokens, common_prefix, join_tokens
from tests.chat.replay import spoken
from tests.chat.shapes import (
    ASK,
    CALL,
    CONVERSATION,
    PLAIN_CONVERSATION,
    RESULT,
    SEARCH,
    SHAPES,
    TOLD,
    WEATHER,
    assistant,
    system,
    user,
)
from tests.chat.text_models import template_names, text_model
from tests.matrix import every_nth

LONG_SYSTEM = "You are a helpful assistant. Answer briefly, and say so when there is something you do not know."


@dataclass
class RememberingServer:
    """A renderer and a store that resumes anywhere: what a request's outcome would be, and its explanation."""

    template: str
    now: datetime = datetime(2026, 3, 1, 12)
    runs: list[Tokens] = field(default_factory=list[Tokens])

    def __post_init__(self) -> None:
        self.model = text_model(self.template)
        self.renderer = Renderer(self.model, clock=lambda: self.now)

    def ask(self, request: ChatRequest, answer: Answer = Answer(content="Sunny.")) -> tuple[Rendered, Explanation]:  # noqa: B008
        rendered = self.renderer.render(request)
        prompt = rendered.prompt.tokens
        matched, stored_next = self.match(prompt)
        reused = min(matched, len(prompt) - 1)
        outcome = Outcome(
            num_prompt=len(prompt),
            num_matched=matched,
            num_reused=reused,
            num_prefilled=len(prompt) - reused,
            stored_next=stored_next,
        )
        explanation = self.renderer.explain(rendered, outcome)
        sampled = self.model.encode(spoken(answer, rendered, has_channels=self.template == "channels"))
        self.runs.append(join_tokens(prompt, as_tokens(sampled)))
        self.renderer.learn(rendered, sampled, answer)
        check_accounts(explanation, outcome)
        return rendered, explanation

    def match(self, prompt: Tokens) -> tuple[int, Tokens | None]:
        # Of runs that agree equally far, the latest one.
        best = max(reversed(self.runs), key=lambda run: common_prefix(run, prompt), default=None)
        if best is None:
            return 0, None
        matched = common_prefix(best, prompt)
        return matched, best[matched : matched + 32] if matched < len(best) else None

    def reason(self, request: ChatRequest) -> Reason:
        return self.ask(request)[1].reason


def check_accounts(explanation: Explanation, outcome: Outcome) -> None:
    """The accounts cover the computed tokens, without a gap."""
    at = outcome.num_reused
    for account in explanation.accounts:
        assert account.span.start == at
        at = account.span.stop
    assert at == outcome.num_prompt
    assert explanation.reason in {account.reason for account in explanation.accounts}
    is_cold = any(account.reason is Reason.COLD for account in explanation.accounts)
    assert not is_cold or explanation.diverged_at is None, "what continues nothing has left nothing"


def chat(*messages: Message, **options: object) -> ChatRequest:
    return ChatRequest(messages=messages, template_options=options)


def test_every_reason_has_advice() -> None:
    assert set(ADVICE) == set(Reason)


def test_cold_then_nothing_new_then_new_tokens() -> None:
    server = RememberingServer("keeps_everything")
    assert server.reason(chat(system(), ASK)) is Reason.COLD
    assert server.reason(chat(system(), ASK)) is Reason.NOTHING_NEW
    answer = Answer(content="It is sunny.")
    _, explanation = server.ask(chat(user("Hello there.")), answer)
    _, explanation = server.ask(chat(user("Hello there."), as_message(answer), user("Thanks!")))
    assert explanation.reason is Reason.NEW_TOKENS
    assert explanation.diverged_at is None


def test_a_cold_request_continues_nothing_that_came_while_it_was_answered() -> None:
    renderer = RememberingServer("keeps_everything").renderer
    rendered = renderer.render(chat(system(), ASK))
    renderer.render(chat(system(), user("What is the weather in Rome?")))
    num = len(rendered.prompt)
    outcome = Outcome(num_prompt=num, num_matched=0, num_reused=0, num_prefilled=num, reason=Reason.COLD)
    assert renderer.explain(rendered, outcome).reason is Reason.COLD


@pytest.mark.parametrize("template", ["strips_thinking", "think_in_prompt", "keeps_in_loop"])
@pytest.mark.parametrize("thought", ["It is sunny.", "Really?"])
def test_thinking_that_is_said_again_is_stripped_where_it_was(template: str, thought: str) -> None:
    server = RememberingServer(template)
    # A short model thinks what it says, and the same is asked and said again later.
    said = Answer(content="It is sunny.", reasoning=thought)
    messages: list[Message] = [ASK]
    reasons: list[Reason] = []
    for question in ("Thanks!", "Again?", "It is sunny.", "Really?", "Again?", "Bye."):
        _, explanation = server.ask(chat(*messages), said)
        reasons.append(explanation.reason)
        at = explanation.part
        assert at is None or at.index in (None, len(messages) - 2), (at, len(messages))
        messages += [as_message(said), user(question)]
    assert reasons == [Reason.COLD] + 5 * [Reason.THINKING_STRIPPED]


@pytest.mark.parametrize("template", ["strips_thinking", "think_in_prompt", "empty_block", "keeps_in_loop", "channels"])
def test_thinking_stripped(template: str) -> None:
    server = RememberingServer(template)
    answer = Answer(content="It is sunny.", reasoning="They ask for the weather, so I say that it is sunny there.")
    server.ask(chat(ASK), answer)
    _, explanation = server.ask(chat(ASK, as_message(answer), user("Thanks!")))
    assert explanation.reason is Reason.THINKING_STRIPPED
    assert explanation.part is not None
    assert "ask" in explanation.expected_text or "think" in explanation.expected_text
    assert "sunny" in explanation.actual_text or "think" in explanation.actual_text
    assert "--restore-reasoning" in explanation.advice


def test_the_loop_is_stripped_at_the_next_user_message() -> None:
    server = RememberingServer("keeps_in_loop")
    for messages in ((ASK,), (ASK, CALL, RESULT)):
        server.ask(ChatRequest(messages=messages, tools=(WEATHER,)))
    after = ChatRequest(messages=(ASK, CALL, RESULT, TOLD, user("Thanks!")), tools=(WEATHER,))
    _, explanation = server.ask(after)
    assert explanation.reason is Reason.THINKING_STRIPPED
    assert explanation.part is not None
    assert explanation.part.index == 1


def test_thinking_off_leaves_a_mark() -> None:
    server = RememberingServer("thinking_off_mark")
    answer = Answer(content="It is sunny.")
    server.ask(chat(ASK, enable_thinking=False), answer)
    _, explanation = server.ask(chat(ASK, as_message(answer), user("Thanks!"), enable_thinking=False))
    assert explanation.reason is Reason.THINKING_STRIPPED


def test_the_date_changed() -> None:
    server = RememberingServer("dated")
    server.ask(chat(system(LONG_SYSTEM), ASK))
    server.now += timedelta(days=1)
    _, explanation = server.ask(chat(system(LONG_SYSTEM), ASK))
    assert explanation.reason is Reason.DATE_CHANGED
    assert "--freeze-template-date" in explanation.advice
    # In the client's own system prompt it is seen from the text.
    server = RememberingServer("strips_thinking")
    server.ask(chat(system(f"{LONG_SYSTEM} Today is 2026-03-01. {LONG_SYSTEM}"), ASK))
    assert server.reason(chat(system(f"{LONG_SYSTEM} Today is 2026-03-02. {LONG_SYSTEM}"), ASK)) is Reason.DATE_CHANGED


@pytest.mark.parametrize("now", ["2026-03-01 09:{:02d}", "9:{:02d} am on March 1", "17723580{:02d}"])
def test_a_clock_is_told_apart_from_a_date(now: str) -> None:
    server = RememberingServer("strips_thinking")
    server.ask(chat(system(f"{LONG_SYSTEM} It is {now.format(41)}. {LONG_SYSTEM}"), ASK))
    _, explanation = server.ask(chat(system(f"{LONG_SYSTEM} It is {now.format(52)}. {LONG_SYSTEM}"), ASK))
    assert explanation.reason is Reason.CLOCK_CHANGED
    assert "time of day" in explanation.advice


def test_a_value_that_changes_with_every_request() -> None:
    server = RememberingServer("strips_thinking")
    server.ask(chat(system(f"{LONG_SYSTEM} billing: cch=a81f7; {LONG_SYSTEM}"), ASK))
    assert server.reason(chat(system(f"{LONG_SYSTEM} billing: cch=3be02; {LONG_SYSTEM}"), ASK)) is Reason.BREAKER


def test_the_system_prompt_changed() -> None:
    server = RememberingServer("strips_thinking")
    server.ask(chat(system(LONG_SYSTEM + " Be kind."), ASK))
    _, explanation = server.ask(chat(system(LONG_SYSTEM + " Write long answers."), ASK))
    assert explanation.reason is Reason.SYSTEM_CHANGED
    assert explanation.part is not None
    assert explanation.part.kind is PartKind.SYSTEM
    assert "kind" in explanation.expected_text
    assert "Write" in explanation.actual_text


@pytest.mark.parametrize("template", ["strips_thinking", "moves_tools"])
def test_the_tools_changed(template: str) -> None:
    server = RememberingServer(template)
    server.ask(ChatRequest(messages=(system(), ASK), tools=(WEATHER, SEARCH)))
    assert server.reason(ChatRequest(messages=(system(), ASK), tools=(SEARCH, WEATHER))) is Reason.TOOLS_CHANGED


def test_template_options_changed() -> None:
    server = RememberingServer("thinking_off_mark")
    server.ask(chat(ASK, enable_thinking=True))
    assert server.reason(chat(ASK, enable_thinking=False)) is Reason.TEMPLATE_OPTIONS_CHANGED


def test_edited_messages() -> None:
    server = RememberingServer("strips_thinking")
    told = assistant("Sunny.")
    server.ask(chat(system(), ASK, told, user("And tomorrow?"), assistant("Rain."), user("And on Monday?")))
    edited_last = chat(system(), ASK, told, user("And tomorrow?"), assistant("Rain."), user("Or on Sunday?"))
    assert server.reason(edited_last) is Reason.LAST_MESSAGE_EDITED
    edited_early = chat(system(), ASK, told, user("Why is that?"), assistant("Rain."), user("Or on Sunday?"))
    assert server.reason(edited_early) is Reason.EARLIER_MESSAGE_EDITED
    edited_answer = chat(system(), ASK, assistant("Rainy."), user("Why is that?"), assistant("Rain."), user("Oh?"))
    assert server.reason(edited_answer) is Reason.EARLIER_MESSAGE_EDITED


def test_what_is_taken_out_of_a_chat_that_goes_on_is_cleared_or_summarised() -> None:
    server = RememberingServer("strips_thinking")
    long = user("Read this. " + "It rained all day in Paris. " * 40)
    whole = (system(), ASK, assistant("Sunny."), long, assistant("Rain."), user("And on Monday?" * 60))
    server.ask(chat(*whole))
    placeholder = user("Read this. It was taken out.")
    cleared = (*whole[:3], placeholder, *whole[4:], assistant("Sun."), user("And on Tuesday?"))
    assert server.reason(chat(*cleared)) is Reason.CONTEXT_CLEARED
    summary = (*whole[:3], user("Summary: it rained."), assistant("Rain."), user("And on Tuesday?"))
    assert server.reason(chat(*summary)) is Reason.COMPACTED
    edited = (
        *whole[:3],
        user("Now r" + str(long["content"])[1:]),
        *whole[4:],
        assistant("Sun."),
        user("And on Tuesday?" * 90),
    )
    assert server.reason(chat(*edited)) is Reason.EARLIER_MESSAGE_EDITED


SUMMARY = "It rained in Paris all week, and the user asks for each day in turn."


@pytest.mark.parametrize("agent", [None, ("a session", "")])
def test_a_summary_in_a_first_message_of_its_own_continues_its_chat(agent: tuple[str, str] | None) -> None:
    server = RememberingServer("strips_thinking")
    first, head = user("How is the weather in Paris? " * 60), system(LONG_SYSTEM)
    asked = replace(chat(head, first, assistant("Sunny."), user("Summarise this.")), agent=agent)
    server.ask(asked, Answer(content=SUMMARY))
    # What the client makes of the summary is its own affair where it says who it is.
    words = SUMMARY if agent is None else "It was sunny."
    next_chat = replace(chat(head, user(f"Until now: {words}"), user("And on Sunday?")), agent=agent)
    assert server.reason(next_chat) is Reason.COMPACTED


@pytest.mark.parametrize(
    ("agents", "begun", "next_turn"),
    [
        ((("one", ""), ("two", "")), True, "Write a poem about cats."),
        ((None, None), True, "Write a poem about cats."),
        ((("one", ""), ("one", "")), True, "Write a poem about cats. " * 90),
        ((("one", ""), ("one", "")), False, "Write a poem about cats."),
        ((None, None), True, f"Check this: {SUMMARY} " * 40),
    ],
    ids=["another agent", "nobody's", "as long", "no chat", "a quoted answer"],
)
def test_what_is_no_summary_of_a_chat_is_another_one(
    agents: tuple[tuple[str, str] | None, ...], *, begun: bool, next_turn: str
) -> None:
    server = RememberingServer("strips_thinking")
    head, first = system(LONG_SYSTEM), user("How is the weather in Paris? " * 60)
    messages = (head, first, assistant("Sunny."), user("Summarise this.")) if begun else (head, first)
    before, now = agents
    server.ask(replace(chat(*messages), agent=before), Answer(content=SUMMARY))
    assert server.reason(replace(chat(head, user(next_turn)), agent=now)) is Reason.BRANCHED


def test_an_agent_is_compared_with_what_it_sent_itself() -> None:
    server = RememberingServer("strips_thinking")
    head, long = system(LONG_SYSTEM), "How is the weather in Paris? " * 60
    for agent in ("one", "two"):
        server.ask(replace(chat(head, user(f"{agent}: {long}"), assistant("Sunny."), ASK), agent=(agent, "")))
    summary = replace(chat(head, user("It was sunny.")), agent=("one", ""))
    assert server.reason(summary) is Reason.COMPACTED


def test_an_explanation_tells_what_a_cache_that_keeps_everything_would_have_computed() -> None:
    def of(*accounts: tuple[int, int, Reason]) -> Explanation:
        spans = tuple(ComputedSpan(span=Span(start, stop), reason=reason) for start, stop, reason in accounts)
        return Explanation(reason=spans[0].reason, accounts=spans, advice="")

    lost = of((10, 40, Reason.NO_SNAPSHOT), (40, 60, Reason.EVICTED), (60, 65, Reason.CONTEXT_CLEARED))
    assert (lost.num_at_best, lost.change) == (5, Reason.CONTEXT_CLEARED)
    assert of((10, 40, Reason.EVICTED)).num_at_best == 0, "an exact repeat"


def test_another_chat_with_the_same_system_prompt_branches() -> None:
    server = RememberingServer("strips_thinking")
    server.ask(chat(system(LONG_SYSTEM), ASK))
    assert server.reason(chat(system(LONG_SYSTEM), user("How are you today?"))) is Reason.BRANCHED


def test_agents_that_say_who_they_are_are_not_one_chat_edited() -> None:
    """Sub-agents get other tasks between the same words."""

    def asked(part: int, agent: tuple[str, str] | None) -> ChatRequest:
        request = chat(system(LONG_SYSTEM), user(f"Part {part}: read."), assistant("Yes."), user("Today is a day."))
        return replace(request, agent=agent)

    for agents, reason in (
        ([("s", "a"), ("s", "b")], Reason.BRANCHED),
        ([("s", "a"), ("s", "a")], Reason.EARLIER_MESSAGE_EDITED),
        ([None, None], Reason.EARLIER_MESSAGE_EDITED),
    ):
        server = RememberingServer("strips_thinking")
        server.ask(asked(1, agents[0]))
        assert server.reason(asked(2, agents[1])) is reason


def test_another_chat_that_shares_the_templates_first_words_alone_is_cold() -> None:
    server = RememberingServer("strips_thinking")
    server.ask(chat(ASK))
    assert server.reason(chat(user("Tell me a story."))) is Reason.COLD


CODER = (
    "You are a careful coding assistant. You work in the user's repository, read files before you change them, and "
    "run the tests after each change. The time is {}. Never delete what you did not make. Explain each step briefly, "
    "and ask where a wish can be read in two ways. Prefer small changes to large ones, and keep to the style around."
)
NURSE = (
    "You are a careful nursing assistant. You work in a hospital, look at the chart before you answer, and call a "
    "doctor wherever a value is out of its range. Never give a dose that is not in the plan."
)
FIX = user("Please fix the bug in the parser: it loops on an empty line.")
GREET = user("Good morning! Who needs a new bandage?")
DONE = assistant("It is fixed.")
CHART: dict[str, Any] = {"type": "function", "function": {"name": "get_chart", "description": "A patient's chart."}}
TITLES = system("You write titles. Answer with at most five words that sum up what the user wants, and nothing else.")
CODING = ChatRequest(messages=(system(CODER.format("9:41")), FIX), tools=(WEATHER, SEARCH))
GOES_ON = frozenset({Reason.NEW_TOKENS, Reason.THINKING_STRIPPED, Reason.TEMPLATE_RERENDERED})
IS_OTHER = frozenset({Reason.COLD})
PAIRS: dict[str, tuple[ChatRequest, ChatRequest, frozenset[Reason]]] = {
    "the chat goes on": (CODING, replace(CODING, messages=(*CODING.messages, DONE, user("Thanks!"))), GOES_ON),
    "the last message is edited": (
        replace(CODING, messages=(*CODING.messages, DONE, user("Thanks!"))),
        replace(CODING, messages=(*CODING.messages, DONE, user("Not quite."))),
        frozenset({Reason.LAST_MESSAGE_EDITED, Reason.TEMPLATE_RERENDERED}),
    ),
    "other tools": (CODING, replace(CODING, tools=(SEARCH, CHART)), frozenset({Reason.TOOLS_CHANGED})),
    "another system prompt": (
        CODING,
        replace(CODING, messages=(system(CODER.format("9:41").replace("careful", "quick")), FIX)),
        frozenset({Reason.SYSTEM_CHANGED}),
    ),
    "the time in another chat": (
        CODING,
        replace(CODING, messages=(system(CODER.format("9:52")), GREET)),
        frozenset({Reason.CLOCK_CHANGED}),
    ),
    "another chat of the program": (
        CODING,
        replace(CODING, messages=(CODING.messages[0], GREET)),
        frozenset({Reason.BRANCHED, Reason.TEMPLATE_RERENDERED}),
    ),
    "another program": (CODING, ChatRequest(messages=(system(NURSE), GREET), tools=(CHART,)), IS_OTHER),
    "another program without tools": (CODING, ChatRequest(messages=(system(NURSE), GREET)), IS_OTHER),
    "a title for the same message": (CODING, ChatRequest(messages=(TITLES, FIX)), IS_OTHER),
    "other programs with a short system prompt": (
        ChatRequest(messages=(system("You are a helpful assistant for cooks."), GREET), tools=(SEARCH,)),
        ChatRequest(messages=(system("You are a helpful assistant for coders."), FIX), tools=(WEATHER,)),
        IS_OTHER,
    ),
    "other programs without a system prompt": (
        ChatRequest(messages=(user("What is a monad?"),)),
        ChatRequest(messages=(user("What is a burrito, and may I eat it cold?"),)),
        IS_OTHER,
    ),
    "other programs with other tools": (
        ChatRequest(messages=(GREET,), tools=(CHART,)),
        ChatRequest(messages=(FIX,), tools=(WEATHER, SEARCH)),
        IS_OTHER,
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("template", ["strips_thinking", "moves_tools", "dated", "keeps_in_loop", "channels"])
def test_a_request_continues_what_it_shares_words_with(template: str, pair: str) -> None:
    before, now, expected = PAIRS[pair]
    server = RememberingServer(template)
    server.ask(chat(system(LONG_SYSTEM), user("Hello.")))
    server.ask(before, Answer(content="It is fixed."))
    _, explanation = server.ask(now)
    assert explanation.reason in expected, (explanation.reason, explanation.part, explanation.shared_text)


def test_requests_of_other_programs_are_not_compared() -> None:
    before, now, _ = PAIRS["another program"]
    explanation = compare_requests(text_model("strips_thinking"), before, now).explanation
    assert (explanation.reason, explanation.diverged_at) == (Reason.COLD, None)


def test_an_answer_given_back_in_other_words() -> None:
    server = RememberingServer("keeps_everything")
    server.ask(chat(ASK), Answer(content="It is sunny."))
    assert server.reason(chat(ASK, assistant("It is rainy."), user("Ok."))) is Reason.ANSWER_RENDERED_DIFFERENTLY


def test_arguments_that_the_template_writes_again() -> None:
    server = RememberingServer("respaced_arguments")
    answer = CONVERSATION[1][1]
    server.ask(ChatRequest(messages=(ASK,), tools=(WEATHER,)), Answer(content=None, tool_calls=answer.tool_calls))
    _, explanation = server.ask(
        ChatRequest(messages=(ASK, assistant(None, city="Paris"), RESULT), tools=(WEATHER,)),
    )
    assert explanation.reason is Reason.ANSWER_RENDERED_DIFFERENTLY


@pytest.mark.parametrize("template", ["moves_tools", "moves_system"])
def test_text_that_the_template_moves(template: str) -> None:
    server = RememberingServer(template)
    request = ChatRequest(messages=(system(), ASK), tools=(WEATHER,))
    server.ask(request)
    grown = ChatRequest(messages=(system(), ASK, assistant("Sunny."), user("Thanks!")), tools=(WEATHER,))
    assert server.reason(grown) is Reason.TEMPLATE_RERENDERED


def test_what_was_there_and_is_no_more_was_evicted() -> None:
    server = RememberingServer("strips_thinking")
    rendered, _ = server.ask(chat(system(LONG_SYSTEM), ASK))
    again = server.renderer.render(chat(system(LONG_SYSTEM), ASK))
    length, reached = len(rendered.prompt), 9
    gone = Outcome(num_prompt=length, num_evicted=reached, num_prefilled=length, reason=Reason.EVICTED)
    assert server.renderer.explain(again, gone).accounts == (
        ComputedSpan(span=Span(0, reached), reason=Reason.EVICTED),
        ComputedSpan(span=Span(reached, length), reason=Reason.NOT_STORED),
    )
    cleared = replace(gone, num_evicted=0, reason=Reason.COLD)
    assert server.renderer.explain(again, cleared).reason is Reason.NOT_STORED


def test_what_a_cancelled_request_had_not_computed_was_not_evicted() -> None:
    server = RememberingServer("strips_thinking")
    server.ask(chat(system(LONG_SYSTEM), ASK))
    again = server.renderer.render(chat(system(LONG_SYSTEM), ASK))
    length = len(again.prompt)
    outcome = Outcome(num_prompt=length, num_matched=9, num_reused=9, num_prefilled=length - 9, reason=Reason.CANCELLED)
    assert server.renderer.explain(again, outcome).accounts == (
        ComputedSpan(span=Span(9, length), reason=Reason.CANCELLED),
    )


def test_a_match_without_a_snapshot() -> None:
    server = RememberingServer("strips_thinking")
    rendered = server.renderer.render(chat(system(LONG_SYSTEM), ASK))
    length = len(rendered.prompt)
    outcome = Outcome(num_prompt=length, num_matched=length - 3, num_reused=2, num_prefilled=length - 2)
    explanation = server.renderer.explain(rendered, outcome)
    check_accounts(explanation, outcome)
    assert [account.reason for account in explanation.accounts] == [Reason.NO_SNAPSHOT, Reason.NEW_TOKENS]
    assert explanation.reason is Reason.NO_SNAPSHOT


def test_a_cache_that_is_off() -> None:
    server = RememberingServer("strips_thinking")
    rendered = server.renderer.render(chat(ASK))
    outcome = Outcome(num_prompt=len(rendered.prompt), num_prefilled=len(rendered.prompt), reason=Reason.CACHE_OFF)
    assert server.renderer.explain(rendered, outcome).reason is Reason.CACHE_OFF


@pytest.mark.parametrize("template", every_nth((name for name in template_names() if name != "single_turn"), 3))
def test_every_computed_token_is_accounted_for(template: str) -> None:
    server = RememberingServer(template)
    refused = {"alternates": {"tool", "system in the middle", "after a tool loop"}}.get(template, set())
    for name, request in SHAPES.items():
        if any(name.startswith(each) for each in refused):
            continue
        server.ask(request)
    messages: tuple[Message, ...] = (system(),)
    tools = () if template == "alternates" else (WEATHER,)
    for incoming, answer in PLAIN_CONVERSATION if template == "alternates" else CONVERSATION:
        messages = (*messages, *incoming)
        server.ask(ChatRequest(messages=messages, tools=tools), answer)
        messages = (*messages, as_message(answer))
