"""The bodies of Ollama's API. Other fields are refused by name, ignored, or noted."""

from typing import Annotated, Any, Literal

from pydantic import Field

from reprise.api.http.body import Body, Needs
from reprise.api.openai.chat_body import ToolSpec

IGNORED = frozenset({"keep_alive", "truncate", "shift", "dimensions", "verbose"})
"""Fields of the API that have no effect here: the model stays loaded, and a chat that is too long is refused."""

REFUSED = {
    "adapters": "Start the server with a model that has them.",
    "modelfile": "Start the server with the model you want.",
}

IGNORED_OPTIONS = frozenset(
    {
        "embedding_only",
        "f16_kv",
        "logits_all",
        "low_vram",
        "main_gpu",
        "mirostat_eta",
        "mirostat_tau",
        "num_batch",
        "num_ctx",
        "num_gpu",
        "num_keep",
        "num_thread",
        "numa",
        "penalize_newline",
        "use_mlock",
        "use_mmap",
        "vocab_only",
    }
)
"""How Ollama loads a model and what it forgets of a long chat: the server's own options say that here."""


class Options(Body):
    """Sampling, under Ollama's names."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    num_predict: int | None = None
    """-1, -2 and 0: as much as there is room for."""
    num_ctx: int | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    """0: no penalty; -1: over the whole context."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    mirostat: int | None = None
    typical_p: float | None = None
    tfs_z: float | None = None


class Function(Body):
    name: str
    arguments: Any = None


class Call(Body):
    function: Function
    id: str | None = None


class OllamaMessage(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    """In Base64."""
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class AnswerBody(Body):
    """What `/api/chat` and `/api/generate` have in common."""

    model: str | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    stream: bool | None = None
    """By default the answer streams."""
    keep_alive: str | float | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None


class OllamaChatBody(AnswerBody):
    """A chat to answer; without messages the model is loaded, which it is."""

    messages: list[OllamaMessage] | None = None
    tools: list[ToolSpec] | None = None


class GenerateBody(AnswerBody):
    """A prompt to answer, as a chat of one message unless it is `raw` or a `suffix` gives the text after the answer."""

    prompt: str | None = None
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None


class ShowBody(Body):
    model: str | None = None
    name: str | None = None


class PullBody(Body):
    """A model of the hub to fetch."""

    needs = Needs.NO_MODEL
    model: str | None = None
    name: str | None = None
    stream: bool | None = None
    insecure: bool | None = None
    """Without effect: where the hub is, the server's environment says."""


class DeleteBody(Body):
    """A model to remove from the hub's cache."""

    needs = Needs.NO_MODEL
    model: str | None = None
    name: str | None = None
