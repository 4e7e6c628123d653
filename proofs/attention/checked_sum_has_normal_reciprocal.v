From Coq Require Import ZArith Reals Lra Lia List Permutation Bool.
From Flocq Require Import Core.
From Proofs Require Import constants binary32.
Import ListNotations.
Open Scope R_scope.

(* The multiples of a dyadic number with few bits, up to [lanes] of them, are numbers of the format. *)
Lemma multiples_fit :
  ((Z.abs LANES_Z * Z.abs LANE_LIMIT_m <=? 2 ^ 24) && (0 <=? LANE_LIMIT_m) && (-149 <=? LANE_LIMIT_e))%Z = true.
Proof. vm_compute. reflexivity. Qed.

Lemma multiple_fp32 : forall n, (Z.of_nat n <= LANES_Z)%Z -> fp32 (INR n * LANE_LIMIT).
Proof.
intros n Hn. assert (B := multiples_fit).
apply andb_prop in B as [B B3]. apply andb_prop in B as [B1 B2].
apply Z.leb_le in B1. apply Z.leb_le in B2. apply Z.leb_le in B3.
rewrite LANE_LIMIT_dyadic, INR_IZR_INZ, <- Rmult_assoc, <- mult_IZR. apply fp32_dyadic; auto.
rewrite Z.abs_mul. apply Z.le_trans with (2 := B1). apply Z.mul_le_mono_nonneg_r; lia.
Qed.

Lemma limit_nonneg : 0 <= LANE_LIMIT.
Proof. unfold LANE_LIMIT. lra. Qed.

(* Adding up at most LANES lanes, each within its limit, costs no margin in any order. *)
Theorem lanes_add_up : forall t m xs s,
  sums t (fun x => Rabs x <= LANE_LIMIT) m xs s -> (Z.of_nat (length xs) <= LANES_Z)%Z ->
  Rabs s <= INR (length xs) * LANE_LIMIT.
Proof.
intros t m xs s H.
induction H as [x Hx Tx | m1 m2 xs ys a b c Ha IHa Hb IHb Hc | m xs a k c Hk Ha IHa Hc | m xs ys s HP Hs IHs]; intros L.
- simpl length. now rewrite Rmult_1_l.
- rewrite app_length in *. apply (computes_abs_le _ _ _ _ Hc). now apply multiple_fp32.
  eapply Rle_trans. apply Rabs_triang. rewrite plus_INR, Rmult_plus_distr_r.
  apply Rplus_le_compat; [apply IHa | apply IHb]; lia.
- rewrite map_length in *. apply (computes_abs_le _ _ _ _ Hc). now apply multiple_fp32.
  rewrite Rabs_mult, (Rabs_pos_eq (bpow radix2 k)) by apply bpow_ge_0.
  apply Rle_trans with (Rabs a * 1).
  + apply Rmult_le_compat_l. apply Rabs_pos. now apply bpow_le_1.
  + rewrite Rmult_1_r. auto.
- rewrite <- (Permutation_length HP) in *. auto.
Qed.

(* A row that passes the check and the floor has a finite denominator, and 0.5 / l, with whatever relative
   error a reciprocal has, is above the smallest normal number and finite. *)
Theorem checked_sum_has_normal_reciprocal : forall t m lanes l q e,
  sums t (fun x => Rabs x <= LANE_LIMIT) m lanes l -> (Z.of_nat (length lanes) <= LANES_Z)%Z ->
  SUM_FLOOR <= l -> Rabs e <= reciprocal_relative -> q = / 2 * / l * (1 + e) ->
  0 < l <= FP32_MAX /\ smallest_normal < q < FP32_MAX.
Proof.
intros t m lanes l q e H L Fl He ->.
assert (Up := lanes_add_up t m lanes l H L).
assert (Pl : 0 < SUM_FLOOR) by (unfold SUM_FLOOR; lra).
rewrite Rabs_pos_eq in Up by lra.
assert (Top : INR (length lanes) * LANE_LIMIT <= LANES * LANE_LIMIT).
{ apply Rmult_le_compat_r. apply limit_nonneg. rewrite INR_IZR_INZ. apply IZR_le in L. unfold LANES, LANES_Z in *. lra. }
apply Rabs_le_inv in He.
assert (Hl : l <= LANES * LANE_LIMIT) by lra.
assert (Inv : / (LANES * LANE_LIMIT) <= / l <= / SUM_FLOOR) by (split; apply Rinv_le; lra).
assert (A : smallest_normal < / 2 * / (LANES * LANE_LIMIT) * (1 - reciprocal_relative)).
{ unfold smallest_normal, LANES, LANE_LIMIT, reciprocal_relative. lra. }
assert (B : / 2 * / SUM_FLOOR * (1 + reciprocal_relative) < FP32_MAX).
{ unfold SUM_FLOOR, reciprocal_relative, FP32_MAX. lra. }
assert (C : LANES * LANE_LIMIT <= FP32_MAX) by (unfold LANES, LANE_LIMIT, FP32_MAX; lra).
assert (D : 0 < 1 - reciprocal_relative) by (unfold reciprocal_relative; lra).
assert (I : 0 < / l) by (apply Rinv_0_lt_compat; lra).
assert (J : 0 < / (LANES * LANE_LIMIT)) by (apply Rinv_0_lt_compat; lra).
split; [lra | split].
- apply Rlt_le_trans with (1 := A). apply Rmult_le_compat; lra.
- apply Rle_lt_trans with (2 := B). apply Rmult_le_compat; lra.
Qed.
