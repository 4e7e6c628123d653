From Coq Require Import ZArith Reals Lra Lia List.
From Flocq Require Import Core.
From Proofs Require Import constants binary32 any_order summation_error clamp_keeps_the_bound attention_bound convex_bound final_division output_bound replay_never_overflows.
Import ListNotations.
Open Scope R_scope.

(* A sink is one more key, of value 0: its weight enters the denominator and nothing enters o. *)
Definition sink_key (w rho p : R) := Key w 0 rho p p 0.

Lemma exact_with_sink : forall ks w rho p, weights ks + w <> 0 ->
  exact (ks ++ [sink_key w rho p]) = sum_of (fun k => attention_bound.w k * v k) ks / (weights ks + w).
Proof.
intros ks w rho p H. unfold exact, weights, sum_of in *. rewrite !map_app, !total_app. simpl.
f_equal; ring.
Qed.

Lemma sum_and_zero : forall t m xs o, sums t (fun _ => True) m xs o -> sums t (fun _ => True) (S (m + 0)) (xs ++ [0]) o.
Proof.
intros t m xs o H. apply sums_add with o 0; auto. apply sums_term; auto. apply fp32_0.
left. rewrite Rplus_0_r. unfold nearest. rewrite round_generic; auto. typeclasses eauto. exact (sums_fp32 _ _ _ _ _ H).
Qed.

Section Sink.
Variables (ks : list key) (tl to : bool) (ml mo : nat) (before l o low high largest q e h inner : R) (ws rho_s ps : R).
Hypothesis keys_conform : forall k, In k ks -> conforming k.
Hypothesis sink_conforms : 0 < ws /\ 0 <= rho_s /\ 0 <= ps /\ fp32 ps /\
  (Rabs (ps - ws) <= rho_s * ws \/ ws <= 2 * omega /\ ps <= 2 * omega).
Hypothesis values : forall k, In k ks -> low <= v k <= high /\ Rabs (v k) <= largest.
Hypothesis zero_is_a_value : low <= 0 <= high /\ 0 <= largest.
Hypothesis values_finite : largest <= largest_bf16.
Hypothesis weights_are_a_sum : sums tl (fun _ => True) ml (map p ks) before.
Hypothesis sink_is_added : computes tl (before + ps) l.
Hypothesis o_is_a_sum : sums to (fun _ => True) mo (map x ks) o.
Hypothesis floor : SUM_FLOOR <= l.
Hypothesis reciprocal : Rabs e <= reciprocal_relative /\ q = / 2 * / l * (1 + e).
Hypothesis half : computes false (o * q) h.

Let all := ks ++ [sink_key ws rho_s ps].
Let ml' := S (ml + 0).
Let mo' := S (mo + 0).
Let first_order := numerator all tl to ml' mo' / denominator all tl ml'.
Let convex := (farthest (exact all) low high + skew all tl to * largest) * (1 + flushed_in_l all tl ml' / SUM_FLOOR)
  + (INR (length all) * flushed_per_key all tl to largest + flushed_in_o all to mo' + largest * flushed_in_l all tl ml') / SUM_FLOOR.
Hypothesis inner_is_one_of_them : (0 < denominator all tl ml' /\ first_order <= inner) \/ convex <= inner.

Lemma all_conform : forall k, In k all -> conforming k.
Proof.
intros k I. apply in_app_or in I as [I|[<-|[]]]; auto.
destruct sink_conforms as [W [Rh [P [_ C]]]]. repeat split; simpl; auto.
- destruct C as [C|[C1 C2]]; [left; split; auto; left | right; auto].
  rewrite Rminus_diag_eq by reflexivity. rewrite Rabs_R0. apply Rmult_le_pos; auto. unfold BF16_UNIT_ROUNDOFF. lra.
- rewrite Rmult_0_r, Rminus_0_r, Rabs_R0. apply Rlt_le, omega_pos.
Qed.

(* The output with a sink is within the contract's bound, the sink counted as a key of value 0. *)
Theorem sinks :
  let divided := inner + (2 * reciprocal_relative + 3 * unit_roundoff) * (Rabs (exact all) + inner) in
  Rabs (nearest_bf16 (2 * limited h) - exact all) <= divided + unit * (Rabs (exact all) + divided) + 2 * smallest_normal.
Proof.
apply (output_bound all tl to ml' mo' l o low high largest q e h inner); auto using all_conform.
- intros k I. apply in_app_or in I as [I|[<-|[]]]; auto. simpl. rewrite Rabs_R0. exact zero_is_a_value.
- unfold all. rewrite map_app. apply sums_add with before ps; auto. apply sums_term; auto. apply sink_conforms.
- unfold all. rewrite map_app. now apply sum_and_zero.
Qed.

End Sink.

(* The check sees the sink's weight: a denominator that passes is at least it. *)
Theorem sink_is_seen : forall t before ps l, 0 <= before -> fp32 ps -> omega <= ps -> computes t (before + ps) l -> ps <= l.
Proof.
intros t before ps l B F O C. assert (W := omega_pos). destruct (computes_ge t (before + ps) l ps C F ltac:(lra)) as [H|H]; auto.
rewrite Rabs_pos_eq in H; lra.
Qed.

(* In a replay the running maximum starts at the sink's ceiling: no weight, the sink's included, passes 2**(1 - BIAS), and
   the denominator stays within the limits of a checked one. *)
Theorem replayed_denominator_with_sink : forall t m ws ps before l,
  sums t (fun x => Rabs x <= bpow radix2 of_weights) m ws before -> (Z.of_nat (length ws) <= MAX_KEYS_Z)%Z ->
  Rabs ps <= bpow radix2 of_weights -> computes t (before + ps) l -> Rabs l <= LANES * LANE_LIMIT.
Proof.
intros t m ws ps before l H L P C. destruct exponents_Z as [E1 [E2 E3]].
assert (B := any_order_doubles t (Z.to_nat MAX_KEYS_Z) of_weights m ws before
  ltac:(rewrite Z2Nat.id; [exact E2 | exact E3]) E1 H ltac:(lia)).
rewrite INR_IZR_INZ, Z2Nat.id in B by exact E3.
assert (G : fp32 (bpow radix2 64)) by (apply generic_format_bpow; easy).
apply Rle_trans with (bpow radix2 64).
- apply (computes_abs_le _ _ _ _ C G). eapply Rle_trans. apply Rabs_triang.
  unfold of_weights, BIAS_Z, MAX_KEYS_Z in *. simpl in *. lra.
- unfold LANES, LANE_LIMIT. simpl. lra.
Qed.
