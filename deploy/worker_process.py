"""Assembles one worker process from its parts: engine, services of its role, server."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import grpc
import torch
from grpc_health.v1 import health, health_pb2
from platformdirs import user_cache_path

from baton import channel
from baton.error_interceptor import ErrorInterceptor
from baton.metrics import MetricsServer
from baton.v1 import fault_pb2_grpc, kv_transfer_pb2_grpc, worker_pb2, worker_pb2_grpc
from decode_worker.handoffs import Handoffs
from decode_worker.push_service import PushServicer
from decode_worker.service import DecodeServicer
from deploy.worker_spec import WorkerAddress, WorkerSpec
from kv_transfer.grpc_transport import write_handler
from kv_transfer.receiver import LandingSink
from prefill_worker.peers import Peers
from prefill_worker.service import PrefillServicer
from worker.draining import Draining
from worker.fault_injection import InjectedFaults
from worker.fault_points import NO_FAULTS
from worker.fault_service import FaultServicer
from worker.host import WorkerConfig, WorkerHost, load_worker
from worker.state_feed import StateFeed
from worker.worker_metrics import MeteredRunner, WorkerCollector, worker_instruments
from worker.worker_service import LandingCounts, WorkerServicer

STALL_LIMIT_S = 60.0  # a step that takes longer is stuck
ENGINE_STOP_TIMEOUT_S = 10.0
HAND_BACK_TIMEOUT_S = 2.0  # for calls to end that were told to
SERVER_STOP_GRACE_S = 0.5  # for their last words to leave
# Threads of the interpreter change twenty times as often as by default, so that the threads of gRPC get their
# turn beside a step that computes in Python.
SWITCH_INTERVAL_S = 0.0005


class WorkerProcess:
    """Serves one worker in this process. `start` once, `stop` once."""

    def __init__(self) -> None:
        self._is_ready = False
        self._draining = Draining()
        self._closing: list[Callable[[], Awaitable[None]]] = []  # ends what outlasts its call
        self._host: WorkerHost | None = None
        self._server: grpc.aio.Server | None = None

    async def start(self, spec: WorkerSpec, on_progress: Callable[[str], None]) -> WorkerAddress:
        """Loads the model and serves. `on_progress` gets a phrase a phase, from another thread."""
        _take_cores(spec.cores)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        instruments = worker_instruments()
        metered = partial(MeteredRunner, instruments=instruments)
        host = await asyncio.to_thread(load_worker, _config(spec), StateFeed(), on_progress, metered)
        self._host, self._peers = host, Peers()
        on_progress("starting services")
        self._server = channel.server([ErrorInterceptor()])
        faults = InjectedFaults() if spec.allow_faults else None
        handoffs, names, landing = self._add_services(host, self._server, faults)
        instruments.registry.register(WorkerCollector(_info(spec, host), host.engine.load, landing))
        self._metrics = MetricsServer(instruments.registry, spec.host, spec.metrics_port)
        self._health: health.aio.HealthServicer = await channel.add_health_and_reflection(self._server, names)
        handoffs.address = f"{spec.host}:{channel.bind(self._server, 0, host=spec.host)}"
        host.engine.start()
        await self._server.start()
        for name in names:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._is_ready = True
        return WorkerAddress(spec.name, spec.role, handoffs.address, host.epoch, os.getpid(), self._metrics.address)

    def is_healthy(self) -> bool:
        """Whether the engine makes progress, or has nothing to do."""
        return self._host is not None and self._host.engine.stalled_s() < STALL_LIMIT_S

    async def stop(self, grace_s: float) -> None:
        """Takes no new requests, gives running ones `grace_s` seconds, then hands them back: others go on with them."""
        self._is_ready = False
        self._draining.begin()
        if self._host is None or self._server is None:
            return
        self._host.state.notify()
        await self._health.enter_graceful_shutdown()
        if not await self._draining.wait_idle(grace_s):
            self._draining.expire()
            await self._draining.wait_idle(HAND_BACK_TIMEOUT_S)
        await self._server.stop(SERVER_STOP_GRACE_S)
        for close in self._closing:
            await close()
        await self._peers.close()
        await asyncio.to_thread(self._metrics.stop)
        self._host.state.close()
        await asyncio.to_thread(self._host.engine.stop, ENGINE_STOP_TIMEOUT_S)

    def _add_services(
        self, host: WorkerHost, server: grpc.aio.Server, injected: InjectedFaults | None
    ) -> tuple[Handoffs, list[str], Callable[[], LandingCounts]]:
        faults = injected or NO_FAULTS
        sink = LandingSink(host.epoch, host.kv_pool)
        handoffs = Handoffs(host, sink)
        role, services = host.config.role, ["WorkerService"]
        landing = lambda: LandingCounts(sink.num_open, sink.stale_writes, handoffs.num_quarantined_blocks)  # noqa: E731
        worker_servicer = WorkerServicer(host, landing, lambda: self._is_ready)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker_servicer, server)  # type: ignore[no-untyped-call]
        if role in ("prefill", "mixed"):
            servicer = PrefillServicer(host, self._peers, self._draining, faults)
            worker_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
            services.append("PrefillService")
            self._closing.append(servicer.close_all)
        if role in ("decode", "mixed"):
            decode = DecodeServicer(host, handoffs, self._draining, faults)
            worker_pb2_grpc.add_DecodeServiceServicer_to_server(decode, server)  # type: ignore[no-untyped-call]
            push = PushServicer(host, handoffs)
            kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(push, server)  # type: ignore[no-untyped-call]
            server.add_generic_rpc_handlers((write_handler(sink),))
            services.append("DecodeService")
            self._closing.append(handoffs.close_all)
        if injected is not None:
            fault = FaultServicer(host, injected)
            fault_pb2_grpc.add_FaultServiceServicer_to_server(fault, server)  # type: ignore[no-untyped-call]
            services.append("FaultService")
        return handoffs, [f"{worker_pb2.DESCRIPTOR.package}.{name}" for name in services], landing


def _info(spec: WorkerSpec, host: WorkerHost) -> tuple[str, ...]:
    return spec.name, spec.role, host.epoch, spec.dtype, str(spec.block_size), str(host.num_blocks)


def _config(spec: WorkerSpec) -> WorkerConfig:
    return WorkerConfig(
        name=spec.name,
        role=spec.role,
        model_dir=Path(spec.model_dir),
        kernel_cache_dir=user_cache_path("baton") / "kernels",
        dtype=spec.dtype,
        device=spec.device,
        kv_memory_bytes=spec.kv_memory_bytes,
        block_size=spec.block_size,
        max_step_tokens=spec.max_step_tokens,
        max_batch_sequences=spec.max_batch_sequences,
    )


def _take_cores(cores: tuple[int, ...]) -> None:
    """Pins every thread of this process, those to come included, and gives torch as many threads as cores."""
    if not cores:
        return
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)
    torch.set_num_threads(len(cores))
