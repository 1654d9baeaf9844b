"""`GET /props`, `GET /slots` and `POST /apply-template`: what clients of llama.cpp's server ask before they chat."""

from typing import Any

from fastapi import Request

import reprise
from reprise.api.http.body import Body, Needs
from reprise.api.http.sse import while_connected
from reprise.api.openai.chat_body import ChatMessage, ToolSpec
from reprise.api.openai.chat_request import chat_of
from reprise.api.service.served import Served
from reprise.api.service.service import ChatService
from reprise.api.wire.body_reading import api_router
from reprise.api.wire.context import InContext, Namespace

router = api_router("llama.cpp")


class ApplyTemplateBody(Body):
    """A chat to be written as the model would read it."""

    needs = Needs.TOKENIZER
    model: str | None = None
    messages: list[ChatMessage]
    tools: list[ToolSpec] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None


@router.get("/props")
async def props(context: InContext) -> dict[str, Any]:
    """The model, its context and template, and the sampling of requests that do not choose theirs."""
    served = context.service.served
    text = served.text
    has_tools = text.tool_start is not None or text.parse_tool_call is not None
    return {
        "default_generation_settings": {"n_ctx": served.context or 0, "params": _sampling(served)},
        "total_slots": context.settings.max_batch,
        "model_path": served.id,
        "model_alias": served.id,
        "chat_template": text.template_source,
        "chat_template_caps": {"supports_tools": has_tools, "supports_tool_calls": has_tools},
        "bos_token": "" if text.bos is None else text.decode([text.bos]),
        "eos_token": text.decode([min(text.eos)]) if text.eos else "",
        "modalities": {"vision": text.images is not None, "audio": False},
        "build_info": f"reprise {reprise.__version__}",
    }


@router.get("/slots")
async def slots(context: InContext) -> list[dict[str, Any]]:
    """A slot for each sequence that may be decoded together, and which of them are in use.

    A chat does not own a slot: whichever it gets, what it shares with earlier requests is reused.
    """
    status = context.service.status_of_model()
    num_busy = status.num_prefilling + status.num_decoding
    served = context.service.served
    return [
        {"id": number, "n_ctx": served.context or 0, "speculative": False, "is_processing": number < num_busy}
        for number in range(context.settings.max_batch)
    ]


@router.post("/apply-template")
async def apply_template(
    body: ApplyTemplateBody, request: Request, context: InContext, namespace: Namespace
) -> dict[str, Any]:
    """The text of a chat, with the beginning of the answer; nothing is computed."""
    context.service.served.check_name(body.model)
    return {"prompt": await while_connected(request.receive, _text(body, context.service, namespace))}


async def _text(body: ApplyTemplateBody, service: ChatService, namespace: str) -> str:
    chat = await service.off_loop(
        lambda: chat_of(
            body.messages,
            tools=body.tools or [],
            template_options=body.chat_template_kwargs or {},
            continue_final=body.continue_final_message is True,
            images=service.served.image_parts,
        )
    )
    return await service.text(chat, namespace=namespace)


def _sampling(served: Served) -> dict[str, Any]:
    sampling, _ = served.sampling.sampling({})
    names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
    return {name: getattr(sampling, name) for name in names}
