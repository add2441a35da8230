"""How servers and channels are made, so that both ends of every hop agree on sizes and keepalive."""

from collections.abc import Iterable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

MAX_MESSAGE_BYTES = 16 << 20
KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
# A peer that pings every second is welcome; half of that leaves room for timers that fire early.
MIN_PING_INTERVAL_MS = 500
MAX_RECONNECT_BACKOFF_MS = 2_000

_Options = Sequence[tuple[str, int]]
_SHARED_OPTIONS: _Options = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),  # no limit: a long prefill is a long silence
)
_SERVER_OPTIONS: _Options = (
    *_SHARED_OPTIONS,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it
)


class PortUnavailableError(OSError):
    """A server cannot listen where it should."""


def server(interceptors: Sequence[grpc.aio.ServerInterceptor] = ()) -> grpc.aio.Server:
    """A server without services and ports, to be made in the event loop that runs it."""
    return grpc.aio.server(interceptors=interceptors, options=_SERVER_OPTIONS)


def bind(
    server: grpc.aio.Server,
    port: int,
    *,
    host: str = "127.0.0.1",
    credentials: grpc.ServerCredentials | None = None,
) -> int:
    """Makes the server listen and returns its port; 0 asks for any free one. Raises PortUnavailableError."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise PortUnavailableError(
            f"cannot listen on {address}: the port is taken or the host is not an address of this machine; "
            "choose another, or port 0 for any free one"
        ) from error


def channel(
    address: str, *, credentials: grpc.ChannelCredentials | None = None, internal: bool = False
) -> grpc.aio.Channel:
    """An asyncio channel to host:port; `internal`, between Baton's own processes, also watches it while idle."""
    options = _channel_options(internal=internal)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, credentials, options)


def sync_channel(address: str, *, credentials: grpc.ChannelCredentials | None = None) -> grpc.Channel:
    """A channel to host:port for threads instead of an event loop."""
    options = _channel_options(internal=False)
    if credentials is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, credentials, options)


async def add_health_and_reflection(server: grpc.aio.Server, service_names: Iterable[str]) -> health.aio.HealthServicer:
    """Adds grpc.health.v1 and server reflection, before the server starts.

    The empty name says that the process lives (SERVING at once). Each service name says that it is ready:
    NOT_SERVING until the owner sets it on the returned servicer.
    """
    names = tuple(service_names)
    servicer = health.aio.HealthServicer()
    for name in names:
        await servicer.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return servicer


def _channel_options(*, internal: bool) -> _Options:
    return (
        *_SHARED_OPTIONS,
        ("grpc.keepalive_permit_without_calls", int(internal)),
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_MS),
        ("grpc.enable_http_proxy", 0),  # addresses are dialled as they are, whatever the environment says
    )
