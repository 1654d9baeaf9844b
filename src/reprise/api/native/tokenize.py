"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`."""

from typing import Any

from fastapi import Request

from reprise.api.http.body import Body, Needs
from reprise.api.http.sse import while_connected
from reprise.api.openai.chat_body import ChatMessage, ToolSpec
from reprise.api.openai.chat_request import chat_of
from reprise.api.openai.completions_body import checked_tokens, text_tokens
from reprise.api.service.service import ChatService
from reprise.api.wire.body_reading import api_router
from reprise.api.wire.context import InContext, Namespace
from reprise.core.errors import BadRequest

router = api_router("Tokens")


class TokenizeBody(Body):
    """A text, or a chat that is rendered first."""

    needs = Needs.TOKENIZER
    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    """Put the tokenizer's own beginning before the text, as completions do (the default)."""
    messages: list[ChatMessage] | None = None
    tools: list[ToolSpec] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None


class DetokenizeBody(Body):
    needs = Needs.TOKENIZER
    model: str | None = None
    tokens: list[int]


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request, context: InContext, namespace: Namespace) -> dict[str, Any]:
    """The tokens of a text or a chat, as the model would read them."""
    service = context.service
    service.served.check_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("Send either `prompt` or `messages`.", param="prompt")
    tokens = await while_connected(request.receive, _tokens(body, service, namespace))
    return {"tokens": tokens, "count": len(tokens), "max_model_len": service.served.context}


async def _tokens(body: TokenizeBody, service: ChatService, namespace: str) -> list[int]:
    if body.prompt is not None:
        text, adds_bos = body.prompt, body.add_special_tokens is not False
        return await service.off_loop(lambda: text_tokens(text, service.served, adds_bos=adds_bos).tolist())
    chat = await service.off_loop(
        lambda: chat_of(
            body.messages or [],
            tools=body.tools or [],
            template_options=body.chat_template_kwargs or {},
            continue_final=body.continue_final_message is True,
            images=service.served.image_parts,
        )
    )
    return (await service.render(chat, namespace=namespace, is_final=False)).tokenized.model_tokens.tolist()


@router.get("/tokenizer_info")
async def tokenizer_info(context: InContext) -> dict[str, Any]:
    """The texts of the tokens that begin and end, and the chat template: for clients that render themselves."""
    served = context.service.served
    text = served.text
    return {
        "bos_token": None if text.bos is None else text.decode([text.bos]),
        "eos_token": text.decode([min(text.eos)]) if text.eos else None,
        "chat_template": text.template_source or None,
        "max_model_len": served.context,
    }


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, context: InContext) -> dict[str, Any]:
    """The text of tokens."""
    service = context.service
    service.served.check_name(body.model)
    if not body.tokens:
        return {"prompt": ""}

    def text() -> str:
        return service.served.text.decode(checked_tokens(body.tokens, service.served, param="tokens").tolist())

    return {"prompt": await service.off_loop(text)}
