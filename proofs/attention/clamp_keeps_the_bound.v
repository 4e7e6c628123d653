From Coq Require Import ZArith Reals Lra Lia.
From Flocq Require Import Core Mult_error.
From Proofs Require Import constants binary32.
Open Scope R_scope.

Definition largest_bf16 := (2 - bpow radix2 (-7)) * bpow radix2 127.
Definition limited (h : R) := Rmax (- HALF_BF16_MAX) (Rmin HALF_BF16_MAX h).

Lemma twice_limit : 2 * HALF_BF16_MAX = largest_bf16.
Proof. unfold HALF_BF16_MAX, largest_bf16. simpl. lra. Qed.

Lemma half_pos : 0 < HALF_BF16_MAX.
Proof. unfold HALF_BF16_MAX. lra. Qed.

Lemma limited_cases : forall h, limited h = h /\ - HALF_BF16_MAX <= h <= HALF_BF16_MAX \/
  limited h = HALF_BF16_MAX /\ HALF_BF16_MAX < h \/ limited h = - HALF_BF16_MAX /\ h < - HALF_BF16_MAX.
Proof.
intros h. assert (P := half_pos). unfold limited.
destruct (Rle_or_lt h HALF_BF16_MAX) as [A|A]; destruct (Rle_or_lt (- HALF_BF16_MAX) h) as [B|B].
- left. rewrite Rmin_right, Rmax_right; lra.
- right; right. rewrite Rmin_right, Rmax_left; lra.
- right; left. rewrite Rmin_left, Rmax_right; lra.
- lra.
Qed.

Lemma largest_bf16_format : bf16 largest_bf16 /\ fp32 HALF_BF16_MAX /\ fp32 largest_bf16.
Proof.
assert (E : largest_bf16 = IZR 255 * bpow radix2 120) by (unfold largest_bf16; simpl; lra).
assert (H : HALF_BF16_MAX = IZR 255 * bpow radix2 119) by (unfold HALF_BF16_MAX; simpl; lra).
repeat split.
- rewrite E. apply generic_format_FLT. exists (Float radix2 255 120); simpl; [reflexivity | lia | lia].
- rewrite H. apply fp32_dyadic; lia.
- rewrite E. apply fp32_dyadic; lia.
Qed.

(* The result is 2 h, h = o (0.5 / l), limited to the largest BF16.  The exact result is a mean of BF16
   values, hence within these limits: limiting never moves 2 h away from it. *)
Theorem clamp_keeps_the_bound : forall h exact, Rabs exact <= largest_bf16 ->
  Rabs (2 * limited h - exact) <= Rabs (2 * h - exact).
Proof.
intros h y Hy. rewrite <- twice_limit in Hy. apply Rabs_le_inv in Hy.
destruct (limited_cases h) as [[-> _]|[[-> H]|[-> H]]].
- apply Rle_refl.
- rewrite Rabs_pos_eq by lra. rewrite Rabs_pos_eq by lra. lra.
- rewrite Rabs_left1 by lra. rewrite Rabs_left1 by lra. lra.
Qed.

(* An h that overflows is beyond the limit with its sign, so limiting the infinity and limiting the exact
   product give the same. *)
Theorem overflow_is_beyond_the_limit : forall h, FP32_MAX < Rabs h ->
  (0 < h -> limited h = HALF_BF16_MAX) /\ (h < 0 -> limited h = - HALF_BF16_MAX).
Proof.
intros h H. assert (L : HALF_BF16_MAX <= FP32_MAX) by (unfold HALF_BF16_MAX, FP32_MAX; lra). assert (P := half_pos).
unfold Rabs in H. split; intros S; destruct (limited_cases h) as [[_ C]|[[E C]|[E C]]]; try exact E;
  exfalso; destruct (Rcase_abs h); lra.
Qed.

(* Doubling a limited h is exact, and rounding the result to BF16 stays finite. *)
Theorem limited_result_is_finite : forall h, fp32 h ->
  fp32 (2 * limited h) /\ Rabs (nearest_bf16 (2 * limited h)) <= largest_bf16.
Proof.
intros h Hh. destruct largest_bf16_format as [G [F1 F2]].
assert (D : forall x, fp32 x -> fp32 (2 * x)).
{ intros x Hx. replace (2 * x) with (x * bpow radix2 1) by (change (bpow radix2 1) with 2; ring).
  apply mult_bpow_pos_exact_FLT; [exact Hx | easy]. }
assert (L : fp32 (limited h)).
{ destruct (limited_cases h) as [[-> _]|[[-> _]|[-> _]]]; auto. now apply generic_format_opp. }
split; [now apply D|].
apply abs_round_le_generic; try typeclasses eauto; auto.
rewrite <- twice_limit. assert (P := half_pos).
destruct (limited_cases h) as [[-> [A B]]|[[-> _]|[-> _]]]; apply Rabs_le; lra.
Qed.
