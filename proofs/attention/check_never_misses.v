From Coq Require Import ZArith Reals Lra Lia List Bool.
From Flocq Require Import Core IEEE754.BinarySingleNaN.
From Proofs Require Import binary32 constants.
Import ListNotations.
Open Scope R_scope.

Definition float32 := binary_float 24 128.
Global Instance float32_prec : FLX.Prec_gt_0 24.
Proof. easy. Qed.
Global Instance float32_emax : Prec_lt_emax 24 128.
Proof. easy. Qed.

Definition plus : float32 -> float32 -> float32 := Bplus mode_NE.
Definition literal (m e : Z) : float32 := binary_normalize 24 128 _ _ mode_NE m e false.

(* A machine that flushes replaces a result below the smallest normal number by zero, or does not. *)
Definition flushed (f : bool) (x : float32) : float32 :=
  if f && Bltb (Babs x) (literal 1 (-126)) then B754_zero false else x.

Inductive tree := Term (x : float32) | Add (f : bool) (a b : tree).

Fixpoint sum (t : tree) : float32 :=
  match t with Term x => x | Add f a b => flushed f (plus (sum a) (sum b)) end.

Fixpoint terms (t : tree) : list float32 :=
  match t with Term x => [x] | Add _ a b => terms a ++ terms b end.

(* What exp2 returns, of whatever argument: NaN, or a number without a sign; +inf included. *)
Definition weight (x : float32) : Prop := is_nan x = true \/ Bsign x = false.

(* LANE_LIMIT, brought to an exponent within reach of [literal_value]: a multiple of 2**104 or less. *)
Definition shift := Z.max 0 (LANE_LIMIT_e - 104).
Definition limit : float32 := literal (LANE_LIMIT_m * 2 ^ shift) (LANE_LIMIT_e - shift).
Definition passes (l : float32) : bool := Bleb l limit.

Lemma weight_nonneg : forall x, weight x -> is_finite x = true -> 0 <= B2R x.
Proof.
intros [s|s| |s m e H] [N|W] F; try discriminate; simpl in *; try lra.
subst s. apply F2R_ge_0. easy.
Qed.

Definition fits (x y : float32) := Rlt_bool (Rabs (nearest (B2R x + B2R y))) (bpow radix2 128).

Lemma plus_finite : forall x y, is_finite x = true -> is_finite y = true -> weight x -> weight y ->
  if fits x y then B2R (plus x y) = nearest (B2R x + B2R y) /\ is_finite (plus x y) = true /\ weight (plus x y)
  else plus x y = B754_infinity false.
Proof.
intros x y Fx Fy Wx Wy.
assert (Px := weight_nonneg x Wx Fx). assert (Py := weight_nonneg y Wy Fy).
assert (Sx : Bsign x = false) by (destruct Wx as [N|]; auto; destruct x; discriminate).
assert (Sy : Bsign y = false) by (destruct Wy as [N|]; auto; destruct y; discriminate).
assert (C := Bplus_correct 24 128 _ _ mode_NE x y Fx Fy).
change (Bplus mode_NE x y) with (plus x y) in C.
change (round radix2 (SpecFloat.fexp 24 128) (round_mode mode_NE) (B2R x + B2R y)) with (nearest (B2R x + B2R y)) in C.
unfold fits. destruct (Rlt_bool _ _).
- destruct C as [V [F S]]. split; [exact V | split; [exact F | right]].
  rewrite S, Sx, Sy. destruct (Rcompare_spec (B2R x + B2R y) 0); auto. exfalso; lra.
- destruct C as [V _]. rewrite Sx in V. unfold binary_overflow in V. simpl in V.
  destruct (plus x y); simpl in V; try discriminate. now inversion V.
Qed.

Lemma plus_not_finite : forall x y, weight x -> weight y -> is_finite x && is_finite y = false ->
  is_finite (plus x y) = false /\ weight (plus x y).
Proof.
intros [sx|sx| |sx mx ex Hx] [sy|sy| |sy my ey Hy] [Nx|Wx] [Ny|Wy]; simpl in *; intros F; try discriminate; subst;
  simpl; unfold weight; simpl; auto.
