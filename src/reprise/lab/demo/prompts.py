"""What a chat is in tokens, found without the server: with the template and the tokenizer as mlx-lm loads them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import load

from reprise.core.tokens import Tokens, as_tokens


class LocalTokenizer:
    """The tokenizer and the template of a model directory."""

    def __init__(self, directory: Path, *, tools: Sequence[object] = ()) -> None:
        self._tools = list(tools) or None
        # Through mlx-lm, since transformers changes how some architectures split digits, whatever the file says.
        self._tokenizer = load(directory)
        self._ids = {self._tokenizer.decode([token]): token for token in range(len(self._tokenizer))}

    def prompt(self, history: Sequence[Mapping[str, Any]]) -> Tokens:
        """The tokens of the chat, ready for the answer."""
        return as_tokens(
            self._tokenizer.apply_chat_template(
                [_parsed(message) for message in history], tools=self._tools, add_generation_prompt=True
            )
        )

    def answer(self, texts: Sequence[str]) -> Tokens:
        """The ids of tokens given by their texts. Raises KeyError for a text that is no token."""
        return as_tokens([self._ids[text] for text in texts])


def _parsed(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as templates want it: the arguments of calls as objects, which the API sends as JSON."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)
