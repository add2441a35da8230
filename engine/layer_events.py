"""Reports a layer's KV only when the device has really written it."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

logger = logging.getLogger(__name__)


class DeviceEvent(Protocol):
    """A point in a device's queue of work, such as torch.cuda.Event."""

    def synchronize(self) -> None:
        """Returns when the device has reached it."""
        ...


class LayerEvents:
    """On a device that works asynchronously, a call returns when kernels are queued, not when they have ended.

    One thread waits for the events in their order, so the step itself never waits.
    """

    def __init__(self, record: Callable[[], DeviceEvent]) -> None:
        """`record` marks the present end of the device's queue."""
        self._record = record
        self._waiting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="layer events")

    def deferred(self, on_layer: Callable[[int], None]) -> Callable[[int], None]:
        """A callback for the step's thread that calls `on_layer`, on another thread, once the KV is there."""

        def report(layer: int) -> None:
            self._waiting.submit(_report_when_reached, self._record(), on_layer, layer)

        return report

    def close(self) -> None:
        """Waits for what was recorded, and ends the thread."""
        self._waiting.shutdown()


def _report_when_reached(event: DeviceEvent, on_layer: Callable[[int], None], layer: int) -> None:
    try:
        event.synchronize()
    except RuntimeError:
        # The device has failed, and so does the step; KV that was never reported is never sent.
        logger.exception("layer %d was not written", layer)
        return
    on_layer(layer)
