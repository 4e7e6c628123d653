"""Metamorphic relations: two calls whose exact results are related by a theorem, so that no oracle is needed.

Each result may be off by its own contract, so that the two may differ by the sum of the bounds, carried through the
relation.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fuzz.attention.compare import close, same_bits
from fuzz.attention.evaluate import Answer, OutsideError, Trial, attempt
from verify.attention.problem import BF16, widen
from verify.verdict import Judgement, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from fuzz.case import Case
    from verify.attention.contract import ContractBound
    from verify.attention.problem import AttentionProblem
    from verify.attention.subjects import SubjectResult
    from verify.subjects.subject import Subject

LN2 = math.log(2.0)
ROUNDED = 1.0 + 2.0**-40
"""What float64 does to bounds of a few operations."""

DOUBT = 2.0**-40
"""Relative: what float64 does to a value that is merged from two results; far below any FP32 or BF16 spacing."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """One call with what it is held to."""

    problem: AttentionProblem
    result: SubjectResult
    bound: ContractBound


def _call(trial: Trial, problem: AttentionProblem) -> _Call:
    _, bound = trial.expected(problem)
    return _Call(problem, trial.run(problem), bound)


def _pair(first: _Call, second: _Call, *, shift: float = 0.0, out_factor: float = 1.0) -> dict[str, Any]:
    """Results that must agree: out_2 = out_factor out_1, lse_2 = lse_1 + shift."""
    a, b = first.result, second.result
    pairs = {"out": (b.out, out_factor * widen(a.out), (first.bound.out * out_factor + second.bound.out) * ROUNDED)}
    if a.lse is not None and b.lse is not None:
        lse = a.lse.astype(np.float64) + shift
        limit = first.bound.lse + second.bound.lse + DOUBT * np.abs(np.where(np.isfinite(lse), lse, 0.0))
        pairs["lse"] = (b.lse, lse, limit * ROUNDED)
    return pairs


def _permuted(trial: Trial) -> tuple[str, Judgement, SubjectResult]:
    """Keys in another order, without a mask."""
    problem = dataclasses.replace(trial.problem, causal=False, window=None)
    rng = np.random.default_rng(int(trial.case.asked("seed")))
    order = rng.permutation(problem.kv_len)
    segments = None if problem.k_segments is None else problem.k_segments[:, order]
    moved = dataclasses.replace(problem, k=problem.k[:, :, order], v=problem.v[:, :, order], k_segments=segments)
    first, second = _call(trial, problem), _call(trial, moved)
    return "permute", close(_pair(first, second), "the order of the keys does not matter"), second.result


def _split(trial: Trial) -> tuple[str, Judgement, SubjectResult]:
    """Keys in two calls, merged by their LSE: out = w_1 out_1 + w_2 out_2, w_i = exp(lse_i - lse)."""
    problem = dataclasses.replace(trial.problem, causal=False, window=None, sinks=None)
    at = max(problem.kv_len // 2, 1)
    if problem.kv_len < 2 or trial.subject.features.lse is None:
        raise OutsideError
    halves = []
    for keys in (slice(None, at), slice(at, None)):
        segments = None if problem.k_segments is None else problem.k_segments[:, keys]
        part = dataclasses.replace(problem, k=problem.k[:, :, keys], v=problem.v[:, :, keys], k_segments=segments)
        halves.append(_call(trial, part))
    whole = _call(trial, problem)
    lse = [half.result.lse.astype(np.float64) for half in halves]  # type: ignore[union-attr]
    with np.errstate(invalid="ignore", over="ignore"):
        merged_lse = np.logaddexp(*lse)
        weights = [np.where(np.isneginf(merged_lse), 0.0, np.exp(x - merged_lse))[..., None] for x in lse]
        merged = sum(w * widen(half.result.out) for w, half in zip(weights, halves, strict=True))
        doubt = np.maximum(halves[0].bound.lse, halves[1].bound.lse)
        # |d ln w_i| <= 2 max of the LSE bounds; what float64 does to exp and the sum is DOUBT.
        moved = np.expm1(2.0 * doubt + DOUBT * (1.0 + np.abs(lse[0] - lse[1])))[..., None]
        limit = whole.bound.out + sum(
            w * ((1.0 + moved) * half.bound.out + moved * np.abs(widen(half.result.out)))
            for w, half in zip(weights, halves, strict=True)
        )
        lse_limit = whole.bound.lse + doubt + DOUBT * (1.0 + np.abs(np.where(np.isfinite(merged_lse), merged_lse, 0)))
    limit = np.where(np.isnan(limit), np.inf, limit * ROUNDED)
    assert whole.result.lse is not None  # noqa: S101  the features say that there is one
    pairs: dict[str, Any] = {"out": (whole.result.out, merged, limit), "lse": (whole.result.lse, merged_lse, lse_limit)}
    return "split", close(pairs, "two halves of the keys merge to the whole"), whole.result


def _packed(trial: Trial) -> tuple[str, Judgement, SubjectResult]:
    """The same sequence behind another one in a packed batch, kept apart by segment ids."""
    p = trial.problem
    if p.q_segments is not None or p.q_len != p.kv_len:
        raise OutsideError
    before = int(trial.case.asked("seed")) % 127 + 1

    def packed(x: np.ndarray) -> np.ndarray:
        return np.concatenate([-x[:, :, :before], x], axis=2)

    ids = np.repeat(np.array([[0] * before + [1] * p.q_len]), p.batch, axis=0)
    both = dataclasses.replace(p, q=packed(p.q), k=packed(p.k), v=packed(p.v), q_segments=ids, k_segments=ids)
    if trial.subject.unsupported(both):
        raise OutsideError
    alone, together = _call(trial, p), _call(trial, both)
    cut = np.s_[:, :, before:]
    result, bound = together.result, together.bound
    part = dataclasses.replace(result, out=result.out[cut], lse=None if result.lse is None else result.lse[cut])
    own = dataclasses.replace(bound, out=bound.out[cut], lse=bound.lse[cut])
    pairs = _pair(alone, _Call(both, part, own))
    return "packing", close(pairs, "a sequence does not depend on where it is packed"), alone.result


def _repeated_heads(trial: Trial) -> tuple[str, Judgement, SubjectResult]:
    """Grouped heads, and the same with each KV head repeated: the same arithmetic, bit for bit."""
    p = trial.problem
    group = p.heads // p.kv_heads
    repeated = dataclasses.replace(p, k=np.repeat(p.k, group, axis=1), v=np.repeat(p.v, group, axis=1))
    first, second = trial.run(p), trial.run(repeated)
    what = "grouped heads equal repeated KV heads"
    differs = same_bits(first, second, what)
    verdict = Judgement(Verdict.PASS, what) if differs is None else Judgement(Verdict.FAIL, differs)
    return "grouped", verdict, first


def _constant(trial: Trial) -> tuple[str, Judgement, SubjectResult]:
    """A constant on all logits, through a lane that the queries hold at 1: the output stays, the LSE moves by it."""
    p = trial.problem
    if p.softcap is not None or p.sinks is not None or not p.scale:
        raise OutsideError
    q, k = p.q.copy(), p.k.copy()
    q[..., -1], k[..., -1] = 1.0, 0.0
    base = dataclasses.replace(p, q=q, k=k)
    added = k.copy()
    constant = float(np.array(float(int(trial.case.asked("seed")) % 4001 - 2000)).astype(BF16))
    added[..., -1] = constant
    first, second = _call(trial, base), _call(trial, dataclasses.replace(base, k=added))
    pairs = _pair(first, second, shift=constant * p.scale)
    return "constant", close(pairs, "a constant on all logits moves the LSE alone"), second.result


def _scaled_values(trial: Trial) -> tuple[str, Judgement, SubjectResult]:
    """V scaled by a power of two scales the output, and leaves the LSE."""
    p = trial.problem
    power = int(trial.case.asked("seed")) % 17 - 8
    wide = widen(p.v)
    scaled = np.ldexp(wide, power)
    if (np.abs(scaled) >= 2.0**127).any() or ((wide != 0) & (np.abs(scaled) < 2.0**-100)).any():
        raise OutsideError
    first, second = _call(trial, p), _call(trial, dataclasses.replace(p, v=scaled.astype(BF16)))
    pairs = _pair(first, second, out_factor=2.0**power)
    return "scaled", close(pairs, "V times a power of two scales the output"), second.result


def _doubled(trial: Trial) -> tuple[str, Judgement, SubjectResult]:
    """A key that stands twice weighs as one whose logit is larger by ln 2 (three lanes hold that, exactly in log2)."""
    p = trial.problem
    if p.softcap is not None or not p.scale or p.kv_len < 2 or p.window is not None:
        raise OutsideError
    if p.k_segments is not None:
        raise OutsideError
    token = int(trial.case.asked("seed")) % p.kv_len
    other = (token + 1) % p.kv_len
    q, k, v = p.q.copy(), p.k.copy(), p.v.copy()
    q[..., -3:], k[..., -3:] = 1.0, 0.0
    full = dataclasses.replace(p, q=q, k=k, causal=False)
    twice_k, twice_v = k.copy(), v.copy()
    twice_k[:, :, other], twice_v[:, :, other] = k[:, :, token], v[:, :, token]
    once_k = k.copy()
    rest = LN2 / p.scale
    for lane in (-3, -2, -1):
        part = np.array(rest).astype(BF16)
        once_k[:, :, token, lane] = part
        rest -= float(part)
    kept = [n for n in range(p.kv_len) if n != other]
    twice = _call(trial, dataclasses.replace(full, k=twice_k, v=twice_v))
    once = _call(trial, dataclasses.replace(full, k=once_k[:, :, kept], v=v[:, :, kept]))
    # ln 2 is off by `rest` times the scale: that moves every weight of the row by at most twice as much, relatively.
    doubt = 4.0 * abs(rest * p.scale)
    pairs = _pair(twice, once)
    reach = np.abs(widen(v)).max()
    pairs = {
        name: (got, want, limit + doubt * (reach if name == "out" else 1.0))
        for name, (got, want, limit) in pairs.items()
    }
    return "doubled", close(pairs, "a doubled key equals ln 2 on its logit"), twice.result


def _wide_window(trial: Trial) -> tuple[str, Judgement, SubjectResult]:
    """A window of as many keys as there are, or a few more, hides nothing."""
    p = trial.problem
    if p.window is not None:
        raise OutsideError
    wide = dataclasses.replace(p, window=(p.kv_len - 1 + int(trial.case.asked("seed")) % 3, None))
    first, second = _call(trial, p), _call(trial, wide)
    return "window", close(_pair(first, second), "a window as wide as the keys hides none"), second.result


RELATIONS: dict[str, Callable[[Trial], tuple[str, Judgement, SubjectResult]]] = {
    "permute": _permuted,
    "split": _split,
    "packing": _packed,
    "grouped": _repeated_heads,
    "constant": _constant,
    "scaled": _scaled_values,
    "doubled": _doubled,
    "window": _wide_window,
}


def _question(trial: Trial) -> Answer:
    place, judgement, result = RELATIONS[str(trial.case.asked("relation"))](trial)
    return Answer(result, judgement, place=place)


def evaluate(case: Case, *, subject: Subject, name: str, reproduce: str) -> dict[str, Any] | None:
    """Judge a case by one relation."""
    return attempt(case, _question, subject=subject, name=name, reproduce=reproduce)
