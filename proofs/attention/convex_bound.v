From Coq Require Import ZArith Reals Lra Lia List Permutation Psatz.
From Flocq Require Import Core.
From Proofs Require Import constants binary32 summation_error attention_bound.
Import ListNotations.
Open Scope R_scope.

(* However wrong the weights are, they are non-negative and the same in l and in o, up to one rounding to BF16:
   o / l lies near a mean of the visible values. *)
Definition same_weights (k : key) : Prop :=
  0 <= p k /\ 0 <= b k /\
  (Rabs (b k - p k) <= BF16_UNIT_ROUNDOFF * p k \/ p k <= 2 * omega /\ b k <= 2 * omega) /\
  Rabs (x k - b k * v k) <= omega.

Fixpoint weighted (ys : list R) (ks : list key) : R :=
  match ys, ks with y :: ys', k :: ks' => y * v k + weighted ys' ks' | _, _ => 0 end.

Section Row.
Variables (ks : list key) (tl to : bool) (ml mo : nat) (l o exact low high largest : R).
Hypothesis keys : forall k, In k ks -> same_weights k.
Hypothesis values : forall k, In k ks -> low <= v k <= high /\ Rabs (v k) <= largest.
Hypothesis exact_between : low <= exact <= high.
Hypothesis exact_size : Rabs exact <= largest.
Hypothesis l_is_a_sum : sums tl (fun _ => True) ml (map p ks) l.
Hypothesis o_is_a_sum : sums to (fun _ => True) mo (map x ks) o.
Hypothesis floor : SUM_FLOOR <= l.

Let n := (length ks - 1)%nat.
Let unit := BF16_UNIT_ROUNDOFF.
Definition least t := (1 - unit_of t) ^ n.
Definition most t := (1 + unit_of t) ^ n.

(* How far (1 + eps) / (1 + eta) may be from 1: one rounding to BF16 and n in each sum. *)
Definition skew := Rmax ((1 + unit) * most to / least tl - 1) (1 - (1 - unit) * least to / most tl).
Definition farthest := Rmax (high - exact) (exact - low).
Definition flushed_per_key := 2 * omega * largest * (most tl + most to) + omega * most to.
Definition flushed_in_l := INR ml * omega * most tl.
Definition flushed_in_o := INR mo * omega * most to.

Lemma least_most : forall t, 0 < least t /\ least t <= most t.
Proof.
intros t. assert (U := unit_pos t). assert (S := unit_small t). split.
- apply pow_lt. lra.
- apply pow_incr. lra.
Qed.

Lemma skew_nonneg : 0 <= skew.
Proof.
assert (A := least_most tl). assert (B := least_most to). assert (Un : 0 <= unit) by (unfold unit, BF16_UNIT_ROUNDOFF; lra).
apply Rle_trans with (2 := Rmax_l _ _).
assert (M1 : 1 <= most to) by (apply pow_R1_Rle; assert (U := unit_pos to); lra).
assert (L1 : least tl <= 1).
{ unfold least. apply Rle_trans with (1 ^ n). apply pow_incr. assert (U := unit_pos tl). assert (S := unit_small tl). lra. rewrite pow1. lra. }
assert (Q : 1 <= (1 + unit) * most to / least tl).
{ apply Rmult_le_reg_r with (least tl). lra. unfold Rdiv. rewrite Rmult_assoc, Rinv_l by lra.
  assert (1 * 1 <= (1 + unit) * most to) by (apply Rmult_le_compat; lra). lra. }
lra.
Qed.

Lemma largest_nonneg : 0 <= largest.
Proof. apply Rle_trans with (2 := exact_size). apply Rabs_pos. Qed.

Lemma term_error : forall k y z, In k ks -> rounded (unit_of tl) n (p k) y -> rounded (unit_of to) n (x k) z ->
  0 <= y /\ Rabs (z - y * v k) <= skew * largest * y + flushed_per_key.
