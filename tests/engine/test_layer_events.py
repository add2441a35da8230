import threading

from engine.layer_events import LayerEvents


class ManualEvent:
    """A device event that the test lets happen."""

    def __init__(self, error=None):
        self.reached = threading.Event()
        self.error = error

    def synchronize(self):
        assert self.reached.wait(5)
        if self.error:
            raise self.error


def test_a_layer_is_reported_when_the_device_has_reached_it_and_in_order():
    events = [ManualEvent() for _ in range(3)]
    recorded = iter(events)
    layer_events = LayerEvents(lambda: next(recorded))
    reported, first = [], threading.Event()

    def on_layer(layer):
        reported.append(layer)
        first.set()

    report = layer_events.deferred(on_layer)
    for layer in range(3):
        report(layer)  # does not wait
    events[2].reached.set()
    assert reported == []  # layer 2 was written, layer 0 before it was not
    events[0].reached.set()
    assert first.wait(5)
    assert reported == [0]
    events[1].reached.set()
    layer_events.close()
    assert reported == [0, 1, 2]


def test_a_device_error_reports_nothing(caplog):
    event = ManualEvent(RuntimeError("illegal address"))
    event.reached.set()
    layer_events = LayerEvents(lambda: event)
    reported = []
    layer_events.deferred(reported.append)(4)
    layer_events.close()
    assert reported == []
    assert "layer 4" in caplog.text
