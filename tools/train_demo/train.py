"""Trains the demo's model on chats that it makes up: `python -m tools.train_demo.train OUT`.

The weights are saved now and then, so that any moment's can be exported; `docs/demo-model.md` has the recipe.
"""

import argparse
import json
import math
import random
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.fact_chats import random_chat
from reprise.lab.demo.facts import FactExchange
from tools.train_demo.render import ChatRenderer, TrainingChat
from tools.train_demo.twin import CHUNK, Twin, demo_config
from tools.train_demo.vocabulary import demo_tokenizer

SHORTEST, LONGEST = 8, 56
TOKENS_PER_TURN = 24
EVALUATE_EVERY = 200
"""Steps."""


class ChatSource:
    """Chats of about the same length together, so that little is padding."""

    def __init__(self, renderer: ChatRenderer, *, seed: int, tokens: int) -> None:
        self._renderer, self._random, self._tokens = renderer, random.Random(seed), tokens

    def batch(self) -> list[TrainingChat]:
        draw = self._random
        num_turns = round(math.exp(draw.uniform(math.log(SHORTEST), math.log(LONGEST))))
        return [self.chat(num_turns) for _ in range(max(1, self._tokens // (num_turns * TOKENS_PER_TURN)))]

    def chat(self, num_turns: int) -> TrainingChat:
        draw = self._random
        has_tool = draw.random() < 0.6
        return self._renderer.chat(
            random_chat(draw, num_turns, has_tool=has_tool),
            has_tool=has_tool,
            has_system=draw.random() < 0.5,
            keeps_thoughts=draw.random() < 0.5,
            thinks=draw.random() > 0.1,
        )


def pad(chats: list[TrainingChat]) -> tuple[Tensor, Tensor]:
    """Tokens [batch, longest], and which of them the model learns to write."""
    longest = max(len(chat.tokens) for chat in chats)
    longest += -longest % CHUNK
    tokens = torch.zeros(len(chats), longest, dtype=torch.long)
    learns = torch.zeros(len(chats), longest, dtype=torch.bool)
    for row, chat in enumerate(chats):
        tokens[row, : len(chat.tokens)] = torch.tensor(chat.tokens)
        learns[row, : len(chat.tokens)] = torch.tensor(chat.learns)
    return tokens, learns


def evaluate(model: Twin, source: ChatSource, *, num_chats: int) -> dict[str, str]:
    """Shares of right answers in chats of forty turns, by kind and by how long ago the fact was mentioned.

    Quick rather than exact: every answer is judged token by token as if the ones before it were right, and those to
    earlier turns have no thought. `evaluate.py` has the model speak for itself.
    """
    counts: dict[str, list[bool]] = defaultdict(list)
    model.eval()
    for _ in range(num_chats // 4):
        chats = [source.chat(40) for _ in range(4)]
        tokens, learns = pad(chats)
        where = learns.roll(-1, 1)
        # What is not learned is not judged.
        right = torch.ones_like(where)
        with torch.no_grad():
            right[where] = model(tokens, where).argmax(-1) == tokens.roll(-1, 1)[where]
        for row, chat in enumerate(chats):
            for span in chat.spans:
                if any(chat.learns[span.start : span.stop]):
                    is_right = bool(right[row, span.start - 1 : span.stop - 1].all())
                    counts["last" if span.is_final else "earlier"].append(is_right)
                    counts[_name(span.exchange)].append(is_right)
    model.train()
    return {name: f"{100 * sum(found) / len(found):.1f} % of {len(found)}" for name, found in sorted(counts.items())}


def _name(exchange: FactExchange) -> str:
    if exchange.age == 0:
        return exchange.measure
    far = next(name for limit, name in ((3, "1-3"), (8, "4-8"), (16, "9-16"), (99, "17+")) if exchange.age <= limit)
    return f"{exchange.measure} {far}"


def orthogonal(gradient: Tensor) -> Tensor:
    """The nearest orthogonal matrix, by five Newton-Schulz steps (the Muon optimizer of Jordan et al., 2024)."""
    x = gradient / (gradient.norm() + 1e-7)
    if is_tall := x.shape[0] > x.shape[1]:
        x = x.T
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if is_tall else x


class Optimizer:
    """Muon for the matrices between hidden layers, Adam for everything else, slower in attention."""

    def __init__(self, model: Twin, *, muon_rate: float, adam_rate: float, attention_rate: float) -> None:
        small = ("embed", "in_proj_a", "in_proj_b", "conv1d", "self_attn")
        by_name = dict(model.named_parameters())
        names = {name for name, p in by_name.items() if p.ndim == 2 and not any(part in name for part in small)}
        self._matrices = [by_name[name] for name in sorted(names)]
        self._momentum = [torch.zeros_like(weight) for weight in self._matrices]
        self._muon_rate = muon_rate
        attention = [p for name, p in by_name.items() if "self_attn" in name]
        others = [p for name, p in by_name.items() if name not in names and "self_attn" not in name]
        self._adam = torch.optim.Adam(
            [
                {"params": others, "full_rate": adam_rate},
                {"params": attention, "full_rate": attention_rate},
            ],
            betas=(0.9, 0.98),
        )

    def step(self, scale: float) -> None:
        """Change the weights after a backward pass, by `scale` of the full rates, and clear the gradients."""
        for group in self._adam.param_groups:
            group["lr"] = group["full_rate"] * scale
        self._adam.step()
        self._adam.zero_grad()
        rate = self._muon_rate * scale
        with torch.no_grad():
            for weight, momentum in zip(self._matrices, self._momentum, strict=True):
                assert weight.grad is not None
                momentum.lerp_(weight.grad, 0.05)
                direction = orthogonal(weight.grad.lerp(momentum, 0.95))
                tall = max(1, weight.shape[0] / weight.shape[1]) ** 0.5
                weight.mul_(1 - rate * 0.02).add_(direction, alpha=-rate * tall)
                weight.grad = None


class Log:
    """What happened, as JSON lines on the screen and in a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def say(self, **facts: object) -> None:
        line = json.dumps(facts)
        print(line, flush=True)
        print(line, file=self._file, flush=True)


def train(model: Twin, renderer: ChatRenderer, options: argparse.Namespace) -> None:
    """Train for `options.minutes` or steps: a short warm-up, then full rates, which fall in the last two fifths."""
    log = Log(options.out / "log.jsonl")
    log.say(num_parameters=sum(p.numel() for p in model.parameters()), **{k: str(v) for k, v in vars(options).items()})
    optimizer = Optimizer(
        model,
        muon_rate=options.muon_rate,
        adam_rate=options.adam_rate,
        attention_rate=options.attention_rate,
    )
    source = ChatSource(renderer, seed=1000 + options.seed, tokens=options.tokens)
    started, num_tokens, step, mean = time.monotonic(), 0, 0, 0.0
    while (share := max((time.monotonic() - started) / (60 * options.minutes), step / options.steps)) < 1:
        chats = source.batch()
        tokens, learns = pad(chats)
        where = learns.roll(-1, 1)
        loss = functional.cross_entropy(model(tokens, where), tokens.roll(-1, 1)[where])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(min(1.0, (step + 1) / 50) * max(0.02, min(1.0, 2.5 * (1 - share))))
        num_tokens += sum(len(chat.tokens) for chat in chats)
        step += 1
        mean = loss.item() if step == 1 else 0.98 * mean + 0.02 * loss.item()
        elapsed = time.monotonic() - started
        if step % 100 == 0:
            log.say(step=step, num_tokens=num_tokens, minutes=round(elapsed / 60, 2), loss=round(mean, 4))
        if step % EVALUATE_EVERY == 0:
            _save(model, log, renderer, options, step=step, num_chats=24)
    _save(model, log, renderer, options, step=step, num_chats=100)


def _save(
    model: Twin, log: Log, renderer: ChatRenderer, options: argparse.Namespace, *, step: int, num_chats: int
) -> None:
    torch.save(model.state_dict(), options.out / "model.pt")
    # The same chats each time, of a seed that training does not draw from.
    log.say(step=step, right=evaluate(model, ChatSource(renderer, seed=990_000, tokens=0), num_chats=num_chats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="a directory for the weights and the log")
    parser.add_argument("--minutes", type=float, default=math.inf, help="at most")
    parser.add_argument("--steps", type=int, default=1300)
    parser.add_argument("--tokens", type=int, default=2000, help="tokens in a batch, about")
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--adam-rate", type=float, default=3e-3)
    parser.add_argument("--attention-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="weights to start from")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = demo_tokenizer()
    vocab_size = -(-tokenizer.get_vocab_size() // 32) * 32
    config = demo_config(vocab_size)
    (options.out / "config.json").write_text(json.dumps(config, indent=2))
    model = Twin(config)
    if options.resume is not None:
        model.load_state_dict(torch.load(options.resume))
    train(model, ChatRenderer(tokenizer), options)


if __name__ == "__main__":
    main()
