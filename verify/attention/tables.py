"""What the oracles cost and how tight the bounds are: `python -m verify.attention.tables --out docs/oracle-tables.md`.

Cost is CPU time of one process on one core, the least of three runs; tightness is what part of a bound an error uses,
against ball arithmetic for an oracle and against the oracle for a contract.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from verify.attention import adversarial, oracle_arb, oracle_float64, oracle_mpmath
from verify.attention.cases import AttentionCase, base_values
from verify.attention.contract import reference_and_bound
from verify.attention.gradients import judge as gradient_judge
from verify.attention.gradients import oracle_arb as gradient_balls
from verify.attention.gradients import oracle_float64 as gradients
from verify.attention.gradients.problem import GradientProblem
from verify.attention.judge import judge
from verify.attention.oracle_float64 import TINY
from verify.attention.subjects import run_flywheel
from verify.backend import device_model
from verify.rotary import oracle_arb as rotary_balls
from verify.rotary import oracle_float64 as rotary
from verify.rotary.contract import contract as rotary_contract
from verify.rotary.problem import RotaryProblem
from verify.subjects.judging import judge_subject
from verify.subjects.registry import load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from verify.attention.problem import AttentionProblem

RUNS = 3
BACKWARD = "jax.nn.dot_product_attention[gradients]"
ROWS = 8
"""Rows per case at which the float64 oracle is compared with ball arithmetic."""


def cpu_seconds(run: Callable[[], object]) -> float:
    """The least CPU time of a few runs, the first of which warms caches."""
    times: list[float] = []
    for _ in range(RUNS):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


def dense(heads: int, tokens: int, head_dim: int) -> AttentionProblem:
    """Causal attention over bell-shaped values."""
    return AttentionCase("cost", (1, heads, heads, tokens, tokens, head_dim), seed=1).build()


def costs() -> Iterator[tuple[str, str, float]]:
    """(oracle, problem, CPU-seconds)."""
    model = device_model()
    large, small = dense(4, 4096, 128), dense(2, 256, 128)
    words = "causal, 4 heads x 4096 x 4096, head_dim 128"
    yield "float64, every element", words, cpu_seconds(lambda: oracle_float64.attention(large))
    yield "both, with the contract's bound", words, cpu_seconds(lambda: reference_and_bound(large, model))
    words = "causal, 2 heads x 256 x 256, head_dim 128"
    yield "float64, every element", words, cpu_seconds(lambda: oracle_float64.attention(small))
    yield "both, with the contract's bound", words, cpu_seconds(lambda: reference_and_bound(small, model))
    result, (reference, bound) = run_flywheel(small), reference_and_bound(small, model)
    for power, name in ((False, "verdict"), (True, "verdict with power")):
        yield (
            name,
            words,
            cpu_seconds(lambda p=power: judge(small, result.out, result.lse, bound, reference=reference, power=p)),
        )
    for tokens in (1024, 4096):
        problem = large if tokens == large.q_len else dense(1, tokens, 128)
        rows = list(range(tokens - ROWS, tokens))
        seconds = cpu_seconds(lambda p=problem, r=rows: oracle_arb.attention_rows(p, 0, 0, r)) / ROWS
        yield "ball arithmetic, a row", f"{tokens} keys, head_dim 128", seconds
    row = dense(1, 256, 128)
    yield (
        "mpmath, a row",
        "256 keys, head_dim 128",
        cpu_seconds(lambda: oracle_mpmath.attention_row(row, 0, 0, row.q_len - 1)),
    )
    middle = dense(4, 1024, 128)
    cotangent = GradientProblem.of(middle, np.asarray(middle.v, dtype=np.float32))
    yield (
        "float64 gradients",
        "causal, 4 heads x 1024 x 1024, head_dim 128",
        cpu_seconds(lambda: gradients.gradients(cotangent)),
    )
    backward = load(BACKWARD).arithmetic
    d_out, exact = (
        gradient_judge.cotangent(middle),
        gradients.gradients(GradientProblem.of(middle, np.asarray(middle.v))),
    )
    yield (
        "gradient contract's bound",
        "causal, 4 heads x 1024 x 1024, head_dim 128",
        cpu_seconds(lambda: backward.gradient_bound(middle, d_out, model, exact)),
    )
    positions = RotaryProblem(large.q, np.arange(4096))
    yield "float64 rotary embedding", "4 heads x 4096 x 128", cpu_seconds(lambda: rotary.rotate(positions))


def tightness() -> Iterator[tuple[str, int, float, float, float, float]]:
    """Per family: cases, the oracle's worst share of its bound, both median bounds over max |v|, the kernel's share."""
    model = device_model()
    for family in ("ordinary", "adversarial"):
        cases = adversarial.families()[family]
        oracle_share, kernel_share = 0.0, 0.0
        oracle_size: list[float] = []
        contract_size: list[float] = []
        for case in cases:
            problem = case.build()
            reference, bound = reference_and_bound(problem, model)
            largest = np.abs(problem.v.astype(np.float64)).max()
            if largest > 0.0:
                oracle_size.append(float(np.median(reference.out_error) / largest))
                contract_size.append(float(np.median(bound.out) / largest))
            oracle_share = max(oracle_share, _oracle_share(problem))
            result = run_flywheel(problem, config=case.config)
            share = judge(problem, result.out, result.lse, bound, reference=reference).measures["out"].share
            kernel_share = max(kernel_share, share.value if share is not None else 0.0)
        yield (
            family,
            len(cases),
            oracle_share,
            float(np.median(oracle_size)),
            float(np.median(contract_size)),
            kernel_share,
        )


GRADIENT_CASES = tuple(
    AttentionCase(f"gradients {seed}", shape, seed=seed, causal=causal, exponents=exponents, window=window)
    for seed, (shape, causal, exponents, window) in enumerate(
        (
            ((1, 4, 2, 32, 48, 32), True, (0, 0, 0), None),
            ((1, 2, 1, 48, 48, 32), False, (1, 1, 0), None),
            ((2, 2, 2, 24, 24, 64), True, (0, 0, 20), None),
            ((1, 2, 1, 40, 40, 32), True, (2, 2, 0), (7, None)),
            ((1, 6, 3, 16, 64, 16), True, (-4, -4, -4), None),
        )
    )
)


def gradient_tightness() -> Iterator[tuple[str, int, float, float, float, float]]:
    """The same per derivative, for the gradients of `jax.nn.dot_product_attention`; sizes are the arrays' largest."""
    subject, model = load(BACKWARD), device_model()
    found: dict[str, list[tuple[float, float, float, float]]] = {}
    for case in GRADIENT_CASES:
        problem = case.build()
        d_out = gradient_judge.cotangent(problem)
        backward = GradientProblem.of(problem, d_out)
        reference, balls = gradients.gradients(backward), dict(gradient_balls.gradients(backward).parts())
        bounds = dict(subject.arithmetic.gradient_bound(problem, d_out, model, reference).parts())
        measures = judge_subject(subject, problem).judgement.measures
        for name, part in reference.parts():
            size = float(np.abs(part.value).max())
            error = np.abs(part.value - balls[name].value) - balls[name].error
            share = measures[name].share
            row = (
                float(np.max(error / np.maximum(part.error, TINY))),
                float(np.median(part.error)) / size,
                float(np.median(bounds[name])) / size,
                0.0 if share is None else share.value,
            )
            found.setdefault(name, []).append(row)
    for name, rows in found.items():
        oracle, of_oracle, of_contract, kernel = zip(*rows, strict=True)
        yield name, len(rows), max(oracle), float(np.median(of_oracle)), float(np.median(of_contract)), max(kernel)


