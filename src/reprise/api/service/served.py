"""The model that a server serves, as the API sees it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from reprise.api.http.limits import Limits
from reprise.api.service.image_parts import ImageLimits, image_limits
from reprise.api.service.unread import (
    NO_QUESTION,
    ReadablePart,
    RefusedQuestions,
    Speaker,
    UnreadParts,
    newest_question_at,
    question_of,
)
from reprise.chat.grammars.grammar import Grammars
from reprise.chat.rendering.render import Renderer, RenderSettings
from reprise.chat.text_model import TextModel
from reprise.core.embedding import Embedder
from reprise.core.errors import BadRequest, UnknownModel, prompt_too_long
from reprise.core.job import Number, SamplingDefaults
from reprise.core.settings import Settings

if TYPE_CHECKING:
    # At run time this module, and with it the API, is used without MLX.
    from reprise.engine.models.load import LoadedModel

ENDLESS = 32_768
"""Tokens of an answer that nobody bounds, by a model whose context is not known: one that repeats itself has to end."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """`id` is what `GET /v1/models` says. `context` is in tokens, prompt and answer together; None: not known.

    `created` is when the server started, in Unix seconds. With `accepts_any_name` a request may name any model.
    """

    id: str
    text: TextModel
    renderer: Renderer
    grammars: Grammars
    context: int | None = None
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    """Of requests that do not say."""
    template_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """For the chat template, where a request does not say otherwise."""
    created: int = 0
    architecture: str = ""
    """The model's type, as its configuration names it; empty: not known."""
    layers: str = ""
    """So many of which kind, in words; empty: not known."""
    nbytes: int = 0
    """Of the weights; 0: not known."""
    num_parameters: int | None = None
    quantisation: str = ""
    """The weights' format in a few words; empty: not known."""
    accepts_any_name: bool = False
    adapter_names: tuple[str, ...] = ()
    """What requests may call the adapter that the model has; none: it has no adapter."""
    image_limits: ImageLimits | None = None
    """Of a model that sees images; None: it does not."""
    embedder: Embedder | None = None
    """Of a model that makes vectors or scores; None: it makes text."""
    refused_questions: RefusedQuestions = field(default_factory=RefusedQuestions)
    """Questions with images and the like that were refused, so that the chats they stand in can go on."""

    def check_name(self, name: str | None) -> None:
        """Raise UnknownModel unless a request that names this model can be served. None means the served model."""
        if name is None or self.accepts_any_name or name in (self.id, PurePath(self.id).name):
            return
        raise UnknownModel(
            f"The model {name!r} is not served here. Use {self.id!r}, leave `model` out, "
            "or start the server with --any-model."
        )

    def check_makes_text(self) -> None:
        """Raise BadRequest for an embedder."""
        if self.embedder is not None:
            makes, where = ("scores", "rerank") if self.embedder.is_reranker else ("embeddings", "embeddings")
            raise BadRequest(f"{self.id} makes {makes} and does not answer chats. Use /v1/{where}.", param="model")

    def check_adapter(self, name: str | None) -> None:
        """Raise UnknownModel unless a request that names this adapter can be served. None means the model as it is."""
        if name is not None and name not in self.adapter_names:
            raise unknown_adapter(name, self.adapter_names[:1])

    def max_answer_tokens(self, num_prompt: int, wanted: int | None) -> int:
        """How many of the `wanted` tokens (None: as many as there are) fit after a prompt.

        Raises ContextTooLong if not even one does.
        """
        if self.context is None:
            return ENDLESS if wanted is None else wanted
        room = self.context - num_prompt
        if room < 1:
            raise prompt_too_long(num_prompt, self.context)
        return room if wanted is None else min(wanted, room)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a body is read for: the model that it asks, the server's limits, and the caller's namespace."""

    served: Served
    limits: Limits
    namespace: str = ""

    def check_num(self, *, messages: int = 0, tools: int = 0, param: str = "messages") -> None:
        """Raise BadRequest for more messages, which are in `param`, or more tools than one request may have."""
        if messages > self.limits.max_messages:
            raise BadRequest(
                f"Too many messages: at most {self.limits.max_messages} are accepted. Send fewer.", param=param
            )
        if tools > self.limits.max_tools:
            raise BadRequest(
                f"Too many tools: at most {self.limits.max_tools} are accepted. Send fewer.", param="tools"
            )

    def stops(self, given: str | Sequence[str] | None, *, param: str = "stop") -> tuple[str, ...]:
        """The stop strings of a request. Raises BadRequest."""
        stops = (given,) if isinstance(given, str) else tuple(given or ())
        if len(stops) > self.limits.max_stops:
            most = f"at most {self.limits.max_stops} are accepted"
            raise BadRequest(f"`{param}` has {len(stops)} strings; {most}.", param=param)
        if "" in stops:
            raise BadRequest(f"`{param}` contains an empty string, which would end every answer at once.", param=param)
        return stops

    def top_k(self, given: int | None) -> int | None:
        """The number of likeliest tokens, 0 where that is off. Raises BadRequest for more than there are."""
        vocab_size = self.served.text.vocab_size
        if given is not None and given > vocab_size:
            raise BadRequest(f"`top_k` is {given}, but the vocabulary has only {vocab_size} tokens.", param="top_k")
        return None if given is None else max(0, given)

    def unread(
        self, messages: Sequence[tuple[Speaker, str | Sequence[ReadablePart] | None]], *, is_asked: bool
    ) -> UnreadParts:
        """What stands for the parts of messages, by speaker and content, that the model does not read.

        `is_asked`: they are to be answered, so a refused question is remembered.
        """
        at = newest_question_at([speaker for speaker, _ in messages])
        return UnreadParts(
            at,
            NO_QUESTION if at is None else question_of(messages[at][1]),
            refused=self.served.refused_questions if is_asked else None,
            namespace=self.namespace,
            images=self.served.image_limits,
        )


def unknown_adapter(name: str, served: Sequence[str]) -> UnknownModel:
    """The refusal of an adapter that is none of those that are served."""
    use = "" if not served else f"use {' or '.join(map(repr, served))}, "
    return UnknownModel(
        f"The adapter {name!r} is not served here: {use}leave `adapters` out, or start the server with --adapter."
    )


def names_of_adapter(path: str | None) -> tuple[str, ...]:
    """What requests may call the adapter in this directory."""
    return () if path is None else (path, PurePath(path).name)


def served_model(loaded: "LoadedModel", settings: Settings, *, text: TextModel | None = None) -> Served:
    """The loaded model as the API sees it. `text`: with another template; None: the model's."""
    text = loaded.text if text is None else text
    bounds = [bound for bound in (settings.max_context, loaded.context) if bound is not None]
    return Served(
        id=loaded.name,
        text=text,
        renderer=Renderer(
            text,
            RenderSettings(
                has_canonical_tokens=settings.canonical_tokens,
                freezes_date=settings.freeze_template_date,
                restores_reasoning=settings.restore_reasoning,
                normalizes=settings.normalizes,
                sorts_tools=settings.stable_tools,
                context=min(bounds, default=None),
            ),
        ),
        grammars=Grammars(text),
        context=min(bounds, default=None),
        sampling=SamplingDefaults(by_flag=_sampling_flags(settings), by_model=loaded.sampling),
        template_options=settings.chat_template_args,
        created=int(time.time()),
        architecture=loaded.architecture,
        nbytes=loaded.nbytes,
        num_parameters=loaded.num_parameters,
        quantisation=loaded.quantisation,
        accepts_any_name=settings.accepts_any_model,
        adapter_names=names_of_adapter(settings.adapter_path),
        image_limits=None if text.images is None else image_limits(settings),
        embedder=loaded.embedder,
    )


def _sampling_flags(settings: Settings) -> dict[str, Number]:
    flags = {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "min_p": settings.min_p,
    }
    return {name: value for name, value in flags.items() if value is not None}
