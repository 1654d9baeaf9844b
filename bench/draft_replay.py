"""Answers that were given before, drafted again with passes of fixed costs: counts that are the same on any machine.

No model runs: what it would sample is known. All turns of a workload are of one namespace, one after the other.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import reprise.lab.demo
from bench.fact_chats import random_chat
from bench.tau import answer_of, message_of, spoken, text_model, tools_of
from bench.tiny.build import thinking_template
from reprise.chat.messages.history import as_message
from reprise.chat.text_model import TextModel
from reprise.core.tokens import as_tokens
from reprise.drafts.benefit import PASS_SIZES, PassCosts
from reprise.drafts.drafter import DecodingRow, Drafts, note, propose
from reprise.engine.models.load import load_text_model
from reprise.lab.demo.facts import LOOK_UP_TOOL, SYSTEM_PROMPT

DEMO = Path(reprise.lab.demo.__file__).parent / "model"
COSTS: Mapping[str, Mapping[int, float]] = {
    # MLX's CPU build, a model of 4 layers with 128 features.
    "compute": {1: 1.0, 2: 1.2, 4: 1.55, 8: 2.3, 16: 5.2, 32: 10.0},
    # A device that reads its weights in the time in which it computes some twenty tokens.
    "memory": {1: 1.0, 2: 1.02, 4: 1.06, 8: 1.15, 16: 1.3, 32: 1.65},
}
"""What a pass over so many tokens costs, as a multiple of one over a single token."""

REPEATED = 4
"""So many tokens that were written before are text that repeats; fewer may be chance."""

_VOCABULARY = range(10, 500)
_LINES = 200
_HEAD = (501, 502, 503, 504)
"""What a chat template writes before each answer."""
_TAIL = (505, 506)
"""What it writes behind it."""
_SEEDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTurn:
    """A request. `is_counted`: it is what the workload is about; others come before it."""

    prompt: list[int]
    answer: list[int]
    is_counted: bool = True


def _words(rng: np.random.Generator, num: int) -> list[int]:
    return [int(token) for token in rng.choice(_VOCABULARY, num)]


def workloads(seed: int) -> Mapping[str, list[ReplayTurn]]:
    """Turns by workload, of random words; the last turn of each is the one to time."""
    rng = np.random.default_rng(seed)
    lines = [_words(rng, int(rng.integers(4, 12))) for _ in range(_LINES)]
    file = [token for line in lines for token in line]
    edited = [line if rng.random() > 0.04 else _words(rng, 8) for line in lines]
    ask = _words(rng, 40)
    edit = ReplayTurn(
        prompt=[*ask, *file, *_words(rng, 30), *_HEAD], answer=[token for line in edited for token in line][:1000]
    )

    shape, prompt, tools = _words(rng, 24), _words(rng, 300), list[ReplayTurn]()
    for _ in range(6):
        call = [*shape, *_words(rng, 4), *shape[::-1], *_words(rng, 6), *shape[3:20]]
        tools.append(ReplayTurn(prompt=[*prompt, *_HEAD], answer=call, is_counted=len(tools) == 5))
        prompt = [*tools[-1].prompt, *call, *_TAIL, *_words(rng, 60)]
    said = _words(rng, 400)
    again = ReplayTurn(prompt=[*_words(rng, 200), *_HEAD], answer=said)
    first = ReplayTurn(prompt=again.prompt, answer=said, is_counted=False)
    chat = ReplayTurn(prompt=[*_words(rng, 200), *_HEAD], answer=_words(rng, 400))
    return {"edit": [edit], "tools": tools, "again": [first, again], "chat": [chat]}


def recorded(file: Path, num_dialogues: int) -> Mapping[str, list[ReplayTurn]]:
    """The agent sessions of a tau-bench file: once with its tool calls counted, once with its messages."""
    dialogues: list[Sequence[Mapping[str, Any]]] = [each["traj"] for each in json.loads(file.read_text())]
    text = text_model([m["content"] or "" for dialogue in dialogues for m in dialogue], thinking_template())
    tools, found = tools_of(dialogues), list[tuple[ReplayTurn, bool]]()
    for dialogue in dialogues[:num_dialogues]:
        history: list[Mapping[str, Any]] = []
        for message in dialogue:
            if message["role"] != "assistant":
                history.append(message_of(message))
                continue
            answer = answer_of(message, "")
            turn = ReplayTurn(prompt=_prompt(text, history, tools), answer=text.encode(spoken(answer)))
            found.append((turn, len(answer.tool_calls) > 0))
            history.append(as_message(answer))
    return {"recorded calls": _counted(found, of_calls=True), "recorded messages": _counted(found, of_calls=False)}


def demo_chats() -> Mapping[str, list[ReplayTurn]]:
    """Chats of forty turns as the demo's model is trained to answer them."""
    found = [turn for seed in range(_SEEDS) for turn in demo_turns(Random(seed), 40)]
    return {"demo calls": _counted(found, of_calls=True), "demo answers": _counted(found, of_calls=False)}


