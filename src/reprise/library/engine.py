"""A loaded model with its prefix cache, scheduler and chats, in this process."""

import atexit
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from os import PathLike, fspath
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from pydantic import TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from reprise.api.service.served import served_model
from reprise.api.service.service import ChatService
from reprise.core.backend import Status
from reprise.core.settings import ENGINE_OPTIONS, Settings
from reprise.library.chat import Chat
from reprise.library.replies import Replies
from reprise.loop import EngineClient
from reprise.loop.watch import following_machine
from reprise.quiet import MACHINE

Tool = Callable[..., Any] | Mapping[str, Any]
"""A function, or a tool in OpenAI's form (``{"type": "function", "function": {…}}``)."""


def _spec_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The function by its name, its docstring, and the JSON schema of its parameters."""
    name = cast(str | None, getattr(function, "__name__", None))
    if name is None or not name.isidentifier():
        raise TypeError(f"{function!r} has no name for the model to call. Pass a named function.")
    try:
        schema = TypeAdapter(cast(Any, function)).json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError, NameError) as error:
        raise TypeError(f"The parameters of {name}() have no JSON schema: {error}") from error
    if schema.get("type") != "object":
        raise TypeError(f"{name}() has positional-only parameters, but a model passes them by name.")
    spec: dict[str, Any] = {"name": name, "parameters": _without_titles(schema)}
    description = inspect.getdoc(function)
    if description:
        spec["description"] = description
    return {"type": "function", "function": spec}


def _without_titles(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without the titles that pydantic makes of parameters' names: the model pays for every token."""
    properties = cast(dict[str, dict[str, Any]], schema.get("properties", {}))
    plain = {name: {key: value for key, value in inner.items() if key != "title"} for name, inner in properties.items()}
    return {**schema, "properties": plain}


_CLOSE_S = 40.0


class Engine:
    """The server's engine without HTTP: chats that run at once share one model, one prefix cache and one batch.

    `model` is a local directory or a hub id that mlx-lm can load, or whole `Settings`. Options are those of `reprise
    serve` that are not about HTTP or the process, by the names of `reprise.Settings`, where each is documented:
    `cache_bytes` and `disk_bytes` (bytes, or text such as `"8GB"` or `"25%"`), `disk_directory`, `settles`,
    `max_context`, `kv_bits`, `chat_template`, `temperature`, …; None is the default.

    Safe to use from several threads. Close it, or use it in a `with` block: what the disk lacks is written then.
    Raises LoadFailed and DiskUnusable with a sentence that says what to do, TypeError for an unknown option, ValueError
    for one out of range.
    """

    def __init__(self, model: str | PathLike[str] | Settings, **options: Any) -> None:
        if isinstance(model, Settings):
            if options:
                raise TypeError("Pass either Settings or options, not both.")
            self._settings = model
        else:
            self._settings = _settings(fspath(model), options)
        self._loop = EngineClient(self._settings)
        with ExitStack() as stack:
            # MLX aborts a process that ends before the engine's thread has.
            stack.callback(self._loop.close, now=True, timeout_s=_CLOSE_S)
            loaded = self._loop.start()
            stack.enter_context(following_machine(self._loop))
            stack.enter_context(MACHINE.followed(self._settings.background))
            served = served_model(loaded, self._settings)
            self._replies = Replies(ChatService(served=served, backend=self._loop, settings=self._settings))
            stack.callback(self._replies.close)
            self._closing = stack.pop_all()
        self._served = served
        atexit.register(self.close)

    @property
    def model(self) -> str:
        """The model's name."""
        return self._served.id

    @property
    def context(self) -> int | None:
        """Tokens of prompt and answer together; None: not known."""
        return self._served.context

    @property
    def stats(self) -> Status:
        """What runs, what was counted since the start (tokens), and what memory and disk hold (bytes)."""
        return self._loop.status()

    def chat(
        self,
        system: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] = (),
        tools: Sequence[Tool] = (),
        **options: Any,
    ) -> Chat:
        """A chat that begins with a system prompt, a history in OpenAI's form, or both.

        `tools` are functions (the model sees their names, docstrings and annotated parameters) or tools in
        OpenAI's form; the program calls them, and `Chat.tool_result` gives back what they return. `options` are those
        of every turn, see `Chat`. Nothing is computed. Raises TypeError for an unknown option or a function that has
        no JSON schema.
        """
        start = [] if system is None else [{"role": "system", "content": system}]
        specs = [_spec_of(tool) if callable(tool) else tool for tool in tools]
        return Chat(self._replies, messages=[*start, *messages], tools=specs, options=options)

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until no turn runs and the next turns' known prefixes are computed; False if `timeout_s` was too short.

        This is optional: an earlier turn interrupts that work and continues from what was done.
        """
        return self._replies.wait_idle(timeout_s)

    def clear(self) -> None:
        """Drop everything from the cache that no running turn uses, on disk too. Raises ShuttingDown when closed."""
        self._replies.service.forget_settles("")
        self._loop.clear().result()

    def close(self) -> None:
        """Cancel running turns, write what the disk lacks, and free the model. A second call does nothing."""
        atexit.unregister(self.close)
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _settings(model: str, given: Mapping[str, Any]) -> Settings:
    values: dict[str, Any] = {}
    for name, value in given.items():
        option = ENGINE_OPTIONS.get(name)
        if option is None:
            raise TypeError(f"Unknown engine option {name!r}. The options are {', '.join(sorted(ENGINE_OPTIONS))}.")
        if value is None:
            continue
        try:
            values[name] = option.kind.read(str(value) if isinstance(value, Path) else value, Path())
        except ValueError as error:
            raise ValueError(f"{name} {error}.") from error
    return Settings(model=model, **values)
