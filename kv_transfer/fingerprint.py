"""What must be equal on both sides of a handoff, and the comparison that names what is not."""

from dataclasses import dataclass, fields

# Version of the push protocol and frame format. A change that an older peer would misread raises it.
PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identity of a worker's KV. Block size is not in it: the wire unit is a token, so blocks may differ.

    `model` is a hash of weights and configuration; `num_kv_heads` counts those of the whole model.
    """

    protocol_version: int
    model: str
    kv_dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int


def mismatch(mine: Fingerprint, theirs: Fingerprint) -> str | None:
    """The first field that differs, with both values; None if the two sides may pair.

    Fields are compared in order of declaration, the protocol version first, as other fields of a peer with
    another version may not mean what they seem to.
    """
    for field in fields(Fingerprint):
        here, there = getattr(mine, field.name), getattr(theirs, field.name)
        if here != there:
            return f"{field.name} differs: {here!r} here, {there!r} at the peer"
    return None
