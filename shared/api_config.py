"""The HTTP gateway's configuration: one struct, whose fields are the flags (see shared/flags.py)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shared.flags import option


class ApiConfig(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Where the gateway listens, whom it lets in, and its limits."""

    host: Annotated[str, option("API", "address to listen on")] = "0.0.0.0"
    port: Annotated[int, option("API", "port to listen on; 0 takes any free one")] = 8000
    api_key: Annotated[
        list[str], option("API", "keys clients may send as 'Authorization: Bearer KEY' (default: none is needed)")
    ] = []
    max_concurrent_requests: Annotated[
        int, option("API", "requests in work at once per api process; more are refused with 429", ge=1)
    ] = 2048
    max_parked_requests: Annotated[
        int, option("API", "requests held while the engine recovers; more are refused with 503", ge=0)
    ] = 1024
    max_body_bytes: Annotated[int, option("API", "largest request body in bytes", ge=1024)] = 32 * 1024 * 1024
    keep_alive_timeout: Annotated[
        int, option("API", "seconds an idle connection stays open; more than client pools keep theirs", ge=1)
    ] = 75
    sse_ping_seconds: Annotated[
        float, option("API", "a stream that is silent this long is sent a comment, so that no proxy cuts it", gt=0)
    ] = 15.0
    stall_seconds: Annotated[
        float, option("API", "/health turns 503 when a worker group owes a step's result this long", gt=0)
    ] = 30.0
    shutdown_timeout: Annotated[float, option("API", "seconds that running requests may go on after SIGTERM", ge=0)] = (
        10.0
    )
    trust_request_chat_template: Annotated[bool, option("API", "let requests bring a chat_template of their own")] = (
        False
    )
