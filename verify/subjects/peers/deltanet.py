"""deltanet-tpu's chunked gated delta rule, judged across environments: it needs a JAX below 0.12.

    python -m verify.subjects.peers.deltanet environment DIR     makes an environment for it (uv)
    python -m verify.subjects.peers.deltanet judge DIR           writes case files, runs them there, judges results

Cases and results are files (`deltanet_runner.py` says what they hold), so that neither side imports the other.  The
kernel computes the delta rule alone; its matrix products take BF16 operands, its inverse is FP32.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verify.backend import device_model
from verify.gdn import oracle_float64
from verify.gdn.cases import KEYS, GdnCase
from verify.gdn.contract import contract_bound
from verify.gdn.inverse_steps import InverseSteps
from verify.gdn.judge import GdnResult, judge
from verify.gdn.open_cases import OPEN_CASES
from verify.gdn.problem import BF16, DeltaRuleProblem
from verify.gdn.steps import ChunkSteps
from verify.records import FORMAT
from verify.subjects.gdn_findings import OPERATION, numbers_json, read, write
from verify.verdict import Judgement, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

VERSION = "0.3.0"
JAX = "0.11.2"
REQUIREMENTS = (f"deltanet-tpu=={VERSION}", f"jax=={JAX}", f"jaxlib=={JAX}", "numpy")
NAME = "deltanet_tpu.chunk_gdn"
RUNNER = Path(__file__).with_name("deltanet_runner.py")
PRECISION = "bf16"
# Its inverse is FP32 with a Newton step: hi/lo products charge it with more than that costs.  Its chunks have 128
# tokens, which is the same as 64 for sequences of up to 64.
STEPS = ChunkSteps(InverseSteps("bf16x3"))
WIDTH = 128


def make_environment(directory: Path) -> None:
    """An environment with deltanet-tpu and the JAX that it needs, beside the suite's own."""
    directory = directory.resolve()
    subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, str(directory)], check=True)  # noqa: S607
    install = ["uv", "pip", "install", "--quiet", "--python", str(directory / "bin" / "python"), *REQUIREMENTS]
    # Outside the checkout: uv would hold the environment to this project's pins, of which JAX's are too new for it.
    with tempfile.TemporaryDirectory() as elsewhere:
        subprocess.run(install, check=True, cwd=elsewhere)


def widened(problem: DeltaRuleProblem) -> DeltaRuleProblem:
    """A case with d_k = d_v = 1 in 128 dimensions: keys and queries along e0, the value in every lane."""
    tokens, slots = problem.tokens, len(problem.state)
    q, k = (np.zeros((tokens, 1, WIDTH), np.float32) for _ in range(2))
    q[:, :, 0], k[:, :, 0] = problem.q[:, :, 0], problem.k[:, :, 0]
    state = np.zeros((slots, 1, WIDTH, WIDTH), np.float32)
    state[:, :, 0] = problem.state[:, :, 0]
    v = np.broadcast_to(problem.v.astype(np.float32), (tokens, 1, WIDTH))
    return dataclasses.replace(problem, q=q.astype(BF16), k=k.astype(BF16), v=v.astype(BF16), state=state)


def problems() -> Iterator[tuple[str, str, str, DeltaRuleProblem]]:
    """Name, input and answer in words, problem: open cases of the delta rule, and families of keys."""
    for case in OPEN_CASES.values():
        problem = case.build()
        if case.tier == "cover" and isinstance(problem, DeltaRuleProblem) and problem.sequences.accepted is None:
            yield case.name, case.words, case.answer, widened(problem)
    for keys in KEYS:
        for decay in ("mild", "huge"):
            case = GdnCase(keys, "up to 1", decay, seed=3, lengths=(64,), heads=(1, 1, WIDTH, WIDTH))
            yield f"family-{keys}-{decay}", case.name, "the recurrence", case.rule()


def write_cases(directory: Path) -> dict[str, tuple[str, str, DeltaRuleProblem]]:
    """One file per sequence with tokens, `NAME--NUMBER.npz`; returns input, answer and problem by name."""
    directory.mkdir(parents=True, exist_ok=True)
    found: dict[str, tuple[str, str, DeltaRuleProblem]] = {}
    for name, words, due, problem in problems():
        found[name] = words, due, problem
        for sequence in range(problem.sequences.count):
            span, slot = problem.sequences.span(sequence), problem.sequences.initial_slot(sequence)
            if span.start == span.stop:
                continue
            state = np.zeros_like(problem.state[0]) if slot is None else problem.state[slot]
            g = np.zeros_like(problem.beta) if problem.g is None else problem.g
            np.savez(
                directory / f"{name}--{sequence}.npz",
                q=problem.q[span].astype(np.float32),
                k=problem.k[span].astype(np.float32),
                v=problem.v[span].astype(np.float32),
                beta=problem.beta[span],
                g=g[span],
                state=state,
                scale=np.float64(problem.scale),
            )
    return found


