"""Errors that users see: each has a message that says what to do."""

from collections.abc import Mapping

from reprise.core.sizes import nbytes_text


class RepriseError(Exception):
    """The base of all errors that users see. `str(error)` is the message."""

    status = 500
    """The HTTP status."""
    code = "internal_error"
    retry_after_s: int | None = None
    """When to try again, an estimate in seconds, if that helps."""
    has_record = False
    """Whether the request it ended had started, so that the record of the request has the error."""
    is_explained = False
    """Whether the message says all that the log needs: it has no traceback then."""


class BadRequest(RepriseError):
    """The request is invalid. `param` names the field at fault, if any.

    `details` are for programs, in the format of the API.
    """

    status = 400
    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, details: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.details = details


class InvalidValue(BadRequest):
    """A field of the request has an invalid value; `param` names it."""

    code = "invalid_value"


class UnreadableImage(BadRequest):
    """An image is damaged, of another kind, beyond a limit, or not to be had at its URL.

    Sent again, it most likely is that again.
    """


class TemplateFailed(BadRequest):
    """The model's chat template rejected the messages, with this message."""

    code = "template_failed"


class ContextTooLong(BadRequest):
    """The prompt does not fit the context or the memory."""

    code = "context_length_exceeded"


def prompt_too_long(num_prompt: int, context: int, *, note: str = "", param: str | None = "messages") -> ContextTooLong:
    """The error for a prompt that leaves no room for an answer.

    Clients recognise this error by its wording: agents compact the chat, gateways try a model with a longer context.
    Some parse the numbers.
    """
    # A prompt that just fits leaves no room for the one token that an answer has at least.
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


class NotAllowed(RepriseError):
    """This server does not do that; the sentence says who does."""

    status = 403
    code = "not_allowed"


class QueueFull(RepriseError):
    """Too many requests are waiting."""

    status = 429
    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ShuttingDown(RepriseError):
    """The server or engine is shutting down or has shut down."""

    status = 503
    code = "shutting_down"
    retry_after_s = 5


class RequestCancelled(RepriseError):
    """The request was cancelled, by `DELETE /v1/requests/{id}` or because its stream was not read."""

    # The status that web servers use for a request that its client gave up.
    status = 499
    code = "request_cancelled"


class ClientGone(RequestCancelled):
    """The client has disconnected."""


class ChatBusy(RepriseError):
    """A chat has one turn at a time, and one is still being streamed."""

    status = 409
    code = "chat_busy"


class OutOfMemory(RepriseError):
    """The request does not fit into the memory budget, even with everything else evicted."""

    status = 507
    code = "out_of_memory"


class EngineFailed(RepriseError):
    """The model or a sampler raised while this request ran; others continue."""

    status = 500
    code = "engine_failed"


class EngineLost(EngineFailed):
    """The engine thread has ended: nothing is computed until the server is started again."""

    status = 503


class LoadFailed(RepriseError):
    """A model cannot be loaded; the message says why and what to try."""

    code = "load_failed"


class CacheNotCleared(RepriseError):
    """Not all cleared records could be removed from the disk; they are not used any more."""

    status = 503
    code = "cache_not_cleared"


class DiskUnusable(RepriseError):
    """The directory of the disk cache cannot be used; the message says why and what to try."""

    code = "disk_unusable"


def first_line(error: BaseException) -> str:
    """The first line of a library's error, as a sentence."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".:") + "." if lines else "no reason was given."


def engine_failed(what: str, error: BaseException) -> EngineFailed:
    """The error that a client gets for an unexpected one; `what` failed. The log has the error itself."""
    return EngineFailed(f"{what}: {first_line(error)} The log has the whole error.")


def memory_too_small(model: str, *, bound: int, needed: int) -> LoadFailed:
    """The error for a `--memory` that leaves nothing for requests."""
    return LoadFailed(
        f"--memory is {nbytes_text(bound)}, and {model} needs at least {nbytes_text(needed)} for its weights, the "
        "program and requests. Raise --memory, or choose a smaller model."
    )


def no_room_for_requests(model: str, *, room: int, least: int) -> LoadFailed:
    """The error for weights of several models that leave too little for requests."""
    return LoadFailed(
        f"{model} was not loaded: beside the weights of the models there is room for {nbytes_text(max(0, room))} of "
        f"layer state, and it needs at least {nbytes_text(least)}. Raise --memory or --cache-bytes, or unload a model."
    )
