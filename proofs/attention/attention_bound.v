From Coq Require Import ZArith Reals Lra Lia List Permutation Psatz.
From Flocq Require Import Core Relative.
From Proofs Require Import constants binary32 summation_error clamp_keeps_the_bound.
Import ListNotations.
Open Scope R_scope.

(* A visible key of one row, for one component of the output, in the row's final frame of exponents:
   w the exact weight 2**(s - A), v the value; p the computed weight, b = p rounded to BF16, x the computed
   product b v; rho bounds the relative error of a weight, unless it is so small that it may be flushed. *)
Record key := Key { w : R; v : R; rho : R; p : R; b : R; x : R }.

Definition conforming (k : key) : Prop :=
  0 < w k /\ 0 <= rho k /\ 0 <= p k /\ 0 <= b k /\
  (Rabs (p k - w k) <= rho k * w k /\
     (Rabs (b k - p k) <= BF16_UNIT_ROUNDOFF * p k \/ p k <= 2 * omega /\ b k <= 2 * omega) \/
   w k <= 2 * omega /\ p k <= 2 * omega /\ b k <= 2 * omega) /\
  Rabs (x k - b k * v k) <= omega.

Definition sum_of (f : key -> R) (ks : list key) : R := total (map f ks).

Lemma sum_of_le : forall f g ks, (forall k, In k ks -> f k <= g k) -> sum_of f ks <= sum_of g ks.
Proof.
intros f g ks H. induction ks as [|k ks IH]; unfold sum_of in *; simpl. lra.
apply Rplus_le_compat. apply H. now left. apply IH. intros k' I. apply H. now right.
Qed.

Lemma sum_of_plus : forall f g ks, sum_of (fun k => f k + g k) ks = sum_of f ks + sum_of g ks.
Proof. intros f g ks. unfold sum_of. induction ks as [|k ks IH]; simpl. ring. rewrite IH. ring. Qed.

Lemma sum_of_scaled : forall c f ks, sum_of (fun k => c * f k) ks = c * sum_of f ks.
Proof. intros c f ks. unfold sum_of. induction ks as [|k ks IH]; simpl. ring. rewrite IH. ring. Qed.

Lemma sum_of_minus : forall f g ks, sum_of f ks - sum_of g ks = sum_of (fun k => f k - g k) ks.
Proof. intros f g ks. unfold sum_of. induction ks as [|k ks IH]; simpl. ring. rewrite <- IH. ring. Qed.

Lemma sum_of_abs : forall f ks, Rabs (sum_of f ks) <= sum_of (fun k => Rabs (f k)) ks.
Proof.
intros f ks. unfold sum_of. induction ks as [|k ks IH]; simpl. rewrite Rabs_R0. lra.
eapply Rle_trans. apply Rabs_triang. lra.
Qed.

Lemma sum_of_pos : forall f ks, ks <> [] -> (forall k, In k ks -> 0 < f k) -> 0 < sum_of f ks.
Proof.
intros f ks N H. destruct ks as [|k ks]; [easy|]. unfold sum_of. simpl.
assert (A : 0 < f k) by (apply H; now left).
assert (B : sum_of (fun _ => 0) ks <= sum_of f ks) by (apply sum_of_le; intros k' I; apply Rlt_le, H; now right).
assert (Z : sum_of (fun _ => 0) ks = 0) by (unfold sum_of; clear; induction ks; simpl; lra).
unfold sum_of in *. lra.
Qed.

(* n roundings move a term by at most (1 + u)**n - 1, in either direction. *)
Definition growth (t : bool) (n : nat) := (1 + unit_of t) ^ n - 1.

Lemma growth_nonneg : forall t n, 0 <= growth t n.
Proof.
intros t n. unfold growth. assert (U := unit_pos t). assert (P : 1 <= (1 + unit_of t) ^ n) by (apply pow_R1_Rle; lra). lra.
Qed.

Lemma bernoulli_below : forall u n, 0 <= u <= 1 -> 2 - (1 + u) ^ n <= (1 - u) ^ n.
Proof.
intros u n [H0 H1].
assert (A : 1 + INR n * u <= (1 + u) ^ n).
{ induction n as [|n IH]. simpl; lra. assert (P := pos_INR n). rewrite S_INR. simpl.
  apply Rle_trans with ((1 + u) * (1 + INR n * u)); [nra | apply Rmult_le_compat_l; lra]. }
assert (B : 1 - INR n * u <= (1 - u) ^ n).
{ clear A. induction n as [|n IH]. simpl; lra. assert (P := pos_INR n). rewrite S_INR. simpl.
  apply Rle_trans with ((1 - u) * (1 - INR n * u)); [nra | apply Rmult_le_compat_l; lra]. }
lra.
Qed.

Lemma rounded_error : forall t n y z, rounded (unit_of t) n y z -> Rabs (z - y) <= growth t n * Rabs y.
Proof.
intros t n y z [f [[F1 F2] ->]]. unfold growth. replace (y * f - y) with ((f - 1) * y) by ring. rewrite Rabs_mult.
apply Rmult_le_compat_r. apply Rabs_pos.
assert (U := unit_pos t). assert (S := unit_small t).
assert (B := bernoulli_below (unit_of t) n ltac:(lra)). apply Rabs_le. lra.
Qed.

Lemma sum_error : forall t n f ks ys, Forall2 (rounded (unit_of t) n) (map f ks) ys ->
  Rabs (total ys - sum_of f ks) <= sum_of (fun k => growth t n * Rabs (f k)) ks.
Proof.
intros t n f ks. unfold sum_of. induction ks as [|k ks IH]; intros ys F; inversion F; subst; simpl.
- rewrite Rminus_0_r, Rabs_R0. lra.
- replace (y + total l' - (f k + total (map f ks))) with ((y - f k) + (total l' - total (map f ks))) by ring.
  eapply Rle_trans. apply Rabs_triang. apply Rplus_le_compat. now apply rounded_error. now apply IH.
