From Coq Require Import ZArith Reals Lra Lia List.
From Flocq Require Import Core.
From Proofs Require Import constants binary32 summation_error clamp_keeps_the_bound attention_bound convex_bound final_division output_bound score_error weight_error log_sum_exp_error floor_is_reached flushed_weights_are_negligible recovery_is_exact key_conforms.
Import ListNotations.
Open Scope R_scope.

(* Sums over the keys that a row sees, of their exact weights; the exact result is a mean. *)
Definition summed (f : seen -> R) (is : list seen) : R := total (map (fun i => Rpower 2 (score i) * f i) is).
Definition all_weights (is : list seen) : R := summed (fun _ => 1) is.
Definition mean (f : seen -> R) (is : list seen) : R := summed f is / all_weights is.
Definition exact_result (is : list seen) : R := mean value is.

(* What a key becomes in the frame of a shift A. *)
Definition becomes (A : R) (i : seen) (k : key) : Prop := conforming k /\ v k = value i /\ in_frame_of A i k.

Lemma sum_in_frame : forall A f g is ks, Forall2 (becomes A) is ks ->
  (forall i k, becomes A i k -> g k = f i) -> sum_of (fun k => w k * g k) ks = Rpower 2 (- A) * summed f is.
Proof.
intros A f g is ks F H. unfold sum_of, summed. induction F as [|i k is ks B F IH]; simpl. ring.
rewrite IH, (H i k B). destruct B as [_ [_ [-> _]]]. unfold Rminus. rewrite Rpower_plus. ring.
Qed.

Lemma sum_of_ext : forall f g ks, (forall k, In k ks -> f k = g k) -> sum_of f ks = sum_of g ks.
Proof.
intros f g ks H. apply Rle_antisym; apply sum_of_le; intros k I; rewrite (H k I); lra.
Qed.

(* Each term of a sum of numbers that are not negative is at most the sum. *)
Lemma sums_at_least : forall t term m xs s, sums t term m xs s -> (forall y, In y xs -> 0 <= y) ->
  0 <= s /\ forall y f, In y xs -> fp32 f -> omega <= f <= y -> f <= s.
Proof.
intros t term m xs s H. assert (O := omega_pos).
induction H as [y Hy Ty | m1 m2 xs ys a c s Ha IHa Hb IHb Hc | m xs a k s Hk Ha IHa Hc | m xs ys s HP Hs IHs]; intros P.
- split. apply P; now left. intros z f [->|[]] _ H. lra.
- destruct (IHa (fun y I => P y (in_or_app _ _ _ (or_introl I)))) as [A0 A1].
  destruct (IHb (fun y I => P y (in_or_app _ _ _ (or_intror I)))) as [B0 B1].
  split. apply (computes_nonneg _ _ _ Hc). lra.
  intros y f I F L. assert (G : f <= a + c).
  { apply in_app_or in I as [I|I]. specialize (A1 y f I F L). lra. specialize (B1 y f I F L). lra. }
  destruct (computes_ge _ _ _ f Hc F G) as [Q|Q]; auto. rewrite Rabs_pos_eq in Q; lra.
