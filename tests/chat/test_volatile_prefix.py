"""Prefix breakers: each rule finds what clients write, and nothing else."""

from collections.abc import Sequence

import pytest

from reprise.chat.reasons.volatile_prefix import RULES, normalize, present_moments, reordered_tools
from reprise.chat.rendering.render import Renderer, RenderSettings
from reprise.chat.request import ChatRequest, Cut
from tests.chat.text_models import text_model

BILLING = "x-anthropic-billing-header: cc_version=2.1.37.3e3; cc_entrypoint=cli; cch={};\n"
USER = {"role": "user", "content": "Hi"}
TOOLS = tuple({"type": "function", "function": {"name": name, "parameters": {}}} for name in ("write", "read"))


def asked(system: object, *, cuts: tuple[Cut, ...] = (), tools: Sequence[dict[str, object]] = ()) -> ChatRequest:
    return ChatRequest(messages=({"role": "system", "content": system}, USER), cuts=cuts, tools=tuple(tools))


def names_in(text: str) -> list[str]:
    return [rule.name for rule in RULES if rule.pattern.search(text) is not None]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (BILLING.format("0f3a1"), "billing line"),
        ("Hello.\n" + BILLING.format("0f3a1").strip(), "billing line"),
        ("Current Working Directory (/home/user/project) Files", "working directory"),
        ("Working directory: C:\\project", "working directory"),
        ("<cwd>/project</cwd>", "working directory"),
        ("gitStatus: This is the git status at the start of the conversation.", "git status"),
        ("Current branch: main", "git status"),
    ],
)
def test_each_rule_finds_what_clients_write(text: str, name: str) -> None:
    assert name in names_in(f"You are a helpful assistant.\n{text}")


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("Today's date: 2026-03-01", ["date 2026-03-01"]),
        ("Today's date is Sunday, March 1", ["date Sunday, March 1"]),
        ("Today is Sunday.", ["date Sunday"]),
        ("The current time is 9:41 am.", ["clock 9:41 am"]),
        ("Current date: 01/03/2026", ["date 01/03/2026"]),
        ("Now: 2026-03-01T09:41:30Z", ["clock 09:41:30", "date 2026-03-01"]),
        ("Current time: Sun Mar 1 09:41:02 2026", ["clock 09:41:02", "date Sun Mar 1"]),
        ("timestamp of now=1772358062", ["clock 1772358062"]),
        ("This time you may 3 times call it, now at version 1.12.30 of 10.2.", []),
        ("Now decide 4 things, mark 5 of them and march 6 steps.", []),
        ("Today's ratio is 16:9, the port of the current server is localhost:8080.", []),
        ("Version 1.2.3 was released on 2024-05-01.", []),
    ],
)
def test_a_date_and_a_time_of_day_are_told_apart_and_quoted(text: str, quoted: list[str]) -> None:
    found = present_moments(f"You are a helpful assistant.\n{text}")
    assert [f"{'clock' if moment.is_clock else 'date'} {moment.text}" for moment in found] == quoted


@pytest.mark.parametrize(
    "text",
    [
        "You are a helpful assistant. It is time to be kind.",
        "Version 1.2.3 was released on 2024-05-01.",
        "Stay in the working directory. Use git to see what changed.",
        "Never run `git status -uall`.",
        "Headers such as x-api-key: keep them secret.",
    ],
)
def test_no_rule_finds_what_stays_the_same(text: str) -> None:
    assert names_in(text) == []


def test_the_billing_line_is_left_out() -> None:
    first, second = (normalize(asked(BILLING.format(value) + "Be kind."), sorts_tools=False) for value in "ab")
    assert first.request == second.request == asked("Be kind.")
    assert first.notes == ("billing line left out of the system prompt",)


def test_it_is_left_out_of_parts_and_only_of_the_system_prompt() -> None:
    parts = [{"type": "text", "text": BILLING.format("a").strip()}, {"type": "text", "text": "Be kind."}]
    normalized = normalize(asked(parts), sorts_tools=False)
    assert normalized.request.messages[0]["content"] == [{**parts[0], "text": ""}, parts[1]]
    quoted = ChatRequest(messages=({"role": "user", "content": BILLING.format("a")},))
    assert normalize(quoted, sorts_tools=False).request is quoted


def test_marks_stay_where_they_are() -> None:
    line = BILLING.format("a")
    cuts = (Cut(0, len(line) + 3), Cut(0, 4), Cut(1, 1))
    normalized = normalize(asked(line + "Be kind.", cuts=cuts), sorts_tools=False)
    assert normalized.request.cuts == (Cut(0, 3), Cut(0, 0), Cut(1, 1))


def test_what_a_model_may_need_is_named_and_not_changed() -> None:
    request = asked("Be kind.\nToday's date: 2026-03-01\nWorking directory: /x\ngitStatus: clean: yes")
    normalized = normalize(request, sorts_tools=False)
    assert normalized.request is request
    assert [note.split(" (")[0] for note in normalized.notes] == [
        "the system prompt contains a working directory",
        "the system prompt contains a git status",
        "the system prompt contains a date",
    ]
    assert "('2026-03-01')" in normalized.notes[-1]


def test_tools_are_sorted_only_if_wanted() -> None:
    request = asked("Be kind.", tools=TOOLS)
    assert normalize(request, sorts_tools=False).request is request
    normalized = normalize(request, sorts_tools=True)
    assert normalized.request.tools == TOOLS[::-1]
    assert normalized.notes == ("tools sorted by name",)
    assert normalize(normalized.request, sorts_tools=True).notes == ()


def test_another_order_of_tools_is_named() -> None:
    assert reordered_tools(TOOLS, TOOLS) == ()
    assert reordered_tools(TOOLS, TOOLS[:1]) == ()
    assert "--stable-tools" in reordered_tools(TOOLS, TOOLS[::-1])[0]


def test_the_renderer_does_it_unless_told_otherwise() -> None:
    requests = [
        asked(BILLING.format("a") + "Be kind.", tools=TOOLS),
        asked(BILLING.format("b") + "Be kind.", tools=TOOLS[::-1]),
    ]

    def rendered(settings: RenderSettings) -> list[tuple[str, tuple[str, ...]]]:
        renderer = Renderer(text_model(), settings)
        return [(made.text, made.notes) for made in map(renderer.render, requests)]

    (first, _), (second, notes) = rendered(RenderSettings())
    assert "billing" not in first + second
    assert any("order of the tools changed" in note for note in notes)
    (first, _), (second, _) = rendered(RenderSettings(sorts_tools=True))
    assert first == second
    (first, notes), (second, _) = rendered(RenderSettings(normalizes=False, sorts_tools=True))
    assert "cch=a" in first
    assert "cch=b" in second
    assert notes == ()
