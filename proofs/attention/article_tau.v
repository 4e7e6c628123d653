From Coq Require Import ZArith Reals Lra Lia.
From Flocq Require Import Core.
From Interval Require Import Tactic.
From Proofs Require Import constants binary32.
Open Scope R_scope.

(* The article's budget in nats for rows of N keys, |v| <= 2**12. *)
Definition tau (N : R) := 887 / 10 - ln N - ln 4096 - 2.

(* If every key of a row jumps by tau, our weights are at most e**tau 2**-BIAS (1 + exp2_relative); a lane holds at
   most N / LANES + 1 of them, and sums in any order are at most doubled (any_order.v). *)
Theorem article_tau : forall N, LANES <= N <= MAX_KEYS ->
  let weight := exp (tau N) * bpow radix2 (- BIAS_Z) * (1 + exp2_relative) in
  2 * (N / LANES + 1) * weight <= LANE_LIMIT /\
  2 * N * weight * (1 + BF16_UNIT_ROUNDOFF) * 4096 <= FP32_MAX.
Proof.
intros N [N1 N2] weight.
assert (P : 0 < LANES) by (unfold LANES; lra).
assert (NW : N * exp (tau N) = exp (867 / 10 - ln 4096)).
{ replace N with (exp (ln N)) at 1 by (apply exp_ln; lra). rewrite <- exp_plus. f_equal. unfold tau. field. }
assert (B : bpow radix2 (- BIAS_Z) = / IZR (2 ^ BIAS_Z)) by reflexivity.
set (E := exp (867 / 10 - ln 4096)) in *.
assert (Eu : E <= 2 ^ 114) by (unfold E; interval with (i_prec 60)).
assert (E0 : 0 < E) by apply exp_pos.
assert (X0 := exp_pos (tau N)).
assert (one : exp (tau N) <= E / LANES).
{ apply Rmult_le_reg_r with LANES. exact P. unfold Rdiv. rewrite Rmult_assoc, Rinv_l, Rmult_1_r by lra.
  rewrite <- NW, Rmult_comm. apply Rmult_le_compat_r; lra. }
assert (lanes : (N / LANES + 1) * exp (tau N) <= 2 * E / LANES).
{ rewrite Rmult_plus_distr_r, Rmult_1_l. replace (N / LANES * exp (tau N)) with (E / LANES) by (rewrite <- NW; field; lra).
  unfold Rdiv in *. lra. }
assert (R : 0 <= / IZR (2 ^ BIAS_Z) * (1 + exp2_relative)) by (unfold BIAS_Z, exp2_relative; simpl; lra).
unfold weight. rewrite B. split.
- replace (2 * (N / LANES + 1) * (exp (tau N) * / IZR (2 ^ BIAS_Z) * (1 + exp2_relative)))
    with (2 * ((N / LANES + 1) * exp (tau N)) * (/ IZR (2 ^ BIAS_Z) * (1 + exp2_relative))) by ring.
  apply Rle_trans with (2 * (2 * 2 ^ 114 / LANES) * (/ IZR (2 ^ BIAS_Z) * (1 + exp2_relative))).
  + apply Rmult_le_compat_r; auto. apply Rmult_le_compat_l. lra. apply Rle_trans with (1 := lanes).
    apply Rmult_le_compat_r. apply Rlt_le, Rinv_0_lt_compat; lra. lra.
  + unfold LANES, LANE_LIMIT, exp2_relative, BIAS_Z. simpl. lra.
- replace (2 * N * (exp (tau N) * / IZR (2 ^ BIAS_Z) * (1 + exp2_relative)) * (1 + BF16_UNIT_ROUNDOFF) * 4096)
    with ((N * exp (tau N)) * (2 * (/ IZR (2 ^ BIAS_Z) * (1 + exp2_relative)) * (1 + BF16_UNIT_ROUNDOFF) * 4096)) by ring.
  rewrite NW. apply Rle_trans with (2 ^ 114 * (2 * (/ IZR (2 ^ BIAS_Z) * (1 + exp2_relative)) * (1 + BF16_UNIT_ROUNDOFF) * 4096)).
  + apply Rmult_le_compat_r; auto. unfold BF16_UNIT_ROUNDOFF. lra.
  + unfold BIAS_Z, exp2_relative, BF16_UNIT_ROUNDOFF, FP32_MAX. simpl. lra.
Qed.

(* The article's Claim 1 without its assumption |v| <= 2**12: a jump of 60 nats passes its check at 512K keys, the
   exact result is at most v = 2**60, and o has overflowed.  With the bias it has not. *)
Theorem large_values_overflow :
  1 + exp 60 <= exp (tau 524288) /\ FP32_MAX < exp 60 * 2 ^ 60 /\
  (1 + exp 60 * 2 ^ 60) * bpow radix2 (- BIAS_Z) * (1 + / 128) < FP32_MAX.
Proof.
assert (B : bpow radix2 (- BIAS_Z) = / IZR (2 ^ BIAS_Z)) by reflexivity. rewrite B. unfold tau, FP32_MAX, BIAS_Z.
split; [|split]; interval with (i_prec 100).
Qed.

(* Its Claim 2 needs an anchor that is a score of the row: 200 nats above all of them every weight is below half the
   smallest subnormal number and vanishes, and l with it. *)
Theorem foreign_anchor_vanishes : exp (- 200) < bpow radix2 (-150) /\ nearest (exp (- 200)) = 0.
Proof.
assert (A : exp (- 200) < bpow radix2 (-150)).
{ assert (B : bpow radix2 (-150) = / IZR (2 ^ 150)) by reflexivity. rewrite B. interval with (i_prec 60). }
split; [exact A|].
apply (round_N_small_pos radix2 fp32_exp (fun z => negb (Z.even z)) (exp (- 200)) (mag radix2 (exp (-200)))).
- destruct (mag radix2 (exp (- 200))) as [e He]. simpl. rewrite Rabs_pos_eq in He by (apply Rlt_le, exp_pos).
  apply He. apply Rgt_not_eq, exp_pos.
- unfold fp32_exp, FLT_exp. assert (M : (mag radix2 (exp (- 200)) <= -150)%Z).
  { apply mag_le_bpow. apply Rgt_not_eq, exp_pos. rewrite Rabs_pos_eq by (apply Rlt_le, exp_pos). exact A. }
  lia.
Qed.
