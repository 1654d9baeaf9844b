"""What a chat is in tokens, found without the server: with the template and the tokenizer as mlx-lm loads them."""

from collections.abc import Sequence
from pathlib import Path

from mlx_lm.tokenizer_utils import load

from reprise.core.tokens import Tokens, as_tokens


class LocalTokenizer:
    """The tokenizer and the template of a model directory."""

    def __init__(self, directory: Path) -> None:
        # Through mlx-lm, since transformers changes how some architectures split digits, whatever the file says.
        self._tokenizer = load(directory)
        self._ids = {self._tokenizer.decode([token]): token for token in range(len(self._tokenizer))}

    def prompt(self, history: Sequence[object]) -> Tokens:
        """The tokens of the chat, ready for the answer."""
        return as_tokens(self._tokenizer.apply_chat_template(list(history), add_generation_prompt=True))

    def answer(self, texts: Sequence[str]) -> Tokens:
        """The ids of tokens given by their texts. Raises KeyError for a text that is no token."""
        return as_tokens([self._ids[text] for text in texts])
