"""Arithmetics, and which operation loses the digits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from verify.devices import CPU_INTERPRET, MODELS, V5E, V6E
from verify.emulate import ranking, shown
from verify.emulate.__main__ import EXIT_UNUSABLE, main
from verify.emulate.arithmetic import MODES, Adversarial, At, EmulationError, Exact, Nearest, Stochastic
from verify.emulate.interpreter import trace
from verify.emulate.ranking import FORMAT, arithmetics, effect, rank, rounding_sites
from verify.gdn.inverse_steps import InverseSteps, invert
from verify.rounding import FP32, down, up

if TYPE_CHECKING:
    from pathlib import Path

X = np.random.default_rng(6).standard_normal(400).astype(np.float32)


def chain(x: Any) -> Any:
    """A few operations."""
    return jnp.tanh(x * 3.0) + jnp.exp2(x) / (1.0 + jnp.abs(x))


@pytest.mark.parametrize("device", sorted(MODELS))
def test_adversarial_results_stay_within_the_envelope(device: str) -> None:
    """One equation at a time: moved by at most its envelope, and by more than rounding to nearest does."""
    model = MODELS[device]
    program = trace(lambda x: jnp.exp2(x), X)  # noqa: PLW0108  a name of its own
    exact = program.run((X,))[0]
    for direction in ("up", "down", "away", "toward", "random"):
        found = program.run((X,), Adversarial(model, direction))[0]
        assert (np.abs(found - exact) <= model.exp2_relative * exact).all()
        assert (found == found.astype(np.float32)).all()
        if direction in ("up", "down"):
            assert ((found >= exact) if direction == "up" else (found <= exact)).all()
    assert np.abs(program.run((X,), Adversarial(model, "up"))[0] / exact - 1).max() > model.exp2_relative / 2


def test_the_machine_lies_between_the_directions() -> None:
    """What XLA computes for one function of exact inputs lies between "down" and "up"."""
    program = trace(lambda x: jnp.tanh(x), X)  # noqa: PLW0108
    low, high = (program.run((X,), Adversarial(CPU_INTERPRET, each))[0] for each in ("down", "up"))
    got = np.asarray(jax.jit(jnp.tanh)(X), dtype=np.float64)
    assert ((low <= got) & (got <= high)).all()


@pytest.mark.parametrize("mode", MODES)
def test_stochastic_rounding(mode: str) -> None:
    """Results are neighbours of the exact ones; stochastic rounding is right in the mean; numbers stay as they are."""
    program = trace(lambda x: x * 0.1, X)
    exact = program.run((X,))[0]
    drawn = np.stack([program.run((X,), Stochastic(mode, seed))[0] for seed in range(200)])
    below, above = down(exact, FP32), up(exact, FP32)
    assert ((drawn == below) | (drawn == above)).all()
    assert (drawn.std(axis=0)[below < above] > 0.0).mean() > 0.9
    if mode != "random":
        share = ((drawn - below) / np.where(above > below, above - below, 1.0)).mean(axis=0)
        want = (exact - below) / np.where(above > below, above - below, 1.0)
        # Of 200 draws a share errs by 0.036 at most in the standard deviation: six of them.
        assert np.abs(share - want).max() < 0.22
    whole = trace(lambda x: x * 2.0, X)
    assert (whole.run((X,), Stochastic(mode, 1))[0] == 2.0 * X.astype(np.float64)).all()


def test_stochastic_sums_round_every_addition() -> None:
    """A long sum wanders as sqrt(n) roundings do, not as one."""
    terms = 1.0 + np.abs(np.tile(X, 3))[:1000] / 8
    program = trace(jnp.sum, terms)
    drawn = np.array([program.run((terms,), Stochastic("average", seed))[0] for seed in range(8)])
    assert drawn.std() > 4 * FP32.unit_roundoff * 1000


def test_unknown_names_are_refused() -> None:
    """By name, value and rule."""
    with pytest.raises(ValueError, match=r"direction must be one of .*, got 'left'"):
        Adversarial(CPU_INTERPRET, "left")
    with pytest.raises(ValueError, match=r"mode must be one of .*, got 'coin'"):
        Stochastic("coin")
    with pytest.raises(ValueError, match=r"arithmetic must be one of .*, got 'interval'"):
        arithmetics("interval", CPU_INTERPRET)
    with pytest.raises(ValueError, match="measure must be relative or largest, got 'ulp'"):
        rank(trace(chain, X), (X,), CPU_INTERPRET, measure="ulp")


def test_functions_without_an_envelope_are_named() -> None:
    """With the source line and the device."""
    program = trace(lambda x: jnp.expm1(x), X)  # noqa: PLW0108
    with pytest.raises(
        EmulationError, match=r"test_emulate_ranking.py:\d+: the device model v6e says nothing about expm1"
    ):
        program.run((X,), Adversarial(V6E))


def test_one_equation_alone() -> None:
    """`At` rounds the equations that it names, and no other."""
    program = trace(chain, X)
    exact = program.run((X,))[0]
    sites = rounding_sites(program)
    assert (program.run((X,), At(Nearest(), frozenset()))[0] == exact).all()
    everything = frozenset(site.path for site in sites)
    assert (program.run((X,), At(Nearest(), everything))[0] == program.run((X,), Nearest())[0]).all()
    assert (program.run((X,), At(Exact(), everything, Nearest()))[0] == exact).all()


@pytest.mark.parametrize("kind", ranking.KINDS)
def test_silu_loses_its_digits_in_tanh(kind: str) -> None:
    """On the left 1 + tanh cancels: the tangent's rounding is what is left; the addition itself is exact there."""
    case = shown.shown()["silu"]
    found = rank(trace(case.function, *case.arguments), case.arguments, V6E, kind=kind, measure=case.measure)
    first, second = found.equations[:2]
    assert first.site.primitive == "tanh"
    assert first.site.text == "tangent = jnp.tanh(half)"
    assert first.alone.error > 0.5
    assert first.without.error < 2.0**-10 < second.without.error
    assert found.together.error >= 0.5 * first.alone.error


