"""A real server in this process: HTTP on a free port, the engine loop, a tiny model whose words are given."""

import json
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from reprise.api.service.served import served_model
from reprise.api.service.service import ChatService
from reprise.chat.answer import Answer
from reprise.core.job import Job, Purpose
from reprise.core.settings import Settings
from reprise.loop import EngineClient
from tests.api.server_thread import ServerThread
from tests.models.shared import loader
from tests.workloads.scripted import ScriptedEngine, odd_spelling

Message = dict[str, Any]

_IDLE_S = 120.0


def spoken(answer: Answer) -> str:
    """What a model of the tiny template's markup says behind the `<think>` that its generation prompt opens."""
    calls = "".join(
        f'\n<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'
        for call in answer.tool_calls
    )
    return f"{answer.reasoning or ''}\n</think>\n\n{answer.content or ''}{calls}<|im_end|>"


def spoken_in_channels(answer: Answer) -> str:
    """The same for channel markup, behind `<|start|>assistant`."""
    said = f"<|channel|>final<|message|>{answer.content}<|return|>"
    if answer.reasoning is None:
        return said
    return f"<|channel|>analysis<|message|>{answer.reasoning}<|end|><|start|>assistant{said}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpTurn:
    """One request over HTTP: the message that came back, the counts of `usage`, and the oracle's."""

    id: str
    message: Message
    prompt: int
    computed: int
    oracle: int


@dataclass(eq=False)
class Serving:
    """A client of a running server, and the other side of it."""

    client: httpx.Client
    engine: ScriptedEngine
    service: ChatService
    has_channels: bool
    answer: Answer = field(default_factory=lambda: Answer(content="Yes."))

    def says(self, job: Job) -> str:
        return spoken_in_channels(self.answer) if self.has_channels else spoken(self.answer)

    def ask(
        self,
        messages: Sequence[Message],
        answer: Answer,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int = 512,
    ) -> HttpTurn:
        """One request, which the model answers with `answer`."""
        self.answer = answer
        body: dict[str, Any] = {"messages": list(messages), "temperature": 0, "max_tokens": max_tokens}
        if tools:
            body["tools"] = list(tools)
        response = self.client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        told = response.json()
        usage = told["usage"]
        served = self.engine.of(Purpose.GENERATE)[-1]
        computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        assert computed == served.outcome.num_prefilled
        return HttpTurn(
            id=told["id"],
            message=told["choices"][0]["message"],
            prompt=usage["prompt_tokens"],
            computed=computed,
            oracle=served.oracle,
        )

    def wait_until_idle(self) -> None:
        """Until nothing runs, and nothing is about to: what /health says of it, which would make more work to ask."""
        deadline = time.monotonic() + _IDLE_S
        while not self.service.is_idle:
            assert time.monotonic() < deadline, self.health()
            time.sleep(0.002)

    def health(self) -> dict[str, Any]:
        return self.client.get("/health").json()

    def record(self, request_id: str) -> dict[str, Any]:
        """The record of a request, which is written just after the answer."""
        self.wait_until_idle()
        response = self.client.get(f"/v1/cache/requests/{request_id}")
        assert response.status_code == 200, response.text
        return response.json()


@contextmanager
def serving(model: Path, *, has_channels: bool = False, **settings: Any) -> Generator[Serving]:
    """A server of this model."""
    chosen = Settings(model=str(model), **settings)
    loop = EngineClient(chosen, load=loader(chosen))
    loaded = loop.start()
    engine = ScriptedEngine(loop=loop, spell=odd_spelling(loaded.text.encode), vocab_size=loaded.vocab_size)
    service = ChatService(served=served_model(loaded, chosen), backend=engine, settings=chosen)
    server = ServerThread(service, chosen)
    try:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            served = Serving(client=client, engine=engine, service=service, has_channels=has_channels)
            engine.says = served.says
            yield served
    finally:
        server.stop()
        loop.close(now=True, timeout_s=120)


def returned(turn: HttpTurn, *, has_reasoning: bool) -> Message:
    """The answer as a client sends it back, with its reasoning or without."""
    kept = {key: value for key, value in turn.message.items() if value is not None}
    if not has_reasoning:
        for key in ("reasoning_content", "reasoning"):
            kept.pop(key, None)
    return json.loads(json.dumps(kept))
