"""Headrace: a client for the Headrace text-generation server.

    import headrace

    with headrace.Client() as client:
        print(client.generate("Once upon a time", max_tokens=32).text)

Use `Client` with threads and `AsyncClient` with asyncio. `headrace.v1` has the contract's messages
and stubs.
"""

from headrace._batch import BatchItem
from headrace._channel import CLIENT_VERSION as __version__
from headrace._tool_loop import (
    ToolAnswer,
    ToolArgumentsError,
    ToolDeclinedError,
    ToolError,
    ToolFailedError,
    ToolRunEnd,
    ToolTurn,
    UnknownToolError,
)
from headrace.async_client import AsyncClient
from headrace.async_control import AsyncControl
from headrace.async_session import AsyncRequestHandle, AsyncSession
from headrace.async_streams import AsyncStream
from headrace.async_tool_run import AsyncToolRun
from headrace.client import Client
from headrace.control import Control
from headrace.errors import (
    AlreadyExistsError,
    CallCancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    FieldViolation,
    HeadraceError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    NotSupportedError,
    OutOfRangeError,
    PermissionDeniedError,
    ProtocolError,
    RequestFailedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from headrace.messages import (
    Conversation,
    Message,
    MessageDict,
    Prompt,
    Role,
    Tool,
    ToolCall,
    ToolChoice,
)
from headrace.model_card import Limits, ModelCard
from headrace.options import GenerationOptions, Request, TurnOptions, build_spec
from headrace.results import (
    Accepted,
    CancelStatus,
    Choice,
    Chunk,
    FinishReason,
    HealthStatus,
    PromptInfo,
    Result,
    ServerLoad,
    Timings,
    TokenCandidate,
    TokenInfo,
    Tokenization,
    ToolCallChunk,
    Usage,
)
from headrace.session import RequestHandle, Session
from headrace.streams import Stream
from headrace.tool_run import ToolRun
from headrace.tools import FunctionTool, tool

__all__ = [
    "Accepted",
    "AlreadyExistsError",
    "AsyncClient",
    "AsyncControl",
    "AsyncRequestHandle",
    "AsyncSession",
    "AsyncStream",
    "AsyncToolRun",
    "BatchItem",
    "CallCancelledError",
    "CancelStatus",
    "Choice",
    "Chunk",
    "Client",
    "Control",
    "Conversation",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "FieldViolation",
    "FinishReason",
    "FunctionTool",
    "GenerationOptions",
    "HeadraceError",
    "HealthStatus",
    "InternalError",
    "InvalidArgumentError",
    "Limits",
    "Message",
    "MessageDict",
    "ModelCard",
    "NotFoundError",
    "NotSupportedError",
    "OutOfRangeError",
    "PermissionDeniedError",
    "Prompt",
    "PromptInfo",
    "ProtocolError",
    "Request",
    "RequestFailedError",
    "RequestHandle",
    "ResourceExhaustedError",
    "Result",
    "Role",
    "ServerLoad",
    "Session",
    "Stream",
    "Timings",
    "TokenCandidate",
    "TokenInfo",
    "Tokenization",
    "Tool",
    "ToolAnswer",
    "ToolArgumentsError",
    "ToolCall",
    "ToolCallChunk",
    "ToolChoice",
    "ToolDeclinedError",
    "ToolError",
    "ToolFailedError",
    "ToolRun",
    "ToolRunEnd",
    "ToolTurn",
    "TurnOptions",
    "UnauthenticatedError",
    "UnavailableError",
    "UnknownToolError",
    "Usage",
    "__version__",
    "build_spec",
    "tool",
]
