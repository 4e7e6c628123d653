(* From one key's score to the weight and product that enter the sums: what [conforming] of attention_bound.v asks for,
   in the fast path, and in a rescaling softmax after all its factors. *)
From Coq Require Import ZArith Reals Lra Lia List.
From Flocq Require Import Core Relative.
From Proofs Require Import constants binary32 summation_error attention_bound weight_error final_division floor_is_reached.
Import ListNotations.
Open Scope R_scope.

(* A key that a row sees: its exact score in log2 units, by how much the computed one may be off, its value. *)
Record seen := Seen { score : R; sigma : R; value : R }.

(* The contract's `_shift_error`, and its rho (contract_constants.v: `_grown` and e exp2_relative cover it). *)
Definition shift := unit_roundoff * 2 * (contract_LARGEST_EXPONENT + contract_BIAS) + smallest_normal.
Definition swell (i : seen) := exp (ln 2 * (sigma i + shift)).
Definition rho_of (i : seen) := swell i * (1 + exp2_relative) - 1 + exp2_relative.

(* exp2 on the device: its envelope; anything up to omega where that may be flushed; beyond the envelope's range a number
   (or an infinity) that no checked denominator holds. *)
Definition device_exp2 (t p : R) : Prop := fp32 p /\ 0 <= p /\
  ((exists e, Rabs e <= exp2_relative /\ p = Rpower 2 t * (1 + e)) \/
   (Rpower 2 t * (1 - exp2_relative) <= omega /\ p <= omega) \/
   (contract_LARGEST_EXPONENT <= t /\ LANES * LANE_LIMIT < p)).

(* p is rounded to BF16 and multiplied by the BF16 value, or the value is that of a sink, 0, and nothing is formed. *)
Definition weighs (i : seen) (k : key) : Prop :=
  v k = value i /\
  (bf16 (value i) /\ (b k = nearest_bf16 (p k) \/ p k < omega /\ b k = 0) /\ computes false (b k * v k) (x k) \/
   value i = 0 /\ b k = p k /\ x k = 0).

(* In the frame of a shift A: exact weight 2**(score - A). *)
Definition in_frame_of (A : R) (i : seen) (k : key) : Prop := w k = Rpower 2 (score i - A) /\ rho k = rho_of i.

(* One subtraction from the score, as against a static anchor (or a running maximum with the bias in it) ... *)
Definition exponent_at_once (A s t : R) : Prop := fp32 s /\ fp32 A /\ computes false (s - A) t.
(* ... or two, as in a replay, where the maximum is at or above the score. *)
Definition exponent_in_two (m : Z) (s t : R) : Prop :=
  fp32 s /\ fp32 (IZR m) /\ s <= IZR m /\ exists d, computes false (s - IZR m) d /\ computes false (d - BIAS) t.

Lemma omega_smallest : omega = smallest_normal.
Proof. unfold omega, smallest_normal. simpl. lra. Qed.

Lemma unit_false : unit_of false = unit_roundoff.
Proof. unfold unit_of, unit_roundoff. simpl. lra. Qed.

Lemma Rpower_le : forall a c, a <= c -> Rpower 2 a <= Rpower 2 c.
Proof. intros a c H. apply Rle_Rpower; lra. Qed.

Lemma ln2_pos : 0 < ln 2.
Proof. rewrite <- ln_1. apply ln_increasing; lra. Qed.

Lemma swell_Rpower : forall y, exp (ln 2 * y) = Rpower 2 y.
Proof. intros y. unfold Rpower. f_equal. ring. Qed.

Lemma exp2_small : 0 <= exp2_relative <= / 64.
Proof. unfold exp2_relative. lra. Qed.

Lemma shift_pos : 0 < shift.
Proof. unfold shift, unit_roundoff, contract_LARGEST_EXPONENT, contract_BIAS, smallest_normal. lra. Qed.

Lemma swell_ge_1 : forall i, 0 <= sigma i -> 1 <= swell i.
Proof.
intros i H. unfold swell. rewrite <- exp_0. assert (L := ln2_pos). assert (S := shift_pos).
destruct (Req_dec 0 (ln 2 * (sigma i + shift))) as [<-|N]. lra. apply Rlt_le, exp_increasing.
assert (0 <= ln 2 * (sigma i + shift)) by (apply Rmult_le_pos; lra). lra.
Qed.

(* bf16 has omega's neighbourhood to itself: at least omega it errs relatively, below it stays there. *)
Lemma rounded_p : forall pk bk, fp32 pk -> 0 <= pk -> (bk = nearest_bf16 pk \/ pk < omega /\ bk = 0) ->
  0 <= bk /\ (Rabs (bk - pk) <= BF16_UNIT_ROUNDOFF * pk \/ pk <= 2 * omega /\ bk <= 2 * omega).
Proof.
intros pk bk F P [->|[L ->]].
- assert (Z : 0 <= nearest_bf16 pk) by (apply round_ge_generic; try typeclasses eauto; auto; apply generic_format_0).
  split; auto. destruct (Rle_or_lt omega pk) as [N|S].
  + left. rewrite <- (Rabs_pos_eq pk) at 3 by exact P.
    eapply Rle_trans. apply (relative_error_N_FLT radix2 (-133) 8 ltac:(easy) (fun z => negb (Z.even z))).
    rewrite (Rabs_pos_eq pk) by exact P. apply Rle_trans with (2 := N). unfold omega. apply bpow_le. easy.
    apply Rmult_le_compat_r. apply Rabs_pos. unfold BF16_UNIT_ROUNDOFF. simpl. lra.
  + right. assert (G : generic_format radix2 bf16_exp omega) by (apply generic_format_bpow; easy).
    assert (Q : nearest_bf16 pk <= omega) by (apply round_le_generic; try typeclasses eauto; auto; lra).
    assert (W := omega_pos). lra.
- split. lra. right. assert (W := omega_pos). lra.
Qed.

(* A product of two BF16 numbers is exact, or so small that it is off by at most omega. *)
Lemma bf16_product : forall a c y, bf16 a -> bf16 c -> computes false (a * c) y -> Rabs (y - a * c) <= omega.
Proof.
intros a c y Ha Hc [->|[[F _]|[L ->]]]; [|discriminate|].
- destruct (Rle_or_lt omega (Rabs (a * c))) as [N|S].
  + assert (G : fp32 (a * c)).
    { destruct (FLT_format_generic radix2 (-133) 8 a Ha) as [[m1 e1] E1 M1 X1].
      destruct (FLT_format_generic radix2 (-133) 8 c Hc) as [[m2 e2] E2 M2 X2]. simpl in *.
      assert (E : a * c = IZR (m1 * m2) * bpow radix2 (e1 + e2)).
      { rewrite E1, E2. unfold F2R. simpl. rewrite mult_IZR, bpow_plus. ring. }
      rewrite E in *. change (Z.pow_pos 2 8) with 256%Z in *.
      assert (M : (Z.abs (m1 * m2) <= 2 ^ 16)%Z) by (rewrite Z.abs_mul; nia).
      apply fp32_dyadic. lia.
      rewrite Rabs_mult, <- abs_IZR, (Rabs_pos_eq (bpow _ _)) in N by apply bpow_ge_0.
      assert (Q : omega <= bpow radix2 (16 + (e1 + e2))).
      { apply Rle_trans with (1 := N). rewrite (bpow_plus _ 16). apply Rmult_le_compat_r. apply bpow_ge_0.
        change (bpow radix2 16) with (IZR (2 ^ 16)). now apply IZR_le. }
      unfold omega in Q. apply le_bpow in Q. lia. }
    unfold nearest. rewrite round_generic; auto. rewrite Rminus_diag_eq by reflexivity. rewrite Rabs_R0.
    apply Rlt_le, omega_pos. typeclasses eauto.
  + assert (E := product_error (a * c) _ eq_refl).
    apply Rle_trans with (1 := E). rewrite unit_false.
    assert (U : unit_roundoff * Rabs (a * c) <= unit_roundoff * omega).
    { apply Rmult_le_compat_l. unfold unit_roundoff; lra. lra. }
    apply Rle_trans with (unit_roundoff * omega + bpow radix2 (-150)). lra.
    unfold unit_roundoff, omega. simpl. lra.
- rewrite <- Rabs_Ropp. replace (- (0 - a * c)) with (a * c) by ring. lra.
Qed.

Lemma weighs_conform : forall i k, fp32 (p k) -> 0 <= p k -> weighs i k ->
  0 <= b k /\ (Rabs (b k - p k) <= BF16_UNIT_ROUNDOFF * p k \/ p k <= 2 * omega /\ b k <= 2 * omega) /\
  Rabs (x k - b k * v k) <= omega.
Proof.
intros i k F P [Ev [[Hv [Hb Hx]]|[H0 [Hb Hx]]]].
- destruct (rounded_p _ _ F P Hb) as [B0 B1]. split; auto. split; auto.
  apply bf16_product; auto. destruct Hb as [->|[_ ->]]. apply generic_format_round; typeclasses eauto. apply generic_format_0.
  now rewrite Ev.
- rewrite Hb, Hx, Ev, H0. split; auto. split.
  + left. rewrite Rminus_diag_eq by reflexivity. rewrite Rabs_R0. apply Rmult_le_pos; auto. unfold BF16_UNIT_ROUNDOFF; lra.
  + rewrite Rmult_0_r, Rminus_0_r, Rabs_R0. apply Rlt_le, omega_pos.
Qed.

(* The exponent's own roundings are within [shift] where it is at least -160; below, the unrounded one is below -159. *)
Definition lowest := - (contract_LARGEST_EXPONENT + contract_BIAS).

Lemma shifts_agree : contract_BIAS = BIAS /\ lowest + 1 = -159 /\ fp32 (lowest + 1) /\ fp32 (lowest + 1 + BIAS).
Proof.
split. reflexivity. unfold lowest, contract_LARGEST_EXPONENT, contract_BIAS, BIAS. split. lra. split.
- replace (- (128 + 32) + 1) with (IZR (-159)) by lra. apply fp32_integer. lia.
- replace (- (128 + 32) + 1 + 32) with (IZR (-127)) by lra. apply fp32_integer. lia.
Qed.

Lemma subtraction_error : forall a c y, fp32 a -> fp32 c -> computes false (a - c) y ->
  Rabs (y - (a - c)) <= unit_roundoff * Rabs (a - c) \/ Rabs (a - c) < omega /\ y = 0.
Proof.
intros a c y Ha Hc H. rewrite <- unit_false. apply computes_sum; auto. now apply generic_format_opp.
Qed.

Lemma larger_than_rounded : forall z y, Rabs (y - z) <= unit_roundoff * Rabs z -> Rabs z <= Rabs y * (1 + 2 * unit_roundoff).
Proof.
intros z y H. assert (T : Rabs z <= Rabs y + unit_roundoff * Rabs z).
{ replace z with (y - (y - z)) at 1 by ring. unfold Rminus at 1. eapply Rle_trans. apply Rabs_triang. rewrite Rabs_Ropp. lra. }
assert (P := Rabs_pos y). assert (Q := Rabs_pos z). unfold unit_roundoff in *. lra.
Qed.

Lemma exponent_error_at_once : forall A s t, exponent_at_once A s t -> Rabs t <= - lowest -> Rabs (t - (s - A)) <= shift.
Proof.
intros A s t [Hs [HA C]] T. assert (W := omega_smallest). assert (Po := omega_pos).
destruct (subtraction_error s A t Hs HA C) as [E|[L ->]].
- assert (B := larger_than_rounded _ _ E).
  apply Rle_trans with (1 := E). unfold shift, lowest, unit_roundoff, contract_LARGEST_EXPONENT, contract_BIAS, smallest_normal in *. lra.
- rewrite Rabs_minus_sym, Rminus_0_r. unfold shift, unit_roundoff, contract_LARGEST_EXPONENT, contract_BIAS, smallest_normal in *. lra.
Qed.

Lemma exponent_error_in_two : forall m s t, exponent_in_two m s t -> lowest <= t ->
  t <= - BIAS /\ Rabs (t - (s - (IZR m + BIAS))) <= shift.
Proof.
intros m s t [Hs [Hm [L [d [Cd Ct]]]]] T. assert (W := omega_smallest). assert (Po := omega_pos).
assert (Bz := bias_Z).
assert (Fd : fp32 d) by exact (computes_fp32 _ _ _ Cd).
assert (FB : fp32 BIAS) by (change BIAS with (IZR BIAS_Z); apply fp32_integer; lia).
assert (D0 : d <= 0).
{ destruct Cd as [->|[[_ ->]|[_ ->]]]; try lra; apply round_le_generic; try typeclasses eauto; try apply fp32_0; lra. }
assert (T0 : t <= - BIAS).
{ assert (G : fp32 (- BIAS)) by now apply generic_format_opp.
  destruct Ct as [->|[[F _]|[Q _]]]; [|discriminate|].
  - apply round_le_generic; try typeclasses eauto; auto. lra.
  - exfalso. assert (B0 : 1 <= BIAS) by (unfold BIAS; lra). rewrite Rabs_left in Q by lra. assert (omega <= / 2) by (unfold omega; simpl; lra). lra. }
split; auto.
destruct (subtraction_error d BIAS t Fd FB Ct) as [E2|[Q _]].
2:{ exfalso. assert (B0 : 1 <= BIAS) by (unfold BIAS; lra). rewrite Rabs_left in Q by lra. assert (omega <= / 2) by (unfold omega; simpl; lra). lra. }
assert (B2 := larger_than_rounded _ _ E2).
assert (Pt : Rabs t <= - lowest) by (rewrite Rabs_left1; unfold BIAS in *; lra).
assert (Dl : Rabs d <= 129).
{ rewrite Rabs_left1 by exact D0. rewrite (Rabs_left1 (d - BIAS)) in B2 by (unfold BIAS; lra).
  unfold unit_roundoff, lowest, contract_LARGEST_EXPONENT, contract_BIAS, BIAS in *. lra. }
destruct (subtraction_error s (IZR m) d Hs Hm Cd) as [E1|[Q Z]].
- assert (B1 := larger_than_rounded _ _ E1).
  replace (t - (s - (IZR m + BIAS))) with ((t - (d - BIAS)) + (d - (s - IZR m))) by ring.
  eapply Rle_trans. apply Rabs_triang.
  unfold shift, unit_roundoff, lowest, contract_LARGEST_EXPONENT, contract_BIAS, smallest_normal, BIAS in *. lra.
- subst d. replace (t - (s - (IZR m + BIAS))) with ((t - (0 - BIAS)) + - (s - IZR m)) by ring.
  eapply Rle_trans. apply Rabs_triang. rewrite Rabs_Ropp.
  unfold shift, unit_roundoff, lowest, contract_LARGEST_EXPONENT, contract_BIAS, smallest_normal, BIAS in *. lra.
Qed.

(* The heart: whatever the path, an exponent t near score - A (or far below), and exp2 of it. *)
Definition near_exponent (A : R) (i : seen) (t : R) : Prop :=
  (lowest <= t -> Rabs (t - (score i - A)) <= sigma i + shift) /\
  (t < lowest -> score i - A <= lowest + 1 + sigma i).

Lemma rho_nonneg : forall i, 0 <= sigma i -> 0 <= rho_of i.
Proof.
intros i H. assert (G := swell_ge_1 i H). assert (E := exp2_small). unfold rho_of.
assert (1 * 1 <= swell i * (1 + exp2_relative)) by (apply Rmult_le_compat; lra). lra.
Qed.

(* What may have been flushed: either the exact weight is as small, or rho is at least 1. *)
Lemma small_conforms : forall A i k, 0 <= sigma i -> in_frame_of A i k -> 0 <= p k <= omega -> 0 <= b k <= 2 * omega ->
  Rabs (x k - b k * v k) <= omega -> w k * (1 - exp2_relative) <= omega * swell i -> conforming k.
Proof.
intros A i k Hs [Ew Er] P Sb X B. assert (E := exp2_small). assert (O := omega_pos).
assert (G := swell_ge_1 i Hs). assert (Pr := rho_nonneg i Hs).
assert (Pw : 0 < w k) by (rewrite Ew; apply exp_pos).
split; auto. split. now rewrite Er. split. lra. split. lra. split; auto.
destruct (Rle_or_lt (w k) (2 * omega)) as [L|L]; [right; lra | left; split; [|right; lra]].
assert (R1 : 1 <= rho k).
{ rewrite Er. unfold rho_of.
  assert (2 * omega * (1 - exp2_relative) <= omega * swell i).
  { apply Rle_trans with (2 := B). apply Rmult_le_compat_r; lra. }
  assert (Q : 2 * (1 - exp2_relative) <= swell i) by (apply Rmult_le_reg_l with omega; lra).
  assert (2 * (1 - exp2_relative) * (1 + exp2_relative) <= swell i * (1 + exp2_relative)) by (apply Rmult_le_compat_r; lra).
  assert (0 <= exp2_relative * (1 - 2 * exp2_relative)) by (apply Rmult_le_pos; lra). lra. }
assert (1 * w k <= rho k * w k) by (apply Rmult_le_compat_r; lra).
rewrite Rabs_left1 by lra. lra.
Qed.

Lemma small_weight_conforms : forall A i k, 0 <= sigma i -> in_frame_of A i k -> fp32 (p k) -> 0 <= p k -> weighs i k ->
  p k <= omega -> w k * (1 - exp2_relative) <= omega * swell i -> conforming k.
Proof.
intros A i k Hs Fr F P Wg S B. destruct (weighs_conform i k F P Wg) as [B0 [B1 B2]]. assert (O := omega_pos).
apply (small_conforms A i k); auto. split; auto. destruct B1 as [H|[_ H]]; [|exact H]. apply Rabs_le_inv in H.
assert (BF16_UNIT_ROUNDOFF * p k <= 1 * p k) by (apply Rmult_le_compat_r; [|unfold BF16_UNIT_ROUNDOFF]; lra). lra.
Qed.

Theorem weight_conforms : forall A i k t, 0 <= sigma i -> near_exponent A i t -> in_frame_of A i k ->
  device_exp2 t (p k) -> weighs i k -> p k <= LANES * LANE_LIMIT ->
  conforming k /\ w k <= Rpower 2 (Rmax t lowest + 1) * swell i.
Proof.
intros A i k t Hs [Near Far] Fr [F [P D]] Wg Top. assert (E := exp2_small). assert (O := omega_pos). assert (L2 := ln2_pos).
assert (Fr' := Fr). destruct Fr' as [Ew Er]. assert (G := swell_ge_1 i Hs).
assert (Pw : 0 < w k) by (rewrite Ew; apply exp_pos).
assert (Ps := shift_pos).
(* The exact weight against 2**t. *)
assert (Wt : lowest <= t -> w k <= Rpower 2 t * swell i).
{ intros T. specialize (Near T). apply Rabs_le_inv in Near. rewrite Ew. unfold swell. rewrite swell_Rpower, <- Rpower_plus.
  apply Rpower_le. lra. }
assert (Wf : t < lowest -> w k <= Rpower 2 (lowest + 1) * swell i).
{ intros T. specialize (Far T). rewrite Ew. unfold swell. rewrite swell_Rpower, <- Rpower_plus. apply Rpower_le. lra. }
assert (Low : Rpower 2 (lowest + 1) <= omega / 4).
{ apply Rle_trans with (Rpower 2 (IZR (-128))). apply Rpower_le. unfold lowest, contract_LARGEST_EXPONENT, contract_BIAS. lra.
  rewrite Rpower_bpow. unfold omega. simpl. lra. }
split.
2:{ destruct (Rlt_or_le t lowest) as [T|T].
    - rewrite Rmax_right by lra. exact (Wf T).
    - rewrite Rmax_left by lra. apply Rle_trans with (1 := Wt T). apply Rmult_le_compat_r. lra. apply Rpower_le. lra. }
destruct (Rlt_or_le t lowest) as [T|T].
- (* Far below: computed and exact weight are flushed, or rho passes 1. *)
  assert (Sm : p k <= omega).
  { destruct D as [[e [He ->]]|[[_ D]|[D _]]]; auto.
    - apply Rabs_le_inv in He. assert (Rpower 2 t <= Rpower 2 (lowest + 1)) by (apply Rpower_le; lra).
      assert (0 < Rpower 2 t) by apply exp_pos.
      apply Rle_trans with (omega / 4 * 2). apply Rmult_le_compat; lra. lra.
    - unfold lowest, contract_LARGEST_EXPONENT, contract_BIAS in *. lra. }
  apply (small_weight_conforms A i k); auto.
  apply Rle_trans with (w k * 1). apply Rmult_le_compat_l; lra.
  rewrite Rmult_1_r. apply Rle_trans with (1 := Wf T). apply Rmult_le_compat_r; lra.
- destruct D as [[e [He Ep]]|[[D1 D2]|[_ D]]]; [| |exfalso; lra].
  + specialize (Near T).
    assert (R := weight_error (score i - A) t (sigma i + shift) e (p k) Near He Ep).
    fold (swell i) in R. rewrite <- Ew in R.
    destruct (weighs_conform i k F P Wg) as [B0 [B1 B2]].
    assert (Le : (swell i * (1 + exp2_relative) - 1) * w k <= rho k * w k).
    { apply Rmult_le_compat_r. lra. rewrite Er. unfold rho_of. lra. }
    split; auto. split. { rewrite Er. unfold rho_of. assert (1 * 1 <= swell i * (1 + exp2_relative)) by (apply Rmult_le_compat; lra). lra. }
    split; auto. split; auto. split; auto. left. split; auto. lra.
  + apply (small_weight_conforms A i k); auto.
    apply Rle_trans with (Rpower 2 t * swell i * (1 - exp2_relative)). apply Rmult_le_compat_r; auto. lra.
    replace (Rpower 2 t * swell i * (1 - exp2_relative)) with (Rpower 2 t * (1 - exp2_relative) * swell i) by ring.
    apply Rmult_le_compat_r; lra.
Qed.

Lemma at_once_is_near : forall A i s t, Rabs (s - score i) <= sigma i -> exponent_at_once A s t -> t <= - lowest ->
  near_exponent A i t.
Proof.
intros A i s t Hs X Up. assert (S := shifts_agree). split; intros T.
- assert (E := exponent_error_at_once A s t X ltac:(apply Rabs_le; lra)).
  replace (t - (score i - A)) with ((t - (s - A)) + (s - score i)) by ring. eapply Rle_trans. apply Rabs_triang. lra.
- destruct X as [Fs [FA C]]. destruct S as [_ [S1 [S2 _]]].
  assert (Q : s - A <= lowest + 1).
  { destruct (Rle_or_lt (s - A) (lowest + 1)) as [H|H]; auto. exfalso.
    destruct (computes_ge _ _ _ (lowest + 1) C S2 ltac:(lra)) as [G|G]. lra.
    destruct C as [->|[[K _]|[_ Z]]]; [|discriminate|rewrite Z in T; lra].
    assert (lowest + 1 <= nearest (s - A)) by (apply round_ge_generic; try typeclasses eauto; auto; lra). lra. }
  apply Rabs_le_inv in Hs. lra.
Qed.

Lemma in_two_is_near : forall m i s t, Rabs (s - score i) <= sigma i -> exponent_in_two m s t ->
  near_exponent (IZR m + BIAS) i t.
Proof.
intros m i s t Hs X. assert (S := shifts_agree). split; intros T.
- destruct (exponent_error_in_two m s t X T) as [_ E].
  replace (t - (score i - (IZR m + BIAS))) with ((t - (s - (IZR m + BIAS))) + (s - score i)) by ring.
  eapply Rle_trans. apply Rabs_triang. lra.
- destruct X as [Fs [Fm [L [d [Cd Ct]]]]]. destruct S as [_ [S1 [S2 S3]]].
  assert (B0 : 1 <= BIAS) by (unfold BIAS; lra). assert (O : omega <= / 2) by (unfold omega; simpl; lra).
  assert (Q : d < lowest + 1 + BIAS).
  { destruct (Rlt_or_le d (lowest + 1 + BIAS)) as [H|H]; auto. exfalso.
    destruct Ct as [->|[[K _]|[_ Z]]]; [|discriminate|rewrite Z in T; lra].
    assert (lowest + 1 <= nearest (d - BIAS)) by (apply round_ge_generic; try typeclasses eauto; auto; lra). lra. }
  assert (Q2 : s - IZR m <= lowest + 1 + BIAS).
  { destruct (Rle_or_lt (s - IZR m) (lowest + 1 + BIAS)) as [H|H]; auto. exfalso.
    destruct Cd as [->|[[K _]|[_ Z]]]; [|discriminate|rewrite Z in Q; unfold BIAS in *; lra].
    assert (lowest + 1 + BIAS <= nearest (s - IZR m)) by (apply round_ge_generic; try typeclasses eauto; auto; lra). lra. }
  apply Rabs_le_inv in Hs. lra.
Qed.
