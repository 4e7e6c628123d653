(* FP32 arithmetic as the machines of verify/devices.py may do it, and sums in any order.

   Numbers are reals; a number of the format is one with [fp32 x].  Overflow is not built in: a theorem
   that needs finite results proves that they stay below the largest number of the format, except for
   check_never_misses.v, which works on IEEE numbers with infinities and NaN. *)
From Coq Require Import ZArith Reals Lra Lia List Permutation.
From Flocq Require Import Core Plus_error Relative.
Import ListNotations.
Open Scope R_scope.

Definition fp32_exp := FLT_exp (-149) 24.
Definition bf16_exp := FLT_exp (-133) 8.
Definition fp32 (x : R) := generic_format radix2 fp32_exp x.
Definition bf16 (x : R) := generic_format radix2 bf16_exp x.

Definition nearest (x : R) := round radix2 fp32_exp ZnearestE x.
Definition towards_zero (x : R) := round radix2 fp32_exp Ztrunc x.
Definition nearest_bf16 (x : R) := round radix2 bf16_exp ZnearestE x.

(* The smallest normal number: a result below it may be flushed to zero. *)
Definition omega := bpow radix2 (-126).

(* What an operation with the exact result x may return.  [truncating] machines may also round towards
   zero, as additions inside a matrix product may (devices.dot_unit_roundoff = 2**-23). *)
Definition computes (truncating : bool) (x y : R) : Prop :=
  y = nearest x \/ (truncating = true /\ y = towards_zero x) \/ (Rabs x < omega /\ y = 0).

Definition unit_of (truncating : bool) := bpow radix2 (if truncating then -23 else -24).

Global Instance fp32_prec : Prec_gt_0 24.
Proof. easy. Qed.
Global Instance bf16_prec : Prec_gt_0 8.
Proof. easy. Qed.
Global Instance fp32_valid : Valid_exp fp32_exp.
Proof. apply FLT_exp_valid. easy. Qed.
Global Instance bf16_valid : Valid_exp bf16_exp.
Proof. apply FLT_exp_valid. easy. Qed.

Lemma omega_pos : 0 < omega.
Proof. apply bpow_gt_0. Qed.

Lemma unit_pos : forall t, 0 < unit_of t.
Proof. intros t. apply bpow_gt_0. Qed.

Lemma unit_small : forall t, unit_of t <= / 8388608.
Proof. intros []; unfold unit_of; simpl; lra. Qed.

Lemma fp32_0 : fp32 0.
Proof. apply generic_format_0. Qed.

Lemma nearest_fp32 : forall x, fp32 (nearest x).
Proof. intros x. apply generic_format_round; typeclasses eauto. Qed.

Lemma towards_zero_fp32 : forall x, fp32 (towards_zero x).
Proof. intros x. apply generic_format_round; typeclasses eauto. Qed.

Lemma computes_fp32 : forall t x y, computes t x y -> fp32 y.
Proof.
intros t x y [->|[[_ ->]|[_ ->]]].
- apply nearest_fp32.
- apply towards_zero_fp32.
- exact fp32_0.
Qed.

(* A dyadic number m 2**e with at most 24 bits is a number of the format. *)
Lemma fp32_dyadic : forall m e, (Z.abs m <= 2 ^ 24)%Z -> (-149 <= e)%Z -> fp32 (IZR m * bpow radix2 e).
Proof.
intros m e Hm He.
destruct (Z.eq_dec (Z.abs m) (2 ^ 24)) as [E|E].
- assert (G : fp32 (bpow radix2 (24 + e))).
  { apply generic_format_bpow. unfold fp32_exp, FLT_exp. lia. }
  assert (H : IZR m * bpow radix2 e = bpow radix2 (24 + e) \/ IZR m * bpow radix2 e = - bpow radix2 (24 + e)).
  { rewrite bpow_plus. replace (bpow radix2 24) with (IZR (2 ^ 24)) by (simpl; reflexivity).
    destruct (Z.abs_eq_or_opp m) as [A|A]; rewrite A in E.
    - left. now rewrite E.
    - right. replace m with (- 2 ^ 24)%Z by lia. rewrite opp_IZR. ring. }
  destruct H as [->| ->]; [exact G | now apply generic_format_opp].
- apply generic_format_FLT. exists (Float radix2 m e).
  + reflexivity.
  + simpl. change (Z.pow_pos 2 24) with (2 ^ 24)%Z. lia.
  + simpl. lia.
Qed.

Lemma fp32_integer : forall m, (Z.abs m <= 2 ^ 24)%Z -> fp32 (IZR m).
Proof. intros m Hm. replace (IZR m) with (IZR m * bpow radix2 0) by (simpl; ring). apply fp32_dyadic; lia. Qed.

