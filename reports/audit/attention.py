"""Attention in the audit: inputs, kernels that are right by construction, and kernels with one mistake."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from reports.audit.answers import Arrays, Asked, Due, Kernel
from verify.attention import oracle_float64
from verify.attention.adversarial import by_name
from verify.attention.cases import AttentionCase
from verify.attention.contract import reference_and_bound
from verify.attention.problem import widen
from verify.attention.settle import settle
from verify.attention.subjects import run_flywheel
from verify.backend import device_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from verify.attention.problem import AttentionProblem
    from verify.measures import Errors
    from verify.verdict import Decision

BF16 = np.dtype(ml_dtypes.bfloat16)
LOG2_E = np.float32(np.log2(np.e))
BLOCK = 128
LARGEST = np.float32(ml_dtypes.finfo(BF16).max)
CONFIG = (128, 128, 128)

SHAPE, GROUPED = (1, 2, 1, 512, 512, 64), (2, 4, 2, 256, 256, 64)
ORDINARY = {
    "ordinary": ("bell-shaped q, k, v, one KV head", AttentionCase("ordinary", SHAPE, config=CONFIG)),
    "ordinary-grouped": ("the same, batch 2, four heads on two", AttentionCase("grouped", GROUPED, config=CONFIG)),
    "ordinary-unequal": (
        "the same, 129 queries on 300 keys",
        AttentionCase("unequal", (1, 2, 1, 129, 300, 64), seed=3, config=CONFIG),
    ),
    "ordinary-features": (
        "the same, with window, sinks, soft cap and segments",
        dataclasses.replace(by_name()["segments-window-sinks-softcap"], name="ordinary features"),
    ),
}
SHARP = (
    "jump-limit+1ulp-middle",
    "jump-between-the-limits-middle",
    "jump-2000-nats-last",
    "jumps-in-consecutive-blocks",
    "v-largest-equal-logits",
    "v-2^118-jump-60-nats",
    "v-one-huge-invisible",
    "first-128-keys-2000-below",
    "all-logits-minus-2^126",
    "bell-logits-2^6",
    "near-duplicate-keys",
    "equal-logits-v-mod-8",
    "v-largest-random-logits",
    "falls-in-consecutive-blocks",
    "jump-100-nats-first-block",
    "inf-in-v-middle",
    "nan-in-v-middle",
    "nan-in-k-middle",
    "jump-2000-nats-one-row-grouped-heads",
    "segments-jump",
    "softcap",
)
"""Built against some mistake each, for any kernel."""


@functools.cache
def inputs() -> tuple[Asked, ...]:
    """Every input, with its exact result and bound."""
    named = by_name()
    found = [_asked(name, words, case, ordinary=True) for name, (words, case) in ORDINARY.items()]
    return (*found, *(_asked(name, name.replace("-", " "), named[name], ordinary=False) for name in SHARP))


def _asked(name: str, words: str, case: AttentionCase, *, ordinary: bool) -> Asked:
    problem = case.build()
    reference, bound = reference_and_bound(problem, device_model())
    baseline = emulate(problem, Emulation(scores="bf16", sum_of="rounded"))
    inside = bound.inside_domain
    judged = inside | ~np.isfinite(reference.lse)
    due = {
        "out": Due(
            reference.out,
            reference.out_error,
            np.where(inside[..., None], bound.out, 0.0),
            baseline["out"],
            np.broadcast_to(inside[..., None], reference.out.shape) | ~np.isfinite(reference.out),
        ),
        "lse": Due(reference.lse, reference.lse_error, np.where(inside, bound.lse, 0.0), baseline["lse"], judged),
    }

    def decided(found: Errors, decision: Decision, array: str) -> Decision:
        return settle(problem, found, decision, array, reference)[0]

    return Asked("attention", name, words, ordinary, problem, due, settle=decided)


def run(asked: Asked, softmax: Any = "static") -> Arrays:  # noqa: ANN401  a literal type
    """Our kernel on an input, in the blocks that the inputs are built for."""
    result = run_flywheel(asked.problem, config=CONFIG, softmax=softmax)
    assert result.lse is not None  # noqa: S101  it was asked for
    return {"out": result.out, "lse": result.lse}


@dataclasses.dataclass(frozen=True)
class Emulation:
    """Softmax attention in numpy: FP32 scores and sums, BF16 weights and output, unless a field says otherwise.

    Attributes:
        scores: "fp32"; "bf16": rounded to BF16; "query": the scaled query is rounded to BF16.
        anchor: what is subtracted: the row's "maximum", the "first" visible score, or "nothing".
        exponential: "exact" (to FP32), or "quadratic": 2^x from a parabola between powers of two.
        flush: weights below it become 0.
        sum_of: the denominator sums weights "before" rounding, or "rounded" ones; "bf16": in BF16, block by block.
        accumulator: "fp32", or "bf16" after every block of keys.
        output: rounded to "nearest", or "truncated".
    """

    scores: str = "fp32"
    anchor: str = "maximum"
    exponential: str = "exact"
    flush: float = 0.0
    sum_of: str = "before"
    accumulator: str = "fp32"
    output: str = "nearest"


def emulate(problem: AttentionProblem, steps: Emulation) -> Arrays:
    """What such a kernel gives."""
    out = np.zeros((*problem.q.shape[:3], problem.v_dim), np.float32)
    lse = np.zeros(problem.q.shape[:3], np.float32)
    with np.errstate(all="ignore"):
        for b in range(problem.batch):
            mask = problem.mask(b)
            for h in range(problem.heads):
                out[b, h], lse[b, h] = _head(problem, b, h, mask, steps)
    return {"out": _truncated(out) if steps.output == "truncated" else out.astype(BF16), "lse": lse}


def _bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(BF16).astype(np.float32)


def _truncated(x: np.ndarray) -> np.ndarray:
    return (x.view(np.uint32) >> 16).astype(np.uint16).view(BF16)


def _scores(problem: AttentionProblem, b: int, h: int, steps: Emulation) -> np.ndarray:
    q = problem.q[b, h].astype(np.float32)
    k = problem.k[b, problem.kv_head(h)].astype(np.float32)
    scale = np.float32(problem.scale)
    s = _bf16(q * scale) @ k.T if steps.scores == "query" else (q @ k.T) * scale
    if problem.softcap is not None:
        s = np.float32(problem.softcap) * np.tanh(s / np.float32(problem.softcap))
    return _bf16(s) if steps.scores == "bf16" else s


def _head(
    problem: AttentionProblem, b: int, h: int, mask: np.ndarray, steps: Emulation
) -> tuple[np.ndarray, np.ndarray]:
    s = np.where(mask, _scores(problem, b, h, steps), np.float32(-np.inf))
    v = problem.v[b, problem.kv_head(h)].astype(np.float32)
    seen = mask.any(axis=1)
    sink = problem.sink(h)
    anchor = np.zeros((len(s), 1), np.float32)
    if steps.anchor == "maximum":
        anchor = s.max(axis=1, keepdims=True, initial=-np.inf if sink is None else sink)
    elif steps.anchor == "first":
        anchor = np.take_along_axis(s, mask.argmax(axis=1)[:, None], axis=1)
    anchor = np.where(seen[:, None], anchor, np.float32(0.0)).astype(np.float32)
    p = np.where(mask, _exponential(s - anchor, steps), np.float32(0.0))
    p = np.where(p < steps.flush, np.float32(0.0), p)
    l = _denominator(_bf16(p) if steps.sum_of == "rounded" else p, steps)  # noqa: E741  the field's name
    if sink is not None:
        l = l + np.exp(np.float32(sink) - anchor[:, 0])  # noqa: E741
    # Normalised before the product, which overflows otherwise where v is large.
    weights = _bf16(np.where((l == 0)[:, None], np.float32(0.0), p / l[:, None]))
    # As in any kernel that is right: what no row sees does not reach the product, NaN included.
    v = np.where(mask.any(axis=0)[:, None], v, np.float32(0.0))
    out = _product(weights, v, mask, steps)
    # A mean of finite values is finite: the largest BF16, where rounded weights carry it beyond.
    averaged = np.isinf(out) & np.isfinite(l)[:, None] & np.isfinite(v).all()
    out = np.where(averaged | (np.abs(out) > LARGEST) & np.isfinite(out), np.copysign(LARGEST, out), out)
    return out, np.where(l == 0, np.float32(-np.inf), anchor[:, 0] + np.log(l))


def _exponential(x: np.ndarray, steps: Emulation) -> np.ndarray:
    if steps.exponential == "exact":
        return np.exp(x)
    t = np.maximum(x * LOG2_E, np.float32(-200.0))
    whole = np.floor(t)
    part = t - whole
    # 1 + a f + (1 - a) f^2: exact at powers of two, a of least largest error.
    return np.ldexp(np.float32(1.0) + part * (np.float32(0.6565) + np.float32(0.3435) * part), whole.astype(np.int32))


def _denominator(p: np.ndarray, steps: Emulation) -> np.ndarray:
    if steps.sum_of != "bf16":
        return p.sum(axis=1, dtype=np.float32)
    total = np.zeros(len(p), np.float32)
    for start in range(0, p.shape[1], BLOCK):
        total = _bf16(total + p[:, start : start + BLOCK].sum(axis=1, dtype=np.float32))
    return total


def _product(p: np.ndarray, v: np.ndarray, mask: np.ndarray, steps: Emulation) -> np.ndarray:
    if not np.isfinite(v).all():  # 0 * inf must not reach rows that do not see it
        return np.stack([p[row, mask[row]] @ v[mask[row]] for row in range(len(p))])
    if steps.accumulator == "fp32":
        return p @ v
    total = np.zeros((len(p), v.shape[1]), np.float32)
    for start in range(0, p.shape[1], BLOCK):
        total = _bf16(total + p[:, start : start + BLOCK] @ v[start : start + BLOCK])
    return total


TEXTBOOK = Emulation()


def _textbook(asked: Asked) -> Arrays:
    return emulate(asked.problem, TEXTBOOK)


def exact(problem: AttentionProblem) -> Arrays:
    """The exact result, rounded to the formats of a kernel."""
    reference = oracle_float64.attention(problem)
    with np.errstate(over="ignore", invalid="ignore"):
        return {"out": reference.out.astype(BF16), "lse": reference.lse.astype(np.float32)}


def right_kernels() -> list[Kernel]:
    """Right by construction, or judged element by element elsewhere in this suite."""
    sorts: Sequence[tuple[str, str, Callable[[Asked], Arrays]]] = (
        ("the exact result", "rounded once to BF16: nothing can be nearer", lambda asked: exact(asked.problem)),
        ("textbook softmax", "FP32 scores and sums, BF16 weights, row maximum subtracted (numpy)", _textbook),
        ("flywheel.attention", "static anchor, checks and replay", run),
        ("flywheel.attention[online]", "rescaling throughout", lambda asked: run(asked, "online")),
    )
    return [Kernel("attention", name, True, "right", words, answer) for name, words, answer in sorts]  # noqa: FBT003


ARITHMETIC = {
    "query scaled in BF16": (Emulation(scores="query"), "scale folded into q, which is rounded again"),
    "accumulator in BF16": (Emulation(accumulator="bf16"), "rounded after every 128 keys"),
    "denominator in BF16": (Emulation(sum_of="bf16"), "the sum of weights rounded after every 128 keys"),
    "output truncated": (Emulation(output="truncated"), "cut to BF16 instead of rounded: errors all lean to zero"),
    "small weights flushed": (Emulation(flush=2.0**-8), "weights below 1/256 of the largest become 0"),
    "exp2 from a parabola": (Emulation(exponential="quadratic"), "right at powers of two, 0.2 % off between"),
    "no maximum subtracted": (Emulation(anchor="nothing"), "exp of the scores as they are"),
    "anchor without checks": (Emulation(anchor="first"), "first score subtracted, no check, no replay"),
}


def arithmetic_kernels() -> list[Kernel]:
    """The textbook kernel with one step done wrong."""
    kernels = [
        Kernel(
            "attention",
            name,
            False,  # noqa: FBT003
            "arithmetic",
            words,
            lambda a, s=steps: emulate(a.problem, s),
            _textbook,
        )
        for name, (steps, words) in ARITHMETIC.items()
    ]
    return kernels + [
        Kernel("attention", name, False, "results", words, lambda a, f=spoil: f(_textbook(a)), _textbook)  # noqa: FBT003
        for name, words, spoil in SPOILT
    ]


def _changed(answer: Arrays, out: np.ndarray) -> Arrays:
    return answer | {"out": out}


def _two_lanes_swapped(answer: Arrays) -> Arrays:
    out = answer["out"].copy()
    out[:, :, -1, :2] = out[:, :, -1, 1::-1]
    return _changed(answer, out)


SMALL = 0.02
"""What the planted mistake takes for nothing."""


def _small_zeroed(answer: Arrays) -> Arrays:
    return _changed(answer, np.where(np.abs(answer["out"].astype(np.float32)) < SMALL, BF16.type(0.0), answer["out"]))


def _nan_hidden(answer: Arrays) -> Arrays:
    return _changed(answer, np.nan_to_num(answer["out"].astype(np.float32)).astype(BF16))


def _one_percent(answer: Arrays) -> Arrays:
    with np.errstate(over="ignore"):
        return _changed(answer, (answer["out"].astype(np.float32) * np.float32(1.01)).astype(BF16))


SPOILT = (
    ("one row's lanes swapped", "lanes 0 and 1 of each head's last row change places", _two_lanes_swapped),
    ("small results become 0", "every |out| below 0.02", _small_zeroed),
    ("all results 1 % too large", "a normaliser that is off by 1 %", _one_percent),
    ("NaN and infinity hidden", "replaced by numbers (nan_to_num)", _nan_hidden),
    ("LSE in log2 units", "instead of nats", lambda answer: answer | {"lse": answer["lse"] * LOG2_E}),
)


def definition_kernels() -> list[Kernel]:
    """The exact result of another question, rounded."""

    def answer(change: Callable[[AttentionProblem], AttentionProblem | None]) -> Callable[[Asked], Arrays | None]:
        def found(asked: Asked) -> Arrays | None:
            other = change(asked.problem)
            return None if other is None else exact(other)

        return found

    return [Kernel("attention", name, False, "definitions", words, answer(change)) for name, words, change in WRONG]  # noqa: FBT003


def _gathered(problem: AttentionProblem, heads: np.ndarray) -> AttentionProblem:
    return dataclasses.replace(problem, k=problem.k[:, heads], v=problem.v[:, heads])


def _tiled(problem: AttentionProblem) -> AttentionProblem | None:
    if problem.kv_heads in (1, problem.heads):
        return None
    return _gathered(problem, np.arange(problem.heads) % problem.kv_heads)


def _positions(problem: AttentionProblem, shift: int) -> np.ndarray:
    aligned = np.arange(problem.q_len) + problem.kv_len - problem.q_len + shift
    return np.tile(aligned, (problem.batch, 1))


def _top_left(problem: AttentionProblem) -> AttentionProblem | None:
    if problem.q_len == problem.kv_len or not problem.causal:
        return None
    return dataclasses.replace(problem, q_positions=_positions(problem, problem.q_len - problem.kv_len))


def _shifted(shift: int) -> Callable[[AttentionProblem], AttentionProblem | None]:
    def change(problem: AttentionProblem) -> AttentionProblem | None:
        return dataclasses.replace(problem, q_positions=_positions(problem, shift)) if problem.causal else None

    return change


def _without(**fields: Any) -> Callable[[AttentionProblem], AttentionProblem | None]:  # noqa: ANN401
    def change(problem: AttentionProblem) -> AttentionProblem | None:
        if all(getattr(problem, name) is None for name in fields):
            return None
        return dataclasses.replace(problem, **fields)

    return change


def _next_sink(problem: AttentionProblem) -> AttentionProblem | None:
    return None if problem.sinks is None else dataclasses.replace(problem, sinks=np.roll(problem.sinks, -1))


def _wider_window(problem: AttentionProblem) -> AttentionProblem | None:
    if problem.window is None or problem.window[0] is None:
        return None
    return dataclasses.replace(problem, window=(problem.window[0] + 1, problem.window[1]))


def _mean(problem: AttentionProblem) -> AttentionProblem:
    # Keys of zero, not a scale of zero: non-finite keys must not show either.
    return dataclasses.replace(problem, k=np.zeros_like(problem.k))


def _noisy_values(problem: AttentionProblem) -> AttentionProblem:
    v = widen(problem.v) * (1.0 + 2.0**-6)
    with np.errstate(over="ignore"):
        return dataclasses.replace(problem, v=v.astype(BF16))


WRONG = (
    ("mean of the visible values", "weights all equal: q and k are never read", _mean),
    ("scores without their scale", "scale 1", lambda problem: dataclasses.replace(problem, scale=1.0)),
    ("values 1.6 % off", "v times 1 + 2^-6, as after a wrong dequantisation", _noisy_values),
    ("mask one key late", "each row sees the next key", _shifted(1)),
    ("mask one key early", "no row sees itself", _shifted(-1)),
    ("mask one block late", "each row sees 128 more keys", _shifted(BLOCK)),
    ("mask aligned top-left", "where there are more keys than queries", _top_left),
    ("heads mapped by remainder", "query head h reads KV head h mod kv_heads", _tiled),
    ("window ignored", "", _without(window=None)),
    ("window one key wider", "", _wider_window),
    ("soft cap ignored", "", _without(softcap=None)),
    ("sinks ignored", "", _without(sinks=None)),
    ("sink of the next head", "", _next_sink),
    ("segments ignored", "packed sequences see each other", _without(q_segments=None, k_segments=None)),
)
