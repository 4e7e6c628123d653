From Coq Require Import ZArith Reals Lra Lia Bool.
From Flocq Require Import Core.
From Proofs Require Import constants binary32 integer_maximum_rescales_exactly.
Open Scope R_scope.

(* exp2 of an exponent t: 2**t with a relative error within the worst device's envelope. *)
Definition weight_of (t p : R) : Prop := exists e, Rabs e <= exp2_relative /\ p = Rpower 2 t * (1 + e).

Definition least_weight := bpow radix2 (- (BIAS_Z + 1)) * (1 - exp2_relative).

Lemma bias_fits : ((0 <=? BIAS_Z) && (BIAS_Z <? 2 ^ 24))%Z = true.
Proof. vm_compute. reflexivity. Qed.

Lemma bias_Z : (0 <= BIAS_Z < 2 ^ 24)%Z.
Proof. assert (B := bias_fits). apply andb_prop in B as [B1 B2]. split. now apply Z.leb_le. now apply Z.ltb_lt. Qed.

(* The exponent of the score that the anchor was taken from: at least -(BIAS + 1) after both roundings. *)
Theorem exponent_of_the_anchors_score : forall s, fp32 s -> (Z.abs (Zceil s) + BIAS_Z <= 2 ^ 24)%Z ->
  let a := nearest (IZR (Zceil s) + BIAS) in
  a = IZR (Zceil s) + BIAS /\ IZR (- (BIAS_Z + 1)) <= nearest (s - a) <= - BIAS.
Proof.
intros s Hs Hm a. assert (Bz := bias_Z). change BIAS with (IZR BIAS_Z) in *.
assert (A : a = IZR (Zceil s) + IZR BIAS_Z).
{ unfold a. change BIAS with (IZR BIAS_Z). rewrite <- plus_IZR. apply round_generic. typeclasses eauto. apply fp32_integer. lia. }
split; [exact A|]. rewrite A.
assert (U := Zceil_ub s). assert (L := Zceil_lb s).
split.
- apply round_ge_generic; try typeclasses eauto. apply fp32_integer. lia. rewrite opp_IZR, plus_IZR. lra.
- apply round_le_generic; try typeclasses eauto. rewrite <- opp_IZR. apply fp32_integer. lia. lra.
Qed.

(* In a replay the maximum is subtracted first and BIAS second, which works for scores of every size. *)
Theorem exponent_in_a_replay : forall s, fp32 s ->
  let t := nearest (nearest (s - IZR (Zceil s)) - BIAS) in IZR (- (BIAS_Z + 1)) <= t <= - BIAS.
Proof.
intros s Hs t. assert (Bz := bias_Z). change BIAS with (IZR BIAS_Z) in *.
assert (U := Zceil_ub s). assert (L := Zceil_lb s).
assert (I : -1 <= nearest (s - IZR (Zceil s)) <= 0).
{ split.
  - apply round_ge_generic; try typeclasses eauto. apply (fp32_integer (-1)). easy. lra.
  - apply round_le_generic; try typeclasses eauto. apply fp32_0. lra. }
unfold t. change BIAS with (IZR BIAS_Z). split.
- apply round_ge_generic; try typeclasses eauto. apply fp32_integer. lia. rewrite opp_IZR, plus_IZR. lra.
- apply round_le_generic; try typeclasses eauto. rewrite <- opp_IZR. apply fp32_integer. lia. lra.
Qed.

Lemma Rpower_bpow : forall n, Rpower 2 (IZR n) = bpow radix2 n.
Proof. intros n. rewrite bpow_exp. unfold Rpower. simpl. now rewrite Rmult_comm. Qed.

Lemma weight_at_least : forall t p, IZR (- (BIAS_Z + 1)) <= t -> weight_of t p -> least_weight <= p.
Proof.
intros t p Ht [e [He ->]]. unfold least_weight. rewrite <- Rpower_bpow. apply Rabs_le_inv in He.
assert (P : 0 < 1 - exp2_relative) by (unfold exp2_relative; lra).
apply Rmult_le_compat; try lra. apply Rlt_le, exp_pos. apply Rle_Rpower; lra.
Qed.

(* [contains p s]: s is a sum in which the weight p entered and was not rescaled since (a replay's factor is
   1 once the final maximum is reached). *)
Inductive contains (p : R) : R -> Prop :=
| contains_term : fp32 p -> contains p p
| contains_more : forall s b c, contains p s -> fp32 s -> 0 <= b -> computes false (s + b) c -> contains p c.

Lemma contains_at_least : forall p s f, contains p s -> fp32 f -> omega <= f <= p -> f <= s /\ fp32 s.
Proof.
intros p s f H Hf [O P]. assert (W := omega_pos). induction H as [Hp | s b c Hs [IH _] Fs Pb Hc]; auto.
split; [|now apply computes_fp32 in Hc].
assert (Q : f <= s + b) by lra.
destruct (computes_ge _ _ _ f Hc Hf Q) as [G|G]; [exact G|].
rewrite Rabs_pos_eq in G by lra. lra.
Qed.

Lemma floor_below : omega <= SUM_FLOOR <= least_weight.
Proof.
unfold omega, SUM_FLOOR, least_weight, exp2_relative.
assert (E : bpow radix2 (- (BIAS_Z + 1)) = / IZR (2 ^ (BIAS_Z + 1))) by reflexivity. rewrite E.
unfold BIAS_Z. simpl. lra.
Qed.

Lemma floor_fp32 : fp32 SUM_FLOOR.
Proof. rewrite SUM_FLOOR_dyadic. apply fp32_dyadic; vm_compute; discriminate. Qed.

(* A denominator that the anchor's own score entered reaches the floor: in the fast path ... *)
Theorem floor_is_reached : forall s p l, fp32 s -> (Z.abs (Zceil s) + BIAS_Z <= 2 ^ 24)%Z ->
  weight_of (nearest (s - nearest (IZR (Zceil s) + BIAS))) p -> contains p l -> SUM_FLOOR <= l.
Proof.
intros s p l Hs Hm W C. assert (F := floor_below).
apply (contains_at_least p l SUM_FLOOR C floor_fp32). split. apply F.
apply Rle_trans with (1 := proj2 F). apply weight_at_least with (2 := W). now apply exponent_of_the_anchors_score.
Qed.

(* ... and in a replay, for scores of every size. *)
Theorem floor_is_reached_in_a_replay : forall s p l, fp32 s ->
  weight_of (nearest (nearest (s - IZR (Zceil s)) - BIAS)) p -> contains p l -> SUM_FLOOR <= l.
Proof.
intros s p l Hs W C. assert (F := floor_below).
apply (contains_at_least p l SUM_FLOOR C floor_fp32). split. apply F.
apply Rle_trans with (1 := proj2 F). apply weight_at_least with (2 := W). now apply exponent_in_a_replay.
Qed.
