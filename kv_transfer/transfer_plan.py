"""Into which slices KV is cut on its way, and which of it was covered already. Pure."""

from dataclasses import dataclass

import numpy as np

from kv_transfer.errors import DuplicateFrame, OutOfRange

# A small message costs several times the CPU of a large one per byte, a huge one stalls the connection.
DEFAULT_GROUP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class KvSlice:
    """KV of consecutive layers and consecutive tokens: what one frame carries."""

    layers: range
    tokens: range

    @property
    def num_cells(self) -> int:
        """Pairs of (layer, token)."""
        return len(self.layers) * len(self.tokens)


def cut(layers: range, tokens: range, token_bytes: int, max_bytes: int = DEFAULT_GROUP_BYTES) -> list[KvSlice]:
    """Slices of at most `max_bytes` that cover `layers` x `tokens`, each pair exactly once, layers first.

    `token_bytes` is the size of one token of one layer. Whole layers are grouped while they fit; a layer
    that does not fit alone is cut by tokens. Raises ValueError if not even one token of one layer fits.
    """
    if token_bytes > max_bytes:
        raise ValueError(f"a token of one layer is {token_bytes} bytes, more than the {max_bytes} of a slice")
    if not layers or not tokens:
        return []
    layer_bytes = len(tokens) * token_bytes
    if layer_bytes <= max_bytes:
        return [KvSlice(part, tokens) for part in _chop(layers, max_bytes // layer_bytes)]
    pieces = _chop(tokens, max_bytes // token_bytes)
    return [KvSlice(range(layer, layer + 1), piece) for layer in layers for piece in pieces]


def _chop(whole: range, size: int) -> list[range]:
    return [whole[i : i + size] for i in range(0, len(whole), size)]


class SliceGrouper:
    """Collects layers as they become ready until a slice is worth sending.

    Layers of one chunk of tokens arrive one by one or several at once. They are held back only until they
    fill a slice, the model's last layer arrives, or something that does not continue them arrives.
    """

    def __init__(self, num_layers: int, token_bytes: int, max_bytes: int = DEFAULT_GROUP_BYTES) -> None:
        self._num_layers = num_layers
        self._token_bytes = token_bytes
        self._max_bytes = max_bytes
        self._pending: KvSlice | None = None

    def add(self, layers: range, tokens: range) -> list[KvSlice]:
        """Takes what became ready; returns the slices that are due."""
        due: list[KvSlice] = []
        pending = self._pending
        if pending is not None and (pending.tokens, pending.layers.stop) == (tokens, layers.start):
            layers = range(pending.layers.start, layers.stop)
            self._pending = None
        else:
            due += self.flush()
        if layers.stop < self._num_layers:
            layers, rest = self._split(layers, tokens)
            self._pending = KvSlice(rest, tokens) if rest else None
        return due + cut(layers, tokens, self._token_bytes, self._max_bytes)

    def flush(self) -> list[KvSlice]:
        """Returns what is still held back."""
        pending, self._pending = self._pending, None
        if pending is None:
            return []
        return cut(pending.layers, pending.tokens, self._token_bytes, self._max_bytes)

    def _split(self, layers: range, tokens: range) -> tuple[range, range]:
        """The layers that fill whole slices, and the rest."""
        layers_per_slice = max(1, self._max_bytes // (len(tokens) * self._token_bytes))
        num_due = len(layers) - len(layers) % layers_per_slice
        return layers[:num_due], layers[num_due:]


class Coverage:
    """Which (layer, token) pairs of a transfer were claimed: one byte each."""

    def __init__(self, num_layers: int, tokens: range) -> None:
        self._tokens = tokens
        self._claimed = np.zeros((num_layers, len(tokens)), dtype=np.bool_)
        self._num_missing = self._claimed.size

    @property
    def num_missing(self) -> int:
        """Pairs not claimed yet."""
        return self._num_missing

    def claim(self, part: KvSlice) -> None:
        """Claims every pair of `part`, or none: OutOfRange, or DuplicateFrame if any was claimed."""
        num_layers, first = len(self._claimed), self._tokens.start
        inside = part.layers.start >= 0 and part.layers.stop <= num_layers
        if not inside or part.tokens.start < first or part.tokens.stop > self._tokens.stop:
            raise OutOfRange(
                f"layers {_interval(part.layers)}, tokens {_interval(part.tokens)} lie outside layers "
                f"[0, {num_layers}), tokens {_interval(self._tokens)} of the transfer"
            )
        cells = self._claimed[
            part.layers.start : part.layers.stop, part.tokens.start - first : part.tokens.stop - first
        ]
        if cells.any():
            raise DuplicateFrame(
                f"part of layers {_interval(part.layers)}, tokens {_interval(part.tokens)} was delivered before"
            )
        cells[:] = True
        self._num_missing -= part.num_cells

    def first_missing(self) -> tuple[int, int] | None:
        """The lowest (layer, token) not claimed; None if everything was."""
        if self._num_missing == 0:
            return None
        layer, offset = np.unravel_index(int(np.argmin(self._claimed)), self._claimed.shape)
        return int(layer), self._tokens.start + int(offset)


def _interval(values: range) -> str:
    return f"[{values.start}, {values.stop})"