def read_result(directory: Path, name: str, problem: DeltaRuleProblem) -> GdnResult | str:
    """Put a packed problem's sequences together again; or what the kernel raised."""
    out = np.zeros((problem.tokens, problem.n_v, problem.d_v), np.float32)
    state = problem.state.astype(np.float32).copy()
    for sequence in range(problem.sequences.count):
        span, write = problem.sequences.span(sequence), int(problem.sequences.write_slots[sequence])
        slot = problem.sequences.initial_slot(sequence)
        final = np.zeros_like(state[0]) if slot is None else problem.state[slot]
        if span.start < span.stop:
            with np.load(directory / f"{name}--{sequence}.npz") as found:
                if "error" in found:
                    return str(found["error"])
                out[span], final = found["out"], found["state"]
        if write >= 0:
            state[write] = final
    return GdnResult(out.astype(BF16), state)


def judge_results(results: Path, cases: dict[str, tuple[str, str, DeltaRuleProblem]]) -> dict[str, Judgement]:
    """A verdict per case."""
    found: dict[str, Judgement] = {}
    for name, (_, _, problem) in cases.items():
        result = read_result(results, name, problem)
        if isinstance(result, str):
            found[name] = Judgement(Verdict.FAIL, f"the kernel raised {result}")
            continue
        reference = oracle_float64.gdn_chunked(problem)
        found[name] = judge(problem, result, contract_bound(problem, STEPS, device_model()), reference=reference)
    return found


def record(name: str, words: str, due: str, problem: DeltaRuleProblem, judgement: Judgement) -> dict[str, Any]:
    """The record of a judged case (`verify.records`)."""
    return {
        "format": FORMAT,
        "operation": OPERATION,
        "subject": NAME,
        "subject_version": VERSION,
        "case": name,
        "family": "open",
        "shape": {"tokens": problem.tokens, "n_kq": problem.n_kq, "n_v": problem.n_v, "d_k": WIDTH, "d_v": WIDTH},
        "features": {"sequences": problem.sequences.lengths.tolist()},
        "verdict": judgement.verdict.value,
        "reason": judgement.reason,
        "notes": list(judgement.notes),
        "measures": {part: numbers_json(measures) for part, measures in judgement.measures.items()},
        "environment": {
            "backend": "cpu",
            "device_model": device_model().name,
            "interpret": "tpu interpreter",
            "versions": {"jax": JAX, "jaxlib": JAX},
            "date": dt.datetime.now(tz=dt.UTC).isoformat(timespec="seconds"),
        },
        "reproduce": "python -m verify.subjects.peers.deltanet judge DIR",
        "input": words,
        "expected": due,
        "contract": {
            "inside": "not stated",
            "words": "g <= 0 and normalised keys are asked for; no numerical bound is stated (a loss of precision "
            "after strong decay is mentioned for documents that follow one another: mask_lambda_by_doc)",
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the environment, or judge in it; prints one JSON object per case."""
    parser = argparse.ArgumentParser(prog="python -m verify.subjects.peers.deltanet", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("environment", "judge"):
        commands.add_parser(command).add_argument("environment", type=Path, metavar="DIR")
    commands.choices["judge"].add_argument("--exchange", type=Path, help="keep case and result files there")
    commands.choices["judge"].add_argument("--renew", action="store_true", help="put the records among the findings")
    given = parser.parse_args(arguments)
    if given.command == "environment":
        make_environment(given.environment)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        exchange = given.exchange or Path(scratch)
        cases = write_cases(exchange / "cases")
        python = str(given.environment / "bin" / "python")
        command = [python, "-P", str(RUNNER), str(exchange / "cases"), str(exchange / "results"), PRECISION]
        subprocess.run(command, check=True)
        judged = judge_results(exchange / "results", cases)
    records = [record(name, *cases[name], judgement) for name, judgement in judged.items()]
    for found in records:
        print(json.dumps(found))
    if given.renew:
        kept = [other for other in read() if other["subject"] != NAME]
        write(sorted(kept + records, key=lambda r: r["subject"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
