from pathlib import Path
from typing import Any, Literal

from mlx import nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

def load(
    path_or_hf_repo: str,
    tokenizer_config: dict[str, Any] | None = None,
    *,
    lazy: bool = False,
    return_config: Literal[True],
) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]: ...

DEFAULT_ALLOW_PATTERNS: list[str]

def load_config(model_path: Path) -> dict[str, Any]: ...
def load_adapters(model: nn.Module, adapter_path: str) -> nn.Module: ...
def load_tokenizer(
    model_path: str, tokenizer_config_extra: dict[str, Any] | None = None, eos_token_ids: int | list[int] | None = None
) -> TokenizerWrapper: ...
def hf_repo_to_path(hf_repo: str) -> Path: ...
def save_config(config: dict[str, Any], config_path: Path) -> None: ...
def _get_classes(config: dict[str, Any]) -> tuple[type[Any], type[Any]]: ...
