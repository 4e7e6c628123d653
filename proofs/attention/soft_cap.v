From Coq Require Import ZArith Reals Lra Lia.
From Flocq Require Import Core.
From Proofs Require Import constants binary32.
Open Scope R_scope.

(* The slope of tanh is at most 1, and falls like 4 exp (-2 |x|). *)
Lemma cosh_pos : forall x, 0 < cosh x.
Proof. intros x. unfold cosh. assert (A := exp_pos x). assert (B := exp_pos (- x)). lra. Qed.

Lemma tanh_slope : forall x, derivable_pt_lim tanh x (/ (cosh x * cosh x)).
Proof.
intros x. assert (P := cosh_pos x).
assert (D := derivable_pt_lim_div sinh cosh x _ _ (derivable_pt_lim_sinh x) (derivable_pt_lim_cosh x) ltac:(lra)).
assert (Q : (cosh x * cosh x - sinh x * sinh x) = 1).
{ unfold cosh, sinh. assert (E : exp x * exp (- x) = 1) by (rewrite <- exp_plus, Rplus_opp_r; apply exp_0).
  replace 1 with (exp x * exp (- x)). field. }
rewrite Q in D. replace (/ (cosh x * cosh x)) with (1 / Rsqr (cosh x)) by (unfold Rsqr; field; lra). exact D.
Qed.

Lemma cosh_large : forall x, 1 <= cosh x /\ exp (Rabs x) / 2 <= cosh x.
Proof.
intros x. unfold cosh. assert (A := exp_pos x). assert (B := exp_pos (- x)).
assert (E : exp x * exp (- x) = 1) by (rewrite <- exp_plus, Rplus_opp_r; apply exp_0).
split.
- assert (S : 0 <= (exp x - 1) * (exp x - 1)) by apply Rle_0_sqr.
  assert (T : 2 * exp x <= exp x * (exp x + exp (- x))) by nra.
  assert (U : 2 <= exp x + exp (- x)) by (apply Rmult_le_reg_l with (exp x); lra). lra.
- unfold Rabs. destruct (Rcase_abs x); lra.
Qed.

Lemma slope_small : forall x, 0 < / (cosh x * cosh x) <= Rmin 1 (4 * exp (-2 * Rabs x)).
Proof.
intros x. destruct (cosh_large x) as [L1 L2]. assert (P : 0 < cosh x * cosh x) by nra.
split. now apply Rinv_0_lt_compat.
apply Rmin_glb.
- rewrite <- Rinv_1. apply Rinv_le; nra.
- assert (E := exp_pos (Rabs x)).
  apply Rle_trans with (/ (exp (Rabs x) / 2 * (exp (Rabs x) / 2))).
  + apply Rinv_le. apply Rmult_lt_0_compat; lra. apply Rmult_le_compat; lra.
  + right. replace (-2 * Rabs x) with (- Rabs x + - Rabs x) by ring. rewrite exp_plus, exp_Ropp. field. lra.
Qed.

Lemma tanh_size : forall x, Rabs (tanh x) <= 1.
Proof.
intros x. unfold tanh. assert (P := cosh_pos x). unfold Rdiv. rewrite Rabs_mult, Rabs_inv, (Rabs_pos_eq (cosh x)) by lra.
apply Rmult_le_reg_r with (cosh x). exact P. rewrite Rmult_assoc, Rinv_l, Rmult_1_r, Rmult_1_l by lra.
unfold cosh, sinh. assert (A := exp_pos x). assert (B := exp_pos (- x)). apply Rabs_le. lra.
Qed.

