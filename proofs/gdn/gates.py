"""Log-decays: how they are formed, how their sums are, and what holds them."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from flywheel.gdn import tile
from proofs.constants import envelope
from proofs.exact import FP32, ball, ball_precision, power_of_two
from proofs.lemma import Assumption, Method, lemma, require
from verify import devices
from verify.gdn import contract, inverse_levels, steps
from verify.gdn.float64_stages import Approx

_TESTS = "verify/tests/kernels/gdn/test_gdn_chunk.py"


def _significands() -> np.ndarray:
    """The FP32 numbers whose first eight bits are 10000000 or 10000001.

    Rounding to eight bits looks at the 16 bits below and at whether the eighth is odd; so what is left depends on these
    alone, and relative to the number it is largest where the first bits are least.
    """
    return (np.arange(2**17, dtype=np.uint32) | np.uint32(0x3F800000)).view(np.float32)


def _pieces(x: np.ndarray, count: int) -> tuple[list[np.ndarray], np.ndarray]:
    """The BF16 pieces of FP32 numbers, one after another, and what is left."""
    pieces, rest = [], x
    for _ in range(count):
        piece = rest.astype(ml_dtypes.bfloat16).astype(np.float32)
        pieces.append(piece)
        rest = rest - piece
    return pieces, rest


@lemma(
    statement="three BF16 pieces are an FP32 number exactly, 1 + 2**-7 + 2**-14 times its size together; sums of a "
    "segment's log-decays are charged gamma(n + 2), or gamma(3 n + 2) as pieces on the matrix unit",
    rests_on=(
        "gdn_tile.PIECES",
        "steps.PIECES",
        "steps.PIECES_SIZE",
        "inverse_levels.LOW_UNIT",
        "inverse_levels.SPLIT_UNIT",
        "devices.unit_roundoff",
        "devices.dot_unit_roundoff",
    ),
    methods=(Method.EXHAUSTIVE, Method.BALLS),
    assumptions=(
        Assumption(
            "tokens outside of a segment enter its sum as exact zeros",
            f"{_TESTS}::test_a_reset_leaves_its_neighbours_their_digits",
        ),
    ),
)
def gate_sums() -> str:
    """Section 4 of docs/gdn-contract.md.

    A piece is what is left rounded to BF16, so that of a number in [1, 2) at most 2**-8 remains, 2**-17 after two, and
    nothing after three: tried on every last 16 bits of a significand.  Two pieces leave a 2**-17th (`bf16x3`
    operands).  Sizes: the largest sum of |piece| over |x| is compared with PIECES_SIZE, exactly (both sides have less
    than 53 bits).

    Products of pieces with zeros and ones are exact.  Adding zeros rounds nothing, so that a term of a segment of at
    most n tokens passes through at most n - 1 additions on the vector unit, PIECES n - 1 on the matrix unit: the
    contract's own `_segment_errors` is compared with (1 + u)**k - 1.  A kernel that differs in the number of pieces
    from the contract is refuted.
    """
    require(tile.PIECES == steps.PIECES, f"the kernel takes {tile.PIECES} pieces, the contract counts {steps.PIECES}")
    x = _significands()
    pieces, rest = _pieces(x, max(steps.PIECES, 2))
    require(not rest.any(), f"{steps.PIECES} pieces leave up to {float(np.abs(rest).max()):.3g} of a log-decay")
    of_two = np.abs(x - pieces[0] - pieces[1]).astype(np.float64)
    unit, spacing = inverse_levels.SPLIT_UNIT, float(devices.BF16_UNIT_ROUNDOFF) * inverse_levels.LOW_UNIT
    require(bool((of_two <= unit * x.astype(np.float64)).all()), "two pieces leave more than SPLIT_UNIT")
    require(float(of_two.max()) <= spacing, "two pieces leave more than LOW_UNIT of half a spacing")
    size = np.sum([np.abs(piece).astype(np.float64) for piece in pieces], axis=0)
    require(
        bool((size <= steps.PIECES_SIZE * x.astype(np.float64)).all()),
        f"pieces add up to {float((size / x).max()):.9f} of the number's size, PIECES_SIZE is {steps.PIECES_SIZE:.9f}",
    )
    with ball_precision():
        for model in devices.MODELS.values():
            for tokens in (1, 2, 63, 64):
                _sums_are_charged(model, tokens)
    return f"{x.size} significands; sizes reach {float((size / x).max()):.6f}; {len(devices.MODELS)} device models"


def _sums_are_charged(model: devices.DeviceModel, tokens: int) -> None:
    g = Approx(-np.ones(tokens), np.zeros(tokens))
    for decay, terms, u in (
        ("segments", tokens, model.unit_roundoff),
        ("pieces", steps.PIECES * tokens, model.dot_unit_roundoff),
    ):
        chunk: Any = object.__new__(contract._Chunk)  # noqa: SLF001  its own charge, without a whole chunk
        chunk.rows, chunk.n, chunk.unit, chunk.device = SimpleNamespace(g=g), tokens, model.unit_roundoff, model
        chunk.steps = dataclasses.replace(steps.BF16_STEPS, decay=decay)
        charged = ball(float(chunk._segment_errors().error.max()))  # noqa: SLF001
        grown = ((terms - 1) * ball(1 + Fraction(u)).log()).exp() - 1
        needed = grown * (ball(steps.PIECES_SIZE) if decay == "pieces" else 1)
        require(
            charged >= needed, f"a sum of {tokens} log-decays ({decay}) errs by more than is charged on {model.name}"
        )


@lemma(
    statement="ln softplus(x) is x to FP32 below FAR, and is formed from a normal exponential above it; log-decays "
    "raised to LEAST_LOG_DECAY have the decay 0 in FP32, and 64 of them sum to a finite number",
    rests_on=(
        "gdn_tile.FAR",
        "gdn_tile.LEAST_LOG_DECAY",
        "steps.FAR",
        "devices.unit_roundoff",
        "devices.smallest_normal",
    ),
    methods=(Method.BALLS, Method.EXACT),
    assumptions=(
        Assumption(
            "a hard reset is raised to LEAST_LOG_DECAY", f"{_TESTS}::test_a_reset_leaves_its_neighbours_their_digits"
        ),
    ),
)
def log_decays() -> str:
    """-exp(a_log) softplus(x) as -exp(a_log + ln softplus(x)), x = a + dt_bias.

    FAR: 0 <= x - ln softplus(x) <= exp(x) / 2, below u |x| for x < FAR, one of the three roundings of u |x| that the
    contract grants there (rounding x itself and the sum with a_log are the others).  From FAR on exp(x) is normal and
    softplus is at least exp(FAR) / 2: its logarithm is finite.

    LEAST_LOG_DECAY: exp of it, and of everything below, is less than half the smallest subnormal number, hence 0 on
    every machine, flushed or not; what is added to it in a segment is at most 0.  Raised to it, 64 resets sum to a
    finite number and to exact multiples of zero elsewhere, where -inf would give NaN.
    """
    far, least = tile.FAR, tile.LEAST_LOG_DECAY
    require(float(steps.FAR) == far, f"the kernel's FAR is {far}, the emulation's {float(steps.FAR)}")
    with ball_precision():
        u, x = ball(envelope("unit_roundoff")), ball(far)
        require(x.exp() / 2 <= u * abs(x), f"ln softplus(x) is not x to FP32 at {far}")
        require(x.exp() / 2 >= ball(envelope("smallest_normal")), f"exp(x) is flushed above FAR = {far}")
        require(x - (1 + x.exp()).log().log() <= x.exp() / 2, "x - ln softplus(x) passes exp(x) / 2")
        require(ball(least).exp() < ball(power_of_two(-150)), f"exp({least}) is not 0 in FP32")
    total = 2 * 64 * abs(Fraction(least))
    require(total <= FP32.largest, f"64 log-decays of {least} overflow")
    return f"FAR = {far}: x is off by {float(np.exp(far) / 2 / abs(far)):.2g}; exp({least}) = 0"
