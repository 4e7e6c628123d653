From Coq Require Import ZArith Reals Lra Lia List.
From Flocq Require Import Core.
From Proofs Require Import constants binary32 summation_error clamp_keeps_the_bound attention_bound convex_bound final_division.
Import ListNotations.
Open Scope R_scope.

(* The final theorem: a row of visible keys with finite BF16 values, weights that err by rho (weight_error.v,
   score_error.v) or are flushed, sums of l and o in any order and rescaled on the way or not (recovery_is_exact.v), a
   denominator that reaches the floor (floor_is_reached.v), and the last steps.  The BF16 output is within the contract's
   out bound of the exact result, with the smaller of the first-order and the convex bound as [inner]. *)
Section Output.
Variables (ks : list key) (tl to : bool) (ml mo : nat) (l o low high largest q e h inner : R).
Hypothesis keys_conform : forall k, In k ks -> conforming k.
Hypothesis values : forall k, In k ks -> low <= v k <= high /\ Rabs (v k) <= largest.
Hypothesis values_finite : largest <= largest_bf16.
Hypothesis l_is_a_sum : sums tl (fun _ => True) ml (map p ks) l.
Hypothesis o_is_a_sum : sums to (fun _ => True) mo (map x ks) o.
Hypothesis floor : SUM_FLOOR <= l.
Hypothesis reciprocal : Rabs e <= reciprocal_relative /\ q = / 2 * / l * (1 + e).
Hypothesis half : computes false (o * q) h.

Let first_order := numerator ks tl to ml mo / denominator ks tl ml.
Let convex := (farthest (exact ks) low high + skew ks tl to * largest) * (1 + flushed_in_l ks tl ml / SUM_FLOOR)
  + (INR (length ks) * flushed_per_key ks tl to largest + flushed_in_o ks to mo + largest * flushed_in_l ks tl ml) / SUM_FLOOR.
Hypothesis inner_is_one_of_them : (0 < denominator ks tl ml /\ first_order <= inner) \/ convex <= inner.

Lemma ks_weights_pos : 0 < weights ks.
Proof. exact (weights_pos ks tl ml l keys_conform l_is_a_sum). Qed.

Lemma exact_between_values : low <= exact ks <= high.
Proof.
assert (W := ks_weights_pos). unfold exact. fold (weights ks) in *.
assert (A : low * weights ks <= sum_of (fun k => w k * v k) ks).
{ unfold weights. rewrite <- sum_of_scaled. apply sum_of_le. intros k I. destruct (values k I) as [[V _] _].
  destruct (keys_conform k I) as [P _]. rewrite (Rmult_comm (w k)). apply Rmult_le_compat_r; lra. }
assert (B : sum_of (fun k => w k * v k) ks <= high * weights ks).
{ unfold weights. rewrite <- sum_of_scaled. apply sum_of_le. intros k I. destruct (values k I) as [[_ V] _].
  destruct (keys_conform k I) as [P _]. rewrite (Rmult_comm (w k)). apply Rmult_le_compat_r; lra. }
split; apply Rmult_le_reg_r with (weights ks); auto; unfold Rdiv; rewrite Rmult_assoc, Rinv_l, Rmult_1_r by lra; assumption.
Qed.

Lemma exact_below_largest : Rabs (exact ks) <= largest.
Proof.
assert (W := ks_weights_pos). unfold exact, Rdiv. rewrite Rabs_mult, Rabs_inv, (Rabs_pos_eq (weights ks)) by lra.
apply Rmult_le_reg_r with (weights ks); auto. rewrite Rmult_assoc, Rinv_l, Rmult_1_r by lra.
eapply Rle_trans. apply sum_of_abs. unfold weights. rewrite <- sum_of_scaled. apply sum_of_le. intros k I.
destruct (values k I) as [_ V]. destruct (keys_conform k I) as [P _].
rewrite Rabs_mult, (Rabs_pos_eq (w k)) by lra. rewrite (Rmult_comm (w k)). apply Rmult_le_compat_r; lra.
Qed.

Lemma conforming_same_weights : forall k, In k ks -> same_weights k.
Proof.
intros k I. destruct (keys_conform k I) as [Pw [Pr [Pp [Pb [H Hx]]]]]. repeat split; auto.
destruct H as [[_ [H|H]]|[_ H]]; auto.
Qed.

Theorem output_bound :
  let divided := inner + (2 * reciprocal_relative + 3 * unit_roundoff) * (Rabs (exact ks) + inner) in
  Rabs (nearest_bf16 (2 * limited h) - exact ks) <=
    divided + unit * (Rabs (exact ks) + divided) + 2 * smallest_normal.
Proof.
assert (Fl : 0 < SUM_FLOOR) by (unfold SUM_FLOOR; lra).
assert (Q : Rabs (o / l - exact ks) <= inner).
{ destruct inner_is_one_of_them as [[D I]|I]; apply Rle_trans with (2 := I).
  - now apply (attention_bound ks tl to ml mo l o keys_conform l_is_a_sum o_is_a_sum D).
  - apply convex_bound; auto using conforming_same_weights, exact_between_values, exact_below_largest. }
destruct reciprocal as [R1 R2].
apply final_division with (o := o) (l := l) (q := q) (e := e); auto. lra.
apply Rle_trans with (2 := values_finite). apply exact_below_largest.
Qed.

End Output.
