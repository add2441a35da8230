"""What can go wrong with a cluster as a whole."""


class ClusterError(Exception):
    """A cluster cannot be started, found or stopped; the message says what to do."""
