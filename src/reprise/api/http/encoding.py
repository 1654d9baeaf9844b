"""The one encoder of all JSON that leaves the server, in whole bodies and in streams.

JSON has no NaN and no infinity, and its text is Unicode. A value that breaks this is a bug of ours: it becomes an error
that is logged and answered as one, and never text that a client cannot parse.
"""

import json

from starlette.responses import Response

from reprise.core.errors import RepriseError


class NotJson(RepriseError):
    """What was to be sent has no form in JSON."""

    code = "not_json_value"


def encode_json(body: object) -> str:
    """Compact JSON. Raises NotJson."""
    try:
        text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except (ValueError, TypeError) as error:
        raise NotJson("The answer has a value that JSON cannot represent. The server's log says where.") from error
    return text


class JsonResponse(Response):
    """A body of strict JSON. Raises NotJson when it is made, while another answer can still be given."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return encode_json(content).encode()
