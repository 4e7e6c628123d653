From Coq Require Import ZArith Reals Lra Lia.
From Flocq Require Import Core Relative.
From Proofs Require Import constants binary32 clamp_keeps_the_bound.
Open Scope R_scope.

Definition unit := BF16_UNIT_ROUNDOFF.

Lemma bf16_error : forall y, Rabs (nearest_bf16 y - y) <= unit * Rabs y + bpow radix2 (-134).
Proof.
intros y. destruct (error_N_FLT radix2 (-133) 8 ltac:(easy) (fun z => negb (Z.even z)) y) as [eps [eta [E1 [E2 [_ E]]]]].
unfold nearest_bf16. change (round radix2 bf16_exp ZnearestE y) with (round radix2 (FLT_exp (-133) 8) (Znearest (fun z => negb (Z.even z))) y).
rewrite E. replace (y * (1 + eps) + eta - y) with (eps * y + eta) by ring.
eapply Rle_trans. apply Rabs_triang. rewrite Rabs_mult. apply Rplus_le_compat.
- apply Rmult_le_compat_r. apply Rabs_pos. apply Rle_trans with (1 := E1). unfold unit, BF16_UNIT_ROUNDOFF. simpl. lra.
- apply Rle_trans with (1 := E2). simpl. lra.
Qed.

Lemma product_error : forall z h, h = nearest z -> Rabs (h - z) <= unit_of false * Rabs z + bpow radix2 (-150).
Proof.
intros z h ->. destruct (error_N_FLT radix2 (-149) 24 ltac:(easy) (fun z => negb (Z.even z)) z) as [eps [eta [E1 [E2 [_ E]]]]].
unfold nearest. change (round radix2 fp32_exp ZnearestE z) with (round radix2 (FLT_exp (-149) 24) (Znearest (fun z => negb (Z.even z))) z).
rewrite E. replace (z * (1 + eps) + eta - z) with (eps * z + eta) by ring.
eapply Rle_trans. apply Rabs_triang. rewrite Rabs_mult. apply Rplus_le_compat.
- apply Rmult_le_compat_r. apply Rabs_pos. apply Rle_trans with (1 := E1). unfold unit_of. simpl. lra.
- apply Rle_trans with (1 := E2). simpl. lra.
Qed.

