"""Errors that a user can meet: each carries a sentence that says what to do."""

from collections.abc import Mapping

from reprise.core.sizes import nbytes_text


class RepriseError(Exception):
    """The base of all errors that reach a user. `str(error)` is the sentence."""

    status = 500
    """The HTTP status that fits."""
    code = "internal_error"
    has_record = False
    """The request that it ended had begun, so that the request's own record tells of it."""


class BadRequest(RepriseError):
    """The request cannot be served as it is. `param` names the field at fault, where one is.

    `details` are for programs, in the form of the API that was asked.
    """

    status = 400
    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, details: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.details = details


class InvalidValue(BadRequest):
    """A field of the request has a value that it cannot have; `param` says which."""

    code = "invalid_value"


class TemplateFailed(BadRequest):
    """The model's chat template refused the messages; the message is the template's own."""

    code = "template_failed"


class ContextTooLong(BadRequest):
    """The prompt does not fit the context or the memory."""

    code = "context_length_exceeded"


def prompt_too_long(num_prompt: int, context: int, *, note: str = "", param: str | None = "messages") -> ContextTooLong:
    """The refusal of a prompt that leaves no room for an answer.

    The words are those by which clients know this error: agents compact the chat, gateways try a longer model. The
    numbers are read as well.
    """
    # A prompt that just fits is too long for the one token that an answer has at least.
    num = num_prompt if num_prompt > context else num_prompt + 1
    return ContextTooLong(
        f"This model's maximum context length is {context} tokens, and the prompt is too long: "
        f"{num} tokens > {context} maximum.{note} Shorten the chat.",
        param=param,
    )


class UnknownModel(RepriseError):
    status = 404
    code = "model_not_found"


class NotFound(RepriseError):
    status = 404
    code = "not_found"


class QueueFull(RepriseError):
    """Too many requests wait. `retry_after_s` is an estimate in seconds."""

    status = 429
    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ShuttingDown(RepriseError):
    """The server or engine is being closed, or is closed already."""

    status = 503
    code = "shutting_down"


class RequestCancelled(RepriseError):
    """The request was cancelled, by `DELETE /v1/requests/{id}` or because its stream was not read."""

    # The status that web servers use for a request that its client gave up.
    status = 499
    code = "request_cancelled"


class ClientGone(RequestCancelled):
    """The client hung up; nobody is there to be answered."""


class ChatBusy(RepriseError):
    """A chat has one turn at a time, and one is being read."""

    status = 409
    code = "chat_busy"


class OutOfMemory(RepriseError):
    """The memory budget cannot hold what this request needs, whatever else is given up."""

    status = 507
    code = "out_of_memory"


class EngineFailed(RepriseError):
    """The model or a sampler raised while this request ran; others go on."""

    status = 500
    code = "engine_failed"


class LoadFailed(RepriseError):
    """A model cannot be loaded; the sentence says why and what to try."""

    code = "load_failed"


class CacheNotCleared(RepriseError):
    """An object store did not remove what was to be cleared; nothing of it is used any more."""

    status = 503
    code = "cache_not_cleared"


class DiskUnusable(RepriseError):
    """The directory of the disk tier cannot be used; the sentence says why and what to try."""

    code = "disk_unusable"


def first_line(error: BaseException) -> str:
    """What a library's error says, as a sentence to quote."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".:") + "." if lines else type(error).__name__


def memory_too_small(model: str, *, bound: int, needed: int) -> LoadFailed:
    """`--memory` leaves nothing for requests."""
    return LoadFailed(
        f"--memory is {nbytes_text(bound)}, and {model} needs at least {nbytes_text(needed)} for its weights, the "
        "program and requests. Raise --memory, or choose a smaller model."
    )


def no_room_for_requests(model: str, *, room: int, least: int) -> LoadFailed:
    """The weights of several models leave too little for requests."""
    return LoadFailed(
        f"{model} was not loaded: beside the weights of the models there is room for {nbytes_text(max(0, room))} of "
        f"layer state, and it needs at least {nbytes_text(least)}. Raise --memory or --cache-bytes, or unload a model."
    )
