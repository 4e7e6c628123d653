"""No bare number is a tolerance: what decides and is no bound stands in the ledger, and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from verify.ledger import entries

ROOT = Path(__file__).parents[3]
JUDGED = ("kernels", "cases", "subjects", "device")
"""Test folders that judge kernels and machines; the others test instruments against closed forms."""

COMPARISONS = ("allclose", "isclose", "assert_allclose")
LARGEST_DENOMINATOR = 256

pytestmark = pytest.mark.smoke


def sources() -> list[Path]:
    """The code of every room, and the tests that judge kernels."""
    tests = ROOT / "verify" / "tests"
    code = [
        path for room in ("flywheel", "verify", "proofs", "fuzz", "reports") for path in (ROOT / room).rglob("*.py")
    ]
    return [path for path in sorted(code) if tests not in path.parents or path.relative_to(tests).parts[0] in JUDGED]


def bare(node: ast.expr) -> bool:
    """A literal between 0 and 1 that is no simple binary fraction: 1e-3, 0.01, but not 0.5, nor 2.0**-24."""
    if not (isinstance(node, ast.Constant) and isinstance(node.value, float) and 0.0 < node.value < 1.0):
        return False
    return node.value.as_integer_ratio()[1] > LARGEST_DENOMINATOR


def offences(code: str) -> list[str]:
    """Comparisons with a bare number, and closeness tests with tolerances of their own."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            typed = any(bare(keyword.value) for keyword in node.keywords)
            # Without a relative tolerance of its own, numpy's default is the tolerance.
            default = name in COMPARISONS and not {"rtol", "rel_tol"} & {keyword.arg for keyword in node.keywords}
            if default or (typed and name in (*COMPARISONS, "approx")):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Compare):
            ordered = any(isinstance(op, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) for op in node.ops)
            if ordered and any(bare(side) for side in (node.left, *node.comparators)):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_no_code_compares_with_a_bare_number() -> None:
    """Neither the rooms' code nor a test that judges a kernel has a typed-in tolerance."""
    found = [f"{path.relative_to(ROOT)}, {text}" for path in sources() for text in offences(path.read_text("utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "assert abs(got - want) < 1e-3",
        "ok = 0.02 >= error.max()",
        "np.testing.assert_allclose(got, want)",
        "np.allclose(got, want, atol=limit)",
        "assert x == pytest.approx(y, rel=1e-6)",
    ],
)
def test_a_bare_tolerance_is_found(code: str) -> None:
    """Each of the usual ways to type one in."""
    assert len(offences(code)) == 1


@pytest.mark.parametrize(
    "code",
    [
        "np.allclose(got, want, rtol=n * 2.0**-24, atol=0)",
        "assert error <= bound",
        "assert error <= 2.0**-24 * size",
        "assert share <= 0.5",
    ],
)
def test_a_bound_is_no_bare_tolerance(code: str) -> None:
    """Computed bounds, powers of two and simple fractions are not refused."""
    assert offences(code) == []


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.where)
def test_the_ledger_agrees_with_the_code(entry: object) -> None:
    """Each entry names a constant that exists, with the value it has, what it decides, and a derivation."""
    assert entry.found() == entry.value  # type: ignore[attr-defined]
    assert entry.decides  # type: ignore[attr-defined]
    assert len(entry.derivation.split()) >= 10  # type: ignore[attr-defined]


def test_every_false_alarm_rate_and_hint_stands_in_the_ledger() -> None:
    """The constants that decide without a bound are the ledger's, and no other."""
    names = {entry.where.split(":")[1] for entry in entries()}
    assert {"FALSE_ALARM_RATE", "CERTAIN_ERRORS", "BARELY_WRONG", "WORST_BF16_ULP"} == names
