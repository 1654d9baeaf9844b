from collections.abc import Mapping
from typing import Any, Self

from mlx import nn

class ModelArgs:
    hidden_size: int
    num_hidden_layers: int
    num_kv_shared_layers: int
    rms_norm_eps: float
    vocab_size: int
    layer_types: list[str]
    @classmethod
    def from_dict(cls, params: Mapping[str, Any]) -> Self: ...

class DecoderLayer(nn.Module):
    layer_type: str
    def __init__(self, config: ModelArgs, layer_idx: int) -> None: ...
