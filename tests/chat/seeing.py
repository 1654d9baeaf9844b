"""Text models with an image side: a reader that knows sizes alone, and templates in the shapes of families that see.

No image is decoded: an image here is any content with a size, and 16 x 16 of its pixels are a placeholder.
"""

from dataclasses import dataclass, field, replace
from functools import cache

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from reprise.chat.images import image_part
from reprise.chat.request import Message
from reprise.chat.text_model import TextModel
from reprise.core.errors import BadRequest
from reprise.core.images import ImageExpansion, ImageFile, digest_of
from reprise.core.tokens import as_tokens
from tests.chat.text_models import backend_tokenizer, make_text_model

PIXELS = 16
"""Of a placeholder, in each direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageForm:
    """How a family writes images. `begin`, `line_end`, `end`: separators in an image, or none."""

    marker: str
    placeholder: str
    template: str
    begin: str | None = None
    line_end: str | None = None
    end: str | None = None
    before: str = ""
    after: str = ""
    counts_from: int | None = None

    @property
    def marks(self) -> list[str]:
        given = (self.marker, self.placeholder, self.begin, self.line_end, self.end)
        return list(dict.fromkeys(mark for mark in given if mark is not None))


@dataclass(slots=True, eq=False)
class SizeReader:
    """Expands images by their sizes."""

    family: ImageForm
    vocab: dict[str, int]
    num_expanded: int = 0
    expanded: list[bytes] = field(default_factory=list[bytes])

    @property
    def marker(self) -> str:
        return self.family.marker

    def expand(self, image: ImageFile) -> ImageExpansion:
        if image.content.startswith(b"broken"):
            raise BadRequest("An image cannot be decoded: it is broken.")
        self.num_expanded += 1
        family = self.family
        rows, columns = max(1, image.height // PIXELS), max(1, image.width // PIXELS)
        line = [family.placeholder] * columns + ([] if family.line_end is None else [family.line_end])
        run = [*filter(None, [family.begin]), *line * rows, *filter(None, [family.end])]
        return ImageExpansion(
            tokens=as_tokens(self.vocab[mark] for mark in run),
            placeholder=self.vocab[family.placeholder],
            rows=rows,
            columns=columns,
            text_before=family.before,
            text_after=family.after,
            counts_from=family.counts_from,
        )


_BODY = """\
{%- macro body(content) -%}
{%- if content is string -%}{{ content }}{%- else -%}
{%- for part in content -%}{%- if part.type == 'image' -%}MARK{%- else -%}{{ part.text }}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
"""
_LINES = (
    _BODY
    + """\
{%- if tools -%}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ body(message.content or '') }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>' }}{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}{{ '</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
)
_ONLY_USERS = (
    """\
{%- for message in messages if message.role != 'user' and message.content is not string -%}
{%- for part in message.content if part.type == 'image' -%}
{{ raise_exception('Only users show images.') }}
{%- endfor -%}
{%- endfor -%}
"""
    + _LINES
)

FAMILIES = {
    # Marks around an image are the template's; the image is its placeholders alone.
    "marks": ImageForm(
        marker="<|image_pad|>",
        placeholder="<|image_pad|>",
        template=_LINES.replace("MARK", "<|vision_start|><|image_pad|><|vision_end|>"),
    ),
    # An image is one mark, which becomes blank lines, a beginning, placeholders and an end.
    "lines": ImageForm(
        marker="<start_of_image>",
        placeholder="<image_soft_token>",
        template=_LINES.replace("MARK", "<start_of_image>"),
        begin="<start_of_image>",
        end="<end_of_image>",
        before="\n\n",
        after="\n\n",
    ),
    # Rows end with a mark, and only users show images.
    "rows": ImageForm(
        marker="[IMG]",
        placeholder="[IMG]",
        template=_ONLY_USERS.replace("MARK", "[IMG]"),
        line_end="[IMG_BREAK]",
        end="[IMG_END]",
    ),
    # The images of a prompt are numbered in its text.
    "numbered": ImageForm(
        marker="<|image_pad|>",
        placeholder="<|image_pad|>",
        template=_LINES.replace("MARK", "<|image_pad|>"),
        begin="</image_id>",
        before="<image_id>",
        counts_from=0,
    ),
}


FURTHER = {
    # The same without a way to write calls: results stand alone, and images in them are refused, too.
    "rows without calls": replace(
        FAMILIES["rows"],
        template=(FAMILIES["rows"].template.partition("{%- for call in")[0] + "{{ '<|im_end|>\\n' }}\n{%- endfor -%}\n")
        + "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}\n",
    ),
}


@cache
def _tokenizer(family: str) -> PreTrainedTokenizerFast:
    known = {**FAMILIES, **FURTHER}[family]
    inner = Tokenizer.from_str(backend_tokenizer().to_str())
    marks = [*known.marks, "<|vision_start|>", "<|vision_end|>", "<image_id>"]
    inner.add_tokens([AddedToken(mark, normalized=False, special=True) for mark in marks])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        chat_template=known.template,
        clean_up_tokenization_spaces=False,
    )


def seeing(family: str = "lines") -> TextModel:
    """A text model that sees, with a reader of its own."""
    tokenizer = _tokenizer(family)
    reader = SizeReader({**FAMILIES, **FURTHER}[family], tokenizer.get_vocab())
    return replace(make_text_model(tokenizer), images=reader)


def picture(content: str = "a", width: int = 48, height: int = 32) -> ImageFile:
    return ImageFile(content=content.encode(), digest=digest_of(content.encode()), width=width, height=height)


def shows(*parts: str | ImageFile, role: str = "user", **more: str) -> Message:
    """A message of texts and images."""
    said = [image_part(part) if isinstance(part, ImageFile) else {"type": "text", "text": part} for part in parts]
    return {"role": role, "content": said, **more}
