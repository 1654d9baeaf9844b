"""Plays a chat through a renderer: what a model samples, what a store could resume, and what an oracle would."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from reprise.chat.answer import Answer
from reprise.chat.messages.history import as_message
from reprise.chat.rendering.render import Renderer
from reprise.chat.request import ChatRequest, Message
from reprise.chat.templates.rendered import Rendered
from reprise.chat.text_model import TextModel
from reprise.core.tokens import Tokens, as_tokens, common_prefix, join_tokens


def spoken(answer: Answer, rendered: Rendered, *, has_channels: bool = False, spacing: str = " ") -> str:
    """The text that a model of the tests' markup would sample for this answer."""
    if has_channels:
        return _spoken_in_channels(answer)
    text = ""
    if answer.reasoning is not None:
        text += ("" if rendered.is_thinking_open else "<think>\n") + answer.reasoning + "\n</think>\n\n"
    text += answer.content or ""
    for call in answer.tool_calls:
        arguments = json.dumps(json.loads(call.arguments), separators=("," + spacing, ":" + spacing))
        text += (
            f'\n<tool_call>\n{{"name":{spacing}"{call.name}",{spacing}"arguments":{spacing}{arguments}}}\n</tool_call>'
        )
    return text + "<|im_end|>"


def _spoken_in_channels(answer: Answer) -> str:
    said: list[str] = []
    if answer.reasoning is not None:
        said.append(f"<|channel|>analysis<|message|>{answer.reasoning}<|im_end|>")
    for call in answer.tool_calls:
        said.append(f"<|channel|>commentary to=functions.{call.name}<|message|>{call.arguments}<|call|>")
    if answer.content is not None:
        said.append(f"<|channel|>final<|message|>{answer.content}<|im_end|>")
    return "<|im_start|>assistant".join(said)


@dataclass
class PerfectStore:
    """Remembers everything that was computed, and the positions at which a model with snapshots could resume."""

    runs: list[Tokens] = field(default_factory=list)
    snapshots: list[tuple[Tokens, int]] = field(default_factory=list)

    def longest(self, prompt: Tokens) -> int:
        """What an oracle that remembers every state could reuse."""
        return max((common_prefix(run, prompt) for run in self.runs), default=0)

    def resumable(self, prompt: Tokens) -> int:
        """What a model can that resumes at snapshots only."""
        return max((at for run, at in self.snapshots if common_prefix(run, prompt) >= at), default=0)

    def add(self, run: Tokens, positions: Sequence[int]) -> None:
        self.runs.append(run)
        self.snapshots += [(run, position) for position in positions]


@dataclass(frozen=True, kw_only=True)
class RenderedTurn:
    rendered: Rendered
    prompt: int
    oracle: int
    """Tokens that an oracle which remembers every state would compute."""
    computed: int
    """Tokens that a model which resumes at this renderer's boundaries computes."""
    settled: int
    """Tokens computed while idle after the turn."""


def play(
    renderer: Renderer,
    text_model: TextModel,
    conversation: Sequence[tuple[tuple[Message, ...], Answer]],
    *,
    request: ChatRequest,
    settles: bool,
    has_channels: bool = False,
    drops_reasoning: bool = False,
) -> list[RenderedTurn]:
    """The turns of a chat that begins with the request's messages and goes on with what comes in."""
    store = PerfectStore()
    messages = request.messages
    turns: list[RenderedTurn] = []
    for incoming, answer in conversation:
        messages = (*messages, *incoming)
        rendered = renderer.render(
            ChatRequest(messages=messages, tools=request.tools, template_options=request.template_options)
        )
        prompt = rendered.prompt.tokens
        bound = len(prompt) - 1
        oracle = len(prompt) - min(bound, store.longest(prompt))
        computed = len(prompt) - min(bound, store.resumable(prompt))
        sampled = as_tokens(text_model.encode(spoken(answer, rendered, has_channels=has_channels)))
        whole = join_tokens(prompt, sampled)
        store.add(whole, [*(b.position for b in rendered.prompt.boundaries), bound, len(whole) - 1])
        renderer.learn(rendered, sampled.tolist(), answer)
        settled = 0
        if settles:
            next_prompt = renderer.next_turn(rendered, answer, branch="tool" if answer.tool_calls else "user")
            if next_prompt is not None:
                settled = len(next_prompt) - store.resumable(next_prompt.tokens)
                store.add(next_prompt.tokens, [b.position for b in next_prompt.boundaries])
        turns.append(
            RenderedTurn(rendered=rendered, prompt=len(prompt), oracle=oracle, computed=computed, settled=settled)
        )
        messages = (*messages, as_message(answer, has_reasoning=not drops_reasoning))
    return turns
