"""What Gated DeltaNet's oracles cost, and how tight its bounds are.

`python -m verify.gdn.tables --out docs/gdn-tables.md` writes the page.  Cost is CPU time of one process on one core,
the least of three runs.  Tightness compares the float64 oracle with ball arithmetic, the inverse's contract with the
emulated eight products, and the chain's contract with the emulated kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from verify.devices import CPU_INTERPRET
from verify.gdn import inverse, oracle_arb, oracle_float64, oracle_mpmath
from verify.gdn.cases import KEYS, GdnCase, every_family
from verify.gdn.contract import contract_bound
from verify.gdn.inverse_contract import inverse_bound
from verify.gdn.inverse_steps import InverseSteps, invert
from verify.gdn.judge import GdnResult, judge
from verify.gdn.problem import final_conv_state
from verify.gdn.steps import BF16_STEPS, KNOWN_STEPS, SPLIT_STEPS, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from verify.gdn.steps import ChunkSteps

RUNS = 3
MODES = {"bf16": BF16_STEPS, "bf16x3": SPLIT_STEPS}
CHAIN_MODES = {"bf16": BF16_STEPS, "bf16, known operands": KNOWN_STEPS, "bf16x3": SPLIT_STEPS}
SEEDS = 3
BETA_FAMILIES = {"up to 1": ("up to 1", "1", "constant"), "1 to 2": ("1 to 2", "2")}
MATRIX_DECAYS = ("0", "mild")
TOKENS = 192


def cpu_seconds(work: Callable[[], object]) -> float:
    """The least CPU time of a few runs, the first of which warms caches."""
    times: list[float] = []
    for _ in range(RUNS):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def _layer(tokens: int, heads: tuple[int, int, int, int], keys: str = "random") -> GdnCase:
    return GdnCase(keys, "up to 1", "mild", seed=1, lengths=(tokens,), heads=heads)


def costs() -> Iterator[tuple[str, str, float]]:
    """(what, problem, CPU-seconds)."""
    large = _layer(4096, (1, 1, 128, 128)).layer()
    words = "layer, 4096 tokens, one head, 128 x 128 state"
    yield "float64, token by token", words, cpu_seconds(lambda: oracle_float64.gdn(large))
    yield "float64, in chunks", words, cpu_seconds(lambda: oracle_float64.gdn_chunked(large))
    middle = _layer(512, (1, 1, 128, 128)).layer()
    words = "layer, 512 tokens, one head, 128 x 128 state"
    yield "float64, in chunks", words, cpu_seconds(lambda: oracle_float64.gdn_chunked(middle))
    yield "contract's bound", words, cpu_seconds(lambda: contract_bound(middle, SPLIT_STEPS, CPU_INTERPRET))
    found = run(middle, SPLIT_STEPS)
    result = GdnResult(found.out, found.state, final_conv_state(middle))
    bound, reference = contract_bound(middle, SPLIT_STEPS, CPU_INTERPRET), oracle_float64.gdn_chunked(middle)
    yield "verdict", words, cpu_seconds(lambda: judge(middle, result, bound, reference=reference))
    small = _layer(64, (1, 1, 16, 16)).layer()
    words = "layer, 64 tokens, one head, 16 x 16 state"
    yield "ball arithmetic, token by token", words, cpu_seconds(lambda: oracle_arb.gdn(small))
    yield "ball arithmetic, in chunks", words, cpu_seconds(lambda: oracle_arb.gdn_chunked(small))
    tiny = _layer(8, (1, 1, 4, 4)).layer()
    words = "layer, 8 tokens, one head, 4 x 4 state"
    yield "mpmath's intervals", words, cpu_seconds(lambda: oracle_mpmath.gdn(tiny))
    lower = matrix("near-duplicate", "up to 1", "mild", 0)
    wide, words = lower.astype(np.float64), "64 x 64, near-duplicate keys"
    yield "inverse, exact", words, cpu_seconds(lambda: inverse.exact(wide))
    yield "inverse, float64", words, cpu_seconds(lambda: inverse.float64(wide))
    yield "inverse's contract", words, cpu_seconds(lambda: inverse_bound(lower, InverseSteps(), CPU_INTERPRET))


def matrix(keys: str, beta: str, decay: str, seed: int) -> np.ndarray:
    """L of one chunk, 128-dimensional BF16 keys: beta_i exp(g_(j+1) + .. + g_i) k_i.k_j below the diagonal, in FP32."""
    problem = GdnCase(keys, beta, decay, seed=seed, heads=(1, 1, 128, 1)).rule()
    k = problem.k[:, 0].astype(np.float32)
    g = np.zeros(len(k)) if problem.g is None else problem.g[:, 0].astype(np.float64)
    after = np.where(np.tril(np.ones((len(k), len(k)), dtype=bool), -1), g[:, None], 0.0)
    return np.tril(problem.beta * (k @ k.T) * np.exp(np.cumsum(after, axis=0)).astype(np.float32), -1)


def oracle_shares() -> Iterator[tuple[str, int, float, float]]:
    """(family of keys, cases, the worst share of the float64 oracle's bound in use, median bound)."""
    for keys in KEYS:
        shares: list[float] = []
        bounds: list[float] = []
        cases = [case for case in every_family() if case.keys == keys]
        for case in cases:
            problem = dataclasses.replace(case, lengths=(20,), heads=(1, 1, 6, 2)).layer()
            found, balls = oracle_float64.gdn(problem), oracle_arb.gdn(problem)
            for name in ("out", "state"):
                error = np.abs(getattr(found, name) - getattr(balls, name))
                room = getattr(found, f"{name}_error") + getattr(balls, f"{name}_error")
                shares.append(float(np.max(np.divide(error, room, out=np.zeros_like(error), where=room > 0))))
                bounds.append(float(np.max(getattr(found, f"{name}_error"))))
        yield keys, len(cases), max(shares), float(np.median(bounds))


def inverse_shares() -> Iterator[tuple[str, str, str, int, float, float, float, float, int]]:
    """Of the inverse's contract: family, beta, precision, matrices, error, bound, their ratio, share, violations.

    Error, bound and share are the worst; the ratio is of the largest entries of bound and error, its median.
    """
    for keys in KEYS:
        for label, betas in BETA_FAMILIES.items():
            for precision in MODES:
                steps = InverseSteps(precision)
                rows = [
                    _compared(matrix(keys, beta, decay, seed), steps)
                    for beta in betas
                    for decay in MATRIX_DECAYS
                    for seed in range(SEEDS)
                ]
                errors, bounds, shares, wrong = (np.array(column) for column in zip(*rows, strict=True))
                ratio = float(np.median(bounds[errors > 0] / errors[errors > 0])) if (errors > 0).any() else 1.0
                yield (
                    keys,
                    label,
                    precision,
                    len(rows),
                    errors.max(),
                    bounds.max(),
                    ratio,
                    shares.max(),
                    int(wrong.sum()),
                )


def _compared(lower: np.ndarray, steps: InverseSteps) -> tuple[float, float, float, int]:
    bound = inverse_bound(lower, steps, CPU_INTERPRET)
    error = np.abs(invert(lower, steps).astype(np.float64) - bound.exact)
    share = np.divide(error, bound.bound, out=np.zeros_like(error), where=bound.bound > 0)
    wrong = int(np.count_nonzero(error > bound.bound + bound.exact_error))
    return float(error.max()), float(bound.bound.max()), float(share.max()), wrong


def chain_shares(
    tokens: int = TOKENS,
) -> Iterator[tuple[str, str, str, str, float, float, float, float, float, float, int]]:
    """Of the chain's contract, for one layer of 128 x 128 per family and mode.

    (keys, beta, decay, mode; of the output: worst error and bound relative to the largest output, worst share; the same
    of the state; violations).
    """
    for keys in KEYS:
        for beta in ("up to 1", "1 to 2"):
            for decay in MATRIX_DECAYS:
                case = GdnCase(keys, beta, decay, seed=1, lengths=(tokens,), heads=(1, 1, 128, 128))
                problem = case.layer(negative=beta != "up to 1")
                reference = oracle_float64.gdn_chunked(problem)
                for mode, steps in CHAIN_MODES.items():
                    found, bound = run(problem, steps), contract_bound(problem, steps, CPU_INTERPRET)
                    numbers: list[float] = []
                    wrong = 0
                    for name in ("out", "state"):
                        want, limit = getattr(reference, name), getattr(bound, name)
                        error = np.abs(getattr(found, name).astype(np.float64) - want)
                        size = np.abs(want).max()
                        wrong += int(np.count_nonzero(error > limit + getattr(reference, f"{name}_error")))
                        numbers += [error.max() / size, limit.max() / size, float((error / limit).max())]
                    yield (keys, beta, decay, mode, *numbers, wrong)  # type: ignore[misc]


def growth_over_tokens(steps: ChunkSteps) -> Iterator[tuple[int, float, float]]:
    """(token, worst error so far, worst bound so far) of the output on random keys, relative to the largest output."""
    problem = _layer(1024, (1, 1, 128, 128)).layer()
    reference = oracle_float64.gdn_chunked(problem)
    found, bound = run(problem, steps), contract_bound(problem, steps, CPU_INTERPRET)
    size = np.abs(reference.out).max()
    error = np.abs(found.out.astype(np.float64) - reference.out)
    for token in (64, 256, 1024):
        yield token, error[:token].max() / size, bound.out[:token].max() / size


def render() -> str:
    """The page."""
    machine = f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}"
    lines = [
        "# What Gated DeltaNet's oracles cost, and how tight its bounds are",
        "",
        "Made by `python -m verify.gdn.tables --out docs/gdn-tables.md`; measured on one core",
        f"({machine}).",
        "",
        "| what | problem | CPU-seconds |",
        "| --- | --- | --- |",
        *(f"| {name} | {words} | {seconds:.2g} |" for name, words, seconds in costs()),
        "",
        "The float64 oracle against ball arithmetic: the part of its proved bound that is in use at the worst element,",
        "over all write strengths and decays.",
        "",
        "| keys | cases | worst share | median bound |",
        "| --- | --- | --- | --- |",
        *(f"| {keys} | {n} | {share:.2g} | {bound:.1g} |" for keys, n, share, bound in oracle_shares()),
        "",
        "The inverse's contract against the emulated eight products (64 x 64, 128-dimensional keys, no decay and mild",
        "decay): largest entries of error and bound, the median of their ratio, and the worst share of single entries.",
        "",
        "| keys | beta | precision | matrices | error | bound | bound / error | worst share | violations |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {k} | {b} | {p} | {n} | {e:.1e} | {w:.1e} | {r:.3g} | {s:.2g} | {v} |"
        for k, b, p, n, e, w, r, s, v in inverse_shares()
    ]
    lines += [
        "",
        f"The chain's contract against the emulated kernel (a layer of {TOKENS} tokens, 128 x 128 state): error and",
        "bound relative to the largest output or state, and the worst share of single elements. A bound above 1 has",
        "no power.",
        "",
        "| keys | beta | decay | mode | out: error | bound | share | state: error | bound | share | violations |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {k} | {b} | {d} | {m} | {a:.1e} | {e:.1e} | {s:.2g} | {x:.1e} | {y:.1e} | {z:.2g} | {v} |"
        for k, b, d, m, a, e, s, x, y, z, v in chain_shares()
    ]
    lines += [
        "",
        "Growth over tokens (random keys, beta up to 1, mild decay): worst error and bound of the output up to a",
        "token, relative to the largest output.",
        "",
        "| mode | token | error | bound |",
        "| --- | --- | --- | --- |",
    ]
    for mode, steps in CHAIN_MODES.items():
        lines += [f"| {mode} | {t} | {e:.1e} | {b:.1e} |" for t, e, b in growth_over_tokens(steps)]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(prog="python -m verify.gdn.tables", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write them there")
    out = parser.parse_args(arguments).out
    text = render()
    if out is None:
        print(text)
    else:
        out.write_text(text, encoding="utf-8")
        print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
