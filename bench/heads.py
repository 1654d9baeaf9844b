"""Chats with the demo's model and what guesses its next tokens: accepted shares and passes, by count.

    python -m bench.heads [--chats 2] [--turns 20] [--costs memory]
    python -m bench.heads --measure 3 [--turns 20] [--temperature 3] [--hidden 512]

Every pass and every guess has a fixed cost, as in `bench.draft_replay`, so that the counts are the same on any machine
and say what a device with such costs would gain. `head` is the trained head that ships with the demo's model. The
others are companions (`--draft-model`) in its place: `same` is the model itself, the most that there is; `random` has
other weights and is of no use. All sides look earlier text up, too; `looked up` is that alone.

With `--measure` nothing is fixed: the head, one with random weights, look-ups alone and no drafts at all answer the
same turns, one behind the other, in another order each time, once the trials behind `--drafts auto` are over. `again`
has no drafts either: by as much as it differs from `without`, engines of one process differ anyhow. What is
compared is all the time that the answers took from their first tokens to their last, by the clock and of processors
(which other programs disturb less, and of which a pass over several tokens takes more threads), and by the clock to
their end, when they are stored. The interval is a bootstrap over the turns.
"""

import argparse
import itertools
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, cast

import mlx.core as mx

from bench.draft_replay import COSTS, DEMO, FixedCosts, ReplayTurn, demo_turns
from bench.rivals import MODELS
from bench.tiny.build import build_model, random_weights
from reprise.core.events import Event, Finished, Sampled
from reprise.core.job import Job, Sampling
from reprise.core.outcome import Outcome
from reprise.core.prompt import Prompt
from reprise.core.settings import Settings
from reprise.core.tokens import as_tokens
from reprise.drafts.benefit import DraftCosts, PassCosts
from reprise.engine.models.heads import FORMATS
from reprise.engine.running.live_sequence import LiveSequence
from reprise.engine.running.runner import TokenFailure, TokenResult
from reprise.loop import EngineClient
from reprise.loop.worker import Worker

HEAD = DEMO.parent / "head"
STEPS: Mapping[str, float] = {"head": 0.03, "same": 0.1, "random": 0.1}
"""What a guess costs, in passes: a head of 2 to 3 % of the weights and the output matrix; a companion of a tenth."""
_PATIENCE_S = 600.0
_LONG_ANSWER = 60
"""Tokens of an answer whose speed is measured, beyond where the model would end it."""
_IDLE_S, _IDLE_SHARE = 3.0, 0.05
_NUM_DRAWS = 2_000
UNITS = ("by the clock", "of processor time", "to the end")
GREEDY = Sampling(temperature=0)
_ids = itertools.count()


class FixedStep(DraftCosts):
    """A guess that takes a share of a pass."""

    def step_s(self, passes: PassCosts) -> float:
        return passes.one_s * self.relative

    def note_steps(self, num: int, seconds: float) -> None:
        """Nothing is learnt."""


@dataclass(slots=True, kw_only=True)
class HeadCounts:
    """What some answers took. Costs are in passes over one token."""

    answers: list[list[int]] = field(default_factory=list[list[int]])
    num_generated: int = 0
    num_computed: int = 0
    """Tokens of prompts that were not reused."""
    num_passes: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    """By what guesses, not by look-ups."""
    num_guesses: int = 0
    num_first_right: int = 0
    """Of these, those whose first token was right."""
    cost: float = 0.0

    @property
    def first_share(self) -> float:
        return self.num_first_right / max(1, self.num_guesses)

    @property
    def passes_per_token(self) -> float:
        return self.num_passes / self.num_generated

    @property
    def speed(self) -> float:
        """Tokens in the time of a pass over one."""
        return self.num_generated / self.cost