- assert (K := bpow_gt_0 radix2 k).
  assert (P' : forall y, In y xs -> 0 <= y).
  { intros y I. assert (Q := P _ (in_map (fun x => x * bpow radix2 k) _ _ I)). simpl in Q.
    apply Rmult_le_reg_r with (bpow radix2 k); lra. }
  destruct (IHa P') as [A0 A1].
  assert (N : 0 <= a * bpow radix2 k) by (apply Rmult_le_pos; lra).
  split. exact (computes_nonneg _ _ _ Hc N).
  intros y f I F L. apply in_map_iff in I as [z [E I]]. simpl in E. subst y.
  assert (U : f * bpow radix2 (- k) <= z).
  { apply Rmult_le_reg_r with (bpow radix2 k); auto. rewrite Rmult_assoc, <- bpow_plus. replace (- k + k)%Z with 0%Z by ring.
    simpl. lra. }
  assert (G : fp32 (f * bpow radix2 (- k))) by (apply Mult_error.mult_bpow_pos_exact_FLT; [exact F | lia]).
  assert (K1 : 1 <= bpow radix2 (- k)) by (change 1 with (bpow radix2 0); apply bpow_le; lia).
  assert (L' : omega <= f * bpow radix2 (- k) <= z).
  { split; auto. apply Rle_trans with (f * 1). lra. apply Rmult_le_compat_l; lra. }
  specialize (A1 z _ I G L').
  assert (G2 : f <= a * bpow radix2 k).
  { apply Rmult_le_compat_r with (r := bpow radix2 k) in A1; [|lra]. rewrite Rmult_assoc, <- bpow_plus in A1.
    replace (- k + k)%Z with 0%Z in A1 by ring. simpl in A1. lra. }
  destruct (computes_ge _ _ _ f Hc F G2) as [Q|Q]; auto. rewrite Rabs_pos_eq in Q; lra.
- destruct (IHs (fun y I => P y (Permutation.Permutation_in _ HP I))) as [A0 A1]. split; auto.
  intros y f I F L. apply A1 with y; auto. now apply (Permutation.Permutation_in _ (Permutation.Permutation_sym HP)).
Qed.

Lemma comes_from : forall (R : seen -> key -> Prop) is ks k, Forall2 R is ks -> In k ks -> exists i, In i is /\ R i k.
Proof.
intros R is ks k F. induction F as [|i k' is ks B F IH]; intros I. easy.
destruct I as [<-|I]. exists i. split; auto. now left. destruct (IH I) as [i' [I' H]]. exists i'. split; auto. now right.
Qed.

Section Row.
Variables (is : list seen) (tl to : bool) (low high largest : R).
Let count := INR (length is).
Let n := (length is - 1)%nat.
Let Gl := attention_bound.growth tl n.
Let Go := attention_bound.growth to n.

Definition alpha_of (i : seen) := (1 + rho_of i) * (1 + BF16_UNIT_ROUNDOFF) * (1 + Go) - 1.
Definition beta_of (i : seen) := (1 + rho_of i) * (1 + Gl) - 1.
(* Flushing: two operations per term at most, over a sum of weights of at least SUM_FLOOR / 2. *)
Definition lost_l := 4 * count * omega * (1 + Gl).
Definition lost_o := (2 * total (map (fun i => Rabs (value i)) is) + 3 * count) * omega * (1 + Go).
Definition theta := (lost_o + Rabs (exact_result is) * lost_l) * (2 / SUM_FLOOR).
Definition first_denominator := 1 - mean beta_of is - lost_l * (2 / SUM_FLOOR).
Definition first_order :=
  (mean (fun i => alpha_of i * Rabs (value i)) is + Rabs (exact_result is) * mean beta_of is + theta) / first_denominator.
(* The convex bound, nothing of which depends on scores. *)
Definition least_of t := (1 - unit_of t) ^ n.
Definition most_of t := (1 + unit_of t) ^ n.
Definition skew_of := Rmax ((1 + BF16_UNIT_ROUNDOFF) * most_of to / least_of tl - 1) (1 - (1 - BF16_UNIT_ROUNDOFF) * least_of to / most_of tl).
Definition convex :=
  (Rmax (high - exact_result is) (exact_result is - low) + skew_of * largest) * (1 + 2 * count * omega * most_of tl / SUM_FLOOR)
  + (count * (2 * omega * largest * (most_of tl + most_of to) + omega * most_of to) + 2 * count * omega * most_of to
     + largest * (2 * count * omega * most_of tl)) / SUM_FLOOR.

Definition within (inner : R) : Prop :=
  (0 < first_denominator /\ mean beta_of is <= 1 - / 262144 /\ lost_l <= SUM_FLOOR / 1048576 /\ first_order <= inner) \/ convex <= inner.

(* The contract's bound of the output (section 6.3), [inner] the smaller of the two. *)
Definition out_bound (inner : R) : R :=
  let divided := inner + (2 * reciprocal_relative + 3 * unit_roundoff) * (Rabs (exact_result is) + inner) in
  divided + unit * (Rabs (exact_result is) + divided) + 2 * smallest_normal.

Hypothesis sigmas : forall i, In i is -> 0 <= sigma i.
Hypothesis values : forall i, In i is -> low <= value i <= high /\ Rabs (value i) <= largest.
Hypothesis values_finite : largest <= largest_bf16.

(* The last steps of a row: denominators that pass the floor, the quotient, the limit, the rounding. *)
Definition divides (l o out : R) : Prop := exists e q h,
  (Rabs e <= reciprocal_relative /\ q = / 2 * / l * (1 + e)) /\ computes false (o * q) h /\ out = nearest_bf16 (2 * limited h).

Lemma row_in_frame : forall A ks ml mo l o out inner, Forall2 (becomes A) is ks ->
  sums tl (fun _ => True) ml (map p ks) l -> sums to (fun _ => True) mo (map x ks) o ->
  (ml <= 2 * length is)%nat -> (mo <= 2 * length is)%nat ->
  SUM_FLOOR <= l -> divides l o out -> within inner -> Rabs (out - exact_result is) <= out_bound inner.
Proof.
intros A ks ml mo l o out inner F Sl So Ml Mo Fl [e [q [h [Re [Ha ->]]]]] In.
assert (Len : length ks = length is) by (symmetry; clear - F; induction F; simpl; auto).
assert (C : forall k, List.In k ks -> conforming k).
{ intros k I. destruct (comes_from _ _ _ _ F I) as [i [_ B]]. apply B. }
assert (V : forall k, List.In k ks -> low <= v k <= high /\ Rabs (v k) <= largest).
{ intros k I. destruct (comes_from _ _ _ _ F I) as [i [Ii [_ [-> _]]]]. auto. }
assert (T : 0 < Rpower 2 (- A)) by apply exp_pos.
assert (N : ks <> []) by (intros ->; apply sums_length in Sl; simpl in Sl; lia).
assert (W : 0 < weights ks) by (apply sum_of_pos; auto; intros k I; apply C, I).
assert (W1 : weights ks = Rpower 2 (- A) * all_weights is).
{ unfold weights, all_weights. rewrite <- (sum_in_frame A (fun _ => 1) (fun _ => 1) is ks F (fun _ _ _ => eq_refl)).
  apply sum_of_ext. intros k _. ring. }
assert (Wp : 0 < all_weights is).
{ rewrite W1 in W. apply Rmult_lt_reg_l with (Rpower 2 (- A)); auto. lra. }
assert (Mean : forall f g, (forall i k, becomes A i k -> g k = f i) -> sum_of (fun k => w k * g k) ks = weights ks * mean f is).
{ intros f g H. rewrite (sum_in_frame A f g is ks F H), W1. unfold mean. field. lra. }
assert (X : exact ks = exact_result is).
{ unfold exact. rewrite (Mean value v). unfold exact_result. fold (weights ks). field. lra. intros i k [_ [E _]]. exact E. }
assert (Be : sum_of (fun k => w k * beta ks tl k) ks = weights ks * mean beta_of is).
{ apply Mean. intros i k [_ [_ [_ E]]]. unfold beta, beta_of, Gl, n. now rewrite E, Len. }
assert (Al : sum_of (fun k => w k * alpha ks to k * Rabs (v k)) ks = weights ks * mean (fun i => alpha_of i * Rabs (value i)) is).
{ rewrite <- (Mean _ (fun k => alpha ks to k * Rabs (v k))). apply sum_of_ext. intros; ring.
  intros i k [_ [Ev [_ E]]]. unfold alpha, alpha_of, Go, n. now rewrite E, Ev, Len. }
assert (Gl0 := growth_nonneg tl n). assert (Go0 := growth_nonneg to n). fold Gl in Gl0. fold Go in Go0.
assert (O := omega_pos).
assert (Pc : 0 <= count) by apply pos_INR.
assert (Iml : INR ml <= 2 * count).
{ unfold count. replace (2 * INR (length is)) with (INR (2 * length is)) by (rewrite mult_INR; simpl; ring). now apply le_INR. }
assert (Imo : INR mo <= 2 * count).
{ unfold count. replace (2 * INR (length is)) with (INR (2 * length is)) by (rewrite mult_INR; simpl; ring). now apply le_INR. }
assert (Const : forall c, sum_of (fun _ => c) ks = count * c).
{ intros c. unfold count. rewrite <- Len. unfold sum_of. clear. induction ks as [|k ks IH]; [simpl; ring|]. simpl length. rewrite S_INR.
  simpl. rewrite IH. ring. }
assert (Fp : 0 < SUM_FLOOR) by (unfold SUM_FLOOR; lra).
assert (Ll : 0 <= flushed_l ks tl ml <= lost_l).
{ unfold flushed_l, lost_l. rewrite Const, Len. fold n. fold Gl.
  assert (Q : INR ml * omega * (1 + Gl) <= 2 * count * omega * (1 + Gl)) by (apply Rmult_le_compat_r; [lra|]; apply Rmult_le_compat_r; lra).
  assert (0 <= INR ml * omega * (1 + Gl)) by (apply Rmult_le_pos; [apply Rmult_le_pos|]; try lra; apply pos_INR).
  assert (0 <= count * (2 * omega * (1 + Gl))) by (apply Rmult_le_pos; auto; apply Rmult_le_pos; lra). split; lra. }
assert (Lo : 0 <= flushed_o ks to mo <= lost_o).
{ unfold flushed_o, lost_o. rewrite Len. fold n. fold Go.
  assert (E : sum_of (fun k => (2 * omega * Rabs (v k) + omega) * (1 + Go)) ks =
    (2 * total (map (fun i => Rabs (value i)) is) + count) * omega * (1 + Go)).
  { unfold count. rewrite <- Len. generalize (1 + Go). intros g. clear - F. unfold sum_of. induction F as [|i k is' ks' B F IH]; [simpl; ring|].
    simpl length. rewrite S_INR. simpl. rewrite IH. destruct B as [_ [-> _]]. ring. }
  rewrite E. assert (Q : INR mo * omega * (1 + Go) <= 2 * count * omega * (1 + Go)) by (apply Rmult_le_compat_r; [lra|]; apply Rmult_le_compat_r; lra).
  assert (Q0 : 0 <= INR mo * omega * (1 + Go)) by (apply Rmult_le_pos; [apply Rmult_le_pos|]; try lra; apply pos_INR).
  assert (Z : 0 <= total (map (fun i => Rabs (value i)) is)).
  { clear. induction is as [|i l IH]; simpl. lra. assert (H := Rabs_pos (value i)). lra. }
  assert (0 <= (2 * total (map (fun i => Rabs (value i)) is) + count) * omega * (1 + Go)) by (apply Rmult_le_pos; [apply Rmult_le_pos|]; lra).
  split; lra. }
unfold out_bound. rewrite <- X.
apply (output_bound ks tl to ml mo l o low high largest q e h inner); auto.
destruct In as [[D [B1 [B2 I]]]|I]; [left|right].
- assert (Half : SUM_FLOOR / 2 <= weights ks).
  { assert (E := error_of_l ks tl ml l C Sl). rewrite Be in E.
    apply (exact_sum_above_half_floor (weights ks) (mean beta_of is) (flushed_l ks tl ml) l); auto; try lra.
    split; auto. assert (P0 : 0 <= weights ks * mean beta_of is).
    { rewrite <- Be. assert (Z : sum_of (fun _ => 0) ks <= sum_of (fun k => w k * beta ks tl k) ks).
      { apply sum_of_le. intros k Ik. destruct (C k Ik) as [P1 [P2 _]]. unfold beta. rewrite Len. fold n. fold Gl.
        apply Rmult_le_pos. lra. assert (1 * 1 <= (1 + rho k) * (1 + Gl)) by (apply Rmult_le_compat; lra). lra. }
      rewrite Const in Z. lra. }
    apply Rmult_le_reg_l with (weights ks); auto. lra. }
  assert (Iw : / weights ks <= 2 / SUM_FLOOR).
  { replace (2 / SUM_FLOOR) with (/ (SUM_FLOOR / 2)) by (field; lra). apply Rinv_le; lra. }
  assert (Iw0 : 0 < / weights ks) by now apply Rinv_0_lt_compat.
  assert (Ql : flushed_l ks tl ml / weights ks <= lost_l * (2 / SUM_FLOOR)) by (apply Rmult_le_compat; lra).
  assert (Qo : flushed_o ks to mo / weights ks <= lost_o * (2 / SUM_FLOOR)) by (apply Rmult_le_compat; lra).
  assert (De : first_denominator <= denominator ks tl ml).
  { unfold denominator, first_denominator. rewrite Be. replace (weights ks * mean beta_of is / weights ks) with (mean beta_of is) by (field; lra). lra. }
  split. lra.
  assert (Nu : 0 <= numerator ks tl to ml mo <= mean (fun i => alpha_of i * Rabs (value i)) is + Rabs (exact_result is) * mean beta_of is + theta).
  { unfold numerator. rewrite Al, Be, X. assert (Pa := Rabs_pos (exact_result is)).
    replace ((weights ks * mean (fun i => alpha_of i * Rabs (value i)) is + Rabs (exact_result is) * (weights ks * mean beta_of is) +
      (flushed_o ks to mo + Rabs (exact_result is) * flushed_l ks tl ml)) / weights ks) with
      (mean (fun i => alpha_of i * Rabs (value i)) is + Rabs (exact_result is) * mean beta_of is +
       (flushed_o ks to mo / weights ks + Rabs (exact_result is) * (flushed_l ks tl ml / weights ks))) by (field; lra).
    assert (Y : Rabs (exact_result is) * (flushed_l ks tl ml / weights ks) <= Rabs (exact_result is) * (lost_l * (2 / SUM_FLOOR))) by (apply Rmult_le_compat_l; lra).
    assert (P1 : 0 <= mean (fun i => alpha_of i * Rabs (value i)) is).
    { apply Rmult_le_reg_l with (weights ks); auto. rewrite Rmult_0_r, <- Al.
      assert (Z : sum_of (fun _ => 0) ks <= sum_of (fun k => w k * alpha ks to k * Rabs (v k)) ks).
      { apply sum_of_le. intros k Ik. destruct (C k Ik) as [Q1 [Q2 _]]. unfold alpha. rewrite Len. fold n. fold Go.
        apply Rmult_le_pos; [|apply Rabs_pos]. apply Rmult_le_pos. lra.
        assert (U : 0 <= BF16_UNIT_ROUNDOFF) by (unfold BF16_UNIT_ROUNDOFF; lra).
        assert (1 * 1 <= (1 + rho k) * (1 + BF16_UNIT_ROUNDOFF)) by (apply Rmult_le_compat; lra).
        assert (1 * 1 <= (1 + rho k) * (1 + BF16_UNIT_ROUNDOFF) * (1 + Go)) by (apply Rmult_le_compat; lra). lra. }
      rewrite Const in Z. lra. }
    assert (P2 : 0 <= mean beta_of is).
    { apply Rmult_le_reg_l with (weights ks); auto. rewrite Rmult_0_r, <- Be.
      assert (Z : sum_of (fun _ => 0) ks <= sum_of (fun k => w k * beta ks tl k) ks).
      { apply sum_of_le. intros k Ik. destruct (C k Ik) as [Q1 [Q2 _]]. unfold beta. rewrite Len. fold n. fold Gl.
        apply Rmult_le_pos. lra. assert (1 * 1 <= (1 + rho k) * (1 + Gl)) by (apply Rmult_le_compat; lra). lra. }
      rewrite Const in Z. lra. }
    assert (P3 : 0 <= Rabs (exact_result is) * mean beta_of is) by now apply Rmult_le_pos.
    assert (P4 : 0 <= flushed_o ks to mo / weights ks) by (apply Rmult_le_pos; lra).
    assert (P5 : 0 <= Rabs (exact_result is) * (flushed_l ks tl ml / weights ks)) by (apply Rmult_le_pos; auto; apply Rmult_le_pos; lra).
    unfold theta. split; lra. }
  apply Rle_trans with (2 := I). unfold first_order, Rdiv. apply Rmult_le_compat; try lra.
  apply Rlt_le, Rinv_0_lt_compat; lra. apply Rinv_le; lra.
- apply Rle_trans with (2 := I). unfold convex, farthest, skew, flushed_in_l, flushed_in_o, flushed_per_key, convex_bound.least, convex_bound.most.
  rewrite X, Len. fold n. fold count. unfold skew_of, least_of, most_of.
  set (mo1 := (1 + unit_of to) ^ n). set (ml1 := (1 + unit_of tl) ^ n). set (ll := (1 - unit_of tl) ^ n). set (lo := (1 - unit_of to) ^ n).
  assert (Ul := unit_pos tl). assert (Uo := unit_pos to).
  assert (Pm1 : 1 <= ml1) by (apply pow_R1_Rle; lra). assert (Pm2 : 1 <= mo1) by (apply pow_R1_Rle; lra).
  assert (If : 0 < / SUM_FLOOR) by now apply Rinv_0_lt_compat.
  assert (Pl : 0 <= largest).
  { destruct ks as [|k ks']; [easy|]. apply Rle_trans with (Rabs (v k)). apply Rabs_pos. apply V. now left. }
  assert (Sk := skew_nonneg ks tl to). unfold skew, convex_bound.least, convex_bound.most in Sk. rewrite Len in Sk. fold n in Sk.
  fold mo1 ml1 ll lo in Sk.
  set (sk := Rmax ((1 + BF16_UNIT_ROUNDOFF) * mo1 / ll - 1) (1 - (1 - BF16_UNIT_ROUNDOFF) * lo / ml1)) in *.
  assert (Ff : 0 <= Rmax (high - exact_result is) (exact_result is - low)).
  { assert (B := exact_between_values ks tl ml l low high largest C V Sl). rewrite X in B. apply Rle_trans with (2 := Rmax_l _ _). lra. }
  set (ff := Rmax (high - exact_result is) (exact_result is - low)) in *.
  assert (A1 : INR ml * omega * ml1 <= 2 * count * omega * ml1) by (apply Rmult_le_compat_r; [lra|]; apply Rmult_le_compat_r; lra).
  assert (A2 : INR mo * omega * mo1 <= 2 * count * omega * mo1) by (apply Rmult_le_compat_r; [lra|]; apply Rmult_le_compat_r; lra).
  apply Rplus_le_compat.
  + apply Rmult_le_compat_l. assert (0 <= sk * largest) by now apply Rmult_le_pos. lra.
    apply Rplus_le_compat_l. apply Rmult_le_compat_r; lra.
  + apply Rmult_le_compat_r. lra. apply Rplus_le_compat. lra. apply Rmult_le_compat_l; lra.
Qed.

(* The LSE: the shift A, maybe rounded once, times ln 2 (a constant held with the relative error [held]), plus the
   device's logarithm of l (contract section 7). *)
Definition beta_prime := mean beta_of is + lost_l * (2 / SUM_FLOOR).
Definition lse := ln (all_weights is).
Definition log_size := ln 2 * contract_LARGEST_EXPONENT.

Definition lse_bound (held : R) : R :=
  let apart := - ln (1 - beta_prime) in
  let parts := apart + log_relative * log_size + log_absolute
    + ((1 + unit_roundoff) * (1 + held) * (1 + unit_roundoff) - 1) * (Rabs lse + log_size + apart) + omega in
  parts + unit_roundoff * (Rabs lse + parts) + omega.

Theorem log_sum_exp : forall A A' c held ks ml l lg product out, Forall2 (becomes A) is ks ->
  sums tl (fun _ => True) ml (map p ks) l -> (ml <= 2 * length is)%nat -> SUM_FLOOR <= l -> Rabs (ln l) <= log_size ->
  mean beta_of is <= 1 - / 262144 -> lost_l <= SUM_FLOOR / 1048576 -> beta_prime < 1 ->
  Rabs (A' - A) <= unit_roundoff * Rabs A -> 0 <= held -> (exists e, Rabs e <= held /\ c = ln 2 * (1 + e)) ->
  Rabs (product - A' * c) <= unit_roundoff * Rabs (A' * c) + omega ->
  Rabs (lg - ln l) <= log_relative * Rabs (ln l) + log_absolute ->
  Rabs (out - (product + lg)) <= unit_roundoff * Rabs (product + lg) + omega ->
  Rabs (out - lse) <= lse_bound held.
Proof.
intros A A' c held ks ml l lg product out F Sl Ml Fl Ls B1 B2 Bp Ha Ph [e [He ->]] Hp Hg Ho.
assert (Len : length ks = length is) by (symmetry; clear - F; induction F; simpl; auto).
assert (C : forall k, List.In k ks -> conforming k).
{ intros k I. destruct (comes_from _ _ _ _ F I) as [i [_ B]]. apply B. }
assert (N : ks <> []) by (intros ->; apply sums_length in Sl; simpl in Sl; lia).
assert (W : 0 < weights ks) by (apply sum_of_pos; auto; intros k I; apply C, I).
assert (T : 0 < Rpower 2 (- A)) by apply exp_pos.
assert (W1 : weights ks = Rpower 2 (- A) * all_weights is).
{ unfold weights, all_weights. rewrite <- (sum_in_frame A (fun _ => 1) (fun _ => 1) is ks F (fun _ _ _ => eq_refl)).
  apply sum_of_ext. intros k _. ring. }
assert (Wp : 0 < all_weights is).
{ rewrite W1 in W. apply Rmult_lt_reg_l with (Rpower 2 (- A)); auto. lra. }
assert (Be : sum_of (fun k => w k * beta ks tl k) ks = weights ks * mean beta_of is).
{ rewrite (sum_in_frame A beta_of (beta ks tl) is ks F), W1. unfold mean. field. lra.
  intros i k [_ [_ [_ E]]]. unfold beta, beta_of, Gl, n. now rewrite E, Len. }
assert (Gl0 := growth_nonneg tl n). fold Gl in Gl0. assert (O := omega_pos).
assert (Pc : 0 <= count) by apply pos_INR. assert (Fp : 0 < SUM_FLOOR) by (unfold SUM_FLOOR; lra).
assert (Iml : INR ml <= 2 * count).
{ unfold count. replace (2 * INR (length is)) with (INR (2 * length is)) by (rewrite mult_INR; simpl; ring). now apply le_INR. }
assert (Const : forall c, sum_of (fun _ => c) ks = count * c).
{ intros c. unfold count. rewrite <- Len. unfold sum_of. clear. induction ks as [|k ks IH]; [simpl; ring|]. simpl length. rewrite S_INR.
  simpl. rewrite IH. ring. }
assert (Ll : 0 <= flushed_l ks tl ml <= lost_l).
{ unfold flushed_l, lost_l. rewrite Const, Len. fold n. fold Gl.
  assert (Q : INR ml * omega * (1 + Gl) <= 2 * count * omega * (1 + Gl)) by (apply Rmult_le_compat_r; [lra|]; apply Rmult_le_compat_r; lra).
  assert (0 <= INR ml * omega * (1 + Gl)) by (apply Rmult_le_pos; [apply Rmult_le_pos|]; try lra; apply pos_INR).
  assert (0 <= count * (2 * omega * (1 + Gl))) by (apply Rmult_le_pos; auto; apply Rmult_le_pos; lra). split; lra. }
assert (Bm : 0 <= mean beta_of is).
{ apply Rmult_le_reg_l with (weights ks); auto. rewrite Rmult_0_r, <- Be.
  assert (Z : sum_of (fun _ => 0) ks <= sum_of (fun k => w k * beta ks tl k) ks).
  { apply sum_of_le. intros k Ik. destruct (C k Ik) as [Q1 [Q2 _]]. unfold beta. rewrite Len. fold n. fold Gl.
    apply Rmult_le_pos. lra. assert (1 * 1 <= (1 + rho k) * (1 + Gl)) by (apply Rmult_le_compat; lra). lra. }
  rewrite Const in Z. lra. }
assert (Half : SUM_FLOOR / 2 <= weights ks).
{ assert (E := error_of_l ks tl ml l C Sl). rewrite Be in E.
  apply (exact_sum_above_half_floor (weights ks) (mean beta_of is) (flushed_l ks tl ml) l); auto; lra. }
assert (Iw : / weights ks <= 2 / SUM_FLOOR).
{ replace (2 / SUM_FLOOR) with (/ (SUM_FLOOR / 2)) by (field; lra). apply Rinv_le; lra. }
assert (Iw0 : 0 < / weights ks) by now apply Rinv_0_lt_compat.
assert (Ql : flushed_l ks tl ml / weights ks <= lost_l * (2 / SUM_FLOOR)) by (apply Rmult_le_compat; lra).
assert (Bq : (sum_of (fun k => w k * beta ks tl k) ks + flushed_l ks tl ml) / weights ks <= beta_prime).
{ rewrite Be. replace ((weights ks * mean beta_of is + flushed_l ks tl ml) / weights ks) with (mean beta_of is + flushed_l ks tl ml / weights ks) by (field; lra).
  unfold beta_prime. lra. }
destruct (log_sum_exp_error ks tl ml l C Sl ltac:(lra)) as [Pl D].
set (apart := - ln (1 - beta_prime)).
assert (D2 : Rabs (ln l - ln (weights ks)) <= apart).
{ apply Rle_trans with (1 := D). unfold apart. apply Ropp_le_contravar.
  destruct (Req_dec (1 - beta_prime) (1 - (sum_of (fun k => w k * beta ks tl k) ks + flushed_l ks tl ml) / weights ks)) as [<-|Ne].
  lra. apply Rlt_le, ln_increasing; lra. }
assert (Lw : ln (weights ks) = lse - A * ln 2).
{ rewrite W1, ln_mult by assumption. unfold lse, Rpower. rewrite ln_exp. ring. }
assert (Pa : 0 <= apart) by (apply Rle_trans with (2 := D2), Rabs_pos).
assert (Sa : Rabs (A * ln 2) <= Rabs lse + log_size + apart).
{ replace (A * ln 2) with (lse - ln l + (ln l - ln (weights ks))) by (rewrite Lw; ring).
  eapply Rle_trans. apply Rabs_triang. unfold Rminus at 1.
  assert (Tr := Rabs_triang lse (- ln l)). rewrite Rabs_Ropp in Tr. lra. }
assert (U : 0 < unit_roundoff) by (unfold unit_roundoff; lra). assert (L2 := ln2_pos).
assert (R0 : 0 <= log_relative /\ 0 <= log_absolute) by (unfold log_relative, log_absolute; lra).
(* A' c against A ln 2. *)
assert (P1 : Rabs (A' * (ln 2 * (1 + e)) - A * ln 2) <= ((1 + unit_roundoff) * (1 + held) - 1) * Rabs (A * ln 2)).
{ replace (A' * (ln 2 * (1 + e)) - A * ln 2) with ((A' - A) * ln 2 * (1 + e) + A * ln 2 * e) by ring.
  eapply Rle_trans. apply Rabs_triang. rewrite !Rabs_mult, (Rabs_pos_eq (ln 2)) by lra. apply Rabs_le_inv in He as He'.
  assert (E1 : Rabs (1 + e) <= 1 + held) by (apply Rabs_le; lra).
  assert (E2 : Rabs (A' - A) * ln 2 * Rabs (1 + e) <= unit_roundoff * Rabs A * ln 2 * (1 + held)).
  { apply Rmult_le_compat; auto using Rabs_pos. apply Rmult_le_pos; auto using Rabs_pos. lra. apply Rmult_le_compat_r; lra. }
  assert (E3 : Rabs A * ln 2 * Rabs e <= Rabs A * ln 2 * held).
  { apply Rmult_le_compat_l; auto. apply Rmult_le_pos; auto using Rabs_pos. lra. }
  lra. }
set (m := A' * (ln 2 * (1 + e))) in *.
assert (P2 : Rabs m <= (1 + unit_roundoff) * (1 + held) * Rabs (A * ln 2)).
{ replace m with (A * ln 2 + (m - A * ln 2)) by ring. eapply Rle_trans. apply Rabs_triang. lra. }
assert (P3 : Rabs (product - A * ln 2) <= ((1 + unit_roundoff) * (1 + held) * (1 + unit_roundoff) - 1) * Rabs (A * ln 2) + omega).
{ replace (product - A * ln 2) with ((product - m) + (m - A * ln 2)) by ring. eapply Rle_trans. apply Rabs_triang.
  assert (unit_roundoff * Rabs m <= unit_roundoff * ((1 + unit_roundoff) * (1 + held) * Rabs (A * ln 2))) by (apply Rmult_le_compat_l; lra). lra. }
assert (G : 0 <= (1 + unit_roundoff) * (1 + held) * (1 + unit_roundoff) - 1).
{ assert (1 * 1 <= (1 + unit_roundoff) * (1 + held)) by (apply Rmult_le_compat; lra).
  assert (1 * 1 <= (1 + unit_roundoff) * (1 + held) * (1 + unit_roundoff)) by (apply Rmult_le_compat; lra). lra. }
assert (P4 : ((1 + unit_roundoff) * (1 + held) * (1 + unit_roundoff) - 1) * Rabs (A * ln 2) <=
  ((1 + unit_roundoff) * (1 + held) * (1 + unit_roundoff) - 1) * (Rabs lse + log_size + apart)) by (apply Rmult_le_compat_l; lra).
assert (P5 : log_relative * Rabs (ln l) <= log_relative * log_size) by (apply Rmult_le_compat_l; lra).
unfold lse_bound. fold apart.
set (parts := apart + log_relative * log_size + log_absolute + ((1 + unit_roundoff) * (1 + held) * (1 + unit_roundoff) - 1) * (Rabs lse + log_size + apart) + omega).
assert (P6 : Rabs (product + lg - lse) <= parts).
{ replace (product + lg - lse) with ((product - A * ln 2) + (lg - ln l) + (ln l - ln (weights ks))) by (rewrite Lw; ring).
  eapply Rle_trans. apply Rabs_triang. eapply Rle_trans. apply Rplus_le_compat_r, Rabs_triang. unfold parts. lra. }
assert (P7 : Rabs (product + lg) <= Rabs lse + parts).
{ replace (product + lg) with (lse + (product + lg - lse)) by ring. eapply Rle_trans. apply Rabs_triang. lra. }
assert (P8 : unit_roundoff * Rabs (product + lg) <= unit_roundoff * (Rabs lse + parts)) by (apply Rmult_le_compat_l; lra).
replace (out - lse) with ((out - (product + lg)) + (product + lg - lse)) by ring.
eapply Rle_trans. apply Rabs_triang. lra.
Qed.

(* The fast path: one shift A for all keys. *)
Definition fast_key (A : R) (i : seen) (k : key) : Prop :=
  in_frame_of A i k /\ weighs i k /\
  exists s t, Rabs (s - score i) <= sigma i /\ exponent_at_once A s t /\ device_exp2 t (p k).

Lemma exponent_not_large : forall t q, device_exp2 t q -> q <= LANES * LANE_LIMIT -> t <= - lowest.
Proof.
intros t q [_ [P D]] T. destruct (Rle_or_lt t (- lowest)) as [H|H]; auto. exfalso. assert (E := exp2_small).
assert (B : Rpower 2 (IZR 127) <= Rpower 2 t).
{ apply Rpower_le. unfold lowest, contract_LARGEST_EXPONENT, contract_BIAS in H. lra. }
rewrite Rpower_bpow in B.
destruct D as [[e [He ->]]|[[D _]|[_ D]]]; [| |lra].
- apply Rabs_le_inv in He. assert (Q : bpow radix2 127 * / 2 <= Rpower 2 t * (1 + e)) by (apply Rmult_le_compat; try lra; apply bpow_ge_0).
  assert (bpow radix2 127 * / 2 <= LANES * LANE_LIMIT) by lra. unfold LANES, LANE_LIMIT in *. simpl in *. lra.
- assert (Q : bpow radix2 127 * / 2 <= Rpower 2 t * (1 - exp2_relative)) by (apply Rmult_le_compat; try lra; apply bpow_ge_0).
  assert (bpow radix2 127 * / 2 <= omega) by lra. unfold omega in *. simpl in *. lra.
Qed.

Lemma keys_become : forall A is' ks, (forall i, In i is' -> 0 <= sigma i) -> Forall2 (fast_key A) is' ks ->
  (forall k, In k ks -> p k <= LANES * LANE_LIMIT) -> Forall2 (becomes A) is' ks.
Proof.
intros A is' ks Hs F Top. induction F as [|i k is' ks [Fr [Wg [s [t [Es [Ex Dv]]]]]] F IH]; constructor.
- assert (T := exponent_not_large t (p k) Dv (Top k (or_introl eq_refl))).
  assert (Si := Hs i (or_introl eq_refl)).
  destruct (weight_conforms A i k t Si (at_once_is_near A i s t Es Ex T) Fr Dv Wg (Top k (or_introl eq_refl))) as [C _].
  split; [exact C | split; [apply Wg | exact Fr]].
- apply IH; auto. intros i' I. apply Hs. now right. intros k' I. apply Top. now right.
Qed.

(* THE THEOREM, static anchor.  Whatever the shift A (the anchor of the row, or any other number), if the denominator
   passes the checks, the BF16 output is within the contract's bound of the exact result. *)
Theorem static_anchor : forall A ks ml mo l o out inner, Forall2 (fast_key A) is ks ->
  sums tl (fun _ => True) ml (map p ks) l -> sums to (fun _ => True) mo (map x ks) o ->
  (ml <= 2 * length is)%nat -> (mo <= 2 * length is)%nat ->
  SUM_FLOOR <= l <= LANES * LANE_LIMIT -> divides l o out -> within inner ->
  Rabs (out - exact_result is) <= out_bound inner.
Proof.
intros A ks ml mo l o out inner F Sl So Ml Mo [L1 L2] D In.
apply (row_in_frame A ks ml mo l o out inner); auto.
apply (keys_become A is ks); auto.
intros k I. assert (Fp : fp32 (p k) /\ 0 <= p k).
{ destruct (comes_from _ _ _ _ F I) as [i [_ [_ [_ [s [t [_ [_ [Q [P _]]]]]]]]]]. auto. }
assert (Pos : forall y, List.In y (map p ks) -> 0 <= y).
{ intros y Iy. apply in_map_iff in Iy as [k' [<- Ik']].
  destruct (comes_from _ _ _ _ F Ik') as [i [_ [_ [_ [s [t [_ [_ [_ [P _]]]]]]]]]]. exact P. }
destruct (sums_at_least _ _ _ _ _ Sl Pos) as [_ Q].
destruct (Rle_or_lt omega (p k)) as [B|B].
- apply Rle_trans with l; auto. apply (Q (p k) (p k)); try apply Fp. apply in_map, I. split; lra.
- apply Rle_trans with omega. lra. unfold omega, LANES, LANE_LIMIT. simpl. lra.
Qed.

(* A rescaling softmax: each key against its fragment's shift a + c, a an integer; c is BIAS in a replay, which subtracts
   it afterwards, and 0 where it is in the shift already (early_bias.v). *)
Definition rescaled_key (c : R) (a : Z) (i : seen) (k : key) : Prop :=
  in_frame_of (IZR a + c) i k /\ weighs i k /\
  exists s t, Rabs (s - score i) <= sigma i /\ device_exp2 t (p k) /\
    (c = 0 /\ exponent_at_once (IZR a) s t /\ s <= IZR a \/ c = BIAS /\ exponent_in_two a s t).

Lemma rescaled_exponent : forall c a i k, 0 <= sigma i -> rescaled_key c a i k ->
  becomes (IZR a + c) i k /\ 0 <= p k <= 1 + / 64 /\ 0 <= b k <= 2 /\ w k <= 2 * swell i.
Proof.
intros c a i k Hs [Fr [Wg [s [t [Es [Dv Ex]]]]]]. assert (E := exp2_small). assert (O := omega_pos).
assert (Nt : near_exponent (IZR a + c) i t /\ t <= 0).
{ destruct Ex as [[-> [Ex L]]|[-> Ex]].
  - assert (T : t <= 0).
    { destruct Ex as [Fs [Fa [->|[[K _]|[_ ->]]]]]; [|discriminate|lra].
      apply round_le_generic; try typeclasses eauto. apply fp32_0. lra. }
    split; auto. rewrite Rplus_0_r. apply (at_once_is_near (IZR a) i s t Es Ex).
    unfold lowest, contract_LARGEST_EXPONENT, contract_BIAS. lra.
  - split. now apply in_two_is_near with s.
    destruct (Rle_or_lt lowest t) as [T|T].
    + destruct (exponent_error_in_two a s t Ex T) as [B _]. unfold BIAS in B. lra.
    + unfold lowest, contract_LARGEST_EXPONENT, contract_BIAS in T. lra. }
destruct Nt as [Nt T0]. destruct Dv as [F [P D]].
assert (R1 : Rpower 2 t <= 1) by (rewrite <- (Rpower_O 2) by lra; apply Rpower_le; exact T0).
assert (R0 : 0 < Rpower 2 t) by apply exp_pos.
assert (O1 : omega <= / 2) by (unfold omega; simpl; lra).
assert (Pk : p k <= 1 + / 64).
{ destruct D as [[e [He ->]]|[[_ D]|[D _]]].
  - apply Rabs_le_inv in He. apply Rle_trans with (1 * (1 + / 64)). apply Rmult_le_compat; lra. lra.
  - lra.
  - unfold contract_LARGEST_EXPONENT in D. lra. }
assert (Top : p k <= LANES * LANE_LIMIT) by (apply Rle_trans with (1 := Pk); unfold LANES, LANE_LIMIT; simpl; lra).
destruct (weight_conforms (IZR a + c) i k t Hs Nt Fr (conj F (conj P D)) Wg Top) as [C W].
destruct (weighs_conform i k F P Wg) as [B0 [B1 _]].
split; [|split; [lra|split; [split; auto|]]].
- split; [exact C | split; [apply Wg | exact Fr]].
- destruct B1 as [B1|[_ B1]]; [|lra]. apply Rabs_le_inv in B1. unfold BF16_UNIT_ROUNDOFF in *. lra.
- apply Rle_trans with (1 := W). assert (G := swell_ge_1 i Hs). apply Rmult_le_compat_r. lra.
  apply Rle_trans with (Rpower 2 1). apply Rpower_le. assert (Rmax t lowest <= 0); [|lra]. apply Rmax_lub; auto.
  unfold lowest, contract_LARGEST_EXPONENT, contract_BIAS. lra. rewrite Rpower_1; lra.
Qed.

Lemma rescaled_one : forall c a i k M y z, 0 <= sigma i -> rescaled_key c a i k ->
  in_frame M a (p k) y -> in_frame M a (x k) z ->
  exists k', becomes (IZR M + c) i k' /\ p k' = y /\ x k' = z.
Proof.
intros c a i k M y z Hs Rk [L Y] [_ Z]. destruct (rescaled_exponent c a i k Hs Rk) as [[C [Ev [Ew Er]]] [Bp [Bb Bw]]].
assert (O := omega_pos). assert (E := exp2_small). assert (G := swell_ge_1 i Hs).
set (r := bpow radix2 (a - M)) in *. assert (R0 : 0 < r) by apply bpow_gt_0. assert (R1 : r <= 1) by (apply bpow_le_1; lia).
assert (Wf : w k * r = Rpower 2 (score i - (IZR M + c))).
{ rewrite Ew. unfold r. rewrite <- Rpower_bpow, <- Rpower_plus. f_equal. rewrite minus_IZR. ring. }
destruct C as [Cw [Cr [Cp [Cb [CC Cx]]]]].
destruct (Z_lt_ge_dec (a - M) (-126)) as [Far|Near].
- (* So far below that everything may be flushed. *)
  assert (Rs : r <= omega / 2).
  { apply Rle_trans with (bpow radix2 (-127)). apply bpow_le. lia. unfold omega. simpl. lra. }
  assert (Yb : 0 <= y <= omega).
  { destruct Y as [->|[-> _]]; [|lra]. split. apply Rmult_le_pos; lra.
    apply Rle_trans with ((1 + / 64) * (omega / 2)). apply Rmult_le_compat; lra. lra. }
  assert (Zb : exists b', 0 <= b' <= 2 * omega /\ Rabs (z - b' * v k) <= omega).
  { destruct Z as [->|[-> _]].
    - exists (b k * r). split. split. apply Rmult_le_pos; lra.
      apply Rle_trans with (2 * (omega / 2)). apply Rmult_le_compat; lra. lra.
      replace (x k * r - b k * r * v k) with ((x k - b k * v k) * r) by ring. rewrite Rabs_mult, (Rabs_pos_eq r) by lra.
      apply Rle_trans with (omega * 1). apply Rmult_le_compat; auto using Rabs_pos. lra. lra.
    - exists 0. rewrite Rmult_0_l, Rminus_0_r, Rabs_R0. lra. }
  destruct Zb as [b' [B1 B2]].
  exists (Key (w k * r) (v k) (rho k) y b' z). split; [|split; reflexivity].
  split; [|split; [exact Ev | split; [exact Wf | exact Er]]].
  apply (small_conforms (IZR M + c) i); auto. split; [exact Wf | exact Er]. simpl.
  apply Rle_trans with (w k * r). assert (0 < w k * r) by now apply Rmult_lt_0_compat.
  apply Rle_trans with (w k * r * 1). apply Rmult_le_compat_l; lra. lra.
  apply Rle_trans with (2 * swell i * (omega / 2)). apply Rmult_le_compat; lra. lra.
- assert (Ey : y = p k * r) by (destruct Y as [H|[_ H]]; [exact H | lia]).
  assert (Ez : z = x k * r) by (destruct Z as [H|[_ H]]; [exact H | lia]).
  exists (Key (w k * r) (v k) (rho k) y (b k * r) z). split; [|split; reflexivity].
  split; [|split; [exact Ev | split; [exact Wf | exact Er]]].
  assert (Sc : forall q, q <= 2 * omega -> 0 <= q -> q * r <= 2 * omega).
  { intros q Q1 Q2. apply Rle_trans with (2 * omega * 1). apply Rmult_le_compat; lra. lra. }
  subst y z. repeat split; simpl; try (apply Rmult_le_pos; lra); auto.
  + now apply Rmult_lt_0_compat.
  + assert (Pz : 0 <= r) by lra.
    destruct CC as [[C1 C2]|[C1 [C2 C3]]]; [left | right; repeat split; apply Sc; lra].
    split.
    * replace (p k * r - w k * r) with ((p k - w k) * r) by ring. rewrite Rabs_mult, (Rabs_pos_eq r) by lra.
      rewrite <- Rmult_assoc. now apply Rmult_le_compat_r.
    * destruct C2 as [C2|[C2 C3]]; [left | right; split; apply Sc; lra].
      replace (b k * r - p k * r) with ((b k - p k) * r) by ring. rewrite Rabs_mult, (Rabs_pos_eq r) by lra.
      rewrite <- Rmult_assoc. now apply Rmult_le_compat_r.
  + replace (x k * r - b k * r * v k) with ((x k - b k * v k) * r) by ring. rewrite Rabs_mult, (Rabs_pos_eq r) by lra.
    apply Rle_trans with (omega * 1). apply Rmult_le_compat; auto using Rabs_pos. lra. lra.
Qed.

(* Fragments of keys, each with the integer that it was computed against. *)
Definition fragments_of (f : key -> R) (fragments : list (Z * list (seen * key))) : list (Z * list R) :=
  map (fun g => (fst g, map (fun ik => f (snd ik)) (snd g))) fragments.
Definition keys_of (fragments : list (Z * list (seen * key))) : list (Z * (seen * key)) :=
  flat_map (fun g => map (fun ik => (fst g, ik)) (snd g)) fragments.

Lemma terms_of_keys : forall f fragments,
  terms_of (fragments_of f fragments) = map (fun c => (fst c, f (snd (snd c)))) (keys_of fragments).
Proof.
intros f fragments. induction fragments as [|[a iks] fr IH]; auto.
unfold terms_of, keys_of, fragments_of in *. simpl. rewrite IH, map_app, !map_map. reflexivity.
Qed.

Lemma keys_rescaled : forall c M all ys zs,
  (forall a i k, In (a, (i, k)) all -> 0 <= sigma i /\ rescaled_key c a i k) ->
  Forall2 (fun own y => in_frame M (fst own) (snd own) y) (map (fun c => (fst c, p (snd (snd c)))) all) ys ->
  Forall2 (fun own y => in_frame M (fst own) (snd own) y) (map (fun c => (fst c, x (snd (snd c)))) all) zs ->
  exists ks, Forall2 (becomes (IZR M + c)) (map (fun c => fst (snd c)) all) ks /\ map p ks = ys /\ map x ks = zs.
Proof.
intros c M all. induction all as [|[a [i k]] all IH]; intros ys zs H Fy Fz; inversion Fy; subst; inversion Fz; subst.
- exists []. repeat split; constructor.
- destruct (IH l' l'0 (fun a' i' k' I => H a' i' k' (or_intror I)) H4 H6) as [ks [K1 [K2 K3]]].
  destruct (H a i k (or_introl eq_refl)) as [Hs Rk].
  destruct (rescaled_one c a i k M y y0 Hs Rk H2 H3) as [k' [B [P X]]].
  exists (k' :: ks). simpl. repeat split; [constructor; auto | |]; congruence.
Qed.

(* THE THEOREM, rescaling softmax and replay: fragment by fragment, what was summed rescaled by powers of two or dropped. *)
Theorem rescaling_softmax : forall c fragments M ys zs l o out inner,
  is = map (fun c => fst (snd c)) (keys_of fragments) ->
  (forall a i k, In (a, (i, k)) (keys_of fragments) -> rescaled_key c a i k) ->
  replayed tl (fun _ => True) (fragments_of p fragments) M ys l ->
  replayed to (fun _ => True) (fragments_of x fragments) M zs o ->
  SUM_FLOOR <= l -> divides l o out -> within inner -> Rabs (out - exact_result is) <= out_bound inner.
Proof.
intros c fragments M ys zs l o out inner Is Rk Rl Ro L D In.
assert (Ky := recovery_keeps_every_term _ _ _ _ _ _ Rl). assert (Kz := recovery_keeps_every_term _ _ _ _ _ _ Ro).
rewrite terms_of_keys in Ky, Kz.
destruct (recovery_is_exact _ _ _ _ _ _ I Rl) as [ml [Ml Sl]]. destruct (recovery_is_exact _ _ _ _ _ _ I Ro) as [mo [Mo So]].
destruct (keys_rescaled c M (keys_of fragments) ys zs) as [ks [K1 [K2 K3]]]; auto.
{ intros a i k Ik. split; auto. apply sigmas. rewrite Is. apply in_map_iff. now exists (a, (i, k)). }
rewrite <- Is in K1. subst ys zs.
assert (Len : length ks = length is) by (symmetry; clear - K1; induction K1; simpl; auto).
rewrite map_length in Ml, Mo. rewrite Len in Ml, Mo.
apply (row_in_frame (IZR M + c) ks ml mo l o out inner); auto; lia.
Qed.

End Row.

(* From BF16 inputs.  A key's products with the row's query, their sum in a matrix unit, the scale. *)
Record token := Token { pairs : list (R * R); held_value : R }.

Section Inputs.
Variables (tokens : list token) (td tl to : bool) (low high largest : R).
(* head_dim; scale log2(e), exactly, and the relative error with which its constant is held. *)
Variables (dim : nat) (scale held : R).

Definition products_of (tk : token) : list R := map (fun qk => fst qk * snd qk) (pairs tk).
(* The contract's sigma (section 3; contract_constants compares its `_score_error`). *)
Definition sigma_of (tk : token) : R :=
  Rabs scale * ((1 + unit_of td) ^ (dim - 1) * (1 + held) * (1 + unit_of false) - 1) * size (products_of tk)
  + (Rabs scale * (1 + held) * (1 + unit_of false) * (1 + unit_of td) ^ (dim - 1) * (2 * INR dim) * omega + omega).
Definition seen_of (tk : token) : seen := Seen (scale * total (products_of tk)) (sigma_of tk) (held_value tk).

Definition computes_score (tk : token) (s : R) : Prop :=
  length (pairs tk) = dim /\ (forall qk, In qk (pairs tk) -> bf16 (fst qk) /\ bf16 (snd qk)) /\
  exists xs m dot c, Forall2 (fun qk y => computes false (fst qk * snd qk) y) (pairs tk) xs /\
    sums td (fun _ => True) m xs dot /\ (m < dim)%nat /\ (exists e, Rabs e <= held /\ c = scale * (1 + e)) /\
    computes false (dot * c) s.

Lemma computed_close : forall z y, computes false z y -> Rabs (y - z) <= unit_of false * Rabs z + omega.
Proof.
intros z y [E|[[F _]|[L ->]]]; [|discriminate|].
- apply Rle_trans with (1 := product_error _ _ E). apply Rplus_le_compat_l. unfold omega. apply bpow_le. easy.
- rewrite <- Rabs_Ropp. replace (- (0 - z)) with z by ring. assert (P := Rabs_pos z). assert (U := unit_pos false).
  assert (0 <= unit_of false * Rabs z) by (apply Rmult_le_pos; lra). lra.
Qed.

Lemma score_within_sigma : forall tk s, computes_score tk s -> Rabs (s - score (seen_of tk)) <= sigma (seen_of tk).
Proof.
intros tk s [Ld [Bf [xs [m [dot [c [Px [Sd [Md [Hc Cs]]]]]]]]]]. simpl.
assert (Lx : length xs = dim) by (rewrite <- Ld; symmetry; clear - Px; induction Px; simpl; auto).
assert (Pr : Forall2 (fun e y => Rabs (y - e) <= omega) (products_of tk) xs).
{ unfold products_of. clear - Px Bf. induction Px as [|qk y qs ys H F IH]; simpl; constructor.
  - destruct (Bf qk (or_introl eq_refl)). now apply bf16_product.
  - apply IH. intros q I. apply Bf. now right. }
assert (E := score_error _ _ td m dot scale c s held Pr Sd Hc (computed_close _ _ Cs)).
apply Rle_trans with (1 := E). unfold sigma_of, score_error.growth, score_error.flushed, most. rewrite Lx.
apply Rplus_le_compat_l. apply Rplus_le_compat_r. apply Rmult_le_compat_r. apply Rlt_le, omega_pos.
destruct Hc as [e [He _]]. assert (Ph : 0 <= held) by (apply Rle_trans with (2 := He), Rabs_pos).
assert (U := unit_pos td). assert (Uf := unit_pos false).
assert (M1 : 1 <= (1 + unit_of td) ^ (dim - 1)) by (apply pow_R1_Rle; lra).
apply Rmult_le_compat_l.
- apply Rmult_le_pos; [apply Rmult_le_pos; [apply Rmult_le_pos; [apply Rabs_pos|]|]|]; lra.
- assert (INR m <= INR dim) by (apply le_INR; lia). lra.
Qed.

Lemma sigma_of_nonneg : forall tk, 0 <= held -> 0 <= sigma_of tk.
Proof.
intros tk Ph. unfold sigma_of. assert (U := unit_pos td). assert (Uf := unit_pos false). assert (O := omega_pos).
assert (M1 : 1 <= (1 + unit_of td) ^ (dim - 1)) by (apply pow_R1_Rle; lra).
assert (Sz : 0 <= size (products_of tk)).
{ unfold size. induction (products_of tk) as [|y ys IH]; simpl. lra. assert (H := Rabs_pos y). lra. }
assert (A := Rabs_pos scale). assert (D := pos_INR dim).
assert (Q : 0 <= (1 + unit_of td) ^ (dim - 1) * (1 + held) * (1 + unit_of false) - 1).
{ assert (1 * 1 <= (1 + unit_of td) ^ (dim - 1) * (1 + held)) by (apply Rmult_le_compat; lra).
  assert (1 * 1 <= (1 + unit_of td) ^ (dim - 1) * (1 + held) * (1 + unit_of false)) by (apply Rmult_le_compat; lra). lra. }
assert (0 <= Rabs scale * ((1 + unit_of td) ^ (dim - 1) * (1 + held) * (1 + unit_of false) - 1) * size (products_of tk)) by (apply Rmult_le_pos; auto; now apply Rmult_le_pos).
assert (0 <= Rabs scale * (1 + held) * (1 + unit_of false) * (1 + unit_of td) ^ (dim - 1) * (2 * INR dim) * omega).
{ repeat apply Rmult_le_pos; lra. }
lra.
Qed.

(* One key of a row against the shift A: BF16 products, their sum, the scale, the subtraction, exp2, the rounding of the
   weight, its product with the BF16 value. *)
Definition computes_key (A : R) (tk : token) (k : key) : Prop :=
  in_frame_of A (seen_of tk) k /\ weighs (seen_of tk) k /\
  exists s t, computes_score tk s /\ exponent_at_once A s t /\ device_exp2 t (p k).

(* ONE THEOREM, from BF16 inputs to the BF16 output.  The exact result is
   sum 2**(scale q.k) v / sum 2**(scale q.k), scale in log2 units; the shift is any number of the format. *)
Theorem attention_theorem : forall A ks ml mo l o out inner, 0 <= held -> largest <= largest_bf16 ->
  (forall tk, In tk tokens -> low <= held_value tk <= high /\ Rabs (held_value tk) <= largest) ->
  Forall2 (computes_key A) tokens ks ->
  sums tl (fun _ => True) ml (map p ks) l -> sums to (fun _ => True) mo (map x ks) o ->
  (ml <= 2 * length tokens)%nat -> (mo <= 2 * length tokens)%nat ->
  SUM_FLOOR <= l <= LANES * LANE_LIMIT -> divides l o out ->
  within (map seen_of tokens) tl to low high largest inner ->
  Rabs (out - exact_result (map seen_of tokens)) <= out_bound (map seen_of tokens) inner.
Proof.
intros A ks ml mo l o out inner Ph Hl V F Sl So Ml Mo L D In.
apply (static_anchor (map seen_of tokens) tl to low high largest) with A ks ml mo l o; auto; try now rewrite map_length.
- intros i I. apply in_map_iff in I as [tk [<- _]]. now apply sigma_of_nonneg.
- intros i I. apply in_map_iff in I as [tk [<- I]]. now apply V.
- clear - F. induction F as [|tk k tks ks [Fr [Wg [s [t [Cs [Ex Dv]]]]]] F IH]; simpl; constructor; auto.
  split; auto. split; auto. exists s, t. split; auto. now apply score_within_sigma.
Qed.

(* The same for a rescaling softmax and for a replay: such keys are those of [rescaling_softmax]. *)
Definition rescales_key (c : R) (a : Z) (tk : token) (k : key) : Prop :=
  in_frame_of (IZR a + c) (seen_of tk) k /\ weighs (seen_of tk) k /\
  exists s t, computes_score tk s /\ device_exp2 t (p k) /\
    (c = 0 /\ exponent_at_once (IZR a) s t /\ s <= IZR a \/ c = BIAS /\ exponent_in_two a s t).

Theorem rescaled_from_inputs : forall c a tk k, rescales_key c a tk k -> rescaled_key c a (seen_of tk) k.
Proof.
intros c a tk k [Fr [Wg [s [t [Cs [Dv Ex]]]]]]. split; auto. split; auto. exists s, t. split; auto. now apply score_within_sigma.
Qed.

End Inputs.
