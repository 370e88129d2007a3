"""A health check from inside the container: is the server ready for requests?

    python3 healthcheck.py [TARGET] [SERVICE]

TARGET: host:port or unix:/path; by default where HEADRACE_LISTEN says that the server listens (a
Unix socket if it has one). SERVICE: by default the generation service, which is ready when the
model is loaded and until the server drains; "" asks only whether the process lives.

The probe speaks plain text. Where TCP has TLS, let the server listen on a Unix socket as well:
HEADRACE_LISTEN="0.0.0.0:50051 unix:/run/headrace/headrace.sock".

Exit code 0: serving; 1: not, or nobody answered within 3 seconds. The reason is on stderr.
"""

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0
SERVICE = "headrace.v1.GenerationService"
DEFAULT_LISTEN = "127.0.0.1:50051"
OPTIONS = (("grpc.enable_http_proxy", 0),)  # a proxy in the environment is for others


def own_target(listen: str) -> str:
    """The address of HEADRACE_LISTEN (addresses separated by blanks) to ask at."""
    addresses = listen.split() or [DEFAULT_LISTEN]
    target = next((address for address in addresses if address.startswith("unix:")), addresses[0])
    host, colon, port = target.rpartition(":")
    loopback = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host)
    return f"{loopback}{colon}{port}" if loopback else target


def check(target: str, service: str) -> str:
    """The status: SERVING, NOT_SERVING with the reason, or why there is none."""
    request = health_pb2.HealthCheckRequest(service=service)
    with grpc.insecure_channel(target, options=OPTIONS) as channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            answer, call = stub.Check.with_call(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    status = str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
    reason = dict(call.trailing_metadata() or ()).get("headrace-reason")
    return f"{status}: {reason}" if reason else status


def main(arguments: list[str]) -> int:
    """Ask, and return the exit code."""
    if len(arguments) > 2:
        sys.stderr.write("usage: healthcheck.py [TARGET] [SERVICE]\n")
        return 1
    target = arguments[0] if arguments else own_target(os.environ.get("HEADRACE_LISTEN", ""))
    status = check(target, arguments[1] if len(arguments) > 1 else SERVICE)
    if status == "SERVING":
        return 0
    sys.stderr.write(f"{target}: {status}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
