"""How far rounding alone may move a logit: what makes a difference a near-tie. Pure.

A token's hidden state is rounded about eight times in each layer: two norms, the three projections and their rotation,
the attention weights, the attention's output, its projection and the residual sum, the gated product, its projection
and the residual sum. A rounding to a type of unit roundoff u is a relative error that is spread evenly over [-u, u]:
its standard deviation is u / sqrt(3). Behind it stands a dot product that is summed up in float32, of about
`hidden_size` terms: sqrt(hidden_size) roundings of 2**-24. Errors of n independent roundings add up as sqrt(n) of one
(Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019), and a relative error of the hidden
state is one of the logits, relative to how far they are spread over the vocabulary.

SmolLM2-135M comes out at 3.5 % of that spread in bfloat16 and 0.0013 % in float32: 0.1 and 0.00004 in logits.
Measured, transformers' bfloat16 logits are off its float32 ones by a little over half of that (by nearly twice at the
worst positions), and its float32 logits off its float64 ones by an eighth.
"""

import math
from dataclasses import dataclass

UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
ROUNDINGS_PER_LAYER = 8
# Of thousands of tokens in bfloat16, the widest near-tie took 1.8; the rest is for the worst positions.
NUM_DEVIATIONS = 4.0


@dataclass(frozen=True, slots=True)
class ModelDepth:
    """What of a model decides how much rounding adds up."""

    num_layers: int
    hidden_size: int


def relative_error(dtype: str, depth: ModelDepth) -> float:
    """Standard deviation of a logit's error, relative to the standard deviation of the logits of its position."""
    unit = math.hypot(UNIT_ROUNDOFF[dtype], math.sqrt(depth.hidden_size) * UNIT_ROUNDOFF["float32"])
    return math.sqrt(ROUNDINGS_PER_LAYER * depth.num_layers) * unit / math.sqrt(3)


def relative_tolerance(dtype: str, reference_dtype: str, depth: ModelDepth) -> float:
    """The largest error of a logit that rounding explains, relative to the standard deviation of the logits.

    To be compared with `TokenChoice.error_needed`, which shares what two logits lack among the two: half of the
    difference between two logits, each of which is computed twice, in `dtype` and in `reference_dtype`.
    """
    errors = math.hypot(relative_error(dtype, depth), relative_error(reference_dtype, depth))
    return NUM_DEVIATIONS * errors / math.sqrt(2)
