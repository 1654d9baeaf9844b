"""The text of content blocks, and a clear refusal of what a text model cannot read."""

from typing import cast

from reprise.api.anthropic.body import Block
from reprise.core.errors import BadRequest


def block_text(block: Block, where: str) -> str:
    """The text of a block of type `text`, `document` or `search_result`. Raises BadRequest for others."""
    match block.type:
        case "text" if block.text is not None:
            return block.text
        case "text":
            raise BadRequest("A text block needs `text`.", param=f"{where}.text")
        case "document":
            return _titled(block, _document_text(block, where))
        case "search_result" if block.content is not None:
            source = block.source if isinstance(block.source, str) else ""
            return _titled(block, f"{source}\n{content_text(block.content, f'{where}.content')}".lstrip("\n"))
        case _:
            raise BadRequest(
                f"This model reads text only, and cannot take a block of type {block.type[:40]!r} here.",
                param=f"{where}.type",
            )


def content_text(content: str | list[Block] | None, where: str) -> str:
    """The text of content; blocks are lines of their own."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(block_text(block, f"{where}[{at}]") for at, block in enumerate(content))


def _document_text(block: Block, where: str) -> str:
    source = block.source
    if isinstance(source, dict):
        kind, text, inner = source.get("type"), source.get("data"), source.get("content")
        if kind == "text" and isinstance(text, str):
            return text
        if kind == "content" and isinstance(inner, str):
            return inner
        if kind == "content" and isinstance(inner, list):
            blocks = [Block.model_validate(entry) for entry in cast(list[object], inner) if isinstance(entry, dict)]
            return content_text(blocks, f"{where}.source.content")
    raise BadRequest(
        "This model reads text only: a document needs a `source` of type 'text' with its `data`.",
        param=f"{where}.source",
    )


def _titled(block: Block, text: str) -> str:
    head = [line for line in (block.title, block.context) if line is not None]
    return "\n".join([*head, text])
