From Coq Require Import ZArith Reals Lra Lia List.
From Flocq Require Import Core.
From Proofs Require Import constants binary32.
Open Scope R_scope.

(* What the contract charges per key, relative to the row's sum of weights. *)
Definition flushed_weight := 8 * bpow radix2 (contract_BIAS_Z + 2) * smallest_normal.
Definition flushed_products := 16 * bpow radix2 (contract_BIAS_Z + 2) * smallest_normal.

(* The exact sum of weights, given the computed one: at least half the floor, while beta is at most 1 - 2**-18 and
   what is flushed from l is no more than a 2**-20th of the floor. *)
Theorem exact_sum_above_half_floor : forall W beta flushed l, 0 <= beta <= 1 - / 262144 -> 0 <= W ->
  0 <= flushed <= SUM_FLOOR / 1048576 -> SUM_FLOOR <= l -> Rabs (l - W) <= W * beta + flushed -> SUM_FLOOR / 2 <= W.
Proof.
intros W beta f l Hb HW Hf Hl H. apply Rabs_le_inv in H.
assert (B : W * beta <= W * (1 - / 262144)) by (apply Rmult_le_compat_l; lra).
assert (P : 0 < SUM_FLOOR) by (unfold SUM_FLOOR; lra). lra.
Qed.

(* One flushed weight is off by at most 2 omega: below it exp2 of an exponent may be anything, and the exact weight
   is at most omega / (1 - exp2_relative). *)
Theorem flushed_weight_size : forall w p, 0 <= w -> 0 <= p <= smallest_normal ->
  w * (1 - exp2_relative) <= smallest_normal -> Rabs (p - w) <= 2 * smallest_normal.
Proof.
intros w p Hw Hp H.
assert (E : 0 <= exp2_relative <= / 2) by (unfold exp2_relative; lra).
assert (B : w * / 2 <= w * (1 - exp2_relative)) by (apply Rmult_le_compat_l; lra).
apply Rabs_le. lra.
Qed.

(* Per key, twice over, since later roundings magnify it: a weight (2 omega) against flushed_weight; a product, a partial sum and a rescaling of it (3 omega)
   against flushed_products; over the smallest sum that a checked row or a replay can have.  And MAX_KEYS flushed
   weights stay a 2**-8th of a row. *)
Theorem flushed_weights_are_negligible : forall W, SUM_FLOOR / 2 <= W ->
  2 * (2 * smallest_normal / W) <= flushed_weight /\
  2 * (3 * smallest_normal / W) <= flushed_products /\
  MAX_KEYS * flushed_weight <= / 256 /\
  contract_BIAS = BIAS.
Proof.
intros W HW.
assert (P : 0 < SUM_FLOOR) by (unfold SUM_FLOOR; lra).
assert (I : / W <= / (SUM_FLOOR / 2)) by (apply Rinv_le; lra).
assert (S : 0 < smallest_normal) by (unfold smallest_normal; lra).
assert (E : bpow radix2 (contract_BIAS_Z + 2) = IZR (2 ^ (contract_BIAS_Z + 2))) by reflexivity.
unfold flushed_weight, flushed_products. rewrite E. unfold contract_BIAS_Z.
split; [|split; [|split]].
- apply Rle_trans with (2 * (2 * smallest_normal * / (SUM_FLOOR / 2))).
  apply Rmult_le_compat_l; [lra|]. apply Rmult_le_compat_l; lra.
  unfold SUM_FLOOR, smallest_normal. simpl. lra.
- apply Rle_trans with (2 * (3 * smallest_normal * / (SUM_FLOOR / 2))).
  apply Rmult_le_compat_l; [lra|]. apply Rmult_le_compat_l; lra.
  unfold SUM_FLOOR, smallest_normal. simpl. lra.
- unfold MAX_KEYS, smallest_normal. simpl. lra.
- reflexivity.
Qed.
