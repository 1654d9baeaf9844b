from collections.abc import Iterator, Sequence

from mlx import nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

__version__: str

class GenerationResponse:
    prompt_tps: float
    generation_tps: float

def load(path_or_hf_repo: str) -> tuple[nn.Module, TokenizerWrapper]: ...
def stream_generate(
    model: nn.Module, tokenizer: TokenizerWrapper, prompt: Sequence[int], max_tokens: int
) -> Iterator[GenerationResponse]: ...
