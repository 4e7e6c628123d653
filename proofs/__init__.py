"""Machine-checked lemmas behind the constants of the kernels and of their contract: `python -m proofs`."""

# Configures JAX, which reads its flags once, before any lemma imports it.
import verify as verify
