"""One router process: its server, its view of the workers, its health."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2

from baton import channel
from baton.error_interceptor import ErrorInterceptor
from baton.metrics import MetricsServer
from baton.v1 import inference_pb2, inference_pb2_grpc
from engine.text_codec import TextCodec
from router.admission import AdmissionQueue
from router.discovery import Discovery
from router.dispatch import DispatchConfig, Dispatcher
from router.forecast import Forecast
from router.membership import Membership, WorkerAddress
from router.policy import Claim, Decision, Refusal, choose
from router.reply import CLIENT_STALL_LIMIT_S
from router.router_metrics import RouterMetrics, SloTargets
from router.service import InferenceServicer

logger = logging.getLogger(__name__)

SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """One router. `port` 0 takes any free one.

    `local_prefill_max_tokens`: a decode worker that lacks no more of a prompt than this prefills it by itself.
    `recovery_patience_s`: so long a request that has lost its workers waits for others. `client_stall_limit_s`: a
    client that takes no message for so long is given up. `metrics_port` is that of /metrics and of the discovery of
    all processes; 0 takes any free one. Answers are counted against `slo_ttft_s` and `slo_tpot_s`; 0 is no target.
    """

    model_dir: str
    model_name: str
    host: str = "127.0.0.1"
    port: int = 0
    max_waiting: int = 1024
    local_prefill_max_tokens: int = 16
    recovery_patience_s: float = 30.0
    client_stall_limit_s: float = CLIENT_STALL_LIMIT_S
    metrics_port: int = 0
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0


class RouterServer:
    """Serves clients. `start` first, then `set_workers` as often as they change, `stop` at the end."""

    async def start(self, spec: RouterSpec) -> str:
        """Listens; returns host:port. Raises PortUnavailableError, or ModelFilesError for a bad model directory."""
        codec = await asyncio.to_thread(TextCodec.from_directory, Path(spec.model_dir))
        self._membership = Membership()
        forecast = Forecast()
        self._queue = AdmissionQueue(self._membership, spec.max_waiting, forecast)
        config = DispatchConfig(spec.local_prefill_max_tokens, spec.recovery_patience_s)
        dispatcher = Dispatcher(self._membership, self._queue, forecast, config)
        self._server: grpc.aio.Server = channel.server([ErrorInterceptor()])
        metrics = RouterMetrics(SloTargets(spec.slo_ttft_s, spec.slo_tpot_s))
        metrics.watch(lambda: self._queue.num_waiting, self._membership.workers_up, self._membership.num_circuits_open)
        servicer = InferenceServicer(
            spec.model_name, codec, self._membership, dispatcher, metrics, spec.client_stall_limit_s
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, self._server)  # type: ignore[no-untyped-call]
        self._health: health.aio.HealthServicer = await channel.add_health_and_reflection(self._server, [SERVICE_NAME])
        port = channel.bind(self._server, spec.port, host=spec.host)
        registry = metrics.instruments.registry
        self._discovery = Discovery(spec.model_name)
        self._metrics_server = MetricsServer(registry, spec.host, spec.metrics_port, self._discovery.targets)
        self.metrics_address = self._metrics_server.address
        self._discovery.set_router(self.metrics_address)
        await self._server.start()
        self._readiness = asyncio.create_task(self._follow_readiness(), name="readiness")
        return f"{spec.host}:{port}"

    @property
    def ready(self) -> bool:
        """Whether some pair of workers, or a mixed one, could take a request now or after those before it."""
        choice = choose(Claim(1, 2, 2), self._membership.views(), self._membership.blocked_pairs())
        return isinstance(choice, Decision) or choice is Refusal.NO_ROOM

    async def set_workers(self, workers: Sequence[WorkerAddress]) -> None:
        """The workers there are from now on."""
        self._discovery.set_workers(workers)
        await self._membership.set_workers(workers)

    async def stop(self, grace_s: float) -> None:
        """Takes no new requests and gives running ones `grace_s` seconds."""
        self._readiness.cancel()
        await asyncio.wait({self._readiness})
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
        await self._queue.close()
        await self._membership.close()
        await asyncio.to_thread(self._metrics_server.stop)

    async def _follow_readiness(self) -> None:
        while True:
            status = (
                health_pb2.HealthCheckResponse.SERVING if self.ready else health_pb2.HealthCheckResponse.NOT_SERVING
            )
            await self._health.set(SERVICE_NAME, status)
            await self._membership.wait_for_change()
