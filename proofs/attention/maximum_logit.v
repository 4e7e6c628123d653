From Coq Require Import ZArith Reals Lra Lia List.
From Flocq Require Import Core.
From Proofs Require Import constants binary32.
Import ListNotations.
Open Scope R_scope.

(* A visible key: z the exact logit in nats, s the computed score in log2 units, e by how much ln 2 s may be off. *)
Record logit := Logit { z : R; s : R; e : R }.

Fixpoint largest_of (f : logit -> R) (first : logit) (ks : list logit) : R :=
  match ks with [] => f first | k :: ks' => Rmax (f k) (largest_of f first ks') end.

Lemma largest_is_one : forall f first ks, exists k, (k = first \/ In k ks) /\ largest_of f first ks = f k.
Proof.
intros f first ks. induction ks as [|k ks [k' [I E]]]; simpl.
- exists first. auto.
- destruct (Rle_dec (f k) (largest_of f first ks)) as [L|L].
  + exists k'. rewrite Rmax_right by exact L. tauto.
  + exists k. rewrite Rmax_left by lra. tauto.
Qed.

Lemma at_most_largest : forall f first ks k, k = first \/ In k ks -> f k <= largest_of f first ks.
Proof.
intros f first ks. induction ks as [|k' ks IH]; simpl; intros k I.
- destruct I as [->|[]]. lra.
- destruct I as [->|[->|I]].
  + apply Rle_trans with (2 := Rmax_r _ _). auto.
  + apply Rmax_l.
  + apply Rle_trans with (2 := Rmax_r _ _). auto.
Qed.

(* The largest computed score is one of them, exactly, in whatever order it was looked for (maxima do not round): the
   order of comparisons changes nothing, since every largest of the same numbers is the same number. *)
Theorem order_does_not_matter : forall f first ks first' ks',
  (forall k, (k = first \/ In k ks) <-> (k = first' \/ In k ks')) -> largest_of f first ks = largest_of f first' ks'.
Proof.
intros f a ks a' ks' H.
destruct (largest_is_one f a ks) as [k [I E]]. destruct (largest_is_one f a' ks') as [k' [I' E']].
apply Rle_antisym.
- rewrite E. apply at_most_largest. now apply H.
- rewrite E'. apply at_most_largest. now apply H.
Qed.

(* What is returned: the largest score times ln 2, a constant with the relative error [held], rounded. *)
Theorem maximum_logit : forall first ks c out held,
  (forall k, k = first \/ In k ks -> Rabs (ln 2 * s k - z k) <= e k) ->
  0 <= held -> (exists d, Rabs d <= held /\ c = ln 2 * (1 + d)) ->
  let m := largest_of s first ks in
  Rabs (out - m * c) <= unit_roundoff * Rabs (m * c) + omega ->
  let exact := largest_of z first ks in
  let apart := largest_of (fun k => z k + e k) first ks - exact in
  Rabs (out - exact) <= apart + ((1 + held) * (1 + unit_roundoff) - 1) * (Rabs exact + apart) + omega.
Proof.
intros first ks c out held H Ph [d [Hd ->]] m Ho exact apart.
destruct (largest_is_one z first ks) as [k [I E]]. destruct (largest_is_one s first ks) as [j [J F]].
fold exact in E. fold m in F. assert (L2 : 0 < ln 2) by (rewrite <- ln_1; apply ln_increasing; lra).
assert (Hk := H k I). assert (Hj := H j J). apply Rabs_le_inv in Hk. apply Rabs_le_inv in Hj.
assert (A1 := at_most_largest (fun k => z k + e k) first ks k I). assert (A2 := at_most_largest (fun k => z k + e k) first ks j J).
assert (S1 := at_most_largest s first ks k I). fold m in S1. simpl in A1, A2.
assert (S2 : ln 2 * s k <= ln 2 * m) by (apply Rmult_le_compat_l; lra).
assert (D : Rabs (ln 2 * m - exact) <= apart) by (unfold apart; apply Rabs_le; rewrite F in *; lra).
assert (Pa : 0 <= apart) by (apply Rle_trans with (2 := D), Rabs_pos).
assert (U : 0 < unit_roundoff) by (unfold unit_roundoff; lra).
set (y := ln 2 * m) in *. set (x := m * (ln 2 * (1 + d))) in *.
assert (Y : Rabs y <= Rabs exact + apart).
{ replace y with (exact + (y - exact)) by ring. eapply Rle_trans. apply Rabs_triang. lra. }
assert (X : Rabs (x - y) <= held * (Rabs exact + apart)).
{ unfold x, y. replace (m * (ln 2 * (1 + d)) - ln 2 * m) with (d * (ln 2 * m)) by ring. rewrite Rabs_mult.
  apply Rmult_le_compat; auto using Rabs_pos. }
assert (X2 : Rabs x <= (1 + held) * (Rabs exact + apart)).
{ replace x with (y + (x - y)) by ring. eapply Rle_trans. apply Rabs_triang. lra. }
assert (UX : unit_roundoff * Rabs x <= unit_roundoff * ((1 + held) * (Rabs exact + apart))) by (apply Rmult_le_compat_l; lra).
replace (out - exact) with ((out - x) + (x - y) + (y - exact)) by ring.
eapply Rle_trans. apply Rabs_triang. eapply Rle_trans. apply Rplus_le_compat_r, Rabs_triang. lra.
Qed.
