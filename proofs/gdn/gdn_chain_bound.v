From Coq Require Import Reals Lra Lia.
Open Scope R_scope.

(* Matrices are functions of two indices; a product sums over the first n inner ones. *)
Definition matrix := nat -> nat -> R.
Fixpoint sigma (n : nat) (f : nat -> R) : R := match n with O => 0 | S m => sigma m f + f m end.
Definition mul (n : nat) (A B : matrix) : matrix := fun i j => sigma n (fun k => A i k * B k j).
Definition add (A B : matrix) : matrix := fun i j => A i j + B i j.
Definition sub (A B : matrix) : matrix := fun i j => A i j - B i j.
Definition size (A : matrix) : matrix := fun i j => Rabs (A i j).
Definition below (A B : matrix) : Prop := forall i j, A i j <= B i j.

Lemma sigma_ext : forall n f g, (forall k, f k = g k) -> sigma n f = sigma n g.
Proof. intros n f g H. induction n as [|n IH]; simpl. reflexivity. now rewrite IH, H. Qed.

Lemma sigma_plus : forall n f g, sigma n (fun k => f k + g k) = sigma n f + sigma n g.
Proof. intros n f g. induction n as [|n IH]; simpl. ring. rewrite IH. ring. Qed.

Lemma sigma_scaled : forall n c f, sigma n (fun k => c * f k) = c * sigma n f.
Proof. intros n c f. induction n as [|n IH]; simpl. ring. rewrite IH. ring. Qed.

Lemma sigma_zero : forall n, sigma n (fun _ => 0) = 0.
Proof. intros n. induction n as [|n IH]; simpl; lra. Qed.

Lemma sigma_le : forall n f g, (forall k, f k <= g k) -> sigma n f <= sigma n g.
Proof. intros n f g H. induction n as [|n IH]; simpl. lra. specialize (H n). lra. Qed.

Lemma sigma_abs : forall n f, Rabs (sigma n f) <= sigma n (fun k => Rabs (f k)).
Proof. intros n f. induction n as [|n IH]; simpl. rewrite Rabs_R0. lra. eapply Rle_trans. apply Rabs_triang. lra. Qed.

Lemma sigma_swap : forall n m f, sigma n (fun i => sigma m (fun k => f i k)) = sigma m (fun k => sigma n (fun i => f i k)).
Proof. intros n m f. induction n as [|n IH]; simpl. now rewrite sigma_zero. rewrite IH. now rewrite <- sigma_plus. Qed.

Lemma mul_ext : forall n A A' B B', (forall i j, A i j = A' i j) -> (forall i j, B i j = B' i j) ->
  forall i j, mul n A B i j = mul n A' B' i j.
Proof. intros n A A' B B' H K i j. apply sigma_ext. intros k. now rewrite H, K. Qed.

Lemma mul_add_l : forall n A B C i j, mul n (add A B) C i j = mul n A C i j + mul n B C i j.
Proof. intros. unfold mul, add. rewrite <- sigma_plus. apply sigma_ext. intros. ring. Qed.

Lemma mul_add_r : forall n A B C i j, mul n A (add B C) i j = mul n A B i j + mul n A C i j.
Proof. intros. unfold mul, add. rewrite <- sigma_plus. apply sigma_ext. intros. ring. Qed.

Lemma mul_sub_l : forall n A B C i j, mul n (sub A B) C i j = mul n A C i j - mul n B C i j.
Proof.
intros. unfold mul, sub. replace (sigma n (fun k => A i k * C k j) - sigma n (fun k => B i k * C k j))
  with (sigma n (fun k => A i k * C k j) + -1 * sigma n (fun k => B i k * C k j)) by ring.
rewrite <- sigma_scaled, <- sigma_plus. apply sigma_ext. intros. ring.
Qed.

Lemma mul_sub_r : forall n A B C i j, mul n A (sub B C) i j = mul n A B i j - mul n A C i j.
Proof.
intros. unfold mul, sub. replace (sigma n (fun k => A i k * B k j) - sigma n (fun k => A i k * C k j))
  with (sigma n (fun k => A i k * B k j) + -1 * sigma n (fun k => A i k * C k j)) by ring.
