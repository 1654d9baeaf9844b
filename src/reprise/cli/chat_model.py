"""The models of `reprise chat`: one in this process, or one on a server."""

import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from http import HTTPStatus
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol

from reprise.api.http.ending import end_at_once
from reprise.core.errors import BadRequest, RepriseError

if TYPE_CHECKING:
    import httpx

    from reprise.library.chat import ChatAnswer
    from reprise.library.engine import Engine

Message = dict[str, Any]
_CONNECT_S = 10.0


class NoAnswer(RepriseError):
    """There is no answer from the server; the message says why."""

    code = "no_answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPiece:
    """A piece of an answer's text or reasoning."""

    text: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCounts:
    """The tokens of a turn, and the seconds to the first one. None: not reported by the server."""

    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int
    ttft_s: float | None
    total_s: float
    num_pieces: int
    """In how many pieces the answer arrived: few, if the server held it back."""
    finish_reason: str | None = None


class ChatModel(Protocol):
    """Answers chats. `last` and `why` refer to the last complete answer."""

    name: str
    options: dict[str, Any]
    """Of the answers from now on: fields of chat completions."""

    @property
    def last(self) -> TurnCounts | None: ...

    def stream(self, messages: Sequence[Message]) -> Generator[AnswerPiece]:
        """Answer the chat, or continue the answer at its end. Closing the generator cancels. Raises RepriseError."""
        ...

    def prefill(self, messages: Sequence[Message]) -> None:
        """Compute the chat while its last message is being typed. Returns at once; the last call counts."""
        ...

    def why(self) -> str:
        """Why not more of the latest prompt was reused."""
        ...

    def names(self) -> Sequence[str]:
        """The models that it could answer with. Raises NoAnswer."""
        ...

    def use(self, name: str) -> None:
        """Answer with this model from now on. Raises NoAnswer."""
        ...

    def close(self) -> None: ...


