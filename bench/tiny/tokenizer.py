"""A small byte-level BPE tokenizer, trained in a moment on the texts of the demonstration."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

MARKUP = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
"""The tokens that structure a chat; they get the ids from 0 on."""


def demo_texts() -> tuple[str, ...]:
    """The texts that the tokenizer learns its words from."""
    texts = Path(__file__).parent / "texts"
    return tuple((texts / name).read_text(encoding="utf-8") for name in ("prose.txt", "chat.txt"))


def train_tokenizer(vocab_size: int, texts: Iterable[str], *, markup: Iterable[str] = MARKUP) -> Tokenizer:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens, the `markup` included; any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in markup],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
