From Coq Require Import ZArith Reals Lra Lia List Permutation.
From Flocq Require Import Core.
From Proofs Require Import constants binary32 summation_error.
Import ListNotations.
Open Scope R_scope.

(* One score: products q_d k_d (exact, or flushed: each is off by at most omega), summed in any order by a matrix unit
   that may truncate, multiplied by the scale in log2 units, which is held with the relative error [held], and rounded.
   The contract's section 3: its `relative` covers [growth] (contract_constants), its `flushed` the rest. *)
Section Score.
Variables (exact computed : list R) (t : bool) (m : nat) (dot scale c score held : R).
Hypothesis products : Forall2 (fun e x => Rabs (x - e) <= omega) exact computed.
Hypothesis dot_is_a_sum : sums t (fun _ => True) m computed dot.
Hypothesis scale_held : exists e, Rabs e <= held /\ c = scale * (1 + e).
Hypothesis score_rounded : Rabs (score - dot * c) <= unit_of false * Rabs (dot * c) + omega.

Let d := (length computed - 1)%nat.
Definition size (xs : list R) := total (map Rabs xs).
Definition most := (1 + unit_of t) ^ d.
Definition growth := most * (1 + held) * (1 + unit_of false) - 1.
Definition flushed := Rabs scale * (1 + held) * (1 + unit_of false) * most * (INR (length computed) + INR m) * omega + omega.

Lemma sum_close : forall es xs ys, Forall2 (fun e x => Rabs (x - e) <= omega) es xs -> Forall2 (rounded (unit_of t) d) xs ys ->
  Rabs (total ys - total es) <= (most - 1) * size es + INR (length xs) * (most * omega).
Proof.
assert (U := unit_pos t). assert (S := unit_small t). assert (W := omega_pos).
assert (M1 : 1 <= most) by (apply pow_R1_Rle; lra).
intros es xs ys P. revert ys. induction P as [|e x es xs H P IH]; intros ys F.
- inversion F. simpl. rewrite Rminus_0_r, Rabs_R0. unfold size; simpl. lra.
- destruct ys as [|z zs]; [inversion F|].
  assert (R2 : rounded (unit_of t) d x z /\ Forall2 (rounded (unit_of t) d) xs zs) by (inversion F; auto).
  destruct R2 as [Rz Fz]. unfold size, total in *. simpl length. rewrite S_INR. simpl. specialize (IH _ Fz).
  destruct Rz as [f [[F1 F2] E]]. fold most in F2.
  assert (Lo : 2 - most <= f).
  { apply Rle_trans with (2 := F1). unfold most. clear - U S. induction d as [|n IHn]. simpl; lra.
    simpl. assert (A : 1 <= (1 + unit_of t) ^ n) by (apply pow_R1_Rle; lra).
    assert (B : 0 <= (1 - unit_of t) ^ n) by (apply pow_le; lra).
    assert (C : (1 - unit_of t) ^ n <= 1) by (apply Rle_trans with (1 ^ n); [apply pow_incr; lra | rewrite pow1; lra]).
    assert (D1 : unit_of t * 1 <= unit_of t * (1 + unit_of t) ^ n) by (apply Rmult_le_compat_l; lra).
    assert (D2 : unit_of t * (1 - unit_of t) ^ n <= unit_of t * 1) by (apply Rmult_le_compat_l; lra). lra. }
  assert (T : Rabs (z - e) <= (most - 1) * Rabs e + most * omega).
  { replace (z - e) with ((f - 1) * e + f * (x - e)) by (rewrite E; ring).
    eapply Rle_trans. apply Rabs_triang. rewrite !Rabs_mult. apply Rplus_le_compat.
    - apply Rmult_le_compat_r. apply Rabs_pos. apply Rabs_le. lra.
    - apply Rmult_le_compat; auto using Rabs_pos. apply Rabs_le. lra. }
  fold (total zs) in *. fold (total es) in *.
  replace (z + total zs - (e + total es)) with ((z - e) + (total zs - total es)) by ring.
  eapply Rle_trans. apply Rabs_triang. lra.
Qed.

Theorem score_error : Rabs (score - scale * total exact) <= Rabs scale * growth * size exact + flushed.
Proof.
destruct (summation_error _ _ _ _ _ dot_is_a_sum) as [ys [th [F [E T]]]]. fold d in F, T. fold most in T.
assert (C := sum_close _ _ _ products F). destruct scale_held as [e [He Ec]].
assert (U := unit_pos t). assert (W := omega_pos). assert (Uf := unit_pos false).
assert (M1 : 1 <= most) by (apply pow_R1_Rle; lra).
assert (Ph : 0 <= held) by (apply Rle_trans with (2 := He), Rabs_pos).
assert (Sz : 0 <= size exact).
{ unfold size. clear. induction exact as [|x xs IH]; simpl. lra. assert (H := Rabs_pos x). lra. }
assert (Tz : Rabs (total exact) <= size exact).
{ unfold size. clear. induction exact as [|x xs IH]; simpl. rewrite Rabs_R0; lra. eapply Rle_trans. apply Rabs_triang. lra. }
set (rest := most * (INR (length computed) + INR m) * omega).
assert (D : Rabs (dot - total exact) <= (most - 1) * size exact + rest).
{ replace (dot - total exact) with ((total ys - total exact) + th) by (rewrite E; ring).
  eapply Rle_trans. apply Rabs_triang. unfold rest. lra. }
assert (Pr : 0 <= rest).
{ unfold rest. apply Rmult_le_pos; [apply Rmult_le_pos|]; try lra. assert (A := pos_INR (length computed)). assert (B := pos_INR m). lra. }
set (dc := dot * c).
assert (X1 : Rabs (dc - scale * total exact) <= Rabs scale * ((most * (1 + held) - 1) * size exact + (1 + held) * rest)).
{ unfold dc. rewrite Ec. replace (dot * (scale * (1 + e)) - scale * total exact)
    with (scale * ((1 + e) * (dot - total exact) + e * total exact)) by ring.
  rewrite Rabs_mult. apply Rmult_le_compat_l. apply Rabs_pos.
  eapply Rle_trans. apply Rabs_triang. rewrite !Rabs_mult. apply Rabs_le_inv in He as He'.
  assert (A1 : Rabs (1 + e) * Rabs (dot - total exact) <= (1 + held) * ((most - 1) * size exact + rest)).
  { apply Rmult_le_compat; auto using Rabs_pos. apply Rabs_le. lra. }
  assert (A2 : Rabs e * Rabs (total exact) <= held * size exact) by (apply Rmult_le_compat; auto using Rabs_pos). lra. }
assert (X2 : Rabs dc <= Rabs scale * (most * (1 + held) * size exact + (1 + held) * rest)).
{ replace dc with (scale * total exact + (dc - scale * total exact)) by ring. eapply Rle_trans. apply Rabs_triang.
  rewrite Rabs_mult. assert (B : Rabs scale * Rabs (total exact) <= Rabs scale * size exact) by (apply Rmult_le_compat_l; auto using Rabs_pos).
  lra. }
replace (score - scale * total exact) with ((score - dc) + (dc - scale * total exact)) by ring.
eapply Rle_trans. apply Rabs_triang. fold dc in score_rounded.
assert (X3 : unit_of false * Rabs dc <= unit_of false * (Rabs scale * (most * (1 + held) * size exact + (1 + held) * rest))) by (apply Rmult_le_compat_l; lra).
unfold growth, flushed. fold rest. unfold rest in *. lra.
Qed.

End Score.
