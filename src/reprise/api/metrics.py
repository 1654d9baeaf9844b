"""`GET /metrics`."""

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from reprise.api.context import InContext

router = APIRouter(tags=["Server"])


@router.get("/metrics", response_class=Response)
async def get_metrics(context: InContext) -> Response:
    """The server's metrics in Prometheus' text format."""
    return Response(context.metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})