def rotary_tightness() -> Iterator[tuple[str, int, float, float, float]]:
    """Per base: positions, the oracle's worst share of its bound, and both median bounds over max |x|."""
    positions = np.unique(np.geomspace(1, 1 << 20, 60).astype(np.int64))
    x = base_values((1, 1, len(positions), 64), 1, 0)
    for base in (1e4, 1e5, 1e7):
        problem = RotaryProblem(x, positions, base)
        reference, balls = rotary.rotate(problem), rotary_balls.rotate(problem)
        error = np.abs(reference.out - balls.out) - balls.error
        share = float(np.max(error / np.maximum(reference.error, TINY)))
        size = float(np.abs(x.astype(np.float64)).max())
        bound = rotary_contract(problem, device_model(), out_dtype=np.dtype(np.float32)).out
        of_oracle, of_contract = (float(np.median(x)) / size for x in (reference.error, bound))
        yield f"base {base:g}", len(positions), share, of_oracle, of_contract


def _oracle_share(problem: AttentionProblem) -> float:
    """The largest part of the float64 oracle's bound that its error uses, over a few rows of head 0."""
    rows = sorted({int(r) for r in np.linspace(0, problem.q_len - 1, ROWS)})
    reference = oracle_float64.attention(problem)
    worst = 0.0
    for row, (out, _) in zip(rows, oracle_arb.attention_rows(problem, 0, 0, rows), strict=True):
        for lane in range(0, problem.v_dim, 7):
            bound = float(reference.out_error[0, 0, row, lane])
            if bound > 0.0:
                error = abs(out[lane] - float(reference.out[0, 0, row, lane]))
                worst = max(worst, float(error.mid()) / bound)
    return worst


def render() -> str:
    """Both tables in Markdown."""
    lines = [
        "# What the oracles cost, and how tight the bounds are",
        "",
        "Made by `python -m verify.attention.tables --out docs/oracle-tables.md`; measured on one core",
        f"({platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}).",
        "",
        "| oracle | problem | CPU-seconds |",
        "| --- | --- | --- |",
        *(f"| {name} | {words} | {seconds:.3g} |" for name, words, seconds in costs()),
        "",
        "How tight: the part of the float64 oracle's proved bound that its error uses against ball arithmetic, both",
        "bounds relative to the largest |v| (medians over elements and cases), and the part of the contract that",
        "`flywheel.attention` uses at its worst element.",
        "",
        "| family | cases | oracle's share, worst | oracle's bound | contract's bound | kernel's share, worst |",
        "| --- | --- | --- | --- | --- | --- |",
        *(f"| {f} | {n} | {a:.3g} | {b:.2g} | {c:.2g} | {d:.3g} |" for f, n, a, b, c, d in tightness()),
        "",
        "The same for gradients; the kernel is the derivative of `jax.nn.dot_product_attention`, and sizes are",
        "relative to the largest element of each array:",
        "",
        "| derivative | cases | oracle's share, worst | oracle's bound | contract's bound | kernel's share, worst |",
        "| --- | --- | --- | --- | --- | --- |",
        *(
            f"| {f} | {n} | {max(a, 0.0):.3g} | {b:.2g} | {c:.2g} | {d:.3g} |"
            for f, n, a, b, c, d in gradient_tightness()
        ),
        "",
        "And for the rotary embedding at positions up to 2^20 (the contract is that of an FP32 kernel, FP32 result):",
        "",
        "| base | positions | oracle's share, worst | oracle's bound | contract's bound |",
        "| --- | --- | --- | --- | --- |",
        *(f"| {f} | {n} | {max(a, 0.0):.3g} | {b:.2g} | {c:.2g} |" for f, n, a, b, c in rotary_tightness()),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(prog="python -m verify.attention.tables", description=__doc__)
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
