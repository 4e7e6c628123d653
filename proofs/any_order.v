(* How large a sum of n terms can become, in any order of addition: at most twice n terms' worth. *)
From Coq Require Import ZArith Reals Lra Lia List Permutation Psatz.
From Flocq Require Import Core Plus_error.
From Proofs Require Import binary32.
Import ListNotations.
Open Scope R_scope.

Definition two24 := 16777216.

Lemma INR_two24 : forall n, (Z.of_nat n <= 2 ^ 24)%Z -> INR n <= two24.
Proof. intros n H. rewrite INR_IZR_INZ. unfold two24. now apply IZR_le. Qed.

Lemma INR_above_two24 : forall n, (2 ^ 24 < Z.of_nat n)%Z -> two24 + 1 <= INR n.
Proof. intros n H. rewrite INR_IZR_INZ. unfold two24. rewrite <- plus_IZR. apply IZR_le. lia. Qed.

(* The largest value that the machine's addition can return for operands of at most these sizes: rounding
   is monotone and symmetric, so it is the nearest number to the sum of the sizes. *)
Lemma computes_size : forall t a b c, computes t (a + b) c -> Rabs c <= nearest (Rabs a + Rabs b).
Proof.
intros t a b c Hc.
assert (H : Rabs (a + b) <= Rabs a + Rabs b) by apply Rabs_triang.
assert (N : nearest (Rabs (a + b)) <= nearest (Rabs a + Rabs b)).
{ apply round_le; try typeclasses eauto. exact H. }
apply Rle_trans with (2 := N).
assert (P : 0 <= nearest (Rabs (a + b))).
{ apply round_ge_generic; try typeclasses eauto. apply fp32_0. apply Rabs_pos. }
destruct Hc as [->|[[_ ->]|[_ ->]]].
- unfold nearest. rewrite round_NE_abs by typeclasses eauto. apply Rle_refl.
- assert (A : Rabs (towards_zero (a + b)) <= towards_zero (Rabs (a + b))).
  { unfold towards_zero. rewrite round_ZR_abs by typeclasses eauto. apply Rle_refl. }
  apply Rle_trans with (1 := A).
  unfold towards_zero. rewrite round_ZR_DN by (try typeclasses eauto; apply Rabs_pos).
  unfold nearest.
  destruct (round_DN_or_UP radix2 fp32_exp ZnearestE (Rabs (a + b))) as [E|E]; rewrite E.
  + apply Rle_refl.
  + apply Rle_trans with (Rabs (a + b)).
    * apply round_DN_pt. typeclasses eauto.
    * apply round_UP_pt. typeclasses eauto.
- now rewrite Rabs_R0.
Qed.

Lemma nearest_error : forall a b, 0 <= a -> 0 <= b -> fp32 a -> fp32 b ->
  nearest (a + b) <= a + b + Rmin a b /\ nearest (a + b) <= (a + b) * (1 + / two24).
Proof.
intros a b Pa Pb Ha Hb. split.
- assert (E : Rabs (nearest (a + b) - (a + b)) <= Rmin a b).
  { apply Rmin_glb.
    - rewrite <- (Rabs_pos_eq a) at 3 by exact Pa. apply plus_error_le_l; try typeclasses eauto; assumption.
    - rewrite <- (Rabs_pos_eq b) at 3 by exact Pb. apply plus_error_le_r; try typeclasses eauto; assumption. }
  apply Rabs_le_inv in E. lra.
- assert (C : computes false (a + b) (nearest (a + b))) by now left.
  destruct (computes_sum _ _ _ _ Ha Hb C) as [E|[_ ->]].
  + rewrite (Rabs_pos_eq (a + b)) in E by lra. apply Rabs_le_inv in E.
    unfold unit_of in E. simpl in E. unfold two24. lra.
  + apply Rmult_le_pos; unfold two24; lra.
Qed.

(* At most 2**24 terms of at most one unit M sum to at most as many units: the multiples of M up to there
   are numbers of the format.  Beyond, the induction over the last addition uses that its error is at most
   the smaller operand, and at most a 2**-24th of the sum. *)
Theorem any_order_bound : forall t N e m xs s,
  (Z.of_nat N <= 2 ^ 46)%Z -> (-149 <= e)%Z ->
  sums t (fun x => Rabs x <= bpow radix2 e) m xs s -> (length xs <= N)%nat ->
  Rabs s <= INR (length xs) * bpow radix2 e /\ (Z.of_nat (length xs) <= 2 ^ 24)%Z \/
  Rabs s <= (2 * INR (length xs) - INR N / 8388608) * bpow radix2 e /\ (2 ^ 24 < Z.of_nat (length xs))%Z.
Proof.
intros t N e m xs s HN He Hs. set (M := bpow radix2 e) in *.
assert (PM : 0 < M) by apply bpow_gt_0.
assert (RN : INR N <= 70368744177664) by (rewrite INR_IZR_INZ; now apply IZR_le in HN).
assert (PN : 0 <= INR N) by apply pos_INR.
induction Hs as [x Hx Tx | m1 m2 xs ys a b c Ha IHa Hb IHb Hc | m xs a k c Hk Ha IHa Hc | m xs ys s HP Hs IHs]; intros HL.
- left. split. simpl length. now rewrite Rmult_1_l. simpl; lia.
- rewrite app_length in *.
  specialize (IHa ltac:(lia)). specialize (IHb ltac:(lia)).
  assert (La := sums_length _ _ _ _ _ Ha). assert (Lb := sums_length _ _ _ _ _ Hb).
  assert (Sa := sums_fp32 _ _ _ _ _ Ha). assert (Sb := sums_fp32 _ _ _ _ _ Hb).
  rewrite plus_INR.
  assert (Na : 1 <= INR (length xs)) by (change 1 with (INR 1); now apply le_INR).
  assert (Nb : 1 <= INR (length ys)) by (change 1 with (INR 1); now apply le_INR).
  assert (Nab : INR (length xs) + INR (length ys) <= INR N) by (rewrite <- plus_INR; now apply le_INR).
  assert (Size := computes_size _ _ _ _ Hc).
  destruct (nearest_error (Rabs a) (Rabs b) (Rabs_pos _) (Rabs_pos _)
     ltac:(now apply generic_format_abs) ltac:(now apply generic_format_abs)) as [Small Relative].
  assert (Min_a := Rmin_l (Rabs a) (Rabs b)). assert (Min_b := Rmin_r (Rabs a) (Rabs b)).
  set (na := INR (length xs)) in *. set (nb := INR (length ys)) in *.
  destruct IHa as [[IHa Ta]|[IHa Ta]]; destruct IHb as [[IHb Tb]|[IHb Tb]].
  + destruct (Z_le_gt_dec (Z.of_nat (length xs + length ys)) (2 ^ 24)) as [T|T].
    * left. split; auto. apply (computes_abs_le _ _ _ _ Hc).
      -- unfold na, nb. rewrite <- plus_INR, INR_IZR_INZ. apply fp32_dyadic; lia.
      -- eapply Rle_trans. apply Rabs_triang. lra.
    * right. split; [|lia].
      assert (big : two24 + 1 <= na + nb) by (unfold na, nb; rewrite <- plus_INR; apply INR_above_two24; lia).
      unfold two24 in big. nra.
  + right. split; [|lia]. nra.
  + right. split; [|lia]. nra.
  + right. split; [|lia].
    assert (Ba := INR_above_two24 _ Ta). assert (Bb := INR_above_two24 _ Tb). fold na in Ba. fold nb in Bb.
    unfold two24 in *.
    apply Rle_trans with (1 := Size). apply Rle_trans with (1 := Relative).
    apply Rle_trans with ((2 * na - INR N / 8388608 + (2 * nb - INR N / 8388608)) * M * (1 + / 16777216)).
    * apply Rmult_le_compat_r; lra.
    * rewrite (Rmult_comm _ (1 + / 16777216)), <- Rmult_assoc. apply Rmult_le_compat_r; lra.
- rewrite map_length in *. specialize (IHa HL).
  assert (C : Rabs c <= Rabs a).
  { apply (computes_abs_le _ _ _ _ Hc). apply generic_format_abs. exact (sums_fp32 _ _ _ _ _ Ha).
    rewrite Rabs_mult, (Rabs_pos_eq (bpow radix2 k)) by apply bpow_ge_0.
    rewrite <- (Rmult_1_r (Rabs a)) at 2. apply Rmult_le_compat_l. apply Rabs_pos. now apply bpow_le_1. }
  destruct IHa as [[I T]|[I T]]; [left|right]; split; auto; now apply Rle_trans with (1 := C).
- rewrite <- (Permutation_length HP) in *. now apply IHs.
Qed.

Corollary any_order_doubles : forall t N e m xs s,
  (Z.of_nat N <= 2 ^ 46)%Z -> (-149 <= e)%Z ->
  sums t (fun x => Rabs x <= bpow radix2 e) m xs s -> (length xs <= N)%nat ->
  Rabs s <= 2 * INR N * bpow radix2 e.
Proof.
intros t N e m xs s HN He Hs HL.
assert (P := bpow_gt_0 radix2 e). assert (L := le_INR _ _ HL). assert (Z := pos_INR (length xs)).
destruct (any_order_bound t N e m xs s HN He Hs HL) as [[B _]|[B _]]; apply Rle_trans with (1 := B);
  apply Rmult_le_compat_r; lra.
Qed.
