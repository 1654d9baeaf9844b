"""Joins renderer, parser and engine: one `ServiceRequest` in, one `Reply` with its events out.

The life of a request, as every API uses it::

    reply = await service.start(request)      # renders off the loop, queues the jobs; raises what is wrong
    async with reply:                         # leaving early cancels
        async for event in reply.events():    # Began, Piece…, Waiting while there is nothing to send, Ended per choice
            ...
    reply.usage                               # whole now
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar
from uuid import uuid4

from reprise.api.http.limits import Limits
from reprise.api.http.off_loop import Stage, StageThreads
from reprise.api.service.agents import Agents
from reprise.api.service.exchange import EndReason, RawPrompt, Record, ServiceRequest, used_of
from reprise.api.service.image_parts import FetchedImages, has_links, link_of
from reprise.api.service.jobs import answer_format_of, cut_at, job_of
from reprise.api.service.models import Models
from reprise.api.service.records import Records, log_line, record_of
from reprise.api.service.reply import Choice, Inbox, LoopClock, PrefillProgress, Reply
from reprise.api.service.served import Served
from reprise.api.service.settling import Settling
from reprise.api.service.unread import with_read_images
from reprise.chat.answer import ToolCallDelta
from reprise.chat.answers.answer_format import AnswerFormat
from reprise.chat.answers.parse import AnswerParser
from reprise.chat.grammars.tool_grammar import answer_grammar
from reprise.chat.images import image_of, image_part, images_in
from reprise.chat.reasons.explain import Explanation
from reprise.chat.rendering.render import Branch, Renderer, Renderers
from reprise.chat.request import ChatRequest
from reprise.chat.templates.piecewise_tokenizer import encode_long
from reprise.chat.templates.rendered import Rendered
from reprise.chat.text_model import refuse_if_too_long
from reprise.core.backend import Backend, Lookup, Status, total_of
from reprise.core.errors import BadRequest, EngineFailed, NotFound, QueueFull, RepriseError, ShuttingDown
from reprise.core.events import Finished, FinishReason, Progress
from reprise.core.images import of_namespace
from reprise.core.inspection import WHOLE_TREE, Inspection, TreePart
from reprise.core.job import Constraint, Job, Purpose
from reprise.core.outcome import Outcome
from reprise.core.prompt import BoundaryKind, Prompt
from reprise.core.settings import Settings
from reprise.core.tokens import Tokens, as_tokens
from reprise.quiet import why_quiet

log = logging.getLogger(__name__)

T = TypeVar("T")

# How long a cancelled job may take to confirm it, before its record is written without its counts.
_DRAIN_S = 5.0
# How long a client that asks for the latest records waits for those of answers that are just over,
_RECORDS_S = 1.0
# and one that asks for the record of its own answer, which it knows to have ended.
_OWN_RECORD_S = 30.0


class Watcher(Protocol):
    """Who wants to know what happens to requests. Called on the event loop; must be quick."""

    def request_ended(self, record: Record) -> None: ...
    def token_came(self, gap_s: float, model: str) -> None:
        """A token of a model's answer arrived, `gap_s` seconds after the previous one."""
        ...


class RecordCounts(Protocol):
    """What `--record` has written, and what it dropped."""

    num_written: int
    num_dropped: int