@pytest.mark.deep
def test_the_inverse_loses_its_digits_in_bf16() -> None:
    """Every one of the worst ten equations is a conversion to BF16, named with its source line."""
    case = shown.shown()["inverse-bf16"]
    program = trace(case.function, *case.arguments)
    found = rank(program, case.arguments, CPU_INTERPRET, kind="nearest", measure=case.measure)
    assert {each.site.primitive for each in found.equations[:10]} == {"convert_element_type"}
    assert {each.site.file for each in found.equations[:10]} == {"verify/emulate/shown.py"}
    assert all("astype(jnp.bfloat16)" in each.site.text for each in found.equations[:10])


@pytest.mark.parametrize("precision", ["bf16", "bf16x3"])
def test_the_emulated_inverse_errs_as_the_restated_one(precision: str) -> None:
    """All equations rounded to nearest: the error of `verify.gdn.inverse_steps`, but for the order of sums."""
    case = shown.shown()[f"inverse-{precision}"]
    program = trace(case.function, *case.arguments)
    exact, found = program.run(case.arguments)[0], program.run(case.arguments, Nearest())[0]
    numpy = invert(case.arguments[0], InverseSteps(precision))
    errors = [np.abs(each - exact).max() for each in (found, numpy)]
    assert max(errors) < 2.0 * min(errors)
    assert np.abs(exact @ (np.eye(64) + case.arguments[0]) - np.eye(64)).max() < 2.0**-40


def test_the_static_anchor_loses_its_digits_in_bf16() -> None:
    """Small scores: the output's and the weights' rounding come first."""
    case = shown.shown()["static-anchor-small"]
    arguments = tuple(x[:n] for x, n in zip(case.arguments, (8, 64, 64), strict=True))

    def smaller(*arrays: Any) -> Any:
        return shown.static_anchor(*arrays, fragment=32)

    found = rank(trace(smaller, *arguments), arguments, V5E, kind="nearest", measure=case.measure)
    assert [each.site.dtype for each in found.equations[:3]] == ["bfloat16"] * 3
    assert any(each.site.file == "flywheel/attention/tile.py" for each in found.equations)


def test_effects_count_what_is_not_finite() -> None:
    """NaN and infinities where a finite number is due are infinitely wrong; equal ones are right."""
    want = [np.array([1.0, np.nan, np.inf, 0.0])]
    assert effect([want[0].copy()], want, "relative").error == 0.0
    assert np.isinf(effect([np.array([np.nan, np.nan, np.inf, 0.0])], want, "relative").error)
    assert np.isinf(effect([np.array([1.0, 2.0, np.inf, 0.0])], want, "largest").error)
    found = effect([np.array([1.5, np.nan, np.inf, 0.0])], want, "largest")
    assert (found.error, found.index) == (0.5, (0,))


def test_the_command_keeps_a_ranking(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Strict JSON of the documented format, worst equation first, and a table on the screen."""
    path = tmp_path / "kept" / "silu.json"
    assert main(["silu", "--arithmetic", "nearest", "--json", str(path)]) == 0
    body = json.loads(path.read_text(encoding="utf-8"))
    assert body["format"] == FORMAT
    assert body["equations"][0]["primitive"] == "tanh"
    assert body["equations"][0]["file"] == "verify/emulate/shown.py"
    assert [each["rank"] for each in body["equations"]] == list(range(1, len(body["equations"]) + 1))
    errors = [each["alone"]["error"] for each in body["equations"]]
    assert errors == sorted(errors, reverse=True)
    assert "tanh" in capsys.readouterr().out


def test_the_command_takes_functions_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """package.module:function with the arrays of a file; clear errors otherwise."""
    np.savez(tmp_path / "x.npz", y=X)
    assert main(["verify.emulate.shown:silu", "--inputs", str(tmp_path / "x.npz"), "--arithmetic", "nearest"]) == 0
    assert "silu at the inputs of x.npz" in " ".join(capsys.readouterr().out.split())
    for arguments, words in (
        (["nothing"], "FUNCTION must be package.module:function or one of silu"),
        (["silu", "--inputs", str(tmp_path / "x.npz")], "silu has inputs of its own"),
        (["verify.emulate.shown:silu"], "--inputs FILE.npz must give its arguments"),
        (["verify.emulate.shown:none", "--inputs", str(tmp_path / "x.npz")], "has no attribute"),
    ):
        assert main(arguments) == EXIT_UNUSABLE
        assert words in capsys.readouterr().err
