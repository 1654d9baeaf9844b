"""The model that a server serves, as the API sees it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from reprise.api.service.image_parts import ImageLimits, ImageParts, image_limits
from reprise.api.service.unread import RefusedQuestions
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

    @property
    def image_parts(self) -> ImageParts | None:
        """Reads the images of one request; None: the model sees none."""
        return None if self.image_limits is None else ImageParts(self.image_limits)

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