Qed.

Lemma literal_value : forall m e, (Z.abs m < 2 ^ 24)%Z -> (-149 <= e <= 104)%Z ->
  B2R (literal m e) = IZR m * bpow radix2 e /\ is_finite (literal m e) = true.
Proof.
intros m e Hm He.
assert (C := binary_normalize_correct 24 128 _ _ mode_NE m e false). fold (literal m e) in C.
assert (G : fp32 (F2R (Float radix2 m e))) by exact (fp32_dyadic m e ltac:(lia) ltac:(lia)).
cbv zeta in C. match type of C with context [Rlt_bool (Rabs ?r) _] =>
  replace r with (F2R (Float radix2 m e)) in C by (symmetry; apply round_generic; [typeclasses eauto | exact G]) end.
rewrite Rlt_bool_true in C.
- destruct C as [V [F _]]. now split.
- unfold F2R; simpl. rewrite Rabs_mult, <- abs_IZR, (Rabs_pos_eq (bpow radix2 e)) by apply bpow_ge_0.
  apply Rlt_le_trans with (bpow radix2 24 * bpow radix2 e).
  + apply Rmult_lt_compat_r. apply bpow_gt_0. now apply IZR_lt.
  + rewrite <- bpow_plus. change (IZR (Z.pow_pos 2 128)) with (bpow radix2 128). apply bpow_le. lia.
Qed.

Lemma limit_fits : ((Z.abs (LANE_LIMIT_m * 2 ^ shift) <? 2 ^ 24) && (-149 <=? LANE_LIMIT_e - shift) && (LANE_LIMIT_e - shift <=? 104))%Z = true.
Proof. vm_compute. reflexivity. Qed.

Lemma limit_value : B2R limit = LANE_LIMIT /\ is_finite limit = true.
Proof.
assert (S : (0 <= shift)%Z) by (unfold shift; lia).
assert (H : B2R limit = IZR (LANE_LIMIT_m * 2 ^ shift) * bpow radix2 (LANE_LIMIT_e - shift) /\ is_finite limit = true).
{ assert (L := limit_fits). apply andb_prop in L as [L L3]. apply andb_prop in L as [L1 L2].
  apply literal_value. now apply Z.ltb_lt. split; now apply Z.leb_le. }
rewrite LANE_LIMIT_dyadic. destruct H as [H F]. split; auto. rewrite H.
change 2%Z with (radix_val radix2). rewrite mult_IZR, IZR_Zpower by exact S.
rewrite Rmult_assoc, <- bpow_plus. now replace (shift + (LANE_LIMIT_e - shift))%Z with LANE_LIMIT_e by ring.
Qed.

Lemma omega_value : B2R (literal 1 (-126)) = omega.
Proof. rewrite (proj1 (literal_value 1 (-126) ltac:(easy) ltac:(easy))). unfold omega. ring. Qed.

Lemma omega_below_limit : omega <= LANE_LIMIT.
Proof. unfold omega, LANE_LIMIT. simpl. lra. Qed.

Lemma flushed_cases : forall f x, weight x ->
  flushed f x = x \/ (flushed f x = B754_zero false /\ is_finite x = true /\ B2R x < omega).
Proof.
intros f x W. unfold flushed. destruct (f && _) eqn:E; auto. right. split; auto.
apply andb_prop in E as [_ E].
destruct (is_finite x) eqn:F.
- split; auto. rewrite Bltb_correct in E.
  + revert E. rewrite B2R_Babs, omega_value. case Rlt_bool_spec; [|discriminate]. intros L _.
    now rewrite Rabs_pos_eq in L by now apply weight_nonneg.
  + now rewrite is_finite_Babs.
  + apply literal_value; easy.
- exfalso. destruct x as [s|s| |s m e H]; try discriminate; vm_compute in E; discriminate.
Qed.