(* From the quotient r = o / l, known within inner of the exact result, to the BF16 output: the reciprocal, the
   product (rounded or flushed), the limit, the doubling, the last rounding.  The contract's section 6.3. *)
Theorem final_division : forall o l q e h exact inner,
  0 < l -> Rabs exact <= largest_bf16 -> Rabs (o / l - exact) <= inner ->
  Rabs e <= reciprocal_relative -> q = / 2 * / l * (1 + e) -> computes false (o * q) h ->
  let divided := inner + (2 * reciprocal_relative + 3 * unit_roundoff) * (Rabs exact + inner) in
  Rabs (nearest_bf16 (2 * limited h) - exact) <= divided + unit * (Rabs exact + divided) + 2 * smallest_normal.
Proof.
intros o l q e h y inner Pl Hy Hi He Eq Hc divided.
set (r := o / l) in *. set (a := Rabs y) in *.
assert (Pi : 0 <= inner) by (apply Rle_trans with (2 := Hi), Rabs_pos).
assert (Pa : 0 <= a) by apply Rabs_pos.
assert (Sz : Rabs r <= a + inner).
{ replace r with (y + (r - y)) by ring. eapply Rle_trans. apply Rabs_triang. unfold a. lra. }
assert (Er : 2 * (o * q) - r = r * e) by (rewrite Eq; unfold r; field; lra).
assert (R1 : Rabs (2 * (o * q) - r) <= reciprocal_relative * (a + inner)).
{ rewrite Er, Rabs_mult, Rmult_comm. apply Rmult_le_compat; auto using Rabs_pos. }
assert (Pr : 0 <= reciprocal_relative <= 1) by (unfold reciprocal_relative; lra).
assert (R2 : 2 * Rabs (o * q) <= (1 + reciprocal_relative) * (a + inner)).
{ rewrite <- (Rabs_pos_eq 2) at 1 by lra. rewrite <- Rabs_mult. replace (2 * (o * q)) with (r + (2 * (o * q) - r)) by ring.
  eapply Rle_trans. apply Rabs_triang. lra. }
assert (U : unit_of false = unit_roundoff) by (unfold unit_of, unit_roundoff; simpl; lra).
assert (Pu : 0 < unit_roundoff) by (rewrite <- U; apply unit_pos).
assert (W : omega = smallest_normal) by (unfold omega, smallest_normal; simpl; lra).
assert (Pd : inner <= divided).
{ unfold divided. assert (0 <= (2 * reciprocal_relative + 3 * unit_roundoff) * (a + inner)) by (apply Rmult_le_pos; lra). lra. }
assert (Un : 0 <= unit <= 1) by (unfold unit, BF16_UNIT_ROUNDOFF; lra).
assert (Wp := omega_pos).
assert (Q : Rabs (2 * h - y) <= divided + 2 * bpow radix2 (-150) \/ h = 0 /\ Rabs (o * q) < omega).
{ destruct Hc as [N|[[F _]|[F ->]]]; [left|discriminate|right; split; auto].
  assert (P := product_error _ _ N). rewrite U in P.
  replace (2 * h - y) with (2 * (h - o * q) + (2 * (o * q) - r) + (r - y)) by ring.
  eapply Rle_trans. apply Rabs_triang. eapply Rle_trans. apply Rplus_le_compat_r, Rabs_triang.
  rewrite (Rabs_mult 2), (Rabs_pos_eq 2) by lra.
  assert (V : unit_roundoff * (2 * Rabs (o * q)) <= unit_roundoff * ((1 + reciprocal_relative) * (a + inner))) by (apply Rmult_le_compat_l; lra).
  assert (V2 : unit_roundoff * ((1 + reciprocal_relative) * (a + inner)) <= unit_roundoff * (2 * (a + inner))).
  { apply Rmult_le_compat_l. lra. apply Rmult_le_compat_r; lra. }
  assert (V3 : 0 <= reciprocal_relative * (a + inner)) by (apply Rmult_le_pos; lra).
  assert (V4 : 0 <= unit_roundoff * (a + inner)) by (apply Rmult_le_pos; lra).
  unfold divided. lra. }
destruct Q as [Q|[-> Q]].
- assert (C := clamp_keeps_the_bound h y Hy). set (z := 2 * limited h) in *.
  assert (Z1 : Rabs (z - y) <= divided + 2 * bpow radix2 (-150)) by lra.
  assert (Z2 : Rabs z <= a + divided + 2 * bpow radix2 (-150)).
  { replace z with (y + (z - y)) by ring. eapply Rle_trans. apply Rabs_triang. unfold a. lra. }
  assert (E := bf16_error z).
  assert (Z3 : unit * Rabs z <= unit * (a + divided + 2 * bpow radix2 (-150))) by (apply Rmult_le_compat_l; lra).
  replace (nearest_bf16 z - y) with ((nearest_bf16 z - z) + (z - y)) by ring.
  eapply Rle_trans. apply Rabs_triang.
  assert (T : bpow radix2 (-134) + 2 * bpow radix2 (-150) + unit * (2 * bpow radix2 (-150)) <= 2 * smallest_normal).
  { unfold unit, BF16_UNIT_ROUNDOFF, smallest_normal. simpl. lra. }
  lra.
- assert (L0 : limited 0 = 0).
  { destruct (limited_cases 0) as [[E _]|[[_ E]|[_ E]]]; auto; assert (P := half_pos); lra. }
  rewrite L0, Rmult_0_r. unfold nearest_bf16. rewrite round_0 by typeclasses eauto.
  replace (0 - y) with ((r - y) + (2 * (o * q) - r) - 2 * (o * q)) by ring.
  unfold Rminus at 1. eapply Rle_trans. apply Rabs_triang. rewrite Rabs_Ropp.
  eapply Rle_trans. apply Rplus_le_compat_r, Rabs_triang.
  rewrite (Rabs_mult 2), (Rabs_pos_eq 2) by lra.
  assert (V3 : 0 <= reciprocal_relative * (a + inner)) by (apply Rmult_le_pos; lra).
  assert (V4 : 0 <= unit_roundoff * (a + inner)) by (apply Rmult_le_pos; lra).
  assert (V5 : 0 <= unit * (a + divided)) by (apply Rmult_le_pos; lra).
  unfold divided in *. lra.
Qed.