rewrite <- sigma_scaled, <- sigma_plus. apply sigma_ext. intros. ring.
Qed.

Lemma mul_assoc : forall n m A B C i j, mul n A (mul m B C) i j = mul m (mul n A B) C i j.
Proof.
intros. unfold mul.
rewrite (sigma_ext n _ (fun k => sigma m (fun l => A i k * (B k l * C l j)))) by (intros; now rewrite sigma_scaled).
rewrite sigma_swap. apply sigma_ext. intros l. rewrite (Rmult_comm (sigma n _)), <- sigma_scaled. apply sigma_ext. intros k. ring.
Qed.

Lemma mul_size : forall n A B, below (size (mul n A B)) (mul n (size A) (size B)).
Proof.
intros n A B i j. unfold size, mul. eapply Rle_trans. apply sigma_abs. apply sigma_le. intros k. rewrite Rabs_mult. lra.
Qed.

Lemma mul_below : forall n A B C, (forall i j, 0 <= A i j) -> below B C -> below (mul n A B) (mul n A C).
Proof. intros n A B C P H i j. apply sigma_le. intros k. apply Rmult_le_compat_l; auto. Qed.

Lemma size_pos : forall A i j, 0 <= size A i j.
Proof. intros. apply Rabs_pos. Qed.

(* One chunk: n tokens, d channels of the key.  X the exact inverse, [right_v] = beta v and [right_k] = beta k exp(G), S the
   exact state; the kernel has the state S + E. *)
Section Chunk.
Variables (n d : nat).
Variables X Xc right_v right_k Rv Rk S E entering eU eW eV U W R V : matrix.
Definition xi := sub Xc X.
Definition rho_v := sub Rv right_v.
Definition rho_k := sub Rk right_k.
Definition sigma_s := sub entering (add S E).
Hypothesis U_computed : forall i j, U i j = mul n Xc Rv i j + eU i j.
Hypothesis W_computed : forall i j, W i j = mul n Xc Rk i j + eW i j.
Hypothesis R_computed : forall i j, R i j = mul d W entering i j.
Hypothesis V_computed : forall i j, V i j = U i j - R i j + eV i j.

Definition exact_right := sub right_v (mul d right_k S).
Definition exact_V := mul n X exact_right.
Definition exact_W := mul n X right_k.
Definition delta := sub V (sub exact_V (mul d exact_W E)).