Lemma sum_weight : forall t, Forall weight (terms t) -> weight (sum t).
Proof.
induction t as [x|f a IHa b IHb]; simpl; intros H.
- now inversion H.
- apply Forall_app in H as [Ha Hb]. specialize (IHa Ha). specialize (IHb Hb).
  assert (W : weight (plus (sum a) (sum b))).
  { destruct (is_finite (sum a) && is_finite (sum b)) eqn:F.
    - apply andb_prop in F as [Fa Fb]. assert (P := plus_finite _ _ Fa Fb IHa IHb).
      destruct fits. apply P. rewrite P. now right.
    - now apply plus_not_finite. }
  destruct (flushed_cases f _ W) as [-> | [-> _]]; auto. now right.
Qed.

(* A finite sum has finite terms, none larger than it (or than what is flushed). *)
Lemma sum_dominates : forall t, Forall weight (terms t) -> is_finite (sum t) = true ->
  Forall (fun x => is_finite x = true /\ B2R x <= Rmax (B2R (sum t)) omega) (terms t).
Proof.
induction t as [x|f a IHa b IHb]; simpl; intros H F.
- constructor; auto. split; auto. apply Rmax_l.
- apply Forall_app in H as [Ha Hb].
  assert (Wa := sum_weight a Ha). assert (Wb := sum_weight b Hb).
  assert (W : weight (plus (sum a) (sum b))).
  { destruct (is_finite (sum a) && is_finite (sum b)) eqn:E.
    - apply andb_prop in E as [Ea Eb]. assert (P := plus_finite _ _ Ea Eb Wa Wb).
      destruct fits. apply P. rewrite P. now right.
    - now apply plus_not_finite. }
  assert (Fp : is_finite (plus (sum a) (sum b)) = true) by (destruct (flushed_cases f _ W) as [E|[_ [E _]]]; [now rewrite E in F | exact E]).
  destruct (is_finite (sum a) && is_finite (sum b)) eqn:E; [| now rewrite (proj1 (plus_not_finite _ _ Wa Wb E)) in Fp].
  apply andb_prop in E as [Ea Eb]. specialize (IHa Ha Ea). specialize (IHb Hb Eb).
  assert (P := plus_finite _ _ Ea Eb Wa Wb).
  destruct fits; [| now rewrite P in Fp]. destruct P as [V _].
  assert (Na := weight_nonneg _ Wa Ea). assert (Nb := weight_nonneg _ Wb Eb).
  assert (Up : B2R (sum a) <= B2R (plus (sum a) (sum b)) /\ B2R (sum b) <= B2R (plus (sum a) (sum b))).
  { rewrite V. split; apply round_ge_generic; try typeclasses eauto; try (apply generic_format_B2R); lra. }
  assert (M : Rmax (B2R (plus (sum a) (sum b))) omega <= Rmax (B2R (flushed f (plus (sum a) (sum b)))) omega).
  { destruct (flushed_cases f _ W) as [E | [E [_ L]]]; rewrite E. apply Rle_refl.
    simpl. apply Rmax_lub; [|apply Rmax_r]. apply Rle_trans with omega; [lra | apply Rmax_r]. }
  apply Forall_app. split.
  + apply Forall_impl with (2 := IHa). intros x [Fx Lx]. split; auto.
    apply Rle_trans with (1 := Lx). apply Rle_trans with (2 := M). apply Rle_max_compat_r, Up.
  + apply Forall_impl with (2 := IHb). intros x [Fx Lx]. split; auto.
    apply Rle_trans with (1 := Lx). apply Rle_trans with (2 := M). apply Rle_max_compat_r, Up.
Qed.

(* NaN and infinity fail it. *)
Theorem check_fails_nan : passes B754_nan = false /\ passes (B754_infinity false) = false.
Proof. split; vm_compute; reflexivity. Qed.

(* The check l <= LANE_LIMIT on what IEEE additions in any order made of a lane's weights, whichever of
   them are flushed, infinite or NaN: when it passes, every weight is finite and at most LANE_LIMIT. *)