class GuessedSide:
    """An engine whose passes and guesses have fixed costs, and which counts them."""

    def __init__(self, costs: Mapping[int, float], step: float, *, model: Path = DEMO, **settings: Any) -> None:
        """`costs`: of passes, by their size; `step`: of a guess, in passes."""
        self.counts = HeadCounts()
        self._costs, self._step = FixedCosts(costs), step
        self._text: list[int] = []
        self._guesses: list[tuple[int, int]] = []
        """The position of the first token of each guess, and the token."""
        self.engine = EngineClient(Settings(model=str(model), drafts="always", is_audit_off=True, **settings))
        self.engine.start()
        self.engine.call(self._prepare)

    def _prepare(self, worker: Worker) -> None:
        assert worker.drafts is not None
        worker.drafts.costs = self._costs
        if worker.head is not None:
            worker.head.costs = FixedStep(relative=self._step)
        guess = worker.runner.guess

        def noted(live: LiveSequence, num: int) -> list[int]:
            tokens = guess(live, num)
            self._guesses.append((live.position + len(live.unfed) + 1, tokens[0]))
            self.counts.cost += self._step * num
            return tokens

        worker.runner.guess = noted  # type: ignore[method-assign]
        verify = worker.runner.verify

        def counted(lives: Sequence[LiveSequence], drafts: Sequence[Sequence[int]]) -> list[TokenResult | TokenFailure]:
            (live,), (draft,) = lives, drafts
            self.counts.cost += self._costs.relative(1 + len(live.unfed) + len(draft)) - 1
            return verify(lives, drafts)

        worker.runner.verify = counted  # type: ignore[method-assign]

    def run(self, prompt: Sequence[int], num: int, stop: int) -> list[int]:
        """The answer to a prompt, which is counted."""
        self._guesses.clear()
        asked = ask(self.engine, prompt, num=num, stop=stop)
        answer, outcome = asked.tokens, asked.outcome
        counts, text = self.counts, [*prompt, *answer]
        counts.answers.append(answer)
        counts.num_generated += len(answer) - 1
        counts.num_computed += outcome.num_prefilled
        counts.num_passes += len(answer) - 1 - outcome.num_accepted
        counts.cost += len(answer) - 1 - outcome.num_accepted
        for source, drafted in outcome.drafted.items():
            if source in ("head", "draft-model"):
                counts.num_drafted += drafted.num
                counts.num_accepted += drafted.num_accepted
        known = [(text[at], token) for at, token in self._guesses if at < len(text)]
        counts.num_guesses += len(known)
        counts.num_first_right += sum(right == token for right, token in known)
        return answer

    def close(self) -> None:
        self.engine.close(timeout_s=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswer:
    """An answer, what it took, and the time from its first token to the last and to the end."""

    tokens: list[int]
    outcome: Outcome
    decode_s: float
    processor_s: float
    ended_s: float


def ask(
    engine: EngineClient, prompt: Sequence[int], *, num: int, stop: int, sampling: Sampling = GREEDY
) -> TimedAnswer:
    """The answer to a prompt, as it was sampled."""
    ended, end, answer, times = threading.Event(), list[Finished](), list[int](), list[tuple[float, float]]()

    def hear(event: Event) -> None:
        times.append((time.perf_counter(), time.process_time()))
        if isinstance(event, Sampled):
            if not answer:
                times.clear()
                times.append((time.perf_counter(), time.process_time()))
            answer.append(event.token)
        elif isinstance(event, Finished):
            end.append(event)
            ended.set()

    job = Job(
        id=f"job-{next(_ids)}",
        prompt=Prompt(tokens=as_tokens(prompt)),
        max_tokens=num,
        sampling=sampling,
        stop_tokens=frozenset({stop}),
    )
    engine.submit(job, hear)
    assert ended.wait(_PATIENCE_S) and end[0].error is None, end
    (first_s, processor_first_s), (last_s, processor_last_s), (ended_s, _) = times[0], times[-2], times[-1]
    return TimedAnswer(
        tokens=answer,
        outcome=end[0].outcome,
        decode_s=last_s - first_s,
        processor_s=processor_last_s - processor_first_s,
        ended_s=ended_s - first_s,
    )


def hold(side: GuessedSide, turns: Sequence[ReplayTurn]) -> HeadCounts:
    """Hold these chats."""
    for turn in turns:
        side.run(turn.prompt, 2 * len(turn.answer), turn.answer[-1])
    return side.counts


def chats(num: int, num_turns: int) -> list[ReplayTurn]:
    """Turns of chats as the demo's model is trained to answer them."""
    return [turn for seed in range(num) for turn, _ in demo_turns(Random(700 + seed), num_turns)]


def random_companion(directory: Path) -> Path:
    """The demo's model with random weights."""
    shutil.copytree(DEMO, directory)
    weights = random_weights(json.loads((directory / "config.json").read_text()), seed=1)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    return directory


def random_head(directory: Path) -> Path:
    """The demo's head with random weights."""
    shutil.copytree(HEAD, directory)
    weights = cast(dict[str, mx.array], mx.load(str(directory / "model.safetensors")))
    drawn = {
        name: mx.random.normal(array.shape, scale=array.shape[-1] ** -0.5, key=mx.random.key(number))
        for number, (name, array) in enumerate(sorted(weights.items()))
        if array.ndim > 1
    }
    # The file is where the others are still to be read from.
    mx.eval(weights, drawn)
    mx.save_safetensors(str(directory / "model.safetensors"), weights | drawn, metadata={"format": "mlx"})
    return directory


class TimedSide:
    """An engine as it is, and the time of its answers."""

    def __init__(self, model: Path, **settings: Any) -> None:
        self.engine = EngineClient(Settings(model=str(model), is_audit_off=True, settles=False, **settings))
        self.engine.start()
        wait_until_idle()
        self.num_drafted = self.num_accepted = 0

    def times(self, turn: ReplayTurn, sampling: Sampling) -> tuple[float, ...]:
        """Seconds per token of the answer to this turn behind the first, as in `UNITS`."""
        found = ask(self.engine, turn.prompt, num=_LONG_ANSWER, stop=-1, sampling=sampling)
        self.num_drafted += found.outcome.num_drafted
        self.num_accepted += found.outcome.num_accepted
        num = len(found.tokens) - 1
        return found.decode_s / num, found.processor_s / num, found.ended_s / num


def random_model(directory: Path, hidden: int) -> Path:
    """A `qwen3_5` with random weights whose pass takes long beside the time of the host, and its head."""
    config: dict[str, Any] = dict(MODELS["qwen3_5"])
    size = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": 8}
    config["text_config"] = {**config["text_config"], **size}
    build_model(directory, config)
    one_layer = {**config, "text_config": {**config["text_config"], **FORMATS["qwen3_5"].one_layer}}
    layer = random_weights(one_layer, seed=2)
    weights = {"mtp." + name[name.index("layers.0.") :]: value for name, value in layer.items() if "layers.0." in name}
    weights["mtp.fc.weight"] = mx.random.normal((hidden, 2 * hidden), scale=hidden**-0.5, key=mx.random.key(3))
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        weights[f"mtp.{name}.weight"] = mx.ones((hidden,))
    mx.save_safetensors(str(directory / "mtp.safetensors"), weights, metadata={"format": "mlx"})
    return directory


def wait_until_idle() -> None:
    """Wait until this process has done nothing for a while: an engine tries its drafts when it has been quiet."""
    quiet_since, before = time.monotonic(), time.process_time()
    while time.monotonic() - quiet_since < _IDLE_S:
        time.sleep(0.1)
        now = time.process_time()
        if now - before > _IDLE_SHARE * 0.1:
            quiet_since = time.monotonic()
        before = now


def speed_interval(plain: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Where 95 % of the ratios of sums lie, over turns drawn anew."""
    random, num = Random(1), len(plain)
    ratios = list[float]()
    for _ in range(_NUM_DRAWS):
        drawn = random.choices(range(num), k=num)
        ratios.append(sum(plain[k] for k in drawn) / sum(other[k] for k in drawn))
    ratios.sort()
    return ratios[_NUM_DRAWS // 40], ratios[-_NUM_DRAWS // 40]


def demo_sides(folder: Path) -> dict[str, TimedSide]:
    return {
        "without": TimedSide(DEMO, drafts="off"),
        "again": TimedSide(DEMO, drafts="off"),
        "looked up": TimedSide(DEMO, drafts="auto", mtp="off"),
        "head": TimedSide(DEMO, drafts="auto", mtp=str(HEAD)),
        "random": TimedSide(DEMO, drafts="auto", mtp=str(random_head(folder / "random"))),
    }


def random_sides(folder: Path, hidden: int) -> dict[str, TimedSide]:
    model = random_model(folder, hidden)
    return {
        "without": TimedSide(model, drafts="off"),
        "again": TimedSide(model, drafts="off"),
        "looked up": TimedSide(model, drafts="auto", mtp="off"),
        "random": TimedSide(model, drafts="auto", mtp="auto"),
    }


def measure(sides: Mapping[str, TimedSide], num_chats: int, num_turns: int, temperature: float) -> None:
    """Print how many times as fast answers with a head are as those without, as measured."""
    orders = itertools.cycle(itertools.permutations(sides))
    times: dict[str, list[tuple[float, ...]]] = {name: [] for name in sides}
    for number in range(num_chats):
        for seed, (turn, _) in enumerate(demo_turns(Random(800 + number), num_turns)):
            for name in next(orders):
                sampling = Sampling(temperature=temperature, seed=1_000 * number + seed)
                times[name].append(sides[name].times(turn, sampling))
    for side in sides.values():
        side.engine.close(timeout_s=30)
    for name, side in sides.items():
        print(
            f"{name}: {side.num_accepted:,} of {side.num_drafted:,} guessed tokens accepted, {len(times[name])} turns"
        )
        for base in ("without", "looked up"):
            print(f"    beside {base:9}", end="")
            columns = zip(UNITS, zip(*times[base], strict=True), zip(*times[name], strict=True), strict=True)
            for unit, plain, own in columns:
                low, high = speed_interval(plain, own)
                print(f" {sum(plain) / sum(own):.3f} ({low:.3f} to {high:.3f}) {unit};", end="")
            print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=2)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--costs", choices=sorted(COSTS), default="memory")
    parser.add_argument("--measure", type=int, default=0, help="chats whose answers are timed instead")
    parser.add_argument("--temperature", type=float, default=0.0, help="of timed answers: at 3 no guess is right")
    parser.add_argument("--hidden", type=int, default=0, help="time a random model of this width, not the demo's")
    options = parser.parse_args()
    if options.measure > 0:
        with tempfile.TemporaryDirectory(prefix="reprise-bench-") as folder:
            timed = random_sides(Path(folder), options.hidden) if options.hidden else demo_sides(Path(folder))
            measure(timed, options.measure, options.turns, options.temperature)
        return
    turns, costs = chats(options.chats, options.turns), COSTS[options.costs]
    with tempfile.TemporaryDirectory(prefix="reprise-bench-") as folder:
        random = random_companion(Path(folder) / "random")
        sides: dict[str, dict[str, Any]] = {
            "looked up": {},
            "head": {"mtp": str(HEAD)},
            "same": {"draft_model": str(DEMO)},
            "random": {"draft_model": str(random)},
        }
        plain: HeadCounts | None = None
        for name, settings in sides.items():
            side = GuessedSide(costs, STEPS.get(name, 0.0), **settings)
            found = hold(side, turns)
            side.close()
            plain = found if plain is None else plain
            same = sum(one == other for one, other in zip(found.answers, plain.answers, strict=True))
            print(
                f"{name:9} {found.passes_per_token:.3f} passes per token; first guesses right {found.first_share:.3f}, "
                f"{found.num_accepted:,} of {found.num_drafted:,} guessed tokens accepted; {found.speed:.2f} tokens in "
                f"the time of a pass; {found.num_computed:,} tokens of prompts computed; {same} of "
                f"{len(found.answers)} answers the same",
                flush=True,
            )


if __name__ == "__main__":
    main()