def demo_turns(draw: Random, num_turns: int) -> list[tuple[ReplayTurn, bool]]:
    """The turns of one such chat, and whether each is a call."""
    text, found = load_text_model(str(DEMO)), list[tuple[ReplayTurn, bool]]()
    history: list[Mapping[str, Any]] = [{"role": "system", "content": SYSTEM_PROMPT}]
    for said in random_chat(draw, num_turns, has_tool=True):
        history.append({"role": "user", "content": said.user})
        steps = [(said.answer, False)] if said.name is None else [(_call(said.name), True), (said.answer, False)]
        for content, is_call in steps:
            answer = f"{said.thought}\n</think>\n\n{content}<|im_end|>"
            found.append(
                (ReplayTurn(prompt=_prompt(text, history, [LOOK_UP_TOOL]), answer=text.encode(answer)), is_call)
            )
            history.append({"role": "assistant", "content": content})
            if is_call:
                history.append({"role": "tool", "content": said.result})
    return found


def _call(name: str) -> str:
    return f"<tool_call>\n<function=look_up>\n<parameter=name>\n{name}\n</parameter>\n</function>\n</tool_call>"


def _prompt(text: TextModel, history: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
    assert text.render is not None
    return text.encode(text.render(list(history), tools=list(tools), add_generation_prompt=True))


def _counted(turns: Sequence[tuple[ReplayTurn, bool]], *, of_calls: bool) -> list[ReplayTurn]:
    return [
        ReplayTurn(prompt=turn.prompt, answer=turn.answer, is_counted=is_call == of_calls) for turn, is_call in turns
    ]


class WrittenRuns:
    """All runs of `REPEATED` tokens that were written so far."""

    def __init__(self) -> None:
        self._runs: set[tuple[int, ...]] = set()
        self._last: list[int] = []

    def repeated(self, turn: ReplayTurn) -> list[bool]:
        """For each token of the answer: whether it is part of text that was written before it."""
        common = next(
            (i for i, (a, b) in enumerate(zip(self._last, turn.prompt, strict=False)) if a != b),
            min(len(self._last), len(turn.prompt)),
        )
        self._add(turn.prompt[max(0, common - REPEATED + 1) :])
        text = [*turn.prompt, *turn.answer]
        found = [False] * len(text)
        for at in range(max(0, len(turn.prompt) - REPEATED + 1), len(text) - REPEATED + 1):
            run = tuple(text[at : at + REPEATED])
            if run in self._runs:
                found[at : at + REPEATED] = [True] * REPEATED
            self._runs.add(run)
        self._last = text
        return found[len(turn.prompt) :]

    def _add(self, tokens: Sequence[int]) -> None:
        self._runs.update(tuple(tokens[at : at + REPEATED]) for at in range(len(tokens) - REPEATED + 1))


def least_cost(repeated: Sequence[bool], costs: Sequence[float]) -> float:
    """What an oracle's passes over an answer cost that drafts all repeated text and nothing else.

    `costs`: of passes over 1, 2, 3, … tokens, as multiples of the first.
    """
    num = len(repeated)
    spent = [0.0] * (num + 1)
    for at in reversed(range(num)):
        options: list[float] = []
        for size, cost in enumerate(costs, 1):
            if at + size > num or not all(repeated[at : at + size - 1]):
                break
            # The last token of a pass is sampled, whatever it is.
            options.append(cost + spent[at + size])
        spent[at] = min(options)
    return spent[0]


class FixedCosts(PassCosts):
    """Passes whose costs are known and do not change. Between two sizes they rise evenly."""

    is_known = True  # type: ignore[assignment]
    one_s = 1.0  # type: ignore[assignment]
    largest = PASS_SIZES[-1]  # type: ignore[assignment]
    wants_single = False  # type: ignore[assignment]

    def __init__(self, by_size: Mapping[int, float]) -> None:
        super().__init__()
        self._by_size = by_size

    def note(self, num_tokens: int, seconds: float) -> None:
        """Nothing is learnt."""

    def relative_of(self, num_tokens: int, seconds: float) -> float:
        return self.relative(num_tokens)

    def relative(self, num_tokens: int) -> float:
        return float(np.interp(num_tokens, list(self._by_size), list(self._by_size.values())))


@dataclass(slots=True, kw_only=True)
class ReplayCounts:
    """The counts of a workload. Costs are in passes over one token."""

    tokens: int = 0
    """Of the answers, each behind its first one, which is never drafted."""
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    cost: float = 0.0
    best_cost: float = 0.0
    """The oracle's."""

    @property
    def ratio(self) -> float:
        """How much faster than without drafts."""
        return self.tokens / self.cost

    @property
    def best(self) -> float:
        return self.tokens / self.best_cost


def replay(
    turns: Sequence[ReplayTurn], by_size: Mapping[int, float], counts: ReplayCounts, *, rewinds: bool = True
) -> None:
    """Draft the answers with passes of these costs, and add what is counted to `counts`.

    `rewinds`: whether layers can drop rejected tokens; recurrent ones are fed again what was accepted before them.
    """
    drafts, said = Drafts(rewinds=rewinds), WrittenRuns()
    drafts.costs = costs = FixedCosts(by_size)
    by_length = [costs.relative(size) for size in range(1, costs.largest + 1)]
    for turn in turns:
        repeated = said.repeated(turn)
        own = counts if turn.is_counted else ReplayCounts()
        own.tokens += len(turn.answer) - 1
        own.best_cost += least_cost(repeated[1:], by_length)
        for num_fed, num_drafted, num_accepted in _passes(drafts, turn, rewinds=rewinds):
            own.passes += 1
            own.cost += costs.relative(num_fed + num_drafted)
            own.drafted += num_drafted
            own.accepted += num_accepted


def _passes(drafts: Drafts, turn: ReplayTurn, *, rewinds: bool) -> Iterator[tuple[int, int, int]]:
    """(tokens fed besides the draft, drafted tokens, accepted ones) of each pass over an answer."""
    request = drafts.start(as_tokens(turn.prompt), namespace="")
    request.accept(turn.answer[:1])
    at, num_unfed = 1, 0
    while at < len(turn.answer):
        while request.num_read < len(turn.prompt):
            request.read_prompt(len(turn.prompt))
        num_fed = 1 + num_unfed
        rows = [DecodingRow(drafts=request, num_fed=num_fed, most=len(turn.answer) - at - 1)]
        (draft,) = propose(rows)
        guess: list[int] = draft.tokens.tolist() if draft is not None else []
        pairs = zip(guess, turn.answer[at:], strict=False)
        accepted = next((i for i, (token, right) in enumerate(pairs) if token != right), len(guess))
        tokens = turn.answer[at : at + accepted + 1]
        seconds = drafts.costs.relative(num_fed + len(guess))
        note(rows, [draft], [len(tokens)], seconds=seconds)
        request.accept(tokens)
        at += len(tokens)
        num_unfed = 0 if rewinds or accepted == len(guess) else num_fed + accepted
        yield num_fed, len(guess), accepted
    request.end()


def show(file: Path | None, *, num_dialogues: int, rewinds: bool) -> None:
    """Replay all workloads and print the counts."""
    found = {name: [workloads(seed)[name] for seed in range(_SEEDS)] for name in workloads(0)}
    found |= {name: [turns] for name, turns in demo_chats().items()}
    if file is not None:
        found |= {name: [turns] for name, turns in recorded(file, num_dialogues).items()}
    print("costs    workload             tokens   passes  accepted   drafted     cost   ratio  at best")
    for costs, by_size in COSTS.items():
        for name, runs in found.items():
            counts = ReplayCounts()
            for turns in runs:
                replay(turns, by_size, counts, rewinds=rewinds)
            print(
                f"{costs:8} {name:17} {counts.tokens:9,} {counts.passes:8,} {counts.accepted:9,} {counts.drafted:9,}"
                f" {counts.cost:8,.0f}  {counts.ratio:6.3f}  {counts.best:6.3f}",
                flush=True,
            )
