"""Where Prometheus finds the processes of a cluster: its HTTP service discovery format."""

from collections.abc import Sequence
from typing import Any

from router.membership import WorkerAddress


class Discovery:
    """The targets there are now, with the labels that tell them apart. `targets` may be called from any thread."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._router: list[dict[str, Any]] = []
        self._workers: list[dict[str, Any]] = []

    def set_router(self, address: str) -> None:
        """This process."""
        self._router = [self._target(address, "router", "router")]

    def set_workers(self, workers: Sequence[WorkerAddress]) -> None:
        """All workers there are from now on."""
        self._workers = [self._target(w.metrics_address, w.name, w.role) for w in workers if w.metrics_address]

    def targets(self) -> list[dict[str, Any]]:
        """As https://prometheus.io/docs/prometheus/latest/http_sd/ has them."""
        return [*self._router, *self._workers]

    def _target(self, address: str, worker: str, role: str) -> dict[str, Any]:
        return {"targets": [address], "labels": {"worker": worker, "role": role, "model_name": self._model_name}}
