From Coq Require Import ZArith Reals Lra Lia Bool.
From Flocq Require Import Core.
From Interval Require Import Tactic.
From Proofs Require Import constants binary32.
Open Scope R_scope.

(* gamma(n, u) = e**(n u) - 1 bounds a product of n roundings, for every n. *)
Definition gamma (n : nat) (u : R) := exp (INR n * u) - 1.

Lemma exp_INR : forall n x, exp (INR n * x) = exp x ^ n.
Proof.
intros n x. induction n as [|n IH]. simpl. now rewrite Rmult_0_l, exp_0.
rewrite S_INR, Rmult_plus_distr_r, Rmult_1_l, exp_plus, IH. simpl. ring.
Qed.

Lemma one_plus_le_exp : forall u, 1 + u <= exp u.
Proof. intros u. destruct (Req_dec u 0) as [->|N]. rewrite exp_0; lra. now apply Rlt_le, exp_ineq1. Qed.

Lemma power_le_exp : forall n u, 0 <= u -> (1 + u) ^ n <= 1 + gamma n u.
Proof.
intros n u Hu. unfold gamma. rewrite exp_INR. replace (1 + (exp u ^ n - 1)) with (exp u ^ n) by ring.
apply pow_incr. split. lra. apply one_plus_le_exp.
Qed.

(* ln is concave: 1 / (1 - u) <= e**(u / (1 - u)). *)
Lemma inverse_le_exp : forall u, 0 <= u < 1 -> / (1 - u) <= exp (u / (1 - u)).
Proof.
intros u [H0 H1]. replace (/ (1 - u)) with (1 + u / (1 - u)) by (field; lra). apply one_plus_le_exp.
Qed.

Lemma below_power : forall n u, 0 <= u <= 1 -> 1 - gamma n u <= (1 - u) ^ n.
Proof.
intros n u [H0 H1].
assert (B : 1 - INR n * u <= (1 - u) ^ n).
{ induction n as [|n IH]. simpl; lra.
  assert (P := pos_INR n). rewrite S_INR. simpl.
  apply Rle_trans with ((1 - u) * (1 - INR n * u)); [nra | apply Rmult_le_compat_l; lra]. }
unfold gamma. assert (E := one_plus_le_exp (INR n * u)). lra.
Qed.

Lemma MAX_KEYS_fits : ((MAX_KEYS_Z <=? 2 ^ 62) && (0 <=? MAX_KEYS_Z))%Z = true.
Proof. vm_compute. reflexivity. Qed.

Definition worst_unit := Rmax unit_roundoff dot_unit_roundoff.

Lemma worst_unit_value : 0 < worst_unit /\ MAX_KEYS * worst_unit + 130 * worst_unit <= 131 /\ worst_unit < 1 /\
  unit_roundoff <= worst_unit /\ dot_unit_roundoff <= worst_unit.
Proof.
unfold worst_unit, Rmax. destruct (Rle_dec _ _); unfold MAX_KEYS, unit_roundoff, dot_unit_roundoff in *; lra.
Qed.

(* `summing` = gamma(n + 130, worst unit) covers n + 130 roundings in a numerator and, up to MAX_KEYS keys, the
   inverse of n - 1 roundings in a denominator, which the convex bound divides by. *)
Theorem contract_constants : forall n, (1 <= n)%nat -> (Z.of_nat n <= MAX_KEYS_Z)%Z ->
  (1 + worst_unit) ^ (n + 130) <= 1 + gamma (n + 130) worst_unit /\
  / (1 - worst_unit) ^ (n - 1) <= 1 + gamma (n + 130) worst_unit.
Proof.
intros n Hn HN. destruct worst_unit_value as [P [Q [S _]]]. split.
- apply power_le_exp; lra.
- unfold gamma. replace (1 + (exp (INR (n + 130) * worst_unit) - 1)) with (exp (INR (n + 130) * worst_unit)) by ring.
  rewrite <- pow_inv. apply Rle_trans with (exp (worst_unit / (1 - worst_unit)) ^ (n - 1)).
  + apply pow_incr. split. apply Rlt_le, Rinv_0_lt_compat; lra. apply inverse_le_exp; lra.
  + rewrite <- exp_INR. apply exp_le.
    assert (N : INR n <= MAX_KEYS).
    { rewrite INR_IZR_INZ. apply IZR_le in HN. exact HN. }
    assert (N1 : 1 <= INR n) by (change 1 with (INR 1); now apply le_INR).
    rewrite minus_INR, plus_INR by exact Hn. simpl (INR 1). replace (INR 130) with 130 by (simpl; lra).
    apply Rmult_le_reg_r with (1 - worst_unit). lra.
    replace ((INR n - 1) * (worst_unit / (1 - worst_unit)) * (1 - worst_unit)) with ((INR n - 1) * worst_unit) by (field; lra).
    apply Rle_trans with (worst_unit * ((INR n + 130) * (1 - worst_unit))); [|lra].
    rewrite (Rmult_comm _ worst_unit). apply Rmult_le_compat_l. lra.
    assert (INR n * worst_unit <= MAX_KEYS * worst_unit) by (apply Rmult_le_compat_r; lra). nra.
Qed.