Theorem check_never_misses : forall t, Forall weight (terms t) -> passes (sum t) = true ->
  Forall (fun x => is_finite x = true /\ B2R x <= LANE_LIMIT) (terms t).
Proof.
intros t H P. destruct limit_value as [LV LF].
assert (W := sum_weight t H).
assert (F : is_finite (sum t) = true).
{ clear H. revert P W. destruct (sum t) as [s|s| |s m e He]; intros P W; try reflexivity.
  - destruct W as [W|W]; simpl in W; try discriminate W. subst s. now rewrite (proj2 check_fails_nan) in P.
  - now rewrite (proj1 check_fails_nan) in P. }
unfold passes in P. rewrite Bleb_correct in P by assumption. revert P. case Rle_bool_spec; [|discriminate]. rewrite LV. intros L _.
apply Forall_impl with (2 := sum_dominates t H F). intros x [Fx Lx]. split; auto.
apply Rle_trans with (1 := Lx). apply Rmax_lub; auto. apply omega_below_limit.
Qed.

(* Every value that the sum takes on the way. *)
Fixpoint partial_sums (t : tree) : list float32 :=
  sum t :: match t with Term _ => [] | Add _ a b => partial_sums a ++ partial_sums b end.

(* An overflow stays visible: if the sum (of o: terms of either sign) is finite at the end, it always was, and no term
   was infinite or NaN.  So o need be looked at only once. *)
Theorem finite_sum_never_overflowed : forall t, is_finite (sum t) = true ->
  Forall (fun s => is_finite s = true) (partial_sums t).
Proof.
assert (Unflushed : forall f x, is_finite (flushed f x) = true -> is_finite x = true).
{ intros f x H. unfold flushed in H. destruct (f && _) eqn:E; auto. apply andb_prop in E as [_ E].
  destruct x as [s|s| |s m e B]; auto; exfalso; vm_compute in E; discriminate. }
assert (Sticky : forall x y, is_finite (plus x y) = true -> is_finite x = true /\ is_finite y = true).
{ intros [sx|sx| |sx mx ex Hx] [sy|sy| |sy my ey Hy] H; simpl in *; auto; try discriminate;
    try (destruct sx; discriminate); try (destruct sy; discriminate); destruct sx, sy; discriminate. }
induction t as [x|f a IHa b IHb]; intros H; cbn [partial_sums].
- now constructor.
- destruct (Sticky _ _ (Unflushed f _ H)) as [Fa Fb]. constructor; [exact H|].
  apply Forall_app. split; auto.
Qed.

(* So a weight 2**t (1 + e) that passes has an exponent inside the range in which exp2's envelope is stated. *)
Theorem check_bounds_exponents : forall t e p, Rabs e <= exp2_relative -> p = Rpower 2 t * (1 + e) ->
  p <= LANE_LIMIT -> t < contract_LARGEST_EXPONENT.
Proof.
intros t e p He -> Hp. apply Rnot_le_lt. intros Ht.
change contract_LARGEST_EXPONENT with (IZR contract_LARGEST_EXPONENT_Z) in Ht.
assert (E : Rpower 2 (IZR contract_LARGEST_EXPONENT_Z) <= Rpower 2 t) by (apply Rle_Rpower; lra).
assert (R : Rpower 2 (IZR contract_LARGEST_EXPONENT_Z) = bpow radix2 contract_LARGEST_EXPONENT_Z).
{ rewrite bpow_exp. unfold Rpower. simpl. now rewrite Rmult_comm. }
rewrite R in E. apply Rabs_le_inv in He.
assert (B : LANE_LIMIT < bpow radix2 contract_LARGEST_EXPONENT_Z * (1 - exp2_relative)).
{ unfold LANE_LIMIT, contract_LARGEST_EXPONENT_Z, exp2_relative. simpl. lra. }
assert (P : 0 < 1 - exp2_relative) by (unfold exp2_relative; lra).
apply Rlt_not_le in B. apply B. apply Rle_trans with (2 := Hp).
apply Rmult_le_compat; try lra. apply bpow_ge_0.
Qed.
