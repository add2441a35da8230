"""Prompts of an exact length. Pure."""

import random
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptShape:
    """`num_tokens` of each prompt, of which the first `num_shared_tokens` are the same in all. Raises ValueError."""

    num_tokens: int
    num_shared_tokens: int = 0

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or not 0 <= self.num_shared_tokens < self.num_tokens:
            raise ValueError(
                f"{self.num_shared_tokens} shared of {self.num_tokens} prompt tokens: "
                "at least one token must be left that is not shared"
            )


def make_prompts(
    num_prompts: int, shape: PromptShape, *, vocab_size: int, seed: int, excluded_ids: Collection[int] = ()
) -> list[list[int]]:
    """Prompts of random token ids in [0, vocab_size) without the excluded ones, always the same for a seed.

    Right after what they share no two prompts have the same token, as long as there are no more prompts than
    tokens: nothing else of them can be in a prefix cache.
    """
    generator = random.Random(seed)
    usable_ids = sorted(set(range(vocab_size)) - set(excluded_ids))
    shared = generator.choices(usable_ids, k=shape.num_shared_tokens)
    first_own_ids = generator.sample(usable_ids, k=min(num_prompts, len(usable_ids)))
    num_more = shape.num_tokens - shape.num_shared_tokens - 1
    return [
        [*shared, first_own_ids[i % len(first_own_ids)], *generator.choices(usable_ids, k=num_more)]
        for i in range(num_prompts)
    ]
