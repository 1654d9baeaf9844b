"""Trains a head for the demo's model, which stays as it is: `python -m tools.train_demo.train_head OUT`.

The head guesses the token behind the next one, from that next token and the model's hidden state before it. It learns
what the model says, not what the chats say: a guess is right if the model would have chosen the same.
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

import reprise.lab.demo
from tools.train_demo.render import ChatRenderer
from tools.train_demo.train import ChatSource, Log, pad
from tools.train_demo.twin import RMSNorm, Twin, TwinLayer
from tools.train_demo.vocabulary import demo_tokenizer

SHIPPED = Path(reprise.lab.demo.__file__).parent / "model"
_CHAINED = 0.5
"""The weight of the second guess of a chain, which builds on the first."""


class TrainedHead(nn.Module):
    """One full-attention layer over [embedding of the next token, hidden state before it]; names as in checkpoints."""

    def __init__(self, config: dict[str, object]) -> None:
        super().__init__()
        width = int(str(config["hidden_size"]))
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = RMSNorm(width), RMSNorm(width)
        self.layers = nn.ModuleList([TwinLayer(config, is_linear=False)])
        self.norm = RMSNorm(width)
        for name, value in self.named_parameters():
            if value.ndim == 2:
                is_output = any(part in name for part in ("o_proj", "down_proj"))
                nn.init.normal_(value, std=value.shape[1] ** -0.5 * (0.05 if is_output else 1.0))

    def forward(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)], -1))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def load_twin(directory: Path) -> tuple[Twin, dict[str, object]]:
    """The model in this directory with frozen weights, and its `text_config`."""
    config = json.loads((directory / "config.json").read_text())["text_config"]
    twin = Twin(config)
    prefix = "language_model.model."
    weights = load_file(directory / "model.safetensors")
    twin.load_state_dict(
        {
            name.removeprefix(prefix): value.transpose(1, 2) if "conv1d" in name else value
            for name, value in weights.items()
        }
    )
    return twin.requires_grad_(False), config


def hidden_states(twin: Twin, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The embeddings of all tokens, and the hidden state behind each, after the last norm."""
    embeddings = twin.embed_tokens(tokens)
    x = embeddings
    for layer in twin.layers:
        x = layer(x)
    return embeddings, twin.norm(x)


def train(head: TrainedHead, twin: Twin, renderer: ChatRenderer, options: argparse.Namespace) -> None:
    """Train for `options.minutes` or steps; the rate rises in the first fifty steps and falls in the last half."""
    log = Log(options.out / "log.jsonl")
    optimizer = torch.optim.Adam(head.parameters(), lr=options.rate, betas=(0.9, 0.98))
    source = ChatSource(renderer, seed=2000 + options.seed, tokens=options.tokens)
    started, step = time.monotonic(), 0
    shares = [0.0, 0.0]
    while (share := max((time.monotonic() - started) / (60 * options.minutes), step / options.steps)) < 1:
        tokens, learns = pad(source.batch())
        with torch.no_grad():
            embeddings, hidden = hidden_states(twin, tokens)
        loss = torch.zeros(())
        guess = hidden
        for depth in (1, 2):
            # Entry j stands for token j + depth, which the model has chosen behind hidden state j + depth - 1.
            guess = head(embeddings[:, depth:], guess[:, :-1])
            where = learns.roll(-1, 1)[:, depth:].clone()
            where[:, -1] = False
            with torch.no_grad():
                wanted = functional.linear(hidden[:, depth:][where], twin.embed_tokens.weight)
            logits = functional.linear(guess[where], twin.embed_tokens.weight)
            each = functional.cross_entropy(logits, wanted.softmax(-1))
            loss = loss + each * (1.0 if depth == 1 else _CHAINED)
            agrees = (logits.argmax(-1) == wanted.argmax(-1)).float().mean().item()
            shares[depth - 1] += (agrees - shares[depth - 1]) * (1.0 if step == 0 else 0.05)
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = options.rate * min(1.0, (step + 1) / 50) * max(0.02, min(1.0, 2 * (1 - share)))
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 50 == 0:
            minutes = round((time.monotonic() - started) / 60, 2)
            log.say(step=step, minutes=minutes, loss=round(loss.item(), 4), right=[round(each, 4) for each in shares])
        if step % 200 == 0:
            save(head, options.out, source_config=options.config)
    save(head, options.out, source_config=options.config)


def save(head: TrainedHead, directory: Path, *, source_config: dict[str, object]) -> None:
    """Write the head as a folder that `--mtp` takes."""
    weights = {f"mtp.{name}": value.contiguous() for name, value in head.state_dict().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "mlx"})
    config = {"model_type": "qwen3_5_mtp", "text_config": source_config}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="a directory for the head and the log")
    parser.add_argument("--model", type=Path, default=SHIPPED)
    parser.add_argument("--minutes", type=float, default=60.0, help="at most")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--tokens", type=int, default=1500, help="tokens in a batch, about")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    twin, options.config = load_twin(options.model)
    train(TrainedHead(options.config), twin, ChatRenderer(demo_tokenizer()), options)


if __name__ == "__main__":
    main()
