from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

class TokenizerWrapper:
    """A tokenizer of transformers, and what mlx-lm has found out about its model. What is not here is the former's."""

    has_chat_template: bool
    think_start: str | None
    think_end: str | None
    think_start_tokens: Sequence[int] | None
    think_end_tokens: Sequence[int] | None
    tool_call_start: str | None
    tool_call_end: str | None
    tool_parser: Callable[..., Any] | None
    structural_markers: Sequence[str]
    response_transitions: Mapping[str, Sequence[tuple[str, str]]]
    response_initial_state: str | None
    eos_token_ids: set[int]
    @property
    def detokenizer(self) -> Any: ...
    def __len__(self) -> int: ...
    def apply_chat_template(self, conversation: Sequence[Any], /, *, tokenize: bool = True, **options: Any) -> Any: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...

def load(model_path: Path) -> TokenizerWrapper: ...
