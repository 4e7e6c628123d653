From Coq Require Import ZArith Reals Lra Lia.
From Flocq Require Import Core Relative.
From Proofs Require Import constants binary32.
Open Scope R_scope.

(* Rounding to BF16, to nearest, of a number that is not subnormal there. *)
Theorem bf16_rounding_unit : forall x, omega <= Rabs x ->
  Rabs (nearest_bf16 x - x) <= BF16_UNIT_ROUNDOFF * Rabs x.
Proof.
intros x Hx. apply Rle_trans with (/ 2 * bpow radix2 (-8 + 1) * Rabs x).
- apply relative_error_N_FLT; [easy | exact Hx].
- apply Rmult_le_compat_r. apply Rabs_pos. unfold BF16_UNIT_ROUNDOFF. simpl. lra.
Qed.

(* The unit is nearly attained: 1 + 2**-8 lies between the neighbours 1 and 1 + 2**-7 and goes to 1, the even one. *)
Theorem unit_is_attained : nearest_bf16 (1 + / 256) = 1 /\ BF16_UNIT_ROUNDOFF = / 256.
Proof.
split; [| unfold BF16_UNIT_ROUNDOFF; lra].
assert (E : 1 + / 256 = F2R (Float radix2 257 (-8))) by (unfold F2R; simpl; lra).
unfold nearest_bf16, round, scaled_mantissa, cexp.
assert (M : mag radix2 (1 + / 256) = 1%Z :> Z).
{ apply mag_unique. rewrite Rabs_pos_eq by lra. simpl. lra. }
rewrite M. change (bf16_exp 1) with (-7)%Z.
assert (N : ZnearestE ((1 + / 256) * bpow radix2 (- (-7))) = 128%Z).
{ replace ((1 + / 256) * bpow radix2 (- (-7))) with (128 + / 2) by (simpl; lra).
  unfold ZnearestE, Znearest.
  rewrite (Zfloor_imp 128) by (simpl; lra). rewrite Rcompare_Eq by lra. reflexivity. }
rewrite N. unfold F2R. simpl. lra.
Qed.
