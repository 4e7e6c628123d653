(* What a sum in any order errs by, term by term. *)
From Coq Require Import ZArith Reals Lra Lia List Permutation Psatz.
From Flocq Require Import Core Plus_error Mult_error.
From Proofs Require Import binary32.
Import ListNotations.
Open Scope R_scope.

Definition total (xs : list R) : R := fold_right Rplus 0 xs.

Lemma total_app : forall xs ys, total (xs ++ ys) = total xs + total ys.
Proof. intros xs ys. induction xs as [|x xs IH]; simpl. ring. rewrite IH. ring. Qed.

Lemma total_scaled : forall k xs, total (map (fun x => x * k) xs) = total xs * k.
Proof. intros k xs. induction xs as [|x xs IH]; simpl. ring. rewrite IH. ring. Qed.

Lemma total_permutation : forall xs ys, Permutation xs ys -> total xs = total ys.
Proof. intros xs ys H. induction H; simpl; lra. Qed.

(* y is x after at most n roundings of unit u. *)
Definition rounded (u : R) (n : nat) (x y : R) : Prop :=
  exists f, (1 - u) ^ n <= f <= (1 + u) ^ n /\ y = x * f.

Lemma power_grows : forall u n m, 0 <= u -> (n <= m)%nat -> (1 + u) ^ n <= (1 + u) ^ m.
Proof. intros u n m Hu H. apply Rle_pow; [lra | exact H]. Qed.

Lemma power_shrinks : forall u n m, 0 <= u <= 1 -> (n <= m)%nat -> (1 - u) ^ m <= (1 - u) ^ n.
Proof.
intros u n m Hu H. replace m with (n + (m - n))%nat by lia. rewrite pow_add.
assert (A : 0 <= (1 - u) ^ n) by (apply pow_le; lra).
assert (B : (1 - u) ^ (m - n) <= 1) by (apply Rle_trans with (1 ^ (m - n)); [apply pow_incr; lra | rewrite pow1; lra]).
apply Rle_trans with ((1 - u) ^ n * 1); [now apply Rmult_le_compat_l | lra].
Qed.

Lemma rounded_more : forall u n m x y, 0 <= u <= 1 -> (n <= m)%nat -> rounded u n x y -> rounded u m x y.
Proof.
intros u n m x y Hu H [f [[F1 F2] ->]]. exists f. repeat split.
- apply Rle_trans with (2 := F1). now apply power_shrinks.
- apply Rle_trans with (1 := F2). apply power_grows; [apply Hu | exact H].
Qed.

Lemma rounded_once_more : forall u n x y d, 0 <= u <= 1 -> Rabs d <= u -> rounded u n x y ->
  rounded u (S n) x (y * (1 + d)).
Proof.
intros u n x y d Hu Hd [f [[F1 F2] ->]]. exists (f * (1 + d)). apply Rabs_le_inv in Hd.
assert (P : 0 <= (1 - u) ^ n) by (apply pow_le; lra).
repeat split; [| | ring]; simpl; rewrite (Rmult_comm _ (_ ^ n)); apply Rmult_le_compat; lra.
Qed.

Lemma rescaling_error : forall t a k c, fp32 a -> computes t (a * bpow radix2 k) c ->
  Rabs (c - a * bpow radix2 k) <= omega.
Proof.
intros t a k c Ha Hc. assert (W := omega_pos).
destruct (Rle_or_lt omega (Rabs (a * bpow radix2 k))) as [B|B].
- assert (G : fp32 (a * bpow radix2 k)).
  { apply mult_bpow_exact_FLT; auto. assert (M := mag_ge_bpow radix2 (a * bpow radix2 k) (-125) B).
    rewrite mag_mult_bpow in M. lia. intros ->. rewrite Rmult_0_l, Rabs_R0 in B. lra. }
  assert (E : c = a * bpow radix2 k).
  { destruct Hc as [->|[[_ ->]|[L _]]]; [| |lra]; apply round_generic; auto; typeclasses eauto. }
  rewrite E, Rminus_diag_eq by reflexivity. rewrite Rabs_R0. lra.
- assert (O : fp32 omega) by (apply generic_format_bpow; easy).
  set (x := a * bpow radix2 k) in *. apply Rabs_lt_inv in B.
  destruct (Rle_or_lt 0 x) as [P|N].
  + assert (C0 := computes_nonneg _ _ _ Hc P).
    assert (C1 := computes_abs_le _ _ _ omega Hc O ltac:(apply Rabs_le; lra)). apply Rabs_le_inv in C1.
    apply Rabs_le. lra.
  + assert (C0 : c <= 0).
    { destruct Hc as [->|[[_ ->]|[_ ->]]]; try lra; apply round_le_generic; try typeclasses eauto; try apply fp32_0; lra. }
    assert (C1 := computes_abs_le _ _ _ omega Hc O ltac:(apply Rabs_le; lra)). apply Rabs_le_inv in C1.
    apply Rabs_le. lra.
