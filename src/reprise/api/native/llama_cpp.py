"""`GET /props`, `GET /slots` and `POST /apply-template`: what clients of llama.cpp's server ask before they chat."""

from typing import Any

from pydantic import Field

import reprise
from reprise.api.http.body import Needs
from reprise.api.openai.chat_body import ChatFields, ChatMessage
from reprise.api.openai.chat_request import rendered_chat
from reprise.api.service.served import Served
from reprise.api.wire.body_reading import api_router
from reprise.api.wire.context import OfModel, RouteCall

router = api_router("llama.cpp")


class ApplyTemplateBody(ChatFields):
    """A chat to be written as the model would read it."""

    needs = Needs.TOKENIZER
    messages: list[ChatMessage] = Field(default=...)  # pyright: ignore[reportIncompatibleVariableOverride]
    continue_final_message: bool | None = None


@router.get("/props")
async def props(call: OfModel) -> dict[str, Any]:
    """The model, its context and template, and the sampling of requests that do not choose theirs."""
    served = call.service.served
    text = served.text
    has_tools = text.tool_start is not None or text.parse_tool_call is not None
    return {
        "default_generation_settings": {"n_ctx": served.context or 0, "params": _sampling(served)},
        "total_slots": call.context.settings.max_batch,
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
async def slots(call: OfModel) -> list[dict[str, Any]]:
    """A slot for each sequence that may be decoded together, and which of them are in use.

    A chat does not own a slot: whichever it gets, what it shares with earlier requests is reused.
    """
    status = call.service.status_of_model()
    num_busy = status.num_prefilling + status.num_decoding
    served = call.service.served
    return [
        {"id": number, "n_ctx": served.context or 0, "speculative": False, "is_processing": number < num_busy}
        for number in range(call.context.settings.max_batch)
    ]


@router.post("/apply-template")
async def apply_template(body: ApplyTemplateBody, call: OfModel) -> dict[str, Any]:
    """The text of a chat, with the beginning of the answer; nothing is computed."""
    call.service.served.check_name(body.model)
    return {"prompt": await call.while_connected(_text(body, call))}


async def _text(body: ApplyTemplateBody, call: RouteCall) -> str:
    continues = body.continue_final_message is True
    chat = await call.service.off_loop(lambda: rendered_chat(body, call.asked, continue_final=continues))
    return await call.service.text(chat, namespace=call.namespace)


def _sampling(served: Served) -> dict[str, Any]:
    sampling, _ = served.sampling.sampling({})
    names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
    return {name: getattr(sampling, name) for name in names}
