From Coq Require Import ZArith Reals Lra Lia List Bool.
From Flocq Require Import Core Plus_error Mult_error IEEE754.Binary IEEE754.Bits.
From Proofs Require Import constants binary32.
Import ListNotations.
Open Scope R_scope.

(* The ceiling of a number of the format is one. *)
Theorem ceiling_fp32 : forall x, fp32 x -> fp32 (IZR (Zceil x)).
Proof.
intros x Hx.
destruct (Rle_or_lt (bpow radix2 23) (Rabs x)) as [B|B].
- (* From 2**23 on every number of the format is an integer. *)
  assert (I : exists z, x = IZR z).
  { set (m := Ztrunc (scaled_mantissa radix2 fp32_exp x)). set (e := cexp radix2 fp32_exp x).
    assert (E : (0 <= e)%Z).
    { unfold e, cexp, fp32_exp, FLT_exp. assert (M := mag_ge_bpow radix2 x 24 B). lia. }
    exists (m * Zpower radix2 e)%Z. rewrite mult_IZR, IZR_Zpower by exact E. exact Hx. }
  destruct I as [z Ez]. rewrite Ez, Zceil_IZR, <- Ez. exact Hx.
- apply fp32_integer. apply Rabs_lt_inv in B. simpl in B. apply Z.abs_le. split.
  + apply le_IZR. apply Rle_trans with x. simpl. lra. apply Zceil_ub.
  + apply Zceil_glb. simpl. lra.
Qed.

(* The difference of two integers of the format, old <= new, is exact or rounds to -2**24 or less. *)
Theorem difference_of_maxima : forall old new, fp32 (IZR old) -> fp32 (IZR new) -> (old <= new)%Z ->
  nearest (IZR old - IZR new) = IZR (old - new) \/
  nearest (IZR old - IZR new) <= - bpow radix2 24 /\ (old - new < - 2 ^ 24)%Z.
Proof.
intros old new _ _ H. rewrite <- minus_IZR.
destruct (Z_le_gt_dec (- 2 ^ 24) (old - new)) as [N|F].
- left. apply round_generic. typeclasses eauto. apply fp32_integer. lia.
- right. split; [|lia]. apply round_le_generic; try typeclasses eauto.
  + apply generic_format_opp. apply generic_format_bpow. easy.
  + apply Rle_trans with (IZR (- 2 ^ 24)). apply IZR_le; lia. simpl. lra.
Qed.

(* `tile.power_of_two`: the bits (n + 127) << 23 are those of 2**n, and of 0 for n = -127, where it stops. *)
Definition factor (n : Z) : binary32 := b32_of_bits (Z.shiftl (Z.max n (-127) + 127) 23).

Definition factor_is (n : Z) : bool :=
  match factor n with
  | B754_zero _ _ s => negb s && (n =? -127)%Z
  | B754_finite _ _ s m e _ => negb s && (Zpos m =? 2 ^ 23)%Z && (e =? n - 23)%Z
  | _ => false
  end.

Definition all_factors : list Z := map (fun k => (- Z.of_nat k)%Z) (seq 0 128).

Lemma factors_checked : forallb factor_is all_factors = true.
Proof. vm_compute. reflexivity. Qed.

Theorem factor_is_a_power_of_two : forall n, (-126 <= n <= 0)%Z -> B2R 24 128 (factor n) = bpow radix2 n.
Proof.
intros n Hn. assert (C := factors_checked). rewrite forallb_forall in C.
assert (I : In n all_factors).
{ unfold all_factors. apply in_map_iff. exists (Z.to_nat (- n)). split. lia. apply in_seq. lia. }
specialize (C n I). unfold factor_is in C. destruct (factor n) as [s|s|s p H|s m e H]; try discriminate.
- apply andb_prop in C as [_ C]. apply Z.eqb_eq in C. lia.
- apply andb_prop in C as [C Ce]. apply andb_prop in C as [Cs Cm].
  apply Z.eqb_eq in Ce. apply Z.eqb_eq in Cm. apply negb_true_iff in Cs. subst s e.
  simpl. unfold F2R. cbn [Fnum Fexp]. rewrite Cm.
  change (2 ^ 23)%Z with (Zpower radix2 23). rewrite IZR_Zpower by easy. rewrite <- bpow_plus. f_equal. ring.
Qed.

Theorem factor_stops_at_zero : forall n, (n <= -127)%Z -> B2R 24 128 (factor n) = 0.
Proof.
intros n Hn. unfold factor. rewrite Z.max_r by exact Hn. vm_compute. reflexivity.
Qed.

(* Multiplying a partial sum by such a factor changes no digit, unless the product is subnormal. *)
Theorem integer_maximum_rescales_exactly : forall t x n y, fp32 x -> (-126 <= n <= 0)%Z ->
  omega <= Rabs (x * bpow radix2 n) -> computes t (x * B2R 24 128 (factor n)) y -> y = x * bpow radix2 n.
Proof.
intros t x n y Hx Hn B C. rewrite factor_is_a_power_of_two in C by exact Hn.
assert (G : fp32 (x * bpow radix2 n)).
{ apply mult_bpow_exact_FLT; auto. assert (M := mag_ge_bpow radix2 (x * bpow radix2 n) (-125) B).
  rewrite mag_mult_bpow in M. lia. intros ->. rewrite Rmult_0_l, Rabs_R0 in B. assert (P := omega_pos). lra. }
destruct C as [->|[[_ ->]|[L _]]].
- apply round_generic; auto. typeclasses eauto.
- apply round_generic; auto. typeclasses eauto.
- lra.
Qed.

(* The first running maximum is an integer of the format. *)
Theorem first_maximum : exists n : Z, FP32_MAX = IZR n /\ fp32 FP32_MAX /\ FP32_MAX = (2 - bpow radix2 (-23)) * bpow radix2 127.
Proof.
exists (FP32_MAX_m * 2 ^ FP32_MAX_e)%Z. split; [|split].
- unfold FP32_MAX. apply f_equal. vm_compute. reflexivity.
- rewrite FP32_MAX_dyadic. apply fp32_dyadic; vm_compute; easy.
- unfold FP32_MAX. simpl. lra.
Qed.
