"""deltanet-tpu as a subject of campaigns: a process in its own environment, which cases and results reach as files.

    python -m verify.subjects.peers.deltanet environment DIR
    DELTANET_ENVIRONMENT=DIR python -m fuzz run gates state --subject verify.subjects.peers.deltanet_bridge:DELTANET

The kernel computes the delta rule alone: it is given, and judged by, the rule that is in a layer call, with queries,
keys and values rounded to BF16.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from verify.gdn.float64_stages import rule_inputs
from verify.gdn.inverse_steps import CHUNK
from verify.gdn.judge import GdnResult
from verify.gdn.problem import BF16, DeltaRuleProblem
from verify.subjects.gdn import GdnSubject, layer_limits
from verify.subjects.peers.deltanet import NAME, PRECISION, RUNNER, STEPS, WIDTH

if TYPE_CHECKING:
    from verify.gdn.problem import GdnProblem

ENVIRONMENT = "DELTANET_ENVIRONMENT"


def rule_of(problem: GdnProblem) -> DeltaRuleProblem:
    """The delta rule in a layer call; tokens of no sequence hold zeros."""
    n_kq, n_v, d_k, d_v = problem.heads
    q, k = (np.zeros((problem.tokens, n_kq, d_k), BF16) for _ in range(2))
    v = np.zeros((problem.tokens, n_v, d_v), BF16)
    beta, g = (np.zeros((problem.tokens, n_v), np.float32) for _ in range(2))
    for sequence in range(problem.sequences.count):
        span, found = problem.sequences.span(sequence), rule_inputs(problem, sequence)
        for into, exact in ((q, found.q), (k, found.k), (v, found.v), (beta, found.beta), (g, found.g)):
            into[span] = exact.value.astype(into.dtype)
    return DeltaRuleProblem(q, k, v, beta, g, problem.state, problem.sequences, problem.scale)


@dataclasses.dataclass(frozen=True, eq=False)
class Runner:
    """A process that answers cases, and where its files are."""

    process: subprocess.Popen[str]
    exchange: Path

    def answer(self, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """(out, state) of one sequence.

        Raises:
            ValueError: the kernel refuses the input.
            RuntimeError: it raised anything else.
        """
        case, result = self.exchange / "case.npz", self.exchange / "results" / "case.npz"
        np.savez(case, **arrays)  # pyright: ignore[reportArgumentType]  names are the arrays'
        assert self.process.stdin is not None  # noqa: S101  both were asked for
        assert self.process.stdout is not None  # noqa: S101
        self.process.stdin.write(f"{case}\n")
        self.process.stdin.flush()
        if not self.process.stdout.readline():
            message = f"the runner ended with {self.process.wait()}"
            raise RuntimeError(message)
        with np.load(result) as found:
            if "error" not in found:
                return found["out"], found["state"]
            message = str(found["error"])
        raise (ValueError if message.startswith(("ValueError", "NotImplementedError")) else RuntimeError)(message)

    def close(self) -> None:
        """End the process."""
        with self.process:
            self.process.kill()


@functools.cache
def runner() -> Runner:
    """The process of this process, started when it is first asked."""
    python = str(Path(os.environ[ENVIRONMENT]).resolve() / "bin" / "python")
    exchange = Path(tempfile.mkdtemp(prefix="deltanet-"))
    command = [python, "-P", str(RUNNER), "-", str(exchange / "results"), PRECISION]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return Runner(process, exchange)


def _whole_chunks(x: np.ndarray) -> np.ndarray:
    return np.pad(x, ((0, -len(x) % WIDTH), *[(0, 0)] * (x.ndim - 1)))


def _call(problem: DeltaRuleProblem) -> GdnResult:
    out = np.zeros((problem.tokens, problem.n_v, problem.d_v), np.float32)
    state = problem.state.copy()
    sequences = problem.sequences
    assert problem.g is not None  # noqa: S101  `rule_of` gives one
    for sequence in range(sequences.count):
        span, slot, write = sequences.span(sequence), sequences.initial_slot(sequence), sequences.write_slots[sequence]
        final = np.zeros_like(state[0]) if slot is None else problem.state[slot]
        if span.start < span.stop:
            tokens = {name: getattr(problem, name)[span].astype(np.float32) for name in ("q", "k", "v", "beta", "g")}
            arrays = {name: _whole_chunks(x) for name, x in tokens.items()}
            found, final = runner().answer(arrays | {"state": final, "scale": np.asarray(problem.scale)})
            out[span] = found[: span.stop - span.start]
        if write >= 0:
            state[write] = final
    return GdnResult(out.astype(BF16), state)


def _lacking(problem: GdnProblem) -> str | None:
    if ENVIRONMENT not in os.environ:
        return f"{ENVIRONMENT} must name an environment (python -m verify.subjects.peers.deltanet environment DIR)"
    if problem.sequences.lengths.max(initial=0) > CHUNK:
        return f"its chunks have {WIDTH} tokens: the contract's, of {CHUNK}, speaks for sequences of up to {CHUNK}"
    return layer_limits(problem)


DELTANET = GdnSubject(
    name=NAME,
    call=_call,
    steps=STEPS,
    lacking=_lacking,
    computes=rule_of,
    contract="g <= 0 and a gate in [0, 1] are asked for; no numerical bound is documented",
    notes=(
        "given the delta rule alone: convolution, gates and norms are computed for it",
        "sequences padded at the end to multiples of 128 tokens with keys, gates and log-decays of 0",
    ),
)
