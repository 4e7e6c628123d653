"""The numerical budget of the static-anchor softmax: every constant that a lemma justifies, and nothing else.

A weight is p = exp2(s - a - BIAS): s the score in log2 units, a the row's anchor, an integer.  `python -m proofs`
reads these constants and proves what their comments claim; editing one in the unsafe direction fails it.
"""

from __future__ import annotations

from typing import Final

LANES: Final = 128
"""Lanes of a vector register: the grid of queries, and more partial sums than a row's denominator is kept as (8, one
per sublane), so that the lemmas hold for either orientation."""

BIAS: Final = 32
"""log2 units.  The weight at the anchor is 2**-BIAS, not 1: with up to MAX_KEYS keys at the running maximum and any
finite BF16 value, sum_k p_k |v_k| <= MAX_KEYS * 2**-BIAS * BF16_MAX < FP32_MAX (lemma `replay_never_overflows`)."""

MAX_KEYS: Final = 2**30
"""Longest supported row.  What the lemmas assume of the number of keys, and what `attention` refuses beyond."""

LANE_LIMIT: Final = 2.0**117
"""The check's limit on each partial sum: below it the whole denominator is at most LANES * LANE_LIMIT = 2**124,
so that it is finite and 0.5 / l a normal number, also where a reciprocal errs by a few ulp (lemma
`checked_sum_has_normal_reciprocal`)."""

SUM_FLOOR: Final = 2.0 ** -(BIAS + 2)
"""The check's floor on a row's denominator.  An anchor that is a score of the row leaves at least 2**-(BIAS + 1), less
the error of one exp2; a row below the floor had an anchor that was no score of its own (lemma `floor_is_reached`)."""

HALF_BF16_MAX: Final = (2.0 - 2.0**-7) * 2.0**126
"""Half the largest BF16.  Results are formed at half scale and limited there: P is rounded to BF16 and the denominator
is not, so that o / l may pass the largest |v| by 2**-8 and would round to infinity (lemma `clamp_keeps_the_bound`)."""

FP32_MAX: Final = (2.0 - 2.0**-23) * 2.0**127
"""The largest finite FP32.  -FP32_MAX stands for the score of a key that a row does not see."""