class LocalModel:
    """The engine in this process, with the server's cache and disk tier."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._answer: ChatAnswer | None = None
        self._typing: Future[Any] | None = None
        self.options: dict[str, Any] = {}
        self.name = engine.model
        self.last: TurnCounts | None = None

    def stream(self, messages: Sequence[Message]) -> Generator[AnswerPiece]:
        chat = self._engine.chat(messages=messages, **self.options)
        begun_s, num_pieces = time.monotonic(), 0
        for piece in chat.resume() if messages[-1]["role"] == "assistant" else chat.stream():
            num_pieces += 1
            yield AnswerPiece(text=piece.text, reasoning=piece.reasoning)
        self._answer, usage = chat.last, chat.last.usage
        self.last = TurnCounts(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            ttft_s=chat.last.ttft_s,
            total_s=time.monotonic() - begun_s,
            num_pieces=num_pieces,
            finish_reason=str(chat.last.finish_reason),
        )

    def prefill(self, messages: Sequence[Message]) -> None:
        if self._typing is not None:
            self._typing.cancel()
        self._typing = self._engine.chat(messages=messages[:-1]).prefill(messages[-1]["content"])

    def why(self) -> str:
        return "There is no answer yet." if self._answer is None else self._answer.explain()

    def names(self) -> Sequence[str]:
        return (self.name,)

    def use(self, name: str) -> None:
        if name != self.name:
            raise NoAnswer(
                f"This chat runs {self.name} itself. `reprise chat {name}` runs another, and a server has several."
            )

    def close(self) -> None:
        self._engine.close()


class LoadingModel:
    """A model that is loaded on a thread while the first message is typed; an answer waits until it is there.

    `when_failed` is called on that thread with what loading raised.
    """

    def __init__(self, name: str, load: Callable[[], ChatModel], *, when_failed: Callable[[Exception], None]) -> None:
        self.name = name
        self.options: dict[str, Any] = {}
        self._ready: Future[ChatModel] = Future()
        self._typed: Sequence[Message] | None = None

        def run() -> None:
            try:
                self._ready.set_result(load())
            except Exception as error:
                self._ready.set_exception(error)
                when_failed(error)

        # What was typed until then. Registered first, so that it precedes what is typed later.
        self._ready.add_done_callback(lambda ready: None if ready.exception() else self._prefill_typed(ready.result()))
        Thread(target=run, name="reprise-load", daemon=True).start()

    @property
    def is_loading(self) -> bool:
        return not self._ready.done()

    @property
    def last(self) -> TurnCounts | None:
        return None if self.is_loading else self._ready.result().last

    def stream(self, messages: Sequence[Message]) -> Generator[AnswerPiece]:
        if self._ready.exception() is not None:
            # `when_failed` has the reason.
            raise NoAnswer("The model could not be loaded.")
        model = self._ready.result()
        model.options = self.options
        yield from model.stream(messages)

    def prefill(self, messages: Sequence[Message]) -> None:
        self._typed = messages
        if not self.is_loading and self._ready.exception() is None:
            self._prefill_typed(self._ready.result())

    def _prefill_typed(self, model: ChatModel) -> None:
        if self._typed is not None:
            model.prefill(self._typed)

    def why(self) -> str:
        return "There is no answer yet." if self.is_loading else self._ready.result().why()

    def names(self) -> Sequence[str]:
        return (self.name,) if self.is_loading else self._ready.result().names()

    def use(self, name: str) -> None:
        self._ready.result().use(name)

    def close(self) -> None:
        """Close it. While it is loaded this ends the process: MLX aborts one that ends while a thread computes."""
        if self.is_loading:
            end_at_once(0)
        if self._ready.exception() is None:
            self._ready.result().close()


class RemoteModel:
    """A server with OpenAI's chat completions; a Reprise server also prefills while typing and explains reuse."""

    def __init__(self, client: "httpx.Client", *, name: str, is_reprise: bool, options: Mapping[str, Any]) -> None:
        self._client = client
        self._is_reprise = is_reprise
        self.options = dict(options)
        self._request_id: str | None = None
        self._typing: Thread | None = None
        self.name = name
        self.last: TurnCounts | None = None

    def stream(self, messages: Sequence[Message]) -> Generator[AnswerPiece]:
        body = {"model": self.name, "messages": list(messages), "stream": True, **self.options}
        body["stream_options"] = {"include_usage": True}
        if messages[-1]["role"] == "assistant":
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        num_pieces = 0
        begun_s, ttft_s, usage, finish_reason = time.monotonic(), None, dict[str, Any](), None
        for chunk in self._chunks(body):
            self._request_id = chunk.get("id")
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices") or ():
                finish_reason = choice.get("finish_reason") or finish_reason
                delta: dict[str, Any] = choice.get("delta") or {}
                piece = AnswerPiece(
                    text=delta.get("content") or "",
                    reasoning=delta.get("reasoning_content") or delta.get("reasoning") or "",
                )
                if piece.text or piece.reasoning:
                    num_pieces += 1
                    ttft_s = time.monotonic() - begun_s if ttft_s is None else ttft_s
                    yield piece
        details: dict[str, Any] = usage.get("prompt_tokens_details") or {}
        self.last = TurnCounts(
            prompt_tokens=usage.get("prompt_tokens", 0),
            cached_tokens=details.get("cached_tokens"),
            completion_tokens=usage.get("completion_tokens", 0),
            ttft_s=ttft_s,
            total_s=time.monotonic() - begun_s,
            num_pieces=num_pieces,
            finish_reason=finish_reason,
        )

    def _chunks(self, body: Mapping[str, Any]) -> Generator[dict[str, Any]]:
        import httpx  # noqa: PLC0415 (slow to import)
        from httpx_sse import EventSource  # noqa: PLC0415 (imports httpx)

        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if not response.is_success:
                    failed = BadRequest if response.status_code == BadRequest.status else NoAnswer
                    raise failed(_sentence(response.read().decode(errors="replace")))
                for sent in EventSource(response).iter_sse():
                    if sent.data in ("", "[DONE]"):
                        continue
                    chunk: dict[str, Any] = json.loads(sent.data)
                    if "error" in chunk:
                        raise NoAnswer(_sentence(sent.data))
                    yield chunk
        except httpx.HTTPError as error:
            raise NoAnswer(f"The connection to {self._client.base_url} failed: {error}.") from error
        except ValueError as error:
            raise NoAnswer(f"{self._client.base_url} returned invalid JSON.") from error

    def prefill(self, messages: Sequence[Message]) -> None:
        if not self._is_reprise or (self._typing is not None and self._typing.is_alive()):
            return
        body = {"messages": list(messages), "partial": True}
        self._typing = Thread(target=self._prefill, args=(body,), name="reprise-typing", daemon=True)
        self._typing.start()

    def _prefill(self, body: Mapping[str, Any]) -> None:
        import httpx  # noqa: PLC0415

        # Errors are reported when the message is sent.
        try:
            self._client.post("/v1/prefill", json=body)
        except httpx.HTTPError:
            return

    def why(self) -> str:
        from reprise.api.service.records import record_lines  # noqa: PLC0415 (imports pydantic)

        if not self._is_reprise or self._request_id is None:
            return "There is no answer yet." if self._is_reprise else "Not available: this server is not Reprise."
        response = self._client.get(f"/v1/cache/requests/{self._request_id}")
        return "\n".join(record_lines(response.json())) if response.is_success else _sentence(response.text)

    def names(self) -> Sequence[str]:
        return _listed(self._client)

    def use(self, name: str) -> None:
        names = self.names()
        found = [each for each in names if each == name] or [each for each in names if each.endswith(f"/{name}")]
        if len(found) != 1:
            raise NoAnswer(f"The server does not serve {name!r}. It serves {', '.join(names)}.")
        self.name = found[0]

    def close(self) -> None:
        self._client.close()


def remote_model(url: str, *, api_key: str | None, model: str | None, options: Mapping[str, Any]) -> RemoteModel:
    """The server at `url`. `model`: its name there; None: the first one listed. Raises NoAnswer."""
    import httpx  # noqa: PLC0415

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(None, connect=_CONNECT_S)
    client = httpx.Client(base_url=url, headers=headers, timeout=timeout)
    names = _listed(client)
    try:
        health = client.get("/health")
        is_reprise = health.is_success and "tokens_held" in health.json()
    except (httpx.HTTPError, ValueError, TypeError) as error:
        raise NoAnswer(_no_api(url)) from error
    if model is None and not names:
        raise NoAnswer(f"The server at {url} lists no models.")
    return RemoteModel(client, name=model or names[0], is_reprise=is_reprise, options=options)


def _listed(client: "httpx.Client") -> list[str]:
    """The names of a server's models. Raises NoAnswer."""
    import httpx  # noqa: PLC0415

    url = str(client.base_url).rstrip("/")
    try:
        listed = client.get("/v1/models")
        if listed.status_code == HTTPStatus.NOT_FOUND:
            raise NoAnswer(_no_api(url))
        if not listed.is_success:
            raise NoAnswer(_sentence(listed.text))
        return [one["id"] for one in listed.json()["data"]]
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoAnswer(f"No server answers at {url}: {error}. Start one with `reprise serve`.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise NoAnswer(_no_api(url)) from error


def _no_api(url: str) -> str:
    return f"The server at {url} does not have the OpenAI API. Check the address. Example: 127.0.0.1:8080."


def _sentence(body: str) -> str:
    """The message in the body of an error."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"The server answered: {' '.join(body.split())[:200] or 'nothing'}"