Qed.

Section Row.
Variables (ks : list key) (tl to : bool) (ml mo : nat) (l o : R).
Hypothesis keys_conform : forall k, In k ks -> conforming k.
Hypothesis l_is_a_sum : sums tl (fun _ => True) ml (map p ks) l.
Hypothesis o_is_a_sum : sums to (fun _ => True) mo (map x ks) o.

Let n := (length ks - 1)%nat.
Let Gl := growth tl n.
Let Go := growth to n.
Let unit := BF16_UNIT_ROUNDOFF.

Definition weights := sum_of w ks.
Definition exact := sum_of (fun k => w k * v k) ks / weights.
Definition alpha (k : key) := (1 + rho k) * (1 + unit) * (1 + Go) - 1.
Definition beta (k : key) := (1 + rho k) * (1 + Gl) - 1.
Definition flushed_l := sum_of (fun _ => 2 * omega * (1 + Gl)) ks + INR ml * omega * (1 + Gl).
Definition flushed_o := sum_of (fun k => (2 * omega * Rabs (v k) + omega) * (1 + Go)) ks + INR mo * omega * (1 + Go).

Lemma some_keys : ks <> [].
Proof. intros E. assert (H := sums_length _ _ _ _ _ l_is_a_sum). rewrite E in H. simpl in H. lia. Qed.

Lemma weights_pos : 0 < weights.
Proof. apply sum_of_pos. exact some_keys. intros k I. apply keys_conform, I. Qed.

Lemma error_of_l : Rabs (l - weights) <= sum_of (fun k => w k * beta k) ks + flushed_l.
Proof.
destruct (summation_error _ _ _ _ _ l_is_a_sum) as [ys [th [F [E T]]]]. rewrite map_length in *. fold n in F, T.
assert (A := sum_error _ _ _ _ _ F). assert (G := growth_nonneg tl n). fold Gl in A, G.
assert (B : Rabs (sum_of p ks - weights) <= sum_of (fun k => Rabs (p k - w k)) ks).
{ unfold weights. rewrite sum_of_minus. apply sum_of_abs. }
assert (C : sum_of (fun k => Rabs (p k - w k)) ks + sum_of (fun k => Gl * Rabs (p k)) ks <=
            sum_of (fun k => w k * beta k) ks + sum_of (fun _ => 2 * omega * (1 + Gl)) ks).
{ rewrite <- !sum_of_plus. apply sum_of_le. intros k I. assert (W := omega_pos).
  destruct (keys_conform k I) as [Pw [Pr [Pp [Pb [[[H1 H2]|[H1 [H2 H3]]] Hx]]]]]; rewrite (Rabs_pos_eq (p k)) by exact Pp; unfold beta.
  - assert (Up : p k <= (1 + rho k) * w k) by (apply Rabs_le_inv in H1; lra).
    assert (Q : Gl * p k <= Gl * ((1 + rho k) * w k)) by (apply Rmult_le_compat_l; assumption).
    assert (Z : 0 <= omega * Gl) by (apply Rmult_le_pos; lra). lra.
  - assert (D : Rabs (p k - w k) <= 2 * omega) by (apply Rabs_le; lra).
    assert (Q : Gl * p k <= Gl * (2 * omega)) by (apply Rmult_le_compat_l; assumption).
    assert (Z : 0 <= w k * ((1 + rho k) * (1 + Gl) - 1)).
    { apply Rmult_le_pos. lra. assert (0 <= rho k * Gl) by now apply Rmult_le_pos. lra. }
    lra. }
