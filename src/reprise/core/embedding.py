"""Embeddings: what an embedder is for the API, and the records that go to the engine and come back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from reprise.core.tokens import Tokens

Vectors = npt.NDArray[np.float32]
"""One vector per input, shape ``(inputs, dimensions)``; of a reranker one score, in a single dimension."""


class Pooling(StrEnum):
    """Which hidden states make the vector of a text."""

    CLS = "cls"
    """The first token's."""
    MEAN = "mean"
    """All tokens' on average."""
    LAST = "last"
    """The last token's."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmbeddingInput:
    """One text, or a query and a document that a reranker reads together."""

    tokens: Tokens
    num_first: int | None = None
    """Of a pair: the tokens of the first segment; None: there is one."""

    def __post_init__(self) -> None:
        assert len(self.tokens) > 0, "an input has a token"
        assert self.num_first is None or 0 < self.num_first <= len(self.tokens), self


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Embedder:
    """What the API needs of a model that makes vectors instead of text. Safe to use from several threads."""

    encode: Callable[[str], Sequence[int]]
    """The tokens of a text as the model was trained on it, with its special tokens."""
    encode_pair: Callable[[str, str], EmbeddingInput] | None = None
    """Of a reranker: the input for a query and a document; None: it makes vectors."""
    num_dimensions: int
    num_suffix: int = 0
    """The tokens that `encode` puts behind a text."""
    max_tokens: int | None = None
    """The longest input; None: not specified."""
    vocab_size: int
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    """Texts that stand before an input, by name, as `config_sentence_transformers.json` has them."""
    summary: str = ""
    """How it makes its vectors, in a few words."""

    def truncated(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens without what is too long, in front of those that stand behind each text."""
        if self.max_tokens is None or len(tokens) <= self.max_tokens:
            return tokens
        num_kept = max(1, self.max_tokens - self.num_suffix)
        return [*tokens[:num_kept], *tokens[len(tokens) - self.num_suffix :]][: self.max_tokens]

    @property
    def is_reranker(self) -> bool:
        """Whether it scores pairs and makes no vectors."""
        return self.encode_pair is not None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmbeddingJob:
    """The inputs of one request. Inputs of other namespaces never answer for them."""

    id: str
    inputs: tuple[EmbeddingInput, ...]
    namespace: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(len(each.tokens) for each in self.inputs)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmbeddingResult:
    """The vectors of a job, in the order of its inputs, and how they came about; counts in tokens, times in seconds."""

    vectors: Vectors
    num_tokens: int
    num_repeated: int
    """Of inputs whose vectors were there already, or that stood twice in the job."""
    num_passes: int
    queued_s: float
    total_s: float

    def __post_init__(self) -> None:
        assert 0 <= self.num_repeated <= self.num_tokens, self
