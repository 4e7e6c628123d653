"""The formal counterparts: what belongs to what, which axioms are allowed, and that an unsafe constant has no proof."""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest

from proofs import catalogue, constants, formal
from proofs.checkers import coq, gappa, written_constants
from proofs.checkers.outcome import Outcome, Report, Tool
from verify import devices
from verify.attention import contract
from verify.rotary import contract as rotary

from flywheel.attention import budget  # isort: skip  after verify, which configures JAX

if TYPE_CHECKING:
    from pathlib import Path

BY_NAME = {lemma.name: lemma for lemma in catalogue.LEMMAS}
LIBRARIES = set(coq.sources()) - set(BY_NAME)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled files of this run; skips where Coq is missing."""
    if coq.version() is None:
        pytest.skip("Coq with Flocq and the interval library is not installed")
    return tmp_path_factory.getbasetemp() / "coq"


@pytest.fixture
def with_gappa() -> None:
    """Skips where Gappa is missing."""
    if gappa.version() is None:
        pytest.skip("Gappa is not installed")


def proved(name: str, store: Path) -> Report:
    """What Coq says of a lemma with the constants as they are now."""
    return coq.check([name], formal.constants_text(), store)[name]


# Belonging together.


@pytest.mark.smoke
def test_every_formal_file_belongs_to_a_lemma() -> None:
    """A `.v` file is a lemma's, with a theorem of its name, or one that others require; a `.g` file is a lemma's."""
    modules = coq.modules("")
    required = {name for module in modules.values() for name in module.requires}
    assert required - {coq.CONSTANTS} <= set(modules)
    assert required - set(BY_NAME) == LIBRARIES | {coq.CONSTANTS}
    for name in set(modules) & set(BY_NAME):
        assert name in modules[name].theorems
    assert set(gappa.sources()) <= set(BY_NAME)
    assert len(set(modules) & set(BY_NAME)) >= 13
    assert len(gappa.sources()) >= 6


@pytest.mark.smoke
@pytest.mark.parametrize("name", sorted(coq.sources()))
def test_no_step_is_taken_on_trust(name: str) -> None:
    """No `.v` file admits a step, states an axiom or switches off a check of Coq's."""
    text = coq.sources()[name].read_text(encoding="utf-8")
    code = re.sub(r"\(\*.*?\*\)", "", text, flags=re.DOTALL)
    forbidden = r"\b(Admitted|admit|give_up|Axiom|Axioms|Parameter|Parameters|Conjecture|Unset|bypass_check)\b"
    assert not re.findall(forbidden, code)
    # A hypothesis outside of a section would be an axiom.
    assert not re.findall(r"^(Variable|Hypothesis|Context)", code.split("Section")[0], flags=re.MULTILINE)


@pytest.mark.smoke
@pytest.mark.parametrize("name", sorted(set(coq.sources()) & set(BY_NAME)))
def test_table_lists_the_constants_of_the_formal_proof(name: str) -> None:
    """A constant that a `.v` file uses is among those that its lemma says it rests on."""
    every = {written_constants.coq_name(each): each for lemma in catalogue.LEMMAS for each in lemma.rests_on}
    text = coq.sources()[name].read_text(encoding="utf-8")
    used = {every[word] for word in re.findall(r"\b\w+\b", text) if word in every}
    used |= {every[word[:-2]] for word in re.findall(r"\b\w+_[Zme]\b", text) if word[:-2] in every}
    assert used <= set(BY_NAME[name].rests_on)


@pytest.mark.smoke
@pytest.mark.parametrize("name", sorted(gappa.sources()))
def test_table_lists_the_constants_of_the_gappa_script(name: str) -> None:
    """A constant that a `.g` file names is among those that its lemma says it rests on."""
    used = written_constants.names_in(gappa.sources()[name].read_text(encoding="utf-8"))
    assert used
    assert used <= set(BY_NAME[name].rests_on)


# Constants on their way to the tools.


