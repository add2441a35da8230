"""The shape of KV in memory, and the arithmetic of its bytes. Pure."""

from dataclasses import dataclass

# Bytes of one number, by the name the fingerprint carries.
ITEMSIZE_BY_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Geometry of a KV pool, `[num_blocks, num_layers, 2 (k, v), num_kv_heads, block_size, head_dim]`.

    Heads come before tokens, so that a range of heads of one block is contiguous for each of k and v, which
    is what unequal tensor-parallel degrees need. Raises ValueError if a number is not positive or the dtype
    is not one of `ITEMSIZE_BY_DTYPE`.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.dtype not in ITEMSIZE_BY_DTYPE:
            raise ValueError(f"dtype is {self.dtype!r}: use one of {', '.join(ITEMSIZE_BY_DTYPE)}")

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return ITEMSIZE_BY_DTYPE[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token of one head, k or v."""
        return self.head_dim * self.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one layer: k and v of all heads."""
        return 2 * self.num_kv_heads * self.row_bytes

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one block."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)
