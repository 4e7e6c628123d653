"""The set-up of JAX, the probes of the backend, and the device models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from verify import backend
from verify.devices import CPU_INTERPRET
from verify.runtime import MANY_RUNS

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.smoke


def test_backend_is_sound() -> None:
    """Every probe passes here, and the model is that of the CPU."""
    if jax.default_backend() != "cpu":
        pytest.skip("the probes are those of the CPU backend")
    assert [probe() for probe in backend.CPU_PROBES] == [None] * len(backend.CPU_PROBES)
    assert backend.device_model() is CPU_INTERPRET


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--xla_allow_excess_precision=true", "BF16 sums keep excess precision"),
        ("--xla_cpu_max_isa=AVX2", "contracts to a fused multiply-add"),
    ],
)
def test_a_backend_with_other_flags_is_unsound(flags: str, text: str) -> None:
    """A user's own XLA_FLAGS win, and the probes then refuse to give verdicts."""
    code = (
        f"import os; os.environ['XLA_FLAGS'] = {flags!r}; import verify; "
        "from verify.backend import device_model; device_model()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "backend unsound" in run.stderr
    assert text in run.stderr


def test_importing_jax_first_is_refused() -> None:
    """JAX reads its flags once: importing it before verify is an error that says so."""
    code = "import os; os.environ.pop('XLA_FLAGS', None); import jax; import verify"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "import verify before jax" in run.stderr


DIGEST = """
import hashlib
import verify
import numpy as np
from verify.attention import adversarial
from verify.attention.examine import examine_problem
from verify.gdn.cases import GdnCase
from verify.subjects.gdn_ours import run_flywheel_gdn

digest = hashlib.sha256()
for name in ("jump-2000-nats-middle", "causal-300x129", "sinks", "softcap", "segments-window-sinks-softcap"):
    case = adversarial.by_name()[name]
    result = examine_problem(case.build(), config=case.config).result
    digest.update(np.asarray(result.out).tobytes() + np.asarray(result.lse).tobytes())
layer = GdnCase("near-duplicate", "up to 1", "mild", seed=1, lengths=(13, 0, 3, 1, 130, 20), heads=(1, 2, 128, 128))
result = run_flywheel_gdn(layer.layer())
digest.update(result.out.tobytes() + result.state.tobytes() + result.conv_state.tobytes())
print(digest.hexdigest())
"""


@pytest.mark.deep
def test_the_optimiser_changes_no_bit() -> None:
    """Kernels compiled quickly, as tests compile them, and for many runs, as campaigns do, give the same bits."""
    found = [
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            env={name: value for name, value in os.environ.items() if name not in {"XLA_FLAGS", MANY_RUNS}} | chosen,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for chosen in ({}, {MANY_RUNS: "1"})
    ]
    assert found[0] == found[1]


def test_a_copying_kernel_that_loses_writes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that returns something else than a copy makes the backend unsound."""
    monkeypatch.setattr(backend, "_copy", lambda x, _spec, **_: jnp.zeros_like(x))
    assert "changes its input at shape (1, 256)" in (backend.copies() or "")
