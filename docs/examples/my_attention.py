"""The kernel of docs/judge-your-kernel.md: a plain attention in JAX, declared as a subject."""  # noqa: INP001  an example

import jax
import jax.numpy as jnp

from verify.subjects import Arithmetic, Features, subject


@subject(layout="bthd", features=Features(lse="fp32"), arithmetic=Arithmetic(weights="bf16", block_kv=None))
def my_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention, `[batch, tokens, heads, head_dim]`, with its LSE in nats."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * scale
    seen = jnp.tril(jnp.ones(s.shape[2:], bool), k.shape[1] - q.shape[1]) if causal else jnp.ones(s.shape[2:], bool)
    m = jnp.max(s, axis=-1, keepdims=True, where=seen, initial=-1e30)
    p = jnp.where(seen, jnp.exp(s - m), 0.0)
    total = p.sum(axis=-1, keepdims=True)
    sums = jnp.einsum("bhqk,bkhd->bhqd", p.astype(q.dtype), v, preferred_element_type=jnp.float32)
    out = jnp.where(total > 0.0, sums / total, 0.0).transpose(0, 2, 1, 3).astype(q.dtype)
    return out, jnp.where(total > 0.0, m + jnp.log(total), -jnp.inf)[..., 0].transpose(0, 2, 1)