@pytest.mark.smoke
def test_constants_reach_coq_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each constant is written as the real and the dyadic number that it is, read when asked."""
    monkeypatch.setattr(budget, "LANE_LIMIT", 3.0 * 2.0**40)
    text = formal.constants_text()
    assert "Definition LANE_LIMIT_m : Z := (3)%Z." in text
    assert "Definition LANE_LIMIT_e : Z := (40)%Z." in text
    assert f"Definition LANE_LIMIT : R := IZR ({3 * 2**40})." in text
    assert "Definition contract_BIAS : R := IZR (32)." in text
    assert "Definition SUM_FLOOR : R := IZR (1) / IZR 17179869184." in text
    with pytest.raises(ValueError, match="1/3 is no dyadic number"):
        written_constants.dyadic(Fraction(1, 3))


@pytest.mark.smoke
def test_constants_reach_gappa_rounded_up() -> None:
    """Expressions are exact; what no 64-bit number is, is rounded up; anything but arithmetic is refused."""
    assert written_constants.gappa_script("<<3 * 2**40>>") == f"{3 * 2**40}b0"
    assert written_constants.gappa_script("<<devices.unit_roundoff>>") == "1b-24"
    third = written_constants.gappa_script("<<(2 - 1) / 3>>")
    m, e = (int(part) for part in third.split("b"))
    assert Fraction(1, 3) < m * Fraction(2) ** e < Fraction(1, 3) * (1 + Fraction(1, 2**62))
    assert written_constants.evaluate("-2 + budget.BIAS") == constants.value_of("budget.BIAS") - 2
    with pytest.raises(ValueError, match="no arithmetic of constants"):
        written_constants.evaluate("abs(2)")


# Axioms.


@pytest.mark.smoke
def test_allowed_axioms() -> None:
    """Those of the real numbers; with the interval tactic also primitive integers and their specifications."""
    assert coq.axioms(primitive_integers=False) == {
        "ClassicalDedekindReals.sig_forall_dec",
        "ClassicalDedekindReals.sig_not_dec",
        "FunctionalExtensionality.functional_extensionality_dep",
        "Classical_Prop.classic",
    }
    more = coq.axioms(primitive_integers=True) - coq.axioms(primitive_integers=False)
    assert more
    assert all(axiom.startswith(("PrimInt63.", "Uint63.")) for axiom in more)


@pytest.mark.smoke
def test_reading_what_coq_prints() -> None:
    """Every name at the start of a line is an axiom, whatever else Coq may call it."""
    printed = "Axioms:\nA.b\n  : forall x,\n    x\nC.d : Prop\ne is assumed to be guarded.\n"
    assert coq.axioms_printed(printed) == {"A.b", "C.d", "e is assumed to be guarded."}
    assert coq.axioms_printed("Closed under the global context\n") == set()


def test_foreign_axiom_is_a_failure(monkeypatch: pytest.MonkeyPatch, store: Path) -> None:
    """A theorem that rests on anything else fails, though Coq accepts it, and the report names the axiom."""
    text = "Axiom wish : 1 = 2.\nTheorem granted : 1 = 2.\nProof. exact wish. Qed.\n"
    monkeypatch.setattr(coq, "modules", lambda _: {"granted": coq.Module("granted", text)})
    report = coq.check(["granted"], "", store)["granted"]
    assert report.outcome is Outcome.FAILED
    assert "wish" in report.finding


def test_failure_names_the_theorem(monkeypatch: pytest.MonkeyPatch, store: Path) -> None:
    """A proof that fails is reported with the statement it belongs to and Coq's words; what requires it fails too."""
    wrong = "Theorem fine : 1 = 1.\nProof. reflexivity. Qed.\n\nTheorem wrong : 1 = 2.\nProof. reflexivity. Qed.\n"
    after = "From Proofs Require Import wrong.\nTheorem after : 1 = 1.\nProof. reflexivity. Qed.\n"
    modules = {"wrong": coq.Module("wrong", wrong), "after": coq.Module("after", after)}
    monkeypatch.setattr(coq, "modules", lambda _: modules)
    reports = coq.check(["wrong", "after"], "", store)
    assert reports["wrong"].outcome is Outcome.FAILED
    assert reports["wrong"].finding.startswith("no proof of wrong, line 5: ")
    assert reports["after"].finding == "rests on wrong.v, which failed"