(* Rounding s - A, once in the fast path, twice in a replay: the contract's `_shift_error` without its omega. *)
Theorem shift_is_covered : forall t1 t2, Rabs t1 <= contract_LARGEST_EXPONENT -> Rabs t2 <= contract_LARGEST_EXPONENT ->
  unit_roundoff * Rabs t1 + unit_roundoff * Rabs t2 <= unit_roundoff * 2 * (contract_LARGEST_EXPONENT + contract_BIAS).
Proof. intros t1 t2 H1 H2. unfold unit_roundoff, contract_LARGEST_EXPONENT, contract_BIAS in *. lra. Qed.

(* rho: x + x**2 + e exp2 covers e**x (1 + exp2) - 1 + exp2, the rho of key_conforms.v, up to x = 1. *)
Theorem weights_are_covered : forall x, 0 <= x <= 1 ->
  exp x * (1 + exp2_relative) - 1 + exp2_relative <= x + x ^ 2 + exp 1 * exp2_relative.
Proof.
intros x Hx.
assert (E1 : exp x <= exp 1) by (apply exp_le; lra).
assert (E2 : 271 / 100 <= exp 1) by interval with (i_prec 40).
assert (P : 0 <= exp2_relative <= / 64) by (unfold exp2_relative; lra).
destruct (Rle_or_lt x (3 / 8)) as [S|S].
- assert (Q : exp x <= 1 + x + x ^ 2).
  { (* e**x = (e**(-x/2))**-2 <= (1 - x/2)**-2, which 1 + x + x**2 exceeds up to 0.38. *)
    assert (O := one_plus_le_exp (- (x / 2))).
    assert (E3 : exp x * (exp (- (x / 2)) * exp (- (x / 2))) = 1).
    { rewrite <- !exp_plus. replace (x + (- (x / 2) + - (x / 2))) with 0 by field. apply exp_0. }
    assert (M : (1 - x / 2) * (1 - x / 2) <= exp (- (x / 2)) * exp (- (x / 2))) by (apply Rmult_le_compat; lra).
    assert (X := exp_pos x).
    assert (Y : exp x * ((1 - x / 2) * (1 - x / 2)) <= 1) by (apply Rle_trans with (2 := Req_le _ _ E3); apply Rmult_le_compat_l; lra).
    assert (Z : 1 <= (1 + x + x ^ 2) * ((1 - x / 2) * (1 - x / 2))).
    { assert (T : 0 <= x ^ 2 * (1 - 3 * x + x ^ 2)) by (apply Rmult_le_pos; [apply pow2_ge_0 | nra]). nra. }
    apply Rmult_le_reg_r with ((1 - x / 2) * (1 - x / 2)). apply Rmult_lt_0_compat; lra. lra. }
  assert (B : exp x <= exp (3 / 8)) by (apply exp_le; lra).
  assert (B2 : exp (3 / 8) <= 3 / 2) by interval with (i_prec 40).
  assert (C : exp2_relative * (exp x + 1) <= exp2_relative * exp 1) by (apply Rmult_le_compat_l; lra). lra.
- assert (H : / 32 <= 1 + x + x ^ 2 - exp x) by interval with (i_bisect x, i_taylor x, i_prec 40).
  assert (C : exp2_relative * (exp x + 1) <= exp2_relative * (exp 1 + 1)) by (apply Rmult_le_compat_l; lra). lra.
Qed.

(* A score within the domain stays finite through head_dim additions and the rounding of scale and product. *)
Theorem domain_stays_finite : forall d, (d <= 256)%nat ->
  contract_DOMAIN_LIMIT * (1 + dot_unit_roundoff) ^ d * (1 + unit_roundoff) ^ 3 + BIAS <= FP32_MAX.
Proof.
intros d Hd.
assert (G := power_le_exp d dot_unit_roundoff ltac:(unfold dot_unit_roundoff; lra)).
assert (B : exp (INR d * dot_unit_roundoff) <= 1 + / 1024).
{ apply Rle_trans with (exp (256 * dot_unit_roundoff)).
  - apply exp_le. apply Rmult_le_compat_r. unfold dot_unit_roundoff; lra.
    rewrite INR_IZR_INZ. apply IZR_le. lia.
  - unfold dot_unit_roundoff. interval with (i_prec 40). }
unfold gamma in G.
apply Rle_trans with (contract_DOMAIN_LIMIT * (1 + / 1024) * (1 + unit_roundoff) ^ 3 + BIAS).
- apply Rplus_le_compat_r. apply Rmult_le_compat_r. unfold unit_roundoff; lra.
  apply Rmult_le_compat_l. unfold contract_DOMAIN_LIMIT; lra. lra.
- unfold contract_DOMAIN_LIMIT, unit_roundoff, BIAS, FP32_MAX. lra.
Qed.

(* ln l lies within LN2 * LARGEST_EXPONENT for every l between the floor and LANES lanes at their limit. *)
Theorem logarithm_is_covered : forall l, SUM_FLOOR <= l <= LANES * LANE_LIMIT ->
  Rabs (ln l) <= ln 2 * contract_LARGEST_EXPONENT.
Proof.
intros l [H0 H1]. assert (P : 0 < SUM_FLOOR) by (unfold SUM_FLOOR; lra).
assert (L0 : ln SUM_FLOOR <= ln l) by (destruct (Req_dec SUM_FLOOR l) as [<-|N]; [lra | apply Rlt_le, ln_increasing; lra]).
assert (L1 : ln l <= ln (LANES * LANE_LIMIT)).
{ destruct (Req_dec l (LANES * LANE_LIMIT)) as [<-|N]; [lra | apply Rlt_le, ln_increasing; lra]. }
assert (A : - (ln 2 * contract_LARGEST_EXPONENT) <= ln SUM_FLOOR).
{ unfold SUM_FLOOR, contract_LARGEST_EXPONENT. interval with (i_prec 60). }
assert (B : ln (LANES * LANE_LIMIT) <= ln 2 * contract_LARGEST_EXPONENT).
{ unfold LANES, LANE_LIMIT, contract_LARGEST_EXPONENT. interval with (i_prec 60). }
apply Rabs_le. lra.
Qed.