(* The contract's `steepest` and `moved`. *)
Definition steepest (x apart : R) := Rmin 1 (4 * exp (-2 * Rmax (Rabs x - apart) 0)).
Definition moved (x apart : R) := Rmin (apart * steepest x apart) 2.

Theorem tangent_moves : forall x y apart, Rabs (y - x) <= apart -> Rabs (tanh y - tanh x) <= moved x apart.
Proof.
intros x y apart H. assert (Pa : 0 <= apart) by (apply Rle_trans with (2 := H), Rabs_pos).
unfold moved. apply Rmin_glb.
- assert (M : exists c, Rabs (tanh y - tanh x) = / (cosh c * cosh c) * Rabs (y - x) /\ Rabs (c - x) <= Rabs (y - x)).
  { destruct (Rtotal_order x y) as [L|[->|L]].
    - destruct (MVT_cor2 tanh (fun z => / (cosh z * cosh z)) x y L (fun c _ => tanh_slope c)) as [c [E B]].
      exists c. split. rewrite E, Rabs_mult, (Rabs_pos_eq (/ _)). reflexivity. apply Rlt_le, slope_small.
      rewrite !Rabs_pos_eq; lra.
    - exists y. rewrite !Rminus_diag_eq by reflexivity. rewrite Rabs_R0. split; lra.
    - destruct (MVT_cor2 tanh (fun z => / (cosh z * cosh z)) y x L (fun c _ => tanh_slope c)) as [c [E B]].
      exists c. split. rewrite Rabs_minus_sym, E, Rabs_mult, (Rabs_pos_eq (/ _)), (Rabs_minus_sym x y). reflexivity.
      apply Rlt_le, slope_small. rewrite !Rabs_left; lra. }
  destruct M as [c [-> C]]. destruct (slope_small c) as [S1 S2].
  rewrite Rmult_comm. apply Rmult_le_compat; auto using Rabs_pos. lra.
  apply Rle_trans with (1 := S2). unfold steepest. apply Rle_min_compat_l.
  apply Rmult_le_compat_l. lra.
  assert (D : Rabs x - apart <= Rabs c).
  { assert (T := Rabs_triang_inv x c). rewrite Rabs_minus_sym in C. lra. }
  assert (D2 : Rmax (Rabs x - apart) 0 <= Rabs c) by (apply Rmax_lub; [exact D | apply Rabs_pos]).
  destruct (Req_dec (-2 * Rabs c) (-2 * Rmax (Rabs x - apart) 0)) as [->|N]; [lra | apply Rlt_le, exp_increasing; lra].
- assert (A := tanh_size x). assert (B := tanh_size y). unfold Rminus. eapply Rle_trans. apply Rabs_triang.
  rewrite Rabs_Ropp. lra.
Qed.

(* One capped score: [x] the exact argument, [y] the machine's, [t] its tangent, [c] the constant cap log2(e) as it is
   held, [s] the product.  The contract's sigma under a soft cap, with [held] and one rounding in its `relative`. *)
Definition relative (held : R) := (1 + tanh_relative) * ((1 + held) * (1 + unit_roundoff)) - 1.
Definition of_tangent (x apart held : R) :=
  moved x apart + relative held * (Rabs (tanh x) + moved x apart) + (1 + held) * (1 + unit_roundoff) * tanh_absolute.

Section Capped.
Variables (x y t c s cap apart held : R).
Hypothesis cap_positive : 0 < cap.
Hypothesis held_small : 0 <= held.
Hypothesis argument : Rabs (y - x) <= apart.
Hypothesis device : Rabs (t - tanh y) <= tanh_relative * Rabs (tanh y) + tanh_absolute.
Hypothesis constant : exists e, Rabs e <= held /\ c = cap * (1 + e).
Hypothesis product : Rabs (s - t * c) <= unit_roundoff * Rabs (t * c) + omega.

Lemma tanh_relative_pos : 0 <= tanh_relative /\ 0 <= tanh_absolute /\ 0 < unit_roundoff.
Proof. unfold tanh_relative, tanh_absolute, unit_roundoff. lra. Qed.

Theorem soft_cap : Rabs (s - cap * tanh x) <= cap * of_tangent x apart held + omega.
Proof.
destruct tanh_relative_pos as [R0 [A0 U0]]. assert (M := tangent_moves x y apart argument).
set (m := moved x apart) in *. set (th := tanh x) in *. assert (Pm : 0 <= m) by (apply Rle_trans with (2 := M), Rabs_pos).
destruct constant as [e [He ->]]. apply Rabs_le_inv in He as He'.
assert (Y : Rabs (tanh y) <= Rabs th + m).
{ replace (tanh y) with (th + (tanh y - th)) by ring. eapply Rle_trans. apply Rabs_triang. lra. }
assert (Pt := Rabs_pos th).
assert (RY : tanh_relative * Rabs (tanh y) <= tanh_relative * (Rabs th + m)) by (apply Rmult_le_compat_l; lra).
assert (D : Rabs (t - th) <= m + tanh_relative * (Rabs th + m) + tanh_absolute).
{ replace (t - th) with ((t - tanh y) + (tanh y - th)) by ring. eapply Rle_trans. apply Rabs_triang. lra. }
assert (T : Rabs t <= (1 + tanh_relative) * (Rabs th + m) + tanh_absolute).
{ replace t with (th + (t - th)) by ring. eapply Rle_trans. apply Rabs_triang. lra. }
set (z := t * (cap * (1 + e))) in *.
assert (Z : Rabs z <= cap * ((1 + held) * ((1 + tanh_relative) * (Rabs th + m) + tanh_absolute))).
{ unfold z. rewrite !Rabs_mult, (Rabs_pos_eq cap) by lra.
  replace (Rabs t * (cap * Rabs (1 + e))) with (cap * (Rabs (1 + e) * Rabs t)) by ring.
  apply Rmult_le_compat_l. lra. apply Rmult_le_compat; auto using Rabs_pos. apply Rabs_le. lra. }
assert (E : Rabs (z - cap * th) <= cap * (m + tanh_relative * (Rabs th + m) + tanh_absolute + held * ((1 + tanh_relative) * (Rabs th + m) + tanh_absolute))).
{ unfold z. replace (t * (cap * (1 + e)) - cap * th) with (cap * ((t - th) + e * t)) by ring.
  rewrite Rabs_mult, (Rabs_pos_eq cap) by lra. apply Rmult_le_compat_l. lra.
  eapply Rle_trans. apply Rabs_triang. rewrite Rabs_mult. apply Rplus_le_compat. exact D.
  apply Rmult_le_compat; auto using Rabs_pos. }
assert (UZ : unit_roundoff * Rabs z <= unit_roundoff * (cap * ((1 + held) * ((1 + tanh_relative) * (Rabs th + m) + tanh_absolute)))) by (apply Rmult_le_compat_l; lra).
replace (s - cap * th) with ((s - z) + (z - cap * th)) by ring.
eapply Rle_trans. apply Rabs_triang. unfold of_tangent, relative. fold m. fold th. lra.
Qed.

(* However large the argument, an infinite one included (tanh = 1), a capped score is finite. *)
Theorem capped_score_is_finite : Rabs (tanh y) <= 1 -> held <= 4 * unit_roundoff -> cap <= contract_DOMAIN_LIMIT ->
  Rabs s + BIAS <= FP32_MAX.
Proof.
intros Hy Hh Hc. destruct tanh_relative_pos as [R0 [A0 U0]]. destruct constant as [e [He Ec]]. apply Rabs_le_inv in He.
assert (T : Rabs t <= 1 + tanh_relative + tanh_absolute).
{ replace t with (tanh y + (t - tanh y)) by ring. eapply Rle_trans. apply Rabs_triang.
  assert (tanh_relative * Rabs (tanh y) <= tanh_relative * 1) by (apply Rmult_le_compat_l; lra). lra. }
assert (C : Rabs c <= contract_DOMAIN_LIMIT * (1 + 4 * unit_roundoff)).
{ rewrite Ec, Rabs_mult, (Rabs_pos_eq cap) by lra. apply Rmult_le_compat; auto using Rabs_pos. lra. apply Rabs_le. lra. }
assert (Z : Rabs (t * c) <= (1 + tanh_relative + tanh_absolute) * (contract_DOMAIN_LIMIT * (1 + 4 * unit_roundoff))).
{ rewrite Rabs_mult. apply Rmult_le_compat; auto using Rabs_pos. }
assert (S : Rabs s <= (1 + unit_roundoff) * ((1 + tanh_relative + tanh_absolute) * (contract_DOMAIN_LIMIT * (1 + 4 * unit_roundoff))) + omega).
{ replace s with ((s - t * c) + t * c) by ring. eapply Rle_trans. apply Rabs_triang.
  assert (unit_roundoff * Rabs (t * c) <= unit_roundoff * ((1 + tanh_relative + tanh_absolute) * (contract_DOMAIN_LIMIT * (1 + 4 * unit_roundoff)))) by (apply Rmult_le_compat_l; lra).
  lra. }
assert (W : omega <= 1) by (unfold omega; simpl; lra).
apply Rle_trans with ((1 + unit_roundoff) * ((1 + tanh_relative + tanh_absolute) * (contract_DOMAIN_LIMIT * (1 + 4 * unit_roundoff))) + 1 + BIAS). lra.
unfold unit_roundoff, tanh_relative, tanh_absolute, contract_DOMAIN_LIMIT, BIAS, FP32_MAX. lra.
Qed.

End Capped.
