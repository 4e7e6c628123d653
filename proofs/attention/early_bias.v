From Coq Require Import ZArith Reals Lra Lia List Bool.
From Flocq Require Import Core IEEE754.Binary.
From Proofs Require Import constants binary32 any_order integer_maximum_rescales_exactly floor_is_reached.
Import ListNotations.
Open Scope R_scope.

(* The rescaling softmax that a caller asks for subtracts ceil(maximum) + BIAS at once, a replay BIAS afterwards.
   The early shift a = fl(m + BIAS), m an integer of the format: *)
Definition early (m : Z) := nearest (IZR m + BIAS).

(* it is an integer too, at or above the maximum, so that every exponent is at most 0, ... *)
Theorem early_shift_is_an_integer : forall m, fp32 (IZR m) -> exists a : Z, early m = IZR a /\ fp32 (IZR a) /\ (m <= a)%Z.
Proof.
intros m Hm. assert (B := bias_Z). unfold early. change BIAS with (IZR BIAS_Z). rewrite <- plus_IZR.
set (x := IZR (m + BIAS_Z)). assert (N := nearest_fp32 x).
assert (I : exists a, nearest x = IZR a).
{ destruct (Z_le_gt_dec (Z.abs (m + BIAS_Z)) (2 ^ 24)) as [S|L].
  - exists (m + BIAS_Z)%Z. apply round_generic. typeclasses eauto. now apply fp32_integer.
  - assert (Bx : bpow radix2 24 <= Rabs x).
    { unfold x. rewrite <- abs_IZR. change (bpow radix2 24) with (IZR (2 ^ 24)). apply IZR_le. lia. }
    assert (By : bpow radix2 24 <= Rabs (nearest x)).
    { apply abs_round_ge_generic; try typeclasses eauto; auto. apply generic_format_bpow. easy. }
    set (y := nearest x) in *. set (mant := Ztrunc (scaled_mantissa radix2 fp32_exp y)). set (e := cexp radix2 fp32_exp y).
    assert (E : (0 <= e)%Z).
    { unfold e, cexp, fp32_exp, FLT_exp. assert (M := mag_ge_bpow radix2 y 25 By). lia. }
    exists (mant * Zpower radix2 e)%Z. rewrite mult_IZR, IZR_Zpower by exact E. exact N. }
destruct I as [a Ea]. exists a. rewrite <- Ea. repeat split; auto.
apply le_IZR. rewrite <- Ea. apply round_ge_generic; try typeclasses eauto; auto. unfold x. apply IZR_le. lia.
Qed.

(* ... it is m + BIAS exactly wherever that is at most 2**24, where a replay's exponents are the same up to rounding, ... *)
Theorem early_is_late : forall m, (Z.abs m + BIAS_Z <= 2 ^ 24)%Z -> early m = IZR (m + BIAS_Z).
Proof.
intros m H. assert (B := bias_Z). unfold early. change BIAS with (IZR BIAS_Z). rewrite <- plus_IZR.
apply round_generic. typeclasses eauto. apply fp32_integer. lia.
Qed.

(* ... and never falls when the maximum grows. *)
Theorem early_shift_grows : forall m m', (m <= m')%Z -> early m <= early m'.
Proof. intros m m' H. apply round_le; try typeclasses eauto. apply IZR_le in H. lra. Qed.

(* A weight against it is at most that of exponent 0, however the bias was rounded. *)
Theorem early_weight_is_small : forall sc m, fp32 sc -> sc <= IZR m -> fp32 (IZR m) -> nearest (sc - early m) <= 0.
Proof.
intros sc m _ H Hm. destruct (early_shift_is_an_integer m Hm) as [a [-> [_ L]]]. apply IZR_le in L.
apply round_le_generic; try typeclasses eauto. apply fp32_0. lra.
Qed.

(* So the denominator is finite and below the limit of a checked one, whatever was lost of the bias: what can go wrong is
   an o that overflows or a sum below the floor, and both are looked at. *)
Theorem early_denominator : forall t m ws l, sums t (fun x => Rabs x <= bpow radix2 1) m ws l ->
  (Z.of_nat (length ws) <= MAX_KEYS_Z)%Z -> Rabs l <= LANES * LANE_LIMIT.
Proof.
intros t m ws l H L.
assert (E : ((MAX_KEYS_Z <=? 2 ^ 46) && (0 <=? MAX_KEYS_Z))%Z = true) by (vm_compute; reflexivity).
apply andb_prop in E as [E1 E2]. apply Z.leb_le in E1. apply Z.leb_le in E2.
assert (B := any_order_doubles t (Z.to_nat MAX_KEYS_Z) 1 m ws l ltac:(rewrite Z2Nat.id; assumption) ltac:(lia) H ltac:(lia)).
apply Rle_trans with (1 := B). rewrite INR_IZR_INZ, Z2Nat.id by exact E2.
unfold LANES, LANE_LIMIT, MAX_KEYS_Z. simpl. lra.
Qed.

(* Going from an earlier shift to a later one multiplies by 2**(old - new) exactly, or by 0 where that is below 2**-126:
   shifts are integers of the format, bias included, so that [recovery_is_exact] holds of them as of a replay's maxima. *)
Theorem early_bias : forall m m', fp32 (IZR m) -> fp32 (IZR m') -> (m <= m')%Z ->
  exists a a' : Z, early m = IZR a /\ early m' = IZR a' /\ (a <= a')%Z /\
    (nearest (early m - early m') = IZR (a - a') \/ nearest (early m - early m') <= - bpow radix2 24 /\ (a - a' < - 2 ^ 24)%Z) /\
    ((-126 <= a - a')%Z -> B2R 24 128 (factor (a - a')) = bpow radix2 (a - a')) /\
    ((a - a' <= -127)%Z -> B2R 24 128 (factor (a - a')) = 0).
Proof.
intros m m' Hm Hm' H.
destruct (early_shift_is_an_integer m Hm) as [a [Ea [Fa _]]]. destruct (early_shift_is_an_integer m' Hm') as [a' [Ea' [Fa' _]]].
assert (L : (a <= a')%Z) by (apply le_IZR; rewrite <- Ea, <- Ea'; now apply early_shift_grows).
exists a, a'. repeat split; auto.
- rewrite Ea, Ea'. now apply difference_of_maxima.
- intros N. apply factor_is_a_power_of_two. lia.
- apply factor_stops_at_zero.
Qed.