Qed.

Lemma relative_form : forall u z c, 0 <= u -> Rabs (c - z) <= u * Rabs z -> exists d, Rabs d <= u /\ c = z * (1 + d).
Proof.
intros u z c Hu H. destruct (Req_dec z 0) as [->|N].
- exists 0. rewrite Rabs_R0. split. exact Hu. rewrite Rabs_R0, Rmult_0_r in H.
  assert (A := Rabs_pos (c - 0)). assert (Z : c - 0 = 0) by (destruct (Req_dec (c - 0) 0); auto; apply Rabs_no_R0 in H0; lra). lra.
- exists ((c - z) / z). split; [| field; exact N].
  unfold Rdiv. rewrite Rabs_mult, Rabs_inv.
  apply Rmult_le_reg_r with (Rabs z). now apply Rabs_pos_lt.
  rewrite Rmult_assoc, Rinv_l, Rmult_1_r by (apply Rgt_not_eq, Rabs_pos_lt, N). exact H.
Qed.

Lemma Forall2_scaled : forall (P Q : R -> R -> Prop) k xs ys,
  (forall x y, P x y -> Q x (y * k)) -> Forall2 P xs ys -> Forall2 Q xs (map (fun y => y * k) ys).
Proof. intros P Q k xs ys H F. induction F; simpl; constructor; auto. Qed.

Lemma Forall2_weaken : forall (P Q : R -> R -> Prop) xs ys,
  (forall x y, P x y -> Q x y) -> Forall2 P xs ys -> Forall2 Q xs ys.
Proof. intros P Q xs ys H F. induction F; constructor; auto. Qed.

Lemma Forall2_rescaled : forall u n k xs ys, Forall2 (rounded u n) xs ys ->
  Forall2 (rounded u n) (map (fun x => x * k) xs) (map (fun y => y * k) ys).