# Results kept between runs.


@pytest.mark.deep
def test_results_are_kept_by_what_they_rest_on(monkeypatch: pytest.MonkeyPatch, store: Path) -> None:
    """What was proved is not proved again until a constant or file below it changes; failures are not kept."""
    first = proved("bf16_rounding_unit", store)
    assert first.outcome is Outcome.CHECKED
    again = proved("bf16_rounding_unit", store)
    assert again.earlier
    assert (again.finding, again.axioms) == (first.finding, first.axioms)
    monkeypatch.setattr(budget, "LANES", 64)
    assert not proved("bf16_rounding_unit", store).earlier
    monkeypatch.setattr(devices, "BF16_UNIT_ROUNDOFF", 2.0**-9)
    for _ in range(2):
        assert proved("bf16_rounding_unit", store).outcome is Outcome.FAILED


@pytest.mark.deep
@pytest.mark.parametrize("name", sorted(set(coq.sources()) & set(BY_NAME)))
def test_lemma_has_a_formal_proof(name: str, store: Path) -> None:
    """Coq accepts every file as the constants stand, on allowed axioms alone."""
    report = proved(name, store)
    assert report.outcome is Outcome.CHECKED, report.finding
    assert set(report.axioms) <= coq.axioms(primitive_integers=True)


# Unsafe constants.

UNSAFE = [
    (budget, "LANE_LIMIT", 2.0**118, "checked_sum_has_normal_reciprocal"),
    (budget, "LANE_LIMIT", 2.0**128, "check_never_misses"),
    (budget, "LANE_LIMIT", 2.0**70, "article_tau"),
    (budget, "LANES", 256, "checked_sum_has_normal_reciprocal"),
    (budget, "BIAS", 30, "replay_never_overflows"),
    (budget, "BIAS", 33, "flushed_weights_are_negligible"),
    (budget, "BIAS", 40, "floor_is_reached"),
    (budget, "SUM_FLOOR", 2.0**-32, "floor_is_reached"),
    (budget, "SUM_FLOOR", 2.0**-36, "flushed_weights_are_negligible"),
    (budget, "SUM_FLOOR", 0.0, "checked_sum_has_normal_reciprocal"),
    (budget, "MAX_KEYS", 2**32, "replay_never_overflows"),
    (budget, "MAX_KEYS", 2**31, "contract_constants"),
    (budget, "HALF_BF16_MAX", 2.0**127, "clamp_keeps_the_bound"),
    (budget, "HALF_BF16_MAX", (2.0 - 2.0**-6) * 2.0**126, "clamp_keeps_the_bound"),
    (budget, "FP32_MAX", 2.0**120, "clamp_keeps_the_bound"),
    (budget, "FP32_MAX", 2.0**127, "integer_maximum_rescales_exactly"),
    (contract, "BIAS", 31, "flushed_weights_are_negligible"),
    (contract, "LARGEST_EXPONENT", 117.0, "check_never_misses"),
    (contract, "LARGEST_EXPONENT", 64.0, "contract_constants"),
    (contract, "DOMAIN_LIMIT", 2.0**128, "contract_constants"),
    (devices, "BF16_UNIT_ROUNDOFF", 2.0**-9, "bf16_rounding_unit"),
    (devices, "BF16_UNIT_ROUNDOFF", 2.0**-7, "bf16_rounding_unit"),
    (devices, "BF16_UNIT_ROUNDOFF", 2.0**-9, "final_division"),
    (budget, "LANE_LIMIT", 2.0**120, "attention_theorem"),
    (contract, "BIAS", 31, "attention_theorem"),
    (contract, "LARGEST_EXPONENT", 64.0, "attention_theorem"),
    (budget, "LANE_LIMIT", 2.0**10, "early_bias"),
    (budget, "MAX_KEYS", 2**47, "early_bias"),
    (budget, "LANE_LIMIT", 2.0**10, "sinks"),
    (contract, "DOMAIN_LIMIT", 2.0**128, "soft_cap"),
]