class ChatService:
    """The API's one door to the model. All methods belong to the event loop's thread."""

    def __init__(
        self,
        *,
        served: Served,
        backend: Backend,
        settings: Settings,
        limits: Limits | None = None,
        clock: LoopClock | None = None,
        beside: "ChatService | None" = None,
        renderers: Renderers | None = None,
    ) -> None:
        """`beside`: of another model of the same server, with which threads, records and watchers are shared.

        `renderers`: of another one with the same weights and template, so that chats may go on here; None: own ones.
        """
        self.served = served
        self.backend = backend
        self.settings = settings
        self.limits = Limits() if limits is None else limits
        self.clock = LoopClock() if clock is None else clock
        self.renderers = (
            Renderers(served.text, shared=served.renderer, stored=backend) if renderers is None else renderers
        )
        quiet = partial(why_quiet, settings.background)
        self._settling = Settling(backend, max_tokens=settings.max_settle, why_quiet=quiet)
        self._agents = Agents()
        self.records = Records(limit=self.limits.max_records) if beside is None else beside.records
        self.recorder: RecordCounts | None = None
        """With `--record`."""
        self.models: Models[ChatService] | None = None if beside is None else beside.models
        """All models of this server; None: this is the only one, and is always loaded."""
        self.is_closing = False
        self.threads = StageThreads() if beside is None else beside.threads
        self._open: dict[str, Reply] = {} if beside is None else beside._open
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watchers: list[Watcher] = [] if beside is None else beside._watchers

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher` of what happens from now on."""
        self._watchers.append(watcher)

    def unwatch(self, watcher: Watcher) -> None:
        """Tell this one nothing more."""
        self._watchers.remove(watcher)

    @property
    def shows_text(self) -> bool:
        """Whether callers may read what the cache holds: not where it holds other keys' prompts, too."""
        return self.settings.separates_keys or len(self.settings.api_keys) <= 1

    @property
    def is_idle(self) -> bool:
        """Nothing queued, running or settling, and nothing about to be."""
        return not self._open and self.threads.is_idle and not self._tasks and self.backend.status().is_idle

    @property
    def beside(self) -> "list[ChatService]":
        """Those of all models of this server that were loaded, this one among them."""
        return [self] if self.models is None else self.models.services

    def status(self) -> Status:
        """That of all models of this server together."""
        return total_of(list(self.statuses().values()))

    def statuses(self) -> dict[str, Status]:
        """The status of each model of this server, by its id: of aliases with the same engine, by that of the first."""
        return {self.served.id: self.status_of_model()} if self.models is None else self.models.statuses()

    async def inspections(self, part: TreePart = WHOLE_TREE) -> dict[str, Inspection]:
        """What the engine holds of each model that was loaded, by its id, without the trees. Raises ShuttingDown.

        Of aliases with the same engine, by the id of the first.
        """
        found: dict[str, Inspection] = {}
        models = {} if self.models is None else self.models.by_engine()
        services = {name: model.service for name, model in models.items() if model.service is not None}
        for name, service in (services if self.models is not None else {self.served.id: self}).items():
            # A model whose files have changed may have come to nothing.
            with contextlib.suppress(EngineFailed):
                asking = service.backend.inspect(max_nodes=0, part=part)
                found[name] = await asyncio.wrap_future(asking)
        return found

    def status_of_model(self) -> Status:
        """What the engine publishes of this model, with what is under way here."""
        status = self.backend.status()
        is_closing = self.is_closing or status.is_closing
        status = replace(status, is_idle=self.is_idle, is_closing=is_closing)
        if self.recorder is None:
            return status
        return replace(status, num_recorded=self.recorder.num_written, num_unrecorded=self.recorder.num_dropped)

    def cache_namespace(self, namespace: str) -> str:
        """The part of the prefix cache that callers of this namespace use: all the same one, or each their own."""
        return namespace if self.settings.separates_keys else ""

    def _renderer(self, namespace: str) -> Renderer:
        return self.renderers.of(self.cache_namespace(namespace))

    def shown(self, tokens: Tokens, *, namespace: str) -> str:
        """The text of tokens for people; images stand by their names."""
        return self._renderer(namespace).shown(tokens)

    async def start(self, request: ServiceRequest) -> Reply:
        """Render the prompt and queue the request's jobs.

        Raises BadRequest (TemplateFailed, ContextTooLong), QueueFull, ShuttingDown; then nothing was queued.
        """
        arrived_s = time.monotonic()
        chat = request.prompt
        if isinstance(chat, ChatRequest):
            chat = replace(chat, agent=request.caller.key)
        rendered, prompt = await self._prompt(chat, namespace=request.namespace, is_asked=True)
        bound = self.settings.max_tokens if request.max_tokens is None else request.max_tokens
        if request.until is not None:
            prompt = cut_at(prompt, request.until)
        if request.generates and prompt.images and prompt.images[-1].span.stop == len(prompt):
            raise BadRequest(
                "The prompt ends with an image, but text cannot be generated right after one. Add text after it.",
                param="messages",
            )
        room = self.served.max_answer_tokens(len(prompt), bound) if request.generates else 0
        if not request.generates:
            self.served.max_answer_tokens(len(prompt), 1)
        answer_format = answer_format_of(
            request,
            self.served.text,
            prompt.tokens,
            rendered=rendered,
            default_budget=self.settings.thinking_budget,
        )
        constraint = await self._constraint(request, answer_format)
        prediction = await self._predicted(request)
        reply = Reply(
            request,
            rendered=rendered,
            num_prompt=len(prompt),
            render_s=time.monotonic() - arrived_s,
            used=used_of(request, max_tokens=room, has_flag=self.settings.max_tokens is not None),
            choices=[Choice(request, index, AnswerParser(answer_format)) for index in range(request.num_choices)],
            backend=self.backend,
            limits=self.limits,
            clock=self.clock,
            host=self,
        )
        lineage = self._agents.arrive(
            request.caller,
            prompt,
            job_id=reply.choices[0].job_id,
            has_tools=rendered is not None and len(rendered.request.tools) > 0,
            namespace=request.namespace,
        )
        try:
            for choice in reply.choices:
                job = job_of(
                    request,
                    answer_format,
                    prompt,
                    choice,
                    max_tokens=room,
                    stop_tokens=self.served.text.eos,
                    constraint=constraint,
                    prediction=prediction,
                    cache_namespace=self.cache_namespace(request.namespace),
                    lineage=lineage,
                )
                self._settling.overtaken_by(job)
                self.backend.submit(job, reply.inbox.sink(choice.index))
        except BaseException:
            # Those before it are in the queue already.
            reply.cancel()
            raise
        self._open[request.id] = reply
        return reply

    async def render(
        self, chat: ChatRequest, *, namespace: str = "", is_final: bool = True, is_asked: bool = False
    ) -> Rendered:
        """The chat as the model would see it, off the event loop; nothing is computed. `is_final`: see `Renderer`.

        `is_asked`: it is to be answered, so a refusal is remembered.
        """
        self.served.check_makes_text()
        chat = await self._with_images(self._with_defaults(chat), namespace, is_asked=is_asked)
        return await self.off_loop(lambda: self._renderer(namespace).render(chat, is_final=is_final))

    async def text(self, chat: ChatRequest, *, namespace: str = "") -> str:
        """The same as the template writes it; of an image there is the model's marker. Raises what `render` raises."""
        rendered = await self.render(chat, namespace=namespace, is_final=False)
        return self._renderer(namespace).plain(rendered.text)

    async def _with_images(self, chat: ChatRequest, namespace: str, *, is_asked: bool = False) -> ChatRequest:
        """The chat with the images that it links to, all of them decoded, a few at a time. Raises BadRequest.

        Images that cannot be had or decoded are left out, but for those in the newest question.
        """
        limits = self.served.image_limits
        if limits is None or not (images_in(chat.messages) or has_links(chat.messages)):
            return chat
        renderer, own = self._renderer(namespace), self.cache_namespace(namespace)
        # Whoever waits for a network takes no thread of those that decode.
        fetched: FetchedImages | None = None
        if has_links(chat.messages):
            fetched = await self.threads.run(Stage.FETCH, partial(FetchedImages, chat.messages, limits))

        def read(part: Any) -> Any:
            link = link_of(part)
            image = image_of(part) if fetched is None or link is None else fetched.image(link)
            assert image is not None, "an image or a link"
            found = image_part(of_namespace(image, own))
            renderer.see([{"role": "user", "content": [found]}])
            return found

        def see() -> ChatRequest:
            return with_read_images(
                chat, read, refused=self.served.refused_questions, namespace=namespace, is_asked=is_asked
            )

        return await self.threads.run(Stage.SEE, see)

    async def lookup(self, prompt: ChatRequest | RawPrompt, *, namespace: str = "") -> Lookup:
        """What this prompt would find if it came now; nothing changes. Raises what `start` raises."""
        _, tokens = await self._prompt(prompt, namespace=namespace, is_final=False)
        self.served.max_answer_tokens(len(tokens), 1)
        asking = self.backend.lookup(tokens, namespace=self.cache_namespace(namespace))
        return await asyncio.wrap_future(asking)

    def _with_defaults(self, chat: ChatRequest) -> ChatRequest:
        if not self.served.template_options:
            return chat
        return replace(chat, template_options={**self.served.template_options, **chat.template_options})

    async def prefix(
        self, prompt: ChatRequest | RawPrompt, *, namespace: str = "", until: BoundaryKind | None = None
    ) -> Prompt:
        """The tokens of a prompt, up to its last boundary of the kind `until` if that is given.

        Raises what `start` raises, and BadRequest if there is no such boundary.
        """
        _, tokens = await self._prompt(prompt, namespace=namespace)
        return tokens if until is None else cut_at(tokens, until)

    async def typed_prefix(self, chat: ChatRequest, *, namespace: str = "") -> Prompt:
        """What a chat begins with whose last user message is still being typed. Raises what `start` raises."""
        chat = await self._with_images(self._with_defaults(chat), namespace)
        prefix = await self.off_loop(lambda: self._renderer(namespace).typed(chat))
        if len(prefix) == 0:
            raise BadRequest("Nothing of this chat is cached yet.", param="messages")
        return prefix

    async def prefill(
        self, prefix: Prompt, *, request_id: str, namespace: str = "", pin_for_s: float | None = None
    ) -> Outcome:
        """Compute a prefix into the cache; sample nothing. `pin_for_s` as in `Job`.

        Raises what `start` raises. Cancelled when the caller is.
        """
        self.served.max_answer_tokens(len(prefix), 1)
        job = Job(
            id=request_id,
            prompt=prefix,
            purpose=Purpose.PREFILL,
            namespace=self.cache_namespace(namespace),
            owner=namespace,
            pin_for_s=pin_for_s,
        )
        inbox = Inbox(limit=self.limits.max_unread, on_overflow=lambda: None)
        self.backend.submit(job, inbox.sink(0))
        progress = PrefillProgress(request_id=request_id)
        try:
            while True:
                item = await inbox.get(self.limits.keep_alive_s)
                if item is not None and isinstance(item[1], Progress):
                    progress.hear(item[1])
                if item is None or not isinstance(item[1], Finished):
                    continue
                if item[1].reason is not FinishReason.DONE:
                    raise item[1].error or EngineFailed("The prefill was cancelled.")
                return item[1].outcome
        except asyncio.CancelledError:
            self.backend.cancel(request_id)
            raise

    def cancel(self, request_id: str, *, namespace: str) -> None:
        """Cancel a request within one step; what was computed stays in the cache. Raises NotFound."""
        replies = [
            reply
            for reply in self._open.values()
            if request_id in (reply.request.id, reply.request.response_id) and reply.request.namespace == namespace
        ]
        if not replies:
            raise NotFound(f"No request {request_id!r} is running. The id is the `id` of its response.")
        for reply in replies:
            reply.cancel()

    def begin_close(self) -> None:
        """Refuse new requests, and have what the disk lacks written while those that run go on. From any thread."""
        self.is_closing = True
        self.backend.hurry()

    def cut_off(self) -> None:
        """End the answers under way with an error, since their time is over. On the event loop."""
        for reply in tuple(self._open.values()):
            reply.cancel(
                ShuttingDown("The server is shutting down, and the answer was cut off. What was computed is kept.")
            )

    async def close(self) -> None:
        """Refuse new requests, cancel those that run, and wait for what is under way behind the scenes."""
        self.is_closing = True
        for reply in tuple(self._open.values()):
            reply.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.threads.shutdown()

    async def _prompt(
        self, prompt: ChatRequest | RawPrompt, *, namespace: str, is_final: bool = True, is_asked: bool = False
    ) -> tuple[Rendered | None, Prompt]:
        if self.is_closing:
            raise ShuttingDown("The server is shutting down. Try again in a moment.")
        self.served.check_makes_text()
        if isinstance(prompt, RawPrompt):
            if len(prompt.tokens) == 0:
                raise BadRequest("The prompt is empty. Send at least one token.", param="prompt")
            return None, Prompt(tokens=prompt.tokens)
        rendered = await self.render(prompt, namespace=namespace, is_final=is_final, is_asked=is_asked)
        if len(rendered.prompt) == 0:
            raise BadRequest("The chat renders to an empty prompt. Send at least one message with text.")
        return rendered, rendered.prompt

    async def _predicted(self, request: ServiceRequest) -> Tokens | None:
        """What the client says the answer will be much like, as far as an answer can be long."""
        if not request.prediction:
            return None
        text = self.served.text
        refuse_if_too_long(request.prediction, text, context=self.served.context, param="prediction")
        return as_tokens(await self.off_loop(lambda: encode_long(text.encode, request.prediction)))

    async def _constraint(
        self, request: ServiceRequest, answer_format: AnswerFormat
    ) -> Callable[[], Constraint] | None:
        """The grammar of the answer: of a tool call, of what the request asked for, or both.

        Compiled on threads that nothing else waits for, and waited for within bounds.
        """
        grammar, served = request.grammar, self.served

        def begin() -> Future[Callable[[], Constraint]] | None:
            chosen = answer_grammar(
                served.text,
                grammar,
                tools=answer_format.tools,
                tool_choice=answer_format.tool_choice,
                parallel=request.allows_parallel_calls,
            )
            return None if chosen is None else served.grammars.begin(chosen, thinking=answer_format.thinking_to_come)

        if grammar is None and answer_format.tool_choice in ("auto", "none"):
            return None
        making = await self.off_loop(begin)
        if making is None:
            return None
        try:
            return await asyncio.wait_for(asyncio.wrap_future(making), self.limits.grammar_wait_s)
        except TimeoutError as error:
            raise BadRequest(
                f"The grammar was not compiled within {self.limits.grammar_wait_s:g} s. Simplify it, or try "
                "again when fewer grammars are being compiled.",
                param=None if grammar is None else grammar.param,
            ) from error

    async def learn(self, reply: Reply, choice: Choice) -> None:
        """Part of `ReplyHost`: before the client has the end, since its next turn may follow at once and needs these
        tokens."""
        rendered = reply.rendered
        if rendered is None or not choice.tokens:
            return
        answer = choice.answer
        renderer = self._renderer(reply.request.namespace)
        await self.threads.run(Stage.END, lambda: renderer.learn(rendered, choice.tokens, answer))

    def closed(self, reply: Reply) -> None:
        """Part of `ReplyHost`: compute the next turn's beginning ahead, and write the record."""
        as_of = self._settling.num_forgotten(self.cache_namespace(reply.request.namespace))
        reply.recording = self._in_background(self._finish_reply(reply, as_of))

    async def _finish_reply(self, reply: Reply, as_of: int) -> Record:
        try:
            await reply.drain(_DRAIN_S)
            await self._settle(reply, as_of)
            # First the record, which clients ask for at once, then what may be written to disk.
            record = await self._record(reply)
            namespace = self.cache_namespace(reply.request.namespace)
            await self.threads.run(Stage.AFTER, lambda: self.renderers.save(namespace))
            return record
        finally:
            self._open.pop(reply.request.id, None)

    def forget_settles(self, namespace: str) -> None:
        """Compute nothing ahead any more of chats that callers of this namespace have had until now."""
        self._settling.forget(self.cache_namespace(namespace))
        self._agents.forget(namespace)

    def called(self, reply: Reply, call: ToolCallDelta, name: str) -> None:
        """Part of `ReplyHost`: compute how what this tool starts begins, while the rest of the call is written."""
        request = reply.request
        if request.num_choices == 1:
            beginnings = self._agents.expected(name, namespace=request.namespace)
            job_id = reply.choices[0].job_id
            self._settle_beginnings(beginnings, request, name=f"call{call.index}-agent", beside=job_id)

    def _settle_beginnings(
        self,
        beginnings: Sequence[Prompt],
        request: ServiceRequest,
        *,
        name: str,
        beside: str | None = None,
        as_of: int | None = None,
    ) -> None:
        if not self.settings.settles or self.is_closing:
            return
        for number, beginning in enumerate(beginnings):
            self._settling.begin(
                beginning,
                request_id=f"{request.id}-{name}{number}",
                namespace=self.cache_namespace(request.namespace),
                owner=request.namespace,
                beside=beside,
                as_of=as_of,
            )

    async def _settle(self, reply: Reply, as_of: int) -> None:
        """Queue the next turn's known prefix, for when nothing else waits. `as_of`: see `Settling.begin`.

        Before it, how the sub-agents begin that the answer may start: their requests come before that turn.
        """
        rendered, request = reply.rendered, reply.request
        if rendered is None:
            return
        calls = [call.name for ended in reply.ended for call in ended.answer.tool_calls]
        beginnings = self._agents.answered(request.caller, rendered.prompt, calls, namespace=request.namespace)
        self._settle_beginnings(beginnings, request, name="agent", as_of=as_of)
        if not self.settings.settles or self.is_closing or not reply.request.generates:
            return
        # Of several answers it is unknown which one the chat continues.
        if reply.request.num_choices > 1 or len(reply.ended) != 1 or reply.error is not None:
            return
        ended = reply.ended[0]
        branch: Branch = "tool" if ended.reason is EndReason.TOOL_CALLS else "user"
        renderer, next_chat = self._renderer(reply.request.namespace), reply.request.next_chat

        def next_prompt() -> Prompt | None:
            if next_chat is None:
                return renderer.next_turn(rendered, ended.answer, branch=branch)
            try:
                return renderer.typed(self._with_defaults(next_chat(ended.answer)), ends_in_word=False)
            except RepriseError:
                return None  # Without a summary, or refused by the template: the client hears of it otherwise.

        prompt = await self.threads.run(Stage.AFTER, next_prompt)
        if prompt is None or len(prompt) == 0:
            return
        self._settling.begin(
            prompt,
            request_id=request.id,
            namespace=self.cache_namespace(request.namespace),
            owner=request.namespace,
            chat=request.chat_name,
            calls_tool=branch == "tool",
            as_of=as_of,
        )

    async def _record(self, reply: Reply) -> Record:
        request, rendered, outcomes = reply.request, reply.rendered, reply.outcomes
        explanation: Explanation | None = None
        if rendered is not None and outcomes:
            explanation = await self.threads.run(
                Stage.AFTER, lambda: self._renderer(request.namespace).explain(rendered, outcomes[0])
            )
        record = record_of(reply, model=self.served.id, explanation=explanation)
        log.info("%s", log_line(record, names_model=self.models is not None and len(self.models.all) > 1))
        self.note_record(record)
        return record

    async def recorded(self) -> None:
        """Wait a moment for the records of answers that are over."""
        ending = [reply.recording for reply in self._open.values() if reply.recording is not None]
        if ending:
            await asyncio.wait(ending, timeout=_RECORDS_S)

    async def recorded_as(self, request_id: str) -> None:
        """Wait for this request's record if its answer is over: a client may ask as soon as it has its last byte."""
        reply = self._open.get(request_id)
        if reply is None or not reply.is_over:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_OWN_RECORD_S):
                await reply.closed.wait()
                assert reply.recording is not None, "made when the reply is closed"
                await asyncio.wait([reply.recording])

    def note_record(self, record: Record) -> None:
        """Keep the record of a request that is over, or never began, and tell those who watch."""
        self.records.add(record)
        for watcher in self._watchers:
            watcher.request_ended(record)

    def gap(self, gap_s: float) -> None:
        """Part of `ReplyHost`."""
        for watcher in self._watchers:
            watcher.token_came(gap_s, self.served.id)

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Do the work that a request begins with (reading it, rendering, tokenizing) on another thread.

        Raises QueueFull and ShuttingDown. If the caller is cancelled, the work stops as soon as it looks up.
        """
        if self.is_closing:
            raise ShuttingDown("The server is shutting down. Try again in a moment.")
        num_open = self.threads.num_open(Stage.BEGIN)
        if num_open >= self.settings.max_queue:
            raise QueueFull(f"{num_open} requests are being prepared already. Try again in a moment.")
        return await self.threads.run(Stage.BEGIN, work)

    def _in_background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._background_done)
        return task

    def _background_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the work after an answer failed; the answer is not affected", exc_info=error)


def new_request_id(prefix: str) -> str:
    """A request id that no other has, as APIs write them: ``chatcmpl-…``."""
    return f"{prefix}-{uuid4().hex}"
