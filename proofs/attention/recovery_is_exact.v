From Coq Require Import ZArith Reals Lra Lia List Permutation.
From Flocq Require Import Core.
From Proofs Require Import binary32.
Import ListNotations.
Open Scope R_scope.

(* The rescaling softmax, fragment by fragment.  [replayed fragments M xs s]: after the fragments, each with the
   maximum that it was computed against and its terms, the maximum is M and the sum (of l, or of one component of
   o) is s; xs are all terms in the frame of M.  The maximum never falls; what was summed is multiplied by
   2**(old - new), and by 0 where that is below 2**-126.  A saved state to go on from is a first fragment.  A fragment's
   own sum takes fewer additions than it has terms. *)
Inductive replayed (t : bool) (term : R -> Prop) : list (Z * list R) -> Z -> list R -> R -> Prop :=
| replayed_first : forall M m ys s, (m < length ys)%nat -> sums t term m ys s -> replayed t term [(M, ys)] M ys s
| replayed_next : forall fragments M M' m xs ys old s scaled new,
    replayed t term fragments M xs old -> (M <= M')%Z -> (m < length ys)%nat -> sums t term m ys s ->
    computes t (old * bpow radix2 (M - M')) scaled -> computes t (scaled + s) new ->
    replayed t term (fragments ++ [(M', ys)]) M' (map (fun x => x * bpow radix2 (M - M')) xs ++ ys) new
| replayed_dropped : forall fragments M M' m xs ys old s new,
    replayed t term fragments M xs old -> (M - M' < -126)%Z -> (m < length ys)%nat -> sums t term m ys s ->
    computes t (0 + s) new ->
    replayed t term (fragments ++ [(M', ys)]) M' (map (fun _ => 0) xs ++ ys) new.

Lemma zeros_sum : forall t (term : R -> Prop) (xs : list R), term 0 -> xs <> [] ->
  exists m, (m < length xs)%nat /\ sums t term m (map (fun _ => 0) xs) 0.
Proof.
intros t term xs T N. induction xs as [|x xs IH]; [easy|]. destruct xs as [|y ys].
- exists 0%nat. simpl. split. lia. apply sums_term; auto. apply fp32_0.
- destruct IH as [m [L H]]; [easy|]. exists (S (0 + m)). split. simpl in *; lia. change (map (fun _ => 0) (x :: y :: ys)) with ([0] ++ map (fun _ : R => 0) (y :: ys)).
  apply sums_add with 0 0; auto. apply sums_term; auto. apply fp32_0.
  left. rewrite Rplus_0_l. unfold nearest. now rewrite round_0 by typeclasses eauto.
Qed.

(* So a replay is a sum of its terms in some order, rescaled on the way: every theorem about [sums] holds for it,
   attention_bound and convex_bound among them, from a saved state or for the whole row.  It takes fewer than two
   operations per term: an addition, and a rescaling per fragment. *)
Theorem recovery_is_exact : forall t (term : R -> Prop) fragments M xs s, term 0 ->
  replayed t term fragments M xs s -> exists m, (m < 2 * length xs)%nat /\ sums t term m xs s.
Proof.
intros t term fragments M xs s T H.
induction H as [M m ys s Lm Hs | fr M M' m xs ys old s scaled new H [m' [L IH]] HM Lm Hs Hc Hn | fr M M' m xs ys old s new H [m' [L IH]] HM Lm Hs Hn].
- exists m. split; auto. lia.
- exists (S (S m' + m)). rewrite app_length, map_length. split. lia.
  apply sums_add with scaled s; auto. apply sums_rescale with old; auto. lia.
- assert (N : xs <> []) by (intros ->; apply sums_length in IH; simpl in IH; lia).
  destruct (zeros_sum t term xs T N) as [m0 [L0 Z]]. exists (S (m0 + m)). rewrite app_length, map_length. split. lia.
  now apply sums_add with 0 s.
Qed.

(* Its terms are those of all fragments in the last frame: multiplied by 2**(own maximum - last maximum), or 0 where
   the machine's factor was 0 on the way, and then the term's factor is below 2**-126 too. *)
Definition in_frame (M : Z) (own : Z) (x y : R) : Prop :=
  (own <= M)%Z /\ (y = x * bpow radix2 (own - M) \/ y = 0 /\ (own - M < -126)%Z).

Definition terms_of (fragments : list (Z * list R)) : list (Z * R) :=
  flat_map (fun f => map (fun x => (fst f, x)) (snd f)) fragments.

Lemma terms_of_app : forall a b, terms_of (a ++ b) = terms_of a ++ terms_of b.
Proof. intros a b. unfold terms_of. apply flat_map_app. Qed.

Theorem recovery_keeps_every_term : forall t term fragments M xs s, replayed t term fragments M xs s ->
  Forall2 (fun own y => in_frame M (fst own) (snd own) y) (terms_of fragments) xs.
Proof.
intros t term fragments M xs s H.
assert (Own : forall M ys, Forall2 (fun own y => in_frame M (fst own) (snd own) y) (terms_of [(M, ys)]) ys).
{ clear. intros M ys. unfold terms_of. simpl. rewrite app_nil_r. induction ys as [|y ys IH]; simpl; constructor; auto.
  split; simpl. lia. left. rewrite Z.sub_diag. simpl. ring. }
induction H as [M m ys s Lm Hs | fr M M' m xs ys old s scaled new H IH HM Lm Hs Hc Hn | fr M M' m xs ys old s new H IH HM Lm Hs Hn].
- apply Own.
- rewrite terms_of_app. apply Forall2_app; [|apply Own].
  clear - IH HM. induction IH as [|[own x] y a b [L E] F IHF]; simpl; constructor; auto. simpl in *. split. lia.
  destruct E as [->|[-> E]]; [left | right; split; [ring | lia]].
  rewrite Rmult_assoc, <- bpow_plus. do 2 f_equal. ring.
- rewrite terms_of_app. apply Forall2_app; [|apply Own].
  clear - IH HM. induction IH as [|[own x] y a b [L E] F IHF]; simpl; constructor; auto. simpl in *. split. lia.
  right. split; [reflexivity | lia].
Qed.