@pytest.mark.deep
@pytest.mark.parametrize(("module", "constant", "value", "name"), UNSAFE)
def test_unsafe_constant_has_no_proof(
    monkeypatch: pytest.MonkeyPatch, store: Path, module: object, constant: str, value: float, name: str
) -> None:
    """A constant edited in an unsafe direction leaves Coq without a proof of the lemma that names it."""
    monkeypatch.setattr(module, constant, value)
    report = proved(name, store)
    assert report.outcome is Outcome.FAILED
    assert report.finding.startswith(("no proof of", "rests on"))


def test_one_unsafe_constant_has_no_proof(monkeypatch: pytest.MonkeyPatch, store: Path) -> None:
    """The same for one constant, in the default tier."""
    monkeypatch.setattr(budget, "HALF_BF16_MAX", 2.0**127)
    assert proved("clamp_keeps_the_bound", store).finding.startswith("no proof of twice_limit")


@pytest.mark.deep
@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("exp2_relative", 0.6, "floor_is_reached"),
        ("exp2_relative", 2.0**-8, "replay_never_overflows"),
        ("reciprocal_relative", 0.6, "checked_sum_has_normal_reciprocal"),
        ("dot_unit_roundoff", 2.0**-22, "contract_constants"),
        ("smallest_normal", 2.0**-120, "final_division"),
        ("tanh_relative", 3.0, "soft_cap"),
        ("exp2_relative", 2.0**-5, "attention_theorem"),
    ],
)
def test_worse_machine_has_no_proof(
    monkeypatch: pytest.MonkeyPatch, store: Path, field: str, value: float, name: str
) -> None:
    """A device model that allows more than the constants have room for leaves Coq without a proof."""
    worse = dataclasses.replace(devices.V6E, **{field: value})
    monkeypatch.setattr(devices, "MODELS", {**devices.MODELS, "worse": worse})
    assert proved(name, store).outcome is Outcome.FAILED


@pytest.mark.usefixtures("with_gappa")
@pytest.mark.parametrize("name", sorted(gappa.sources()))
def test_gappa_checks_and_refuses(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each script holds as the constants stand, and none with a unit roundoff that is too small for FP32."""
    assert gappa.check([name])[name].outcome is Outcome.CHECKED
    models = {key: dataclasses.replace(model, unit_roundoff=2.0**-30) for key, model in devices.MODELS.items()}
    monkeypatch.setattr(devices, "MODELS", models)
    monkeypatch.setattr(rotary, "FP32_UNIT", 2.0**-30)
    report = gappa.check([name])[name]
    assert report.outcome is Outcome.FAILED
    assert report.finding


@pytest.mark.smoke
def test_counting_what_a_script_concludes() -> None:
    """Conclusions count, conditions and hints do not."""
    script = "y = x;\n{ x in [0, 1] /\\ y in [0, 1]\n  -> x in [0, 2]\n  /\\ y in [0, 3] }\ny - x -> 0 { x <> 0 };\n"
    assert gappa.goals_of(script) == ["x in [0, 2]", "y in [0, 3]"]


@pytest.mark.usefixtures("with_gappa")
@pytest.mark.parametrize("script", ["{ x in [0, 1] -> x in [2, 3] }", "{ x in [0, 1] -> x in", ""])
def test_gappa_failures(script: str) -> None:
    """What does not follow, does not parse or says nothing is a failure."""
    report = gappa.check_script(script)
    assert report.tool is Tool.GAPPA
    assert report.outcome is Outcome.FAILED
