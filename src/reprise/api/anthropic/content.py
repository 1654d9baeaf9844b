"""The text of content blocks. What is no text is left to a function that knows where it stands."""

from collections.abc import Callable
from typing import cast

from reprise.api.anthropic.body import Block
from reprise.core.errors import BadRequest

Unread = Callable[[str, str], str]
"""The text that stands for a block of this type, which is at this place in the body; or it raises."""


def block_text(block: Block, where: str, unread: Unread) -> str:
    """The text of a block. Raises BadRequest for a block without what its type needs."""
    match block.type:
        case "text" if block.text is not None:
            return block.text
        case "text":
            raise BadRequest("A text block needs `text`.", param=f"{where}.text")
        case "document":
            return _titled(block, _document_text(block, where, unread))
        case "search_result" if block.content is not None:
            source = block.source if isinstance(block.source, str) else ""
            inner = content_text(block.content, f"{where}.content", unread)
            return _titled(block, f"{source}\n{inner}".lstrip("\n"))
        case _:
            return unread(block.type, f"{where}.type")


def content_text(content: str | list[Block] | None, where: str, unread: Unread) -> str:
    """The text of content; blocks are lines of their own."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(block_text(block, f"{where}[{at}]", unread) for at, block in enumerate(content))


def _document_text(block: Block, where: str, unread: Unread) -> str:
    source = block.source
    if isinstance(source, dict):
        kind, text, inner = source.get("type"), source.get("data"), source.get("content")
        if kind == "text" and isinstance(text, str):
            return text
        if kind == "content" and isinstance(inner, str):
            return inner
        if kind == "content" and isinstance(inner, list):
            blocks = [Block.model_validate(entry) for entry in cast(list[object], inner) if isinstance(entry, dict)]
            return content_text(blocks, f"{where}.source.content", unread)
    return unread(block.type, f"{where}.source")


def _titled(block: Block, text: str) -> str:
    head = [line for line in (block.title, block.context) if line is not None]
    return "\n".join([*head, text])
