"""Published timings and the line through them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from verify.compiled import __main__ as command
from verify.compiled import calibration
from verify.compiled.calibration import Calibrated
from verify.compiled.compile import Artifact, CompilerMissingError, RefusedError
from verify.compiled.published import Timing, package_directory, parse_timings, tokamax_timings

if TYPE_CHECKING:
    from collections.abc import Callable

CALL = {
    "q": "bf16[2,1024,8,128]",
    "k": "bf16[2,1024,4,128]",
    "v": "bf16[2,1024,4,64]",
    "bias": None,
    "logits_soft_cap": None,
    "mask": {"bool_mask": None, "q_start": None, "causal_mask": {"offset": 0, "window_size": None}},
    "return_residuals": True,
}
CONFIG = {"block_q": 1024, "block_kv": 512}
MEASURED = {"evaluation_times_ms": [3.0, 1.0, 2.0]}
DATA = Path(calibration.__file__).with_name("data") / "calibration.json"


def timing(seconds: float, tokens: int = 1024, head_dim: int = 128) -> Timing:
    """A published call."""
    shape = (1, tokens, 8, head_dim)
    return Timing("v6e", shape, shape, shape, True, False, CONFIG, seconds)


def test_a_table_is_read() -> None:
    """Shapes, mask, configuration and the median time of each call; what the wrapper does not take is left out."""
    table = {
        json.dumps(CALL): {json.dumps(CONFIG): MEASURED, "{}": MEASURED},
        json.dumps(CALL | {"bias": "f32[1]"}): {json.dumps(CONFIG): MEASURED},
        json.dumps(CALL | {"q": "i8[2,1024,8,128]"}): {json.dumps(CONFIG): MEASURED},
    }
    (found,) = parse_timings(json.dumps(table), "v6e")
    assert (found.query, found.key, found.value) == ((2, 1024, 8, 128), (2, 1024, 4, 128), (2, 1024, 4, 64))
    assert (found.causal, found.residuals, found.config, found.seconds) == (True, True, CONFIG, 0.002)
    assert found.name == "2 x 1024 x 8 x 128 causal, residuals"
    assert found.options()["config"] == CONFIG


def test_the_line_through_the_calls() -> None:
    """Calls that lie on a line give its slope and overhead back."""
    pairs = [(1e-3, 1.1e-3 + 1e-4), (2e-3, 2.2e-3 + 1e-4), (5e-3, 5.5e-3 + 1e-4)]
    found = [Calibrated(timing(measured), modelled, modelled, {}, None) for modelled, measured in pairs]
    line = calibration.fit(found)
    assert line is not None
    assert line.slope == pytest.approx(1.1)
    assert line.overhead_seconds == pytest.approx(1e-4)
    assert line.residual == pytest.approx(0, abs=1e-9)
    assert (line.count, line.lowest, line.highest) == (3, pytest.approx(1.12), pytest.approx(1.2))


def test_calls_without_a_time_do_not_count() -> None:
    """A call that did not compile keeps its message and is no point of the line."""
    refused = calibration.calibrated(timing(1e-3), RefusedError("lower", "NotImplementedError", "no", None))
    assert refused.ratio is None
    assert "NotImplementedError" in (refused.reason or "")
    assert calibration.fit([refused, Calibrated(timing(1e-3), 1e-3, 1e-3, {}, None)]) is None


def test_a_spread_is_chosen() -> None:
    """A limited calibration takes short and long calls, without residuals."""
    timings = [timing(1e-3, tokens, head_dim) for tokens in (512, 1024, 2048, 4096) for head_dim in (64, 128)]
    chosen = calibration.choose(timings, 4)
    assert len(chosen) == 4
    assert {chosen[0].query[1], chosen[-1].query[1]} == {512, 4096}
    assert calibration.choose(timings, None) == calibration.choose(timings, 100)


def test_an_absent_package_is_named() -> None:
    """A package that is not installed is named; one that is gives its directory without being imported."""
    with pytest.raises(CompilerMissingError, match="no_such_package is not installed in"):
        package_directory(sys.executable, "no_such_package")
    assert package_directory(sys.executable, "jax").name == "jax"
    assert tokamax_timings(Path("/nowhere"), "v6e") == []


def test_the_command_says_why_it_cannot(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package that ships the timings the command fails with the reason."""

    def absent(interpreter: str, package: str) -> Path:
        message = f"{package} is not installed in {interpreter}"
        raise CompilerMissingError(message)

    monkeypatch.setattr(command.published, "package_directory", absent)
    assert command.main(["calibrate", "--python", "/some/python"]) == 1
    assert "no published timings: tokamax is not installed in /some/python" in capsys.readouterr().out


def test_the_command_prints_the_calibration(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kept: Callable[[str], Artifact],
    tmp_path: Path,
) -> None:
    """Each call's published and modelled time, the line, and the same as JSON."""
    artifact = kept("lengths-v6e-0.0.50.1")
    timings = [timing(1e-5, 512), timing(2e-5, 1024)]
    monkeypatch.setattr(command.published, "package_directory", lambda *_: Path("/somewhere"))
    monkeypatch.setattr(command.published, "tokamax_timings", lambda *_: timings)
    monkeypatch.setattr(calibration, "compile_many", lambda jobs, **_: [(job, artifact) for job in jobs])
    out = tmp_path / "calibration.json"
    assert command.main(["calibrate", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "1 x 512 x 8 x 128 causal" in printed
    assert "2 calls: published / modelled from" in printed
    document = json.loads(out.read_text())
    assert [call["measured_seconds"] for call in document["calls"]] == [1e-5, 2e-5]
    assert document["fit"]["count"] == 2


def test_the_committed_calibration_is_what_the_guide_says() -> None:
    """The kept calibration: a dozen v6e calls, every one slower than modelled, within 10 % of one line."""
    document = json.loads(DATA.read_text())
    assert document["fit"]["count"] >= 12
    assert all(call["reason"] is None for call in document["calls"])
    assert document["fit"]["lowest"] > 1
    assert 1.0 < document["fit"]["slope"] < 1.1
    assert document["fit"]["residual"] < 0.1
