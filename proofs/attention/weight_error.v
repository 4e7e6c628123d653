From Coq Require Import ZArith Reals Lra Lia.
From Flocq Require Import Core.
From Proofs Require Import constants binary32.
Open Scope R_scope.

(* A weight from a score: the computed exponent t' is within tau of the exact one, exp2 errs by its envelope.  This is
   the rho of attention_bound.v, with tau the error of the score and of the shifts (contract_constants.v). *)
Theorem weight_error : forall t t' tau e p, Rabs (t' - t) <= tau -> Rabs e <= exp2_relative ->
  p = Rpower 2 t' * (1 + e) ->
  Rabs (p - Rpower 2 t) <= (exp (ln 2 * tau) * (1 + exp2_relative) - 1) * Rpower 2 t.
Proof.
intros t t' tau e p Ht He ->. unfold Rpower.
assert (E : exp (t' * ln 2) = exp ((t' - t) * ln 2) * exp (t * ln 2)) by (rewrite <- exp_plus; f_equal; ring).
rewrite E. set (w := exp (t * ln 2)). assert (W : 0 < w) by apply exp_pos.
set (g := exp ((t' - t) * ln 2)). assert (G : 0 < g) by apply exp_pos.
assert (L2 : 0 < ln 2) by (rewrite <- ln_1; apply ln_increasing; lra).
apply Rabs_le_inv in Ht. apply Rabs_le_inv in He.
assert (X : 0 <= exp2_relative <= / 2) by (unfold exp2_relative; lra).
set (h := exp (ln 2 * tau)). assert (H : 0 < h) by apply exp_pos.
assert (Up : g <= h) by (apply exp_le; rewrite Rmult_comm; apply Rmult_le_compat_l; lra).
assert (Lo : / h <= g).
{ unfold h. rewrite <- exp_Ropp. apply exp_le. rewrite Ropp_mult_distr_r, (Rmult_comm (ln 2)). apply Rmult_le_compat_r; lra. }
assert (A : g * (1 + e) <= h * (1 + exp2_relative)) by (apply Rmult_le_compat; lra).
assert (B : 2 - h * (1 + exp2_relative) <= g * (1 + e)).
{ apply Rle_trans with (/ h * (1 - exp2_relative)).
  - (* 2 <= y + (1 - x) / h for y = h (1 + x): (1 - x) / h >= (1 - x**2) / y >= ... *)
    apply Rmult_le_reg_r with h. exact H.
    rewrite (Rmult_comm (/ h)), Rmult_assoc, Rinv_l, Rmult_1_r by lra.
    assert (S : 0 <= (h - 1) * (h - 1)) by apply Rle_0_sqr.
    assert (T1 : 1 <= h).
    { unfold h. rewrite <- exp_0. apply exp_le. apply Rmult_le_pos; lra. }
    assert (Q : 0 <= exp2_relative * (h * h - 1)) by (apply Rmult_le_pos; nra). nra.
  - apply Rmult_le_compat; try lra. apply Rlt_le, Rinv_0_lt_compat, H. }
replace (g * w * (1 + e) - w) with ((g * (1 + e) - 1) * w) by ring.
rewrite Rabs_mult, (Rabs_pos_eq w) by lra. apply Rmult_le_compat_r. lra. apply Rabs_le. lra.
Qed.
