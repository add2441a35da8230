"""When a drill cannot go on."""


class DrillFailed(Exception):
    """The drill itself could not be carried out; the message says what stood in its way."""
