"""How tokens are chosen and when an answer ends. Pure."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling and stopping, already validated at the router.

    `temperature` 0 is greedy. `top_k` 0 is no limit. `seed` keys the counter-based generator together with
    the token's position in the sequence, so a token does not depend on the batch or worker it is made in.
    `max_tokens` counts generated tokens. `stop_token_ids` holds every id that ends the answer, the model's
    end tokens included unless the request ignores them.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int = 1
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