(* The identity: what rounding adds to the updates, beside what the state's error does to them. *)
Lemma delta_is : forall i j, delta i j =
  mul n xi exact_right i j + mul n Xc (sub rho_v (mul d rho_k S)) i j
  - mul n X (mul d rho_k E) i j - mul n xi (mul d right_k E) i j - mul n xi (mul d rho_k E) i j
  + eU i j - mul d eW S i j - mul d eW E i j - mul d W sigma_s i j + eV i j.
Proof.
intros i j. unfold delta, sub at 1. rewrite V_computed, U_computed, R_computed.
unfold exact_V, exact_right, exact_W, rho_v, rho_k.
assert (H0 : forall i j, entering i j = add (add S E) sigma_s i j) by (intros; unfold sigma_s, sub, add; ring).
rewrite (mul_ext d W W entering (add (add S E) sigma_s) (fun _ _ => eq_refl) H0).
rewrite !mul_add_r.
assert (H1 : forall i j, W i j = add (mul n Xc Rk) eW i j) by (intros; unfold add; apply W_computed).
rewrite !(mul_ext d W (add (mul n Xc Rk) eW) _ _ H1 (fun _ _ => eq_refl)), !mul_add_l.
unfold sub at 1. rewrite <- !mul_assoc. unfold xi. rewrite !mul_sub_l, !mul_sub_r.
rewrite !(mul_ext n _ _ _ _ (fun _ _ => eq_refl) (fun i j => mul_sub_l d _ _ _ i j)).
repeat match goal with |- context [mul n ?A (fun i j => mul d ?B ?D i j - mul d ?C ?D i j)] =>
  change (mul n A (fun i j => mul d B D i j - mul d C D i j)) with (mul n A (sub (mul d B D) (mul d C D))) end.
rewrite !mul_sub_r. ring.
Qed.

(* The bound: the first term meets the exact right-hand side before absolute values are taken. *)
Theorem updates_bound : below (size delta) (fun i j =>
  size (mul n xi exact_right) i j + mul n (size Xc) (add (size rho_v) (mul d (size rho_k) (size S))) i j
  + mul n (size X) (mul d (size rho_k) (size E)) i j
  + mul n (size xi) (add (size (mul d right_k E)) (mul d (size rho_k) (size E))) i j
  + size eU i j + mul d (size eW) (size S) i j + mul d (size eW) (size E) i j + mul d (size W) (size sigma_s) i j + size eV i j).
Proof.
intros i j. unfold size at 1. rewrite delta_is.
assert (Two : forall A B, below (size (mul d A B)) (mul d (size A) (size B))) by (intros; apply mul_size).
assert (T1 : Rabs (mul n Xc (sub rho_v (mul d rho_k S)) i j) <= mul n (size Xc) (add (size rho_v) (mul d (size rho_k) (size S))) i j).
{ eapply Rle_trans. apply mul_size. apply mul_below. apply size_pos. intros k l. unfold size at 1, sub, add.
  unfold Rminus. eapply Rle_trans. apply Rabs_triang. rewrite Rabs_Ropp. apply Rplus_le_compat_l. apply Two. }
assert (T2 : Rabs (mul n X (mul d rho_k E) i j) <= mul n (size X) (mul d (size rho_k) (size E)) i j).
{ eapply Rle_trans. apply mul_size. apply mul_below. apply size_pos. apply Two. }
assert (T3 : Rabs (mul n xi (mul d right_k E) i j) <= mul n (size xi) (size (mul d right_k E)) i j) by apply mul_size.
assert (T4 : Rabs (mul n xi (mul d rho_k E) i j) <= mul n (size xi) (mul d (size rho_k) (size E)) i j).
{ eapply Rle_trans. apply mul_size. apply mul_below. apply size_pos. apply Two. }
assert (T5 : Rabs (mul d eW S i j) <= mul d (size eW) (size S) i j) by apply mul_size.
assert (T6 : Rabs (mul d eW E i j) <= mul d (size eW) (size E) i j) by apply mul_size.
assert (T7 : Rabs (mul d W sigma_s i j) <= mul d (size W) (size sigma_s) i j) by apply mul_size.
rewrite (mul_add_r n (size xi)). set (a := mul n xi exact_right i j) in *.
set (t1 := mul n Xc (sub rho_v (mul d rho_k S)) i j) in *. set (t2 := mul n X (mul d rho_k E) i j) in *.
set (t3 := mul n xi (mul d right_k E) i j) in *. set (t4 := mul n xi (mul d rho_k E) i j) in *.
set (t5 := mul d eW S i j) in *. set (t6 := mul d eW E i j) in *. set (t7 := mul d W sigma_s i j) in *.
replace (size (mul n xi exact_right) i j) with (Rabs a) by reflexivity.
replace (size eU i j) with (Rabs (eU i j)) by reflexivity. replace (size eV i j) with (Rabs (eV i j)) by reflexivity.
assert (Sum : Rabs (a + t1 - t2 - t3 - t4 + eU i j - t5 - t6 - t7 + eV i j) <=
  Rabs a + Rabs t1 + Rabs t2 + Rabs t3 + Rabs t4 + Rabs (eU i j) + Rabs t5 + Rabs t6 + Rabs t7 + Rabs (eV i j)).
{ unfold Rminus. repeat (eapply Rle_trans; [apply Rabs_triang | apply Rplus_le_compat; [|rewrite ?Rabs_Ropp; apply Rle_refl]]). apply Rle_refl. }
lra.
Qed.
End Chunk.

(* Outputs and the next state, both Q S + P V with V = V^ + W E - delta: [reading] is Q, q exp(G) for outputs and exp(G_C) on
   the diagonal for the state; [writing] is P D, or (k exp(G_C - G))^T. *)
Section Reads.
Variables (n d : nat).
Variables Q Qc P Pc S E entering V W dl Vc eO : matrix.
Hypothesis V_is : forall i j, Vc i j = V i j - mul d W E i j + dl i j.
Definition off_q := sub Qc Q.
Definition off_p := sub Pc P.
Definition off_s := sub entering (add S E).
Definition read : matrix := fun i j => mul d Qc entering i j + mul n Pc Vc i j + eO i j.
Definition exact_read : matrix := fun i j => mul d Q S i j + mul n P V i j.
(* The exact linear map of the state's error. *)
Definition map_of_error : matrix := sub Q (mul n P W).

Lemma read_is : forall i j, read i j - exact_read i j = mul d map_of_error E i j
  + (mul n P dl i j + mul n off_p Vc i j + mul d off_q (add S E) i j + mul d Qc off_s i j + eO i j).
Proof.
intros i j. unfold read, exact_read, map_of_error, off_q, off_p.
assert (H0 : forall i j, entering i j = add (add S E) off_s i j) by (intros; unfold off_s, sub, add; ring).
rewrite (mul_ext d Qc Qc entering (add (add S E) off_s) (fun _ _ => eq_refl) H0).
rewrite !mul_sub_l, !mul_add_r. rewrite <- mul_assoc.
assert (H1 : forall i j, Vc i j = add (sub V (mul d W E)) dl i j) by (intros; unfold add, sub; apply V_is).
replace (mul n P Vc i j) with (mul n P V i j - mul n P (mul d W E) i j + mul n P dl i j). ring.
rewrite (mul_ext n P P Vc _ (fun _ _ => eq_refl) H1), mul_add_r, mul_sub_r. reflexivity.
Qed.

Theorem reads_bound : forall i j, Rabs (read i j - exact_read i j - mul d map_of_error E i j) <=
  mul n (size P) (size dl) i j + mul n (size off_p) (size Vc) i j + mul d (size off_q) (size (add S E)) i j
  + mul d (size Qc) (size off_s) i j + size eO i j.
Proof.
intros i j. rewrite read_is.
match goal with |- Rabs (?m + ?r - ?m) <= _ => replace (m + r - m) with r by ring end.
assert (T1 : Rabs (mul n P dl i j) <= mul n (size P) (size dl) i j) by apply mul_size.
assert (T2 : Rabs (mul n off_p Vc i j) <= mul n (size off_p) (size Vc) i j) by apply mul_size.
assert (T3 : Rabs (mul d off_q (add S E) i j) <= mul d (size off_q) (size (add S E)) i j) by apply mul_size.
assert (T4 : Rabs (mul d Qc off_s i j) <= mul d (size Qc) (size off_s) i j) by apply mul_size.
replace (size eO i j) with (Rabs (eO i j)) by reflexivity.
repeat (eapply Rle_trans; [apply Rabs_triang | apply Rplus_le_compat]); auto using Rle_refl.
Qed.
End Reads.

(* The residual first: V = X (right_v - right_k S), of which the kernel has the operand Rc. *)
Section Residual.
Variables (n d : nat).
Variables X Xc right_v right_k S E Rc eV V : matrix.
Definition off_x := sub Xc X.
Definition residual := sub right_v (mul d right_k S).
Definition rho := sub Rc (sub residual (mul d right_k E)).
Hypothesis residual_updates : forall i j, V i j = mul n Xc Rc i j + eV i j.
Definition delta_r := sub V (sub (mul n X residual) (mul d (mul n X right_k) E)).

Lemma delta_r_is : forall i j, delta_r i j =
  mul n off_x residual i j - mul n off_x (mul d right_k E) i j + mul n Xc rho i j + eV i j.
Proof.
intros i j. unfold delta_r, sub at 1. rewrite residual_updates.
unfold sub at 1. rewrite <- mul_assoc. unfold off_x, rho. rewrite !mul_sub_l, !mul_sub_r. ring.
Qed.

Theorem residual_updates_bound : below (size delta_r) (fun i j =>
  size (mul n off_x residual) i j + mul n (size off_x) (size (mul d right_k E)) i j
  + mul n (size Xc) (size rho) i j + size eV i j).
Proof.
intros i j. unfold size at 1. rewrite delta_r_is.
assert (T1 : Rabs (mul n off_x (mul d right_k E) i j) <= mul n (size off_x) (size (mul d right_k E)) i j) by apply mul_size.
assert (T2 : Rabs (mul n Xc rho i j) <= mul n (size Xc) (size rho) i j) by apply mul_size.
replace (size (mul n off_x residual) i j) with (Rabs (mul n off_x residual i j)) by reflexivity.
replace (size eV i j) with (Rabs (eV i j)) by reflexivity.
assert (A : forall a b c e, Rabs (a - b + c + e) <= Rabs a + Rabs b + Rabs c + Rabs e).
{ intros. unfold Rminus. assert (H1 := Rabs_triang (a + - b + c) e). assert (H2 := Rabs_triang (a + - b) c).
  assert (H3 := Rabs_triang a (- b)). rewrite Rabs_Ropp in H3. lra. }
eapply Rle_trans. apply A. lra.
Qed.
End Residual.

(* Over chunks: E_0 = 0, E_(m+1) = T_m E_m + a_m, where a_m = K_m delta_m + rest_m is what chunk m adds. *)
Section Chain.
Variables (n d : nat).
Variables (T K : nat -> matrix) (dl rest E : nat -> matrix).
Hypothesis start : forall i j, E 0%nat i j = 0.
Hypothesis step : forall m i j, E (S m) i j = mul d (T m) (E m) i j + (mul n (K m) (dl m) i j + rest m i j).

(* Every bound of what a chunk adds is carried by exact maps, keys first: |left Phi K| |delta| + |left Phi| |rest|. *)
Fixpoint carried (m : nat) (left : matrix) (of_delta of_rest : nat -> matrix) : matrix :=
  match m with
  | O => fun _ _ => 0
  | S c => fun i j => mul n (size (mul d left (K c))) (of_delta c) i j + mul d (size left) (of_rest c) i j
                      + carried c (mul d left (T c)) of_delta of_rest i j
  end.

Theorem gdn_chain_bound : forall of_delta of_rest, (forall c, below (size (dl c)) (of_delta c)) ->
  (forall c, below (size (rest c)) (of_rest c)) -> forall m left i j,
  Rabs (mul d left (E m) i j) <= carried m left of_delta of_rest i j.
Proof.
intros od orr Hd Hr m. induction m as [|m IH]; intros left i j; simpl.
- unfold mul. rewrite (sigma_ext d _ (fun _ => 0)). rewrite sigma_zero, Rabs_R0. lra. intros k. rewrite start. ring.
- assert (H : forall i j, E (S m) i j = add (mul d (T m) (E m)) (add (mul n (K m) (dl m)) (rest m)) i j) by (intros; apply step).
  rewrite (mul_ext d left left _ _ (fun _ _ => eq_refl) H), !mul_add_r, !mul_assoc.
  assert (A1 : Rabs (mul n (mul d left (K m)) (dl m) i j) <= mul n (size (mul d left (K m))) (od m) i j).
  { eapply Rle_trans. apply mul_size. apply mul_below. apply size_pos. apply Hd. }
  assert (A2 : Rabs (mul d left (rest m) i j) <= mul d (size left) (orr m) i j).
  { eapply Rle_trans. apply mul_size. apply mul_below. apply size_pos. apply Hr. }
  specialize (IH (mul d left (T m)) i j).
  eapply Rle_trans. apply Rabs_triang. eapply Rle_trans. apply Rplus_le_compat_l, Rabs_triang. lra.
Qed.
End Chain.
