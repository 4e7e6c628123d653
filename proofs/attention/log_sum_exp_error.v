From Coq Require Import ZArith Reals Lra Lia List.
From Flocq Require Import Core.
From Proofs Require Import constants binary32 summation_error attention_bound.
Open Scope R_scope.

Lemma log_of_relative : forall x r, Rabs x <= r -> r < 1 -> Rabs (ln (1 + x)) <= - ln (1 - r).
Proof.
intros x r Hx Hr. apply Rabs_le_inv in Hx.
assert (P : 0 < (1 - r)) by lra.
assert (Le : forall a b, 0 < a -> a <= b -> ln a <= ln b).
{ intros a b Ha [L| ->]; [apply Rlt_le, ln_increasing; assumption | lra]. }
assert (Lo : ln (1 - r) <= ln (1 + x)) by (apply Le; lra).
assert (Hi : ln (1 + x) <= - ln (1 - r)).
{ rewrite <- ln_Rinv by exact P. apply Le. lra.
  apply Rmult_le_reg_r with (1 - r). exact P. rewrite Rinv_l by lra.
  assert (S : 0 <= r * r) by apply Rle_0_sqr. nra. }
apply Rabs_le. lra.
Qed.

(* The logarithm of a computed denominator, for the contract's section 7: within -ln (1 - beta') of that of the exact
   one, beta' the relative error that attention_bound.v allows, as long as it is below 1. *)
Theorem log_sum_exp_error : forall ks t m l, (forall k, In k ks -> conforming k) ->
  sums t (fun _ => True) m (List.map p ks) l ->
  let beta' := (sum_of (fun k => w k * beta ks t k) ks + flushed_l ks t m) / weights ks in
  beta' < 1 -> 0 < l /\ Rabs (ln l - ln (weights ks)) <= - ln (1 - beta').
Proof.
intros ks t m l K S b Hb.
assert (N : ks <> nil) by exact (some_keys ks t m l S).
assert (W : 0 < weights ks) by (apply sum_of_pos; [exact N | intros k I; apply K, I]).
assert (E := error_of_l ks t m l K S).
assert (B : Rabs (l / weights ks - 1) <= b).
{ replace (l / weights ks - 1) with ((l - weights ks) / weights ks) by (field; lra).
  unfold Rdiv. rewrite Rabs_mult, Rabs_inv, (Rabs_pos_eq (weights ks)) by lra.
  apply Rmult_le_compat_r. apply Rlt_le, Rinv_0_lt_compat, W. exact E. }
assert (R := log_of_relative _ _ B Hb). apply Rabs_le_inv in B.
assert (Q : 0 < l / weights ks) by lra.
assert (L : 0 < l).
{ replace l with (l / weights ks * weights ks) by (field; lra). now apply Rmult_lt_0_compat. }
split; auto. replace (1 + (l / weights ks - 1)) with (l * / weights ks) in R by (unfold Rdiv; ring).
rewrite ln_mult, ln_Rinv in R; auto. now apply Rinv_0_lt_compat.
Qed.