Proof.
intros k y z I [f [[F1 F2] Ey]] [g [[G1 G2] Ez]].
destruct (keys k I) as [Pp [Pb [H Hx]]]. destruct (values k I) as [_ V].
fold (least tl) in F1. fold (most tl) in F2. fold (least to) in G1. fold (most to) in G2.
assert (A := least_most tl). assert (B := least_most to). assert (W := omega_pos).
assert (Lg := largest_nonneg). assert (Sk := skew_nonneg).
assert (Un : 0 <= unit < 1) by (unfold unit, BF16_UNIT_ROUNDOFF; lra).
assert (Py : 0 <= y) by (rewrite Ey; apply Rmult_le_pos; lra).
split; [exact Py|].
assert (Eg : Rabs ((x k - b k * v k) * g) <= omega * most to).
{ rewrite Rabs_mult, (Rabs_pos_eq g) by lra. apply Rmult_le_compat; auto using Rabs_pos. lra. }
replace (z - y * v k) with ((b k * g - p k * f) * v k + (x k - b k * v k) * g) by (rewrite Ey, Ez; ring).
eapply Rle_trans. apply Rabs_triang. rewrite Rabs_mult.
assert (M0 : 0 <= most tl * omega) by (apply Rmult_le_pos; lra).
assert (M1 : 0 <= most to * omega) by (apply Rmult_le_pos; lra).
destruct H as [H|[H1 H2]].
- fold unit in H. apply Rabs_le_inv in H.
  assert (D : Rabs (b k * g - p k * f) <= skew * y).
  { assert (Hi : b k * g <= (1 + unit) * most to / least tl * (p k * f)).
    { apply Rle_trans with ((1 + unit) * p k * most to). apply Rmult_le_compat; lra.
      replace ((1 + unit) * most to / least tl * (p k * f)) with ((1 + unit) * p k * most to * (f / least tl)) by (field; lra).
      assert (Q : 1 <= f / least tl) by (apply Rmult_le_reg_r with (least tl); [lra | unfold Rdiv; rewrite Rmult_assoc, Rinv_l; lra]).
      rewrite <- (Rmult_1_r ((1 + unit) * p k * most to)) at 1. apply Rmult_le_compat_l; auto.
      apply Rmult_le_pos; [apply Rmult_le_pos|]; lra. }
    assert (Lo : (1 - unit) * least to / most tl * (p k * f) <= b k * g).
    { apply Rle_trans with ((1 - unit) * p k * least to).
      - replace ((1 - unit) * least to / most tl * (p k * f)) with ((1 - unit) * p k * least to * (f / most tl)) by (field; lra).
        assert (Q : f / most tl <= 1) by (apply Rmult_le_reg_r with (most tl); [lra | unfold Rdiv; rewrite Rmult_assoc, Rinv_l; lra]).
        rewrite <- (Rmult_1_r ((1 - unit) * p k * least to)) at 2. apply Rmult_le_compat_l; auto.
        apply Rmult_le_pos; [apply Rmult_le_pos|]; lra.
      - apply Rmult_le_compat; try lra. apply Rmult_le_pos; lra. }
    assert (S1 := Rmax_l ((1 + unit) * most to / least tl - 1) (1 - (1 - unit) * least to / most tl)).
    assert (S2 := Rmax_r ((1 + unit) * most to / least tl - 1) (1 - (1 - unit) * least to / most tl)).
    fold skew in S1, S2. rewrite Ey in *.
    assert (T1 : ((1 + unit) * most to / least tl - 1) * (p k * f) <= skew * (p k * f)) by now apply Rmult_le_compat_r.
    assert (T2 : (1 - (1 - unit) * least to / most tl) * (p k * f) <= skew * (p k * f)) by now apply Rmult_le_compat_r.
    apply Rabs_le. lra. }
  assert (E : Rabs (b k * g - p k * f) * Rabs (v k) <= skew * y * largest).
  { apply Rmult_le_compat; auto using Rabs_pos. }
  assert (Z : 0 <= 2 * omega * largest * (most tl + most to)) by (apply Rmult_le_pos; [apply Rmult_le_pos|]; lra).
  unfold flushed_per_key. lra.
- assert (D : Rabs (b k * g - p k * f) <= 2 * omega * (most tl + most to)).
  { assert (X1 : b k * g <= 2 * omega * most to) by (apply Rmult_le_compat; lra).
    assert (X2 : p k * f <= 2 * omega * most tl) by (apply Rmult_le_compat; lra).
    assert (X3 : 0 <= b k * g) by (apply Rmult_le_pos; lra). assert (X4 : 0 <= p k * f) by (apply Rmult_le_pos; lra).
    apply Rabs_le. lra. }
  assert (E : Rabs (b k * g - p k * f) * Rabs (v k) <= 2 * omega * (most tl + most to) * largest).
  { apply Rmult_le_compat; auto using Rabs_pos. }
  assert (Z : 0 <= skew * largest * y) by (apply Rmult_le_pos; [apply Rmult_le_pos|]; lra).
  unfold flushed_per_key. lra.
Qed.

