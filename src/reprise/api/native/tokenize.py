"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`."""

from typing import Any

from reprise.api.http.body import Body, Needs
from reprise.api.openai.chat_body import ChatFields
from reprise.api.openai.chat_request import rendered_chat
from reprise.api.openai.completions_body import checked_tokens, text_tokens
from reprise.api.wire.body_reading import api_router
from reprise.api.wire.context import OfModel, RouteCall
from reprise.core.errors import BadRequest

router = api_router("Tokens")


class TokenizeBody(ChatFields):
    """A text, or a chat that is rendered first."""

    needs = Needs.TOKENIZER
    prompt: str | None = None
    add_special_tokens: bool | None = None
    """Put the tokenizer's own beginning before the text, as completions do (the default)."""
    continue_final_message: bool | None = None


class DetokenizeBody(Body):
    needs = Needs.TOKENIZER
    model: str | None = None
    tokens: list[int]


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, call: OfModel) -> dict[str, Any]:
    """The tokens of a text or a chat, as the model would read them."""
    call.service.served.check_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("Send either `prompt` or `messages`.", param="prompt")
    tokens = await call.while_connected(_tokens(body, call))
    return {"tokens": tokens, "count": len(tokens), "max_model_len": call.service.served.context}


async def _tokens(body: TokenizeBody, call: RouteCall) -> list[int]:
    service, continues = call.service, body.continue_final_message is True
    if body.prompt is not None:
        text, adds_bos = body.prompt, body.add_special_tokens is not False
        return await service.off_loop(lambda: text_tokens(text, service.served, adds_bos=adds_bos).tolist())
    chat = await service.off_loop(lambda: rendered_chat(body, call.asked, continue_final=continues))
    return (await service.render(chat, namespace=call.namespace, is_final=False)).tokenized.model_tokens.tolist()


@router.get("/tokenizer_info")
async def tokenizer_info(call: OfModel) -> dict[str, Any]:
    """The texts of the tokens that begin and end, and the chat template: for clients that render themselves."""
    served = call.service.served
    text = served.text
    return {
        "bos_token": None if text.bos is None else text.decode([text.bos]),
        "eos_token": text.decode([min(text.eos)]) if text.eos else None,
        "chat_template": text.template_source or None,
        "max_model_len": served.context,
    }


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, call: OfModel) -> dict[str, Any]:
    """The text of tokens."""
    service = call.service
    service.served.check_name(body.model)
    if not body.tokens:
        return {"prompt": ""}

    def text() -> str:
        return service.served.text.decode(checked_tokens(body.tokens, service.served, param="tokens").tolist())

    return {"prompt": await service.off_loop(text)}
