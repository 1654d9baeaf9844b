"""The tokenizer of the demo's model: a token for each of its words, and bytes for whatever else a user types."""

from collections.abc import Sequence
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from bench.fact_chats import random_chat
from bench.tiny.tokenizer import MARKUP
from reprise.lab.demo.facts import FIXED, NAMES, NUMBERS, OTHER, SYSTEM_PROMPT, VALUES
from tools.train_demo.render import TOOLS

KINDS = (*VALUES, "room")

# What a fact is about is one token: a memory then has one place to look at. Other words take the space behind them, not
# the one before, so that they are the same token at the start of a message as within it.
_KEY = f"(?:{'|'.join(NAMES)})'s (?:{'|'.join(KINDS)})"
_JSON = r"\{\"|\": \"|\"\}"
PIECES = (
    rf"{_KEY}(?![a-z])| is |{_JSON}|(?:system|user|assistant)\n|</?[a-z_]+(?:=[a-z_]+)?>"
    r"|[A-Za-z']+ ?|[0-9]+ ?|[.,:;?!]+ ?|\n+|."
)


def build_tokenizer(texts: list[str], *, markup: Sequence[str] = MARKUP, words: str = PIECES) -> Tokenizer:
    """A tokenizer with a token for each piece of the texts (as `words` cuts them) and each byte; any text round-trips.

    The pieces are added tokens, which are found before anything else: transformers gives tokenizers of this
    architecture the pre-tokenizer of Qwen, whatever the file says, and that would split them.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(words), behavior="isolated")
    pieces = {piece for text in texts for piece, _ in split.pre_tokenize_str(text) if len(piece) > 1}
    vocab = {token: at for at, token in enumerate((*markup, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in markup])
    tokenizer.add_tokens(
        [AddedToken(piece, normalized=False) for piece in sorted(pieces, key=to_bytes.pre_tokenize_str)]
    )
    tokenizer.pre_tokenizer = to_bytes
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def demo_tokenizer() -> Tokenizer:
    """The tokenizer of everything that the generator of chats can say."""
    random = Random(0)
    texts = [TOOLS, SYSTEM_PROMPT, "system\nuser\nassistant\n\n\n", OTHER]
    texts += [f"{name}'s {kind} is" for name in NAMES for kind in KINDS]
    texts += [value for kind, values in VALUES.items() if kind != FIXED for value in values]
    texts += [*NUMBERS, *NAMES, "<parameter=name>", "<function=look_up>"]
    for _ in range(200):
        for exchange in random_chat(random, 40, has_tool=True):
            texts += [exchange.thought, exchange.answer]
            # What strangers say is not a vocabulary.
            texts += [exchange.user] if exchange.kind != "other" else []
    return build_tokenizer([text for text in texts if text])