Proof.
intros u n k xs ys F. induction F as [|x y l l' [f [B ->]] F IH]; simpl; constructor; auto.
exists f. split; [exact B | ring].
Qed.

(* Each of n terms passes through at most n - 1 additions that round; each flush adds less than omega, which
   later roundings may magnify. *)
Theorem summation_error : forall t term m xs s, sums t term m xs s ->
  exists ys theta, Forall2 (rounded (unit_of t) (length xs - 1)) xs ys /\ s = total ys + theta /\
    Rabs theta <= INR m * omega * (1 + unit_of t) ^ (length xs - 1).
Proof.
intros t term m xs s H. set (u := unit_of t).
assert (U : 0 <= u <= 1) by (split; [apply Rlt_le, unit_pos | assert (S := unit_small t); unfold u; lra]).
assert (W := omega_pos).
induction H as [x Hx Tx | m1 m2 xs ys a b c Ha IHa Hb IHb Hc | m xs a k c Hk Ha IHa Hc | m xs ys s HP Hs IHs].
- exists [x], 0. repeat split.
  + constructor; [|constructor]. exists 1. simpl. lra.
  + simpl. ring.
  + rewrite Rabs_R0. simpl. lra.
- destruct IHa as [ya [ta [Fa [Ea Ta]]]]. destruct IHb as [yb [tb [Fb [Eb Tb]]]].
  assert (La := sums_length _ _ _ _ _ Ha). assert (Lb := sums_length _ _ _ _ _ Hb).
  assert (Sa := sums_fp32 _ _ _ _ _ Ha). assert (Sb := sums_fp32 _ _ _ _ _ Hb).
  rewrite app_length.
  set (na := (length xs - 1)%nat) in *. set (nb := (length ys - 1)%nat) in *.
  replace (length xs + length ys - 1)%nat with (S (na + nb)) by (unfold na, nb; lia).
  assert (Ga : (1 + u) ^ na <= (1 + u) ^ (na + nb)) by (apply power_grows; [apply U | lia]).
  assert (Gb : (1 + u) ^ nb <= (1 + u) ^ (na + nb)) by (apply power_grows; [apply U | lia]).
  assert (G1 : 1 <= (1 + u) ^ (na + nb)) by (apply pow_R1_Rle; lra).
  assert (M1 : 0 <= INR m1 * omega) by (apply Rmult_le_pos; [apply pos_INR | lra]).
  assert (M2 : 0 <= INR m2 * omega) by (apply Rmult_le_pos; [apply pos_INR | lra]).
  assert (T : Rabs ta + Rabs tb <= (INR m1 + INR m2) * omega * (1 + u) ^ (na + nb)).
  { apply Rle_trans with (INR m1 * omega * (1 + u) ^ (na + nb) + INR m2 * omega * (1 + u) ^ (na + nb)); [|lra].
    apply Rplus_le_compat; [apply Rle_trans with (1 := Ta) | apply Rle_trans with (1 := Tb)]; apply Rmult_le_compat_l; assumption. }
  rewrite S_INR, plus_INR. set (G := (1 + u) ^ (na + nb)) in *.
  assert (GS : (1 + u) ^ S (na + nb) = (1 + u) * G) by reflexivity.
  destruct (computes_sum _ _ _ _ Sa Sb Hc) as [R|[L ->]].
  + destruct (relative_form u (a + b) c (proj1 U) R) as [d [D ->]].
    exists (map (fun y => y * (1 + d)) (ya ++ yb)), ((ta + tb) * (1 + d)). split; [|split].
    * rewrite map_app. apply Forall2_app.
      -- apply Forall2_scaled with (2 := Fa). intros x y Q. apply rounded_more with (S na); auto; [lia|].
         now apply rounded_once_more.
      -- apply Forall2_scaled with (2 := Fb). intros x y Q. apply rounded_more with (S nb); auto; [lia|].
         now apply rounded_once_more.
    * rewrite total_scaled, total_app, Ea, Eb. ring.
    * rewrite Rabs_mult. apply Rabs_le_inv in D.
      assert (A1 : Rabs (1 + d) <= 1 + u) by (apply Rabs_le; lra).
      assert (A2 : Rabs (ta + tb) <= (INR m1 + INR m2) * omega * G) by (apply Rle_trans with (2 := T); apply Rabs_triang).
      rewrite GS. apply Rle_trans with ((INR m1 + INR m2) * omega * G * (1 + u)).
      -- apply Rmult_le_compat; auto using Rabs_pos.
      -- rewrite (Rmult_comm (1 + u)), <- Rmult_assoc. apply Rmult_le_compat_r. lra.
         apply Rmult_le_compat_r; lra.
  + exists (ya ++ yb), (ta + tb - (a + b)). split; [|split].
    * apply Forall2_app; [apply Forall2_weaken with (2 := Fa) | apply Forall2_weaken with (2 := Fb)];
        intros x y Q; revert Q; apply rounded_more; auto; lia.
    * rewrite total_app, Ea, Eb. ring.
    * assert (A : Rabs (ta + tb - (a + b)) <= Rabs ta + Rabs tb + Rabs (a + b)).
      { unfold Rminus. eapply Rle_trans. apply Rabs_triang. rewrite Rabs_Ropp. apply Rplus_le_compat_r, Rabs_triang. }
      rewrite GS.
      apply Rle_trans with ((INR m1 + INR m2) * omega * G + omega * G).
      -- assert (omega * 1 <= omega * G) by (apply Rmult_le_compat_l; lra). lra.
      -- assert (X : 0 <= ((INR m1 + INR m2) * omega + omega) * G) by (apply Rmult_le_pos; lra).
         assert (Y : 0 <= u * (((INR m1 + INR m2) * omega + omega) * G)) by (apply Rmult_le_pos; [apply U | exact X]).
         lra.
- destruct IHa as [ya [ta [Fa [Ea Ta]]]]. assert (Sa := sums_fp32 _ _ _ _ _ Ha). rewrite map_length.
  assert (E := rescaling_error _ _ _ _ Sa Hc).
  exists (map (fun y => y * bpow radix2 k) ya), (ta * bpow radix2 k + (c - a * bpow radix2 k)). split; [|split].
  + now apply Forall2_rescaled.
  + rewrite total_scaled, Ea. ring.
  + eapply Rle_trans. apply Rabs_triang. rewrite Rabs_mult, (Rabs_pos_eq (bpow radix2 k)) by apply bpow_ge_0.
    assert (K := bpow_le_1 k Hk). assert (K0 := bpow_ge_0 radix2 k).
    assert (G1 : 1 <= (1 + u) ^ (length xs - 1)) by (apply pow_R1_Rle; lra).
    rewrite S_INR.
    assert (A : Rabs ta * bpow radix2 k <= Rabs ta * 1) by (apply Rmult_le_compat_l; [apply Rabs_pos | exact K]).
    assert (B : omega * 1 <= omega * (1 + u) ^ (length xs - 1)) by (apply Rmult_le_compat_l; lra). lra.
- destruct IHs as [zs [th [F [E T]]]]. rewrite <- (Permutation_length HP).
  destruct (Permutation_Forall2 HP F) as [zs' [HP' F']].
  exists zs', th. split; auto. split; auto. now rewrite <- (total_permutation _ _ HP').
Qed.