replace (l - weights) with ((total ys - sum_of p ks) + (sum_of p ks - weights) + th) by (rewrite E; ring).
assert (T' : Rabs th <= INR ml * omega * (1 + Gl)) by (unfold Gl, growth; replace (1 + ((1 + unit_of tl) ^ n - 1)) with ((1 + unit_of tl) ^ n) by ring; exact T).
unfold flushed_l. eapply Rle_trans. apply Rabs_triang.
eapply Rle_trans. apply Rplus_le_compat_r, Rabs_triang. lra.
Qed.

Lemma error_of_o : Rabs (o - sum_of (fun k => w k * v k) ks) <= sum_of (fun k => w k * alpha k * Rabs (v k)) ks + flushed_o.
Proof.
destruct (summation_error _ _ _ _ _ o_is_a_sum) as [ys [th [F [E T]]]]. rewrite map_length in *. fold n in F, T.
assert (A := sum_error _ _ _ _ _ F). assert (G := growth_nonneg to n). fold Go in A, G.
assert (B : Rabs (sum_of x ks - sum_of (fun k => w k * v k) ks) <= sum_of (fun k => Rabs (x k - w k * v k)) ks).
{ rewrite sum_of_minus. apply sum_of_abs. }
assert (Un : 0 <= unit) by (unfold unit, BF16_UNIT_ROUNDOFF; lra).
assert (C : sum_of (fun k => Rabs (x k - w k * v k)) ks + sum_of (fun k => Go * Rabs (x k)) ks <=
            sum_of (fun k => w k * alpha k * Rabs (v k)) ks + sum_of (fun k => (2 * omega * Rabs (v k) + omega) * (1 + Go)) ks).
{ rewrite <- !sum_of_plus. apply sum_of_le. intros k I. assert (W := omega_pos).
  destruct (keys_conform k I) as [Pw [Pr [Pp [Pb [H Hx]]]]]. assert (V := Rabs_pos (v k)).
  assert (X1 : Rabs (x k) <= b k * Rabs (v k) + omega).
  { replace (x k) with ((x k - b k * v k) + b k * v k) by ring. eapply Rle_trans. apply Rabs_triang.
    rewrite Rabs_mult, (Rabs_pos_eq (b k)) by exact Pb. lra. }
  assert (X2 : Rabs (x k - w k * v k) <= omega + Rabs (b k - w k) * Rabs (v k)).
  { replace (x k - w k * v k) with ((x k - b k * v k) + (b k - w k) * v k) by ring. eapply Rle_trans. apply Rabs_triang.
    rewrite Rabs_mult. lra. }
  assert (X3 : Go * Rabs (x k) <= Go * (b k * Rabs (v k) + omega)) by (apply Rmult_le_compat_l; assumption).
  unfold alpha.
  assert (Al : 0 <= w k * ((1 + rho k) * (1 + unit) * (1 + Go) - 1 - rho k) * Rabs (v k)).
  { apply Rmult_le_pos; auto. apply Rmult_le_pos. lra.
    assert (1 * 1 <= (1 + unit) * (1 + Go)) by (apply Rmult_le_compat; lra).
    assert ((1 + rho k) * 1 <= (1 + rho k) * ((1 + unit) * (1 + Go))) by (apply Rmult_le_compat_l; lra). lra. }
  destruct H as [[H1 [H2|[H2 H3]]]|[H1 [H2 H3]]].
  - assert (Up : p k <= (1 + rho k) * w k) by (apply Rabs_le_inv in H1; lra).
    assert (Up2 : unit * p k <= unit * ((1 + rho k) * w k)) by (apply Rmult_le_compat_l; assumption).
    assert (Ub : b k <= (1 + unit) * ((1 + rho k) * w k)) by (apply Rabs_le_inv in H2; fold unit in H2; lra).
    assert (D : Rabs (b k - w k) <= ((1 + unit) * (1 + rho k) - 1) * w k).
    { replace (b k - w k) with ((b k - p k) + (p k - w k)) by ring. eapply Rle_trans. apply Rabs_triang. fold unit in H2. lra. }
    assert (Y1 : Rabs (b k - w k) * Rabs (v k) <= ((1 + unit) * (1 + rho k) - 1) * w k * Rabs (v k)) by now apply Rmult_le_compat_r.
    assert (Y2 : Go * (b k * Rabs (v k)) <= Go * ((1 + unit) * ((1 + rho k) * w k) * Rabs (v k))).
    { apply Rmult_le_compat_l; auto. now apply Rmult_le_compat_r. }
    assert (Y3 : 0 <= omega * Rabs (v k) * (1 + Go)) by (apply Rmult_le_pos; [apply Rmult_le_pos|]; lra).
    lra.
  - assert (D : Rabs (b k - w k) <= 2 * omega + rho k * w k).
    { replace (b k - w k) with ((b k - p k) + (p k - w k)) by ring. eapply Rle_trans. apply Rabs_triang.
      assert (Rabs (b k - p k) <= 2 * omega) by (apply Rabs_le; lra). lra. }
    assert (Y1 : Rabs (b k - w k) * Rabs (v k) <= (2 * omega + rho k * w k) * Rabs (v k)) by now apply Rmult_le_compat_r.
    assert (Y2 : Go * (b k * Rabs (v k)) <= Go * (2 * omega * Rabs (v k))).
    { apply Rmult_le_compat_l; auto. now apply Rmult_le_compat_r. }
    lra.
  - assert (D : Rabs (b k - w k) <= 2 * omega) by (apply Rabs_le; lra).
    assert (Y1 : Rabs (b k - w k) * Rabs (v k) <= 2 * omega * Rabs (v k)) by now apply Rmult_le_compat_r.
    assert (Y2 : Go * (b k * Rabs (v k)) <= Go * (2 * omega * Rabs (v k))).
    { apply Rmult_le_compat_l; auto. now apply Rmult_le_compat_r. }
    assert (Z : 0 <= rho k * w k * Rabs (v k)) by (apply Rmult_le_pos; auto; apply Rmult_le_pos; lra).
    lra. }
replace (o - sum_of (fun k => w k * v k) ks) with ((total ys - sum_of x ks) + (sum_of x ks - sum_of (fun k => w k * v k) ks) + th) by (rewrite E; ring).
assert (T' : Rabs th <= INR mo * omega * (1 + Go)) by (unfold Go, growth; replace (1 + ((1 + unit_of to) ^ n - 1)) with ((1 + unit_of to) ^ n) by ring; exact T).
unfold flushed_o. eapply Rle_trans. apply Rabs_triang.
eapply Rle_trans. apply Rplus_le_compat_r, Rabs_triang. lra.
Qed.

(* The first-order bound A, every quantity relative to the exact sum of weights. *)
Definition numerator := (sum_of (fun k => w k * alpha k * Rabs (v k)) ks + Rabs exact * sum_of (fun k => w k * beta k) ks
  + (flushed_o + Rabs exact * flushed_l)) / weights.
Definition denominator := 1 - sum_of (fun k => w k * beta k) ks / weights - flushed_l / weights.

Theorem attention_bound : 0 < denominator -> 0 < l /\ Rabs (o / l - exact) <= numerator / denominator.
Proof.
intros Hd. assert (Pw := weights_pos). assert (El := error_of_l). assert (Eo := error_of_o).
assert (L : weights * denominator <= l).
{ unfold denominator. apply Rabs_le_inv in El.
  replace (weights * (1 - sum_of (fun k => w k * beta k) ks / weights - flushed_l / weights))
    with (weights - sum_of (fun k => w k * beta k) ks - flushed_l) by (field; lra). lra. }
assert (Pd : 0 < weights * denominator) by now apply Rmult_lt_0_compat.
split. lra.
assert (X : sum_of (fun k => w k * v k) ks = exact * weights) by (unfold exact; field; lra).
assert (D : Rabs (o - exact * l) <= weights * numerator).
{ replace (o - exact * l) with ((o - sum_of (fun k => w k * v k) ks) - exact * (l - weights)) by (rewrite X; ring).
  unfold Rminus at 1. eapply Rle_trans. apply Rabs_triang. rewrite Rabs_Ropp, Rabs_mult.
  assert (M : Rabs exact * Rabs (l - weights) <= Rabs exact * (sum_of (fun k => w k * beta k) ks + flushed_l)).
  { apply Rmult_le_compat_l. apply Rabs_pos. exact El. }
  unfold numerator. field_simplify; [|lra]. lra. }
replace (o / l - exact) with ((o - exact * l) / l) by (field; lra).
unfold Rdiv. rewrite Rabs_mult, Rabs_inv, (Rabs_pos_eq l) by lra.
apply Rle_trans with (weights * numerator * / (weights * denominator)).
- apply Rmult_le_compat; auto using Rabs_pos. apply Rlt_le, Rinv_0_lt_compat; lra. apply Rinv_le; lra.
- right. field. lra.
Qed.

End Row.