Lemma sums_compared : forall ks' ys zs, (forall k, In k ks' -> In k ks) ->
  Forall2 (rounded (unit_of tl) n) (map p ks') ys -> Forall2 (rounded (unit_of to) n) (map x ks') zs ->
  0 <= total ys /\
  Rabs (total zs - weighted ys ks') <= skew * largest * total ys + INR (length ks') * flushed_per_key /\
  Rabs (weighted ys ks' - exact * total ys) <= farthest * total ys.
Proof.
induction ks' as [|k ks' IH]; intros ys zs Sub Fy Fz; inversion Fy; subst; inversion Fz; subst; simpl weighted; simpl total.
- simpl. rewrite !Rmult_0_r, !Rmult_0_l, !Rminus_0_r, Rabs_R0. lra.
- destruct (IH l' l'0 (fun k' I => Sub k' (or_intror I)) H3 H5) as [P [A B]].
  assert (Ik : In k ks) by (apply Sub; now left).
  destruct (term_error k y y0 Ik H1 H2) as [Py E].
  destruct (values k Ik) as [Vb _].
  assert (T : Rabs (y * v k - exact * y) <= farthest * y).
  { replace (y * v k - exact * y) with ((v k - exact) * y) by ring. rewrite Rabs_mult, (Rabs_pos_eq y) by exact Py.
    apply Rmult_le_compat_r; auto. unfold farthest.
    assert (M1 := Rmax_l (high - exact) (exact - low)). assert (M2 := Rmax_r (high - exact) (exact - low)).
    apply Rabs_le. lra. }
  simpl length. rewrite S_INR. split; [fold (total l'); lra | split]; fold (total l'); fold (total l'0).
  + replace (y0 + total l'0 - (y * v k + weighted l' ks')) with ((y0 - y * v k) + (total l'0 - weighted l' ks')) by ring.
    eapply Rle_trans. apply Rabs_triang. lra.
  + replace (y * v k + weighted l' ks' - exact * (y + total l')) with ((y * v k - exact * y) + (weighted l' ks' - exact * total l')) by ring.
    eapply Rle_trans. apply Rabs_triang. lra.
Qed.

Theorem convex_bound :
  Rabs (o / l - exact) <= (farthest + skew * largest) * (1 + flushed_in_l / SUM_FLOOR)
    + (INR (length ks) * flushed_per_key + flushed_in_o + largest * flushed_in_l) / SUM_FLOOR.
Proof.
destruct (summation_error _ _ _ _ _ l_is_a_sum) as [ys [tl' [Fy [El Tl]]]].
destruct (summation_error _ _ _ _ _ o_is_a_sum) as [zs [to' [Fz [Eo To]]]].
rewrite map_length in *. fold n in Fy, Fz, Tl, To. fold (most tl) in Tl. fold flushed_in_l in Tl.
fold (most to) in To. fold flushed_in_o in To.
destruct (sums_compared ks ys zs (fun k I => I) Fy Fz) as [PY [A B]].
assert (Fl : 0 < SUM_FLOOR) by (unfold SUM_FLOOR; lra).
assert (Lg := largest_nonneg). assert (Sk := skew_nonneg).
assert (Ff : 0 <= farthest) by (apply Rle_trans with (2 := Rmax_l _ _); lra).
set (c := farthest + skew * largest).
assert (Ps : 0 <= skew * largest) by now apply Rmult_le_pos.
assert (Pc : 0 <= c) by (unfold c; lra).
set (rest := INR (length ks) * flushed_per_key + flushed_in_o + largest * flushed_in_l).
assert (D : Rabs (o - exact * l) <= c * total ys + rest).
{ replace (o - exact * l) with ((total zs - weighted ys ks) + (weighted ys ks - exact * total ys) + to' - exact * tl') by (rewrite El, Eo; ring).
  assert (Q : Rabs exact * Rabs tl' <= largest * flushed_in_l) by (apply Rmult_le_compat; auto using Rabs_pos).
  unfold Rminus at 1. eapply Rle_trans. apply Rabs_triang. rewrite Rabs_Ropp, Rabs_mult.
  eapply Rle_trans. apply Rplus_le_compat_r. eapply Rle_trans. apply Rabs_triang. apply Rplus_le_compat_r, Rabs_triang.
  unfold c, rest. lra. }
assert (Y : total ys <= l + flushed_in_l) by (apply Rabs_le_inv in Tl; lra).
assert (Pf : 0 <= flushed_in_l) by (apply Rle_trans with (2 := Tl), Rabs_pos).
assert (Pr : 0 <= rest).
{ assert (W := omega_pos). assert (P1 := least_most tl). assert (P2 := least_most to).
  assert (R1 : 0 <= INR (length ks) * flushed_per_key).
  { apply Rmult_le_pos. apply pos_INR. unfold flushed_per_key. apply Rplus_le_le_0_compat.
    apply Rmult_le_pos; [apply Rmult_le_pos|]; lra. apply Rmult_le_pos; lra. }
  assert (R2 : 0 <= flushed_in_o) by (apply Rle_trans with (2 := To), Rabs_pos).
  assert (R3 : 0 <= largest * flushed_in_l) by now apply Rmult_le_pos.
  unfold rest. lra. }
replace (o / l - exact) with ((o - exact * l) / l) by (field; lra).
unfold Rdiv at 1. rewrite Rabs_mult, Rabs_inv, (Rabs_pos_eq l) by lra.
apply Rle_trans with ((c * (l + flushed_in_l) + rest) * / l).
- apply Rmult_le_compat_r. apply Rlt_le, Rinv_0_lt_compat; lra. apply Rle_trans with (1 := D).
  apply Rplus_le_compat_r. now apply Rmult_le_compat_l.
- assert (I : / l <= / SUM_FLOOR) by (apply Rinv_le; lra).
  replace ((c * (l + flushed_in_l) + rest) * / l) with (c + (c * flushed_in_l + rest) * / l) by (field; lra).
  replace (c * (1 + flushed_in_l / SUM_FLOOR) + rest / SUM_FLOOR) with (c + (c * flushed_in_l + rest) * / SUM_FLOOR) by (field; lra).
  apply Rplus_le_compat_l. apply Rmult_le_compat_l; auto.
  apply Rplus_le_le_0_compat; auto. now apply Rmult_le_pos.
Qed.

End Row.
