From Coq Require Import ZArith Reals Lra Lia List Permutation Bool Psatz.
From Flocq Require Import Core.
From Proofs Require Import constants binary32 any_order.
Import ListNotations.
Open Scope R_scope.

(* Exponents of powers of two that no product p v and no weight passes. *)
Definition of_products : Z := 128 - BIAS_Z.
Definition of_weights : Z := 1 - BIAS_Z.

Lemma exponents : ((-149 <=? of_weights) && (MAX_KEYS_Z <=? 2 ^ 46) && (0 <=? MAX_KEYS_Z))%Z = true.
Proof. vm_compute. reflexivity. Qed.

Lemma exponents_Z : (-149 <= of_weights)%Z /\ (MAX_KEYS_Z <= 2 ^ 46)%Z /\ (0 <= MAX_KEYS_Z)%Z.
Proof.
assert (E := exponents). apply andb_prop in E as [E E3]. apply andb_prop in E as [E1 E2].
repeat split; now apply Z.leb_le.
Qed.

(* exp2's error is below half the spacing of BF16 numbers at 2**-BIAS, so that a weight rounds to 2**-BIAS at most. *)
Lemma rounded_weight : forall p, 0 <= p <= bpow radix2 (- BIAS_Z) * (1 + exp2_relative) ->
  0 <= nearest_bf16 p <= bpow radix2 (- BIAS_Z).
Proof.
intros p [P0 P1].
assert (G : generic_format radix2 bf16_exp (bpow radix2 (- BIAS_Z))).
{ apply generic_format_bpow. vm_compute. discriminate. }
split.
- apply round_ge_generic; try typeclasses eauto; auto. apply generic_format_0.
- apply round_N_le_midp; try typeclasses eauto; auto.
  rewrite succ_eq_pos by apply bpow_ge_0. rewrite ulp_bpow.
  replace (bf16_exp (- BIAS_Z + 1)) with (- BIAS_Z - 7)%Z by (vm_compute; reflexivity).
  assert (E : bpow radix2 (- BIAS_Z) = bpow radix2 (- BIAS_Z - 7) * 128).
  { replace (- BIAS_Z)%Z with ((- BIAS_Z - 7) + 7)%Z at 1 by ring. rewrite bpow_plus. change (bpow radix2 7) with 128. ring. }
  assert (Q := bpow_gt_0 radix2 (- BIAS_Z - 7)).
  apply Rle_lt_trans with (1 := P1). rewrite E.
  assert (S : 128 * (1 + exp2_relative) < 128 + / 2) by (unfold exp2_relative; lra). nra.
Qed.

(* A weight exp2(t), t <= -BIAS, rounded to BF16, times a finite BF16 value. *)
Lemma product_size : forall p v, 0 <= p <= bpow radix2 (- BIAS_Z) * (1 + exp2_relative) ->
  Rabs v <= 2 * HALF_BF16_MAX -> Rabs (nearest_bf16 p * v) <= bpow radix2 (of_products).
Proof.
intros p v P Hv. destruct (rounded_weight p P) as [B0 B1].
rewrite Rabs_mult, (Rabs_pos_eq (nearest_bf16 p)) by exact B0.
apply Rle_trans with (bpow radix2 (- BIAS_Z) * (2 * HALF_BF16_MAX)).
- apply Rmult_le_compat; auto using Rabs_pos.
- unfold of_products. replace (128 - BIAS_Z)%Z with (- BIAS_Z + 128)%Z by ring. rewrite bpow_plus.
  apply Rmult_le_compat_l. apply bpow_ge_0. unfold HALF_BF16_MAX. simpl. lra.
Qed.

(* Whatever finite values a replay reads, every partial sum of o (each is a [sums] of fewer terms) is finite,
   in any order of summation and rescaled on the way, on a machine that rounds to nearest or towards zero. *)
Theorem replay_never_overflows : forall t m products o,
  sums t (fun x => Rabs x <= bpow radix2 (of_products)) m products o ->
  (Z.of_nat (length products) <= MAX_KEYS_Z)%Z -> Rabs o <= FP32_MAX.
Proof.
intros t m products o H L. destruct exponents_Z as [E1 [E2 E3]].
assert (B := any_order_doubles t (Z.to_nat MAX_KEYS_Z) (of_products) m products o
  ltac:(rewrite Z2Nat.id; [exact E2 | exact E3]) ltac:(unfold of_products, of_weights in *; lia) H ltac:(lia)).
apply Rle_trans with (1 := B).
rewrite INR_IZR_INZ, Z2Nat.id by exact E3.
unfold of_products, FP32_MAX, BIAS_Z, MAX_KEYS_Z. simpl. lra.
Qed.

(* The denominator of a replay stays within the limits of a checked one. *)
Theorem replayed_denominator : forall t m weights l,
  sums t (fun x => Rabs x <= bpow radix2 of_weights) m weights l ->
  (Z.of_nat (length weights) <= MAX_KEYS_Z)%Z -> Rabs l <= LANES * LANE_LIMIT.
Proof.
intros t m weights l H L. destruct exponents_Z as [E1 [E2 E3]].
assert (B := any_order_doubles t (Z.to_nat MAX_KEYS_Z) of_weights m weights l
  ltac:(rewrite Z2Nat.id; [exact E2 | exact E3]) E1 H ltac:(lia)).
apply Rle_trans with (1 := B).
rewrite INR_IZR_INZ, Z2Nat.id by exact E3. unfold of_weights, LANES, LANE_LIMIT, BIAS_Z, MAX_KEYS_Z. simpl. lra.
Qed.
