"""Every lemma, in the order in which the argument uses them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proofs import packing, ragged
from proofs.attention import (
    article,
    contract,
    features,
    floor,
    joined,
    online,
    overflow,
    parts,
    rescaling,
    rotary,
    rounding,
    sums,
    theorem,
    tiles,
)
from proofs.gdn import activations, chain, convolution, gates, inverse, layout

if TYPE_CHECKING:
    from proofs.lemma import Lemma

LEMMAS: tuple[Lemma, ...] = (
    rounding.bf16_rounding_unit,
    sums.check_never_misses,
    sums.checked_sum_has_normal_reciprocal,
    floor.floor_is_reached,
    floor.flushed_weights_are_negligible,
    rescaling.integer_maximum_rescales_exactly,
    overflow.replay_never_overflows,
    overflow.clamp_keeps_the_bound,
    contract.contract_constants,
    parts.score_error,
    parts.weight_error,
    parts.recovery_is_exact,
    theorem.attention_bound,
    theorem.convex_bound,
    theorem.final_division,
    theorem.output_bound,
    parts.log_sum_exp_error,
    joined.attention_theorem,
    online.early_bias,
    features.soft_cap,
    features.sinks,
    features.maximum_logit,
    article.article_tau,
    rotary.rotary_phase,
    rotary.rotary_turns,
    tiles.tile_skipping,
    packing.packed_rows_written_once,
    ragged.ragged_windows,
    inverse.nilpotent_identities,
    inverse.eight_products,
    inverse.level_four_maxima,
    inverse.inverse_entries_bounded,
    inverse.rounded_keys,
    inverse.whole_chunk_power,
    inverse.inverse_error_measures,
    activations.l2_normalisation,
    activations.silu_by_tanh,
    activations.sigmoid_error,
    activations.softplus_error,
    activations.gate_differences,
    gates.log_decays,
    gates.gate_sums,
    convolution.convolution_products,
    chain.gdn_chain_bound,
    layout.gdn_layout,
)


def select(names: list[str]) -> tuple[Lemma, ...]:
    """The lemmas of these names, in the catalogue's order; all of them if none is named.

    Raises:
        ValueError: a name is no lemma's; the message lists those that are.
    """
    known = [lemma.name for lemma in LEMMAS]
    for name in names:
        if name not in known:
            message = f"no lemma is called {name!r}; the lemmas are: {', '.join(known)}"
            raise ValueError(message)
    return tuple(lemma for lemma in LEMMAS if not names or lemma.name in names)
