class RequestMetadata:
    request_id: str
    internal_request_id: str
    call_method: str
    def __init__(self, *, request_id: str, internal_request_id: str, call_method: str = ...) -> None: ...