(* Rounding never carries a result past a number of the format. *)
Lemma computes_abs_le : forall t x y f, computes t x y -> fp32 f -> Rabs x <= f -> Rabs y <= f.
Proof.
intros t x y f [->|[[_ ->]|[_ ->]]] Hf Hx.
- apply abs_round_le_generic; try typeclasses eauto; assumption.
- apply abs_round_le_generic; try typeclasses eauto; assumption.
- rewrite Rabs_R0. apply Rle_trans with (2 := Hx). apply Rabs_pos.
Qed.

Lemma computes_ge : forall t x y f, computes t x y -> fp32 f -> f <= x -> f <= y \/ Rabs x < omega.
Proof.
intros t x y f [->|[[_ ->]|[H ->]]] Hf Hx.
- left. apply round_ge_generic; try typeclasses eauto; assumption.
- left. apply round_ge_generic; try typeclasses eauto; assumption.
- now right.
Qed.

Lemma computes_nonneg : forall t x y, computes t x y -> 0 <= x -> 0 <= y.
Proof.
intros t x y [->|[[_ ->]|[_ ->]]] Hx.
- apply round_ge_generic; try typeclasses eauto; auto using fp32_0. apply fp32_0.
- apply round_ge_generic; try typeclasses eauto; auto using fp32_0. apply fp32_0.
- lra.
Qed.

(* An addition of two numbers of the format errs relatively, with no room for underflow, unless it is flushed. *)
Lemma computes_sum : forall t a b c, fp32 a -> fp32 b -> computes t (a + b) c ->
  Rabs (c - (a + b)) <= unit_of t * Rabs (a + b) \/ (Rabs (a + b) < omega /\ c = 0).
Proof.
intros t a b c Ha Hb [->|[[Ht ->]|H]].
- left. destruct (Rle_or_lt (Rabs (a + b)) (bpow radix2 (24 + -149))) as [Hs|Hs].
  + unfold nearest. rewrite round_generic.
    * rewrite Rminus_diag_eq by reflexivity. rewrite Rabs_R0.
      apply Rmult_le_pos; [apply Rlt_le, unit_pos | apply Rabs_pos].
    * typeclasses eauto.
    * apply FLT_format_plus_small; try typeclasses eauto; assumption.
  + apply Rle_trans with (/ 2 * bpow radix2 (-24 + 1) * Rabs (a + b)).
    * apply relative_error_N_FLT. easy. apply Rle_trans with (2 := Rlt_le _ _ Hs). now apply bpow_le.
    * apply Rmult_le_compat_r. apply Rabs_pos. destruct t; unfold unit_of; simpl; lra.
- left. subst t. destruct (Rle_or_lt (Rabs (a + b)) (bpow radix2 (24 + -149))) as [Hs|Hs].
  + unfold towards_zero. rewrite round_generic.
    * rewrite Rminus_diag_eq by reflexivity. rewrite Rabs_R0.
      apply Rmult_le_pos; [apply Rlt_le, unit_pos | apply Rabs_pos].
    * typeclasses eauto.
    * apply FLT_format_plus_small; try typeclasses eauto; assumption.
  + apply Rlt_le. unfold unit_of. change (-23)%Z with (- (24) + 1)%Z.
    refine (relative_error_FLT radix2 (-149) 24 fp32_prec Ztrunc (a + b) _).
    apply Rle_trans with (2 := Rlt_le _ _ Hs). now apply bpow_le.
- now right.
Qed.

(* [sums t term m xs s]: s is what some tree of additions returns for the terms xs, in any order; on the
   way a partial sum may be multiplied by a power of two (a replay's rescaling), which multiplies its
   terms.  [term] holds of each term as it was when it was added.  m counts additions and rescalings: each
   may flush once. *)
Inductive sums (t : bool) (term : R -> Prop) : nat -> list R -> R -> Prop :=
| sums_term : forall x, fp32 x -> term x -> sums t term 0 [x] x
| sums_add : forall m1 m2 xs ys a b c,
    sums t term m1 xs a -> sums t term m2 ys b -> computes t (a + b) c -> sums t term (S (m1 + m2)) (xs ++ ys) c
| sums_rescale : forall m xs a k c, (k <= 0)%Z ->
    sums t term m xs a -> computes t (a * bpow radix2 k) c ->
    sums t term (S m) (map (fun x => x * bpow radix2 k) xs) c
| sums_order : forall m xs ys s, Permutation xs ys -> sums t term m xs s -> sums t term m ys s.

Lemma sums_fp32 : forall t term m xs s, sums t term m xs s -> fp32 s.
Proof.
intros t term m xs s H. induction H; auto.
- now apply computes_fp32 in H1.
- now apply computes_fp32 in H1.
Qed.

Lemma sums_length : forall t term m xs s, sums t term m xs s -> (1 <= length xs)%nat.
Proof.
intros t term m xs s H. induction H; simpl; auto.
- rewrite app_length. lia.
- now rewrite map_length.
- now rewrite <- (Permutation_length H).
Qed.

Lemma bpow_le_1 : forall k, (k <= 0)%Z -> bpow radix2 k <= 1.
Proof. intros k Hk. change 1 with (bpow radix2 0). now apply bpow_le. Qed.
