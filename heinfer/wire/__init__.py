"""What parties say to each other: events, state machines, codec, limits, and the TCP around them."""

from heinfer.wire.address import (
    Address,
    TransportError,
    parse_address,
)
from heinfer.wire.budget import (
    MemoryBudget,
    parse_size,
)
from heinfer.wire.connecting import connect
from heinfer.wire.connection import Connection
from heinfer.wire.frames import (
    Framing,
    query_framing,
    session_framing,
)
from heinfer.wire.lending import Lender
from heinfer.wire.limits import (
    Limits,
)
from heinfer.wire.listener import (
    FrameServer,
)
from heinfer.wire.messages import (
    PROTOCOL_VERSION,
    AnswerComplete,
    BlockAnswer,
    BlockRequest,
    Chunk,
    End,
    Failure,
    FailureCode,
    Hello,
    Mode,
    NodeEvent,
    Ready,
    RefusedError,
    ServerEvent,
    UploadComplete,
    failure_code,
)
from heinfer.wire.queries import (
    Describe,
    Description,
    Greeting,
    QueryEvent,
    QueryFailedError,
    QueryFailure,
    QueryFailureCode,
    QueryHeader,
    ResultEvent,
    ResultHeader,
    Statistics,
    TensorChunk,
    TensorSpec,
)
from heinfer.wire.query_client import QueryClient
from heinfer.wire.query_service import (
    QueryHandler,
    query_failure,
    serve_queries,
)
from heinfer.wire.security import (
    HandshakeError,
    PlainText,
    Security,
    Tls,
)
from heinfer.wire.session import (
    NodeSession,
    ServerSession,
    State,
)
from heinfer.wire.session_service import (
    SessionHandler,
    serve_sessions,
)
from heinfer.wire.shapes import block_shapes
from heinfer.wire.tensors import (
    TensorAssembler,
    describe_tensors,
    iterate_tensor_chunks,
    read_query,
    read_result,
)
from heinfer.wire.tokens import TokenFile, make_token, read_token, token_line
from heinfer.wire.transfers import (
    GROUP_BYTES,
    BlockShape,
    Role,
    iterate_row_chunks,
    row_bytes,
)

__all__ = [
    "GROUP_BYTES",
    "PROTOCOL_VERSION",
    "Address",
    "AnswerComplete",
    "BlockAnswer",
    "BlockRequest",
    "BlockShape",
    "Chunk",
    "Connection",
    "Describe",
    "Description",
    "End",
    "Failure",
    "FailureCode",
    "FrameServer",
    "Framing",
    "Greeting",
    "HandshakeError",
    "Hello",
    "Lender",
    "Limits",
    "MemoryBudget",
    "Mode",
    "NodeEvent",
    "NodeSession",
    "PlainText",
    "QueryClient",
    "QueryEvent",
    "QueryFailedError",
    "QueryFailure",
    "QueryFailureCode",
    "QueryHandler",
    "QueryHeader",
    "Ready",
    "RefusedError",
    "ResultEvent",
    "ResultHeader",
    "Role",
    "Security",
    "ServerEvent",
    "ServerSession",
    "SessionHandler",
    "State",
    "Statistics",
    "TensorAssembler",
    "TensorChunk",
    "TensorSpec",
    "Tls",
    "TokenFile",
    "TransportError",
    "UploadComplete",
    "block_shapes",
    "connect",
    "describe_tensors",
    "failure_code",
    "iterate_row_chunks",
    "iterate_tensor_chunks",
    "make_token",
    "parse_address",
    "parse_size",
    "query_failure",
    "query_framing",
    "read_query",
    "read_result",
    "read_token",
    "row_bytes",
    "serve_queries",
    "serve_sessions",
    "session_framing",
    "token_line",
]
