"""What a kernel's algorithm may do to the result, beyond what the machine does: the contract it is held to.

The bound is the one of docs/attention-contract.md, which holds for any order of summation, with the algorithm's own
roundings charged where the derivation has room for them:

- a running maximum that moves after every key block multiplies earlier weights by exp(old - new): one exponential, one
  product and, where the output is kept normalised, one reciprocal more per block (`rescalings`).  They enter the error
  of a weight, rho, through `exp2_relative`.  The exponents' roundings need nothing more: the differences of one key add
  up to its final exponent, so that their roundings add up to what `_shift_error` charges;
- a product that multiplies numerator and denominator apart enters Gamma: four more roundings per block of B keys are at
  most 4 n / B of n keys, hence the factor 1 + 4 / B on the unit of a sum;
- natural exponentials err by the device's `exp_relative` instead of `exp2_relative`;
- P that stays in FP32 is not rounded before P V; its product with a BF16 value rounds once, by FP32's unit roundoff
  (`weight_unit`).  A machine whose products of FP32 matrices take BF16 operands rounds it all the same.

A backward pass is held to docs/gradient-contract.md, which reads the forward pass's bounds; what it rounds is declared
here too.

Scores are owed in FP32: a kernel that rounds the scaled query, or log2(e), to BF16 is judged like every other.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from verify.attention.contract import ContractBound, contract_bound, reference_and_bound
from verify.attention.gradients.contract import DELTAS, GradientBound, Roundings, gradient_bound
from verify.devices import BF16_UNIT_ROUNDOFF

if TYPE_CHECKING:
    from jaxtyping import Float64

    from verify.attention.gradients.reference import Gradients
    from verify.attention.problem import AttentionProblem
    from verify.attention.reference import Reference
    from verify.devices import DeviceModel

EXPONENTIALS = ("exp2", "exp")
WEIGHTS = ("bf16", "fp32")


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """The roundings of an algorithm.

    Attributes:
        weights: format in which P enters P V: "bf16", or "fp32" (BF16 all the same on a machine whose
            `DeviceModel.default_dot` says so).
        exponential: which function makes the weights: "exp2" or "exp".
        block_kv: keys per step of a running maximum; None if the maximum or an anchor is fixed before the first weight.
        d_weights: of a backward pass: format in which dP = dO V^T is kept.
        d_scores: format in which dS enters dS K and dS^T Q.
        delta: how the row sum of P dP is taken: from the forward "output" and dO, or from "weights" P and dP.
    """

    weights: str = "bf16"
    exponential: str = "exp"
    block_kv: int | None = 128
    d_weights: str = "fp32"
    d_scores: str = "bf16"
    delta: str = "output"

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("weights", self.weights, WEIGHTS),
            ("exponential", self.exponential, EXPONENTIALS),
            ("d_weights", self.d_weights, WEIGHTS),
            ("d_scores", self.d_scores, WEIGHTS),
            ("delta", self.delta, DELTAS),
        ):
            if value not in allowed:
                message = f"{name} must be one of {', '.join(allowed)}, got {value!r}"
                raise ValueError(message)
        if self.block_kv is not None and self.block_kv < 1:
            message = f"block_kv must be positive, got {self.block_kv}"
            raise ValueError(message)

    def effective(self, device: DeviceModel, kv_len: int) -> DeviceModel:
        """The device as the contract's derivation sees it through this algorithm, for rows of up to `kv_len` keys."""
        own = self._exponential(device)
        if self.block_kv is None:
            return dataclasses.replace(device, exp2_relative=own)
        rescalings = max(math.ceil(kv_len / self.block_kv), 1)
        each = own + device.reciprocal_relative + 4.0 * device.unit_roundoff
        weight = math.expm1(math.log1p(own) + rescalings * math.log1p(each))
        wider = 1.0 + 4.0 / self.block_kv
        return dataclasses.replace(
            device,
            exp2_relative=weight,
            unit_roundoff=device.unit_roundoff * wider,
            dot_unit_roundoff=device.dot_unit_roundoff * wider,
        )

    def weight_unit(self, device: DeviceModel) -> float:
        """Unit roundoff of P as it enters P V."""
        return _operand_unit(self.weights, device)

    def bound(
        self, problem: AttentionProblem, device: DeviceModel, reference: Reference | None = None
    ) -> ContractBound:
        """|kernel - f| per element, around a reference of the same problem; None: what the float64 oracle says."""
        effective = self.effective(device, problem.kv_len)
        return contract_bound(problem, effective, weight_unit=self.weight_unit(device), reference=reference)

    def reference_and_bound(self, problem: AttentionProblem, device: DeviceModel) -> tuple[Reference, ContractBound]:
        """The float64 oracle's reference and `bound`, from the same scores."""
        effective = self.effective(device, problem.kv_len)
        return reference_and_bound(problem, effective, weight_unit=self.weight_unit(device))

    def gradient_bound(
        self, problem: AttentionProblem, d_out: np.ndarray, device: DeviceModel, reference: Gradients
    ) -> GradientBound:
        """|kernel - exact| per derivative, for a backward pass that reads this forward pass's output and LSE."""
        roundings = Roundings(
            exponential=self._exponential(device),
            weights=_operand_unit(self.weights, device),
            d_weights=BF16_UNIT_ROUNDOFF if self.d_weights == "bf16" else 0.0,
            d_scores=_operand_unit(self.d_scores, device),
            delta=self.delta,
        )
        return gradient_bound(problem, d_out, device, self.bound(problem, device), roundings, reference)

    def _exponential(self, device: DeviceModel) -> float:
        return device.exp_relative if self.exponential == "exp" else device.exp2_relative


def _operand_unit(declared: str, device: DeviceModel) -> float:
    """Unit roundoff of a matrix as it enters a product with BF16 numbers; one in FP32 rounds the product itself."""
    kept = declared == "fp32" and device.default_dot == "fp32"
    return max(device.unit_roundoff, device.dot_unit_roundoff) if kept else BF16_UNIT_ROUNDOFF


def rounded_lse(bound: ContractBound, lse: Float64[np.ndarray, "batch heads q_len"]) -> ContractBound:
    """The bound for a kernel that returns its LSE in BF16; `lse` is the exact one."""
    size = np.where(np.isfinite(lse), np.abs(lse), 0.0) + bound.lse
    return dataclasses.replace(bound, lse=bound.lse + BF16_UNIT_ROUNDOFF * size)
