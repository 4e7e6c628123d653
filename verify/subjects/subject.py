"""What a subject declares, and how it is called."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import inspect
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from verify.attention.gradients.judge import GradientResult
from verify.attention.ragged import aligned_within_segments
from verify.attention.subjects import SubjectResult
from verify.subjects.arithmetic import Arithmetic
from verify.subjects.layouts import LAYOUTS, from_layout, per_batch_entry, to_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jaxtyping import Bool

    from verify.attention.problem import AttentionProblem

ATTENTION, GRADIENTS = OPERATIONS = ("attention", "attention_gradients")
CAUSAL = ("bottom-right", "square", "never")
LSE = ("fp32", "bf16")
MASKED_ROWS = ("zero", "unspecified")


@dataclasses.dataclass(frozen=True)
class Features:
    """What a kernel can do; a problem that needs more is skipped, with the reason.

    Attributes:
        causal: "bottom-right": any lengths; "square": only q_len == kv_len; "never".
        full: also without a causal mask.
        masked_rows: what a row without a visible key holds: "zero" (LSE -inf), or "unspecified", then not judged.
        grouped_heads: heads may be a multiple of kv_heads.
        head_dims: head sizes, None if any.
        multiple_of: of q_len and of kv_len.
        lse: format of the returned log-sum-exp (natural log): "fp32", "bf16", None if it returns none.
        ragged: positions too, where they say that the last rows of each segment meet its last keys (it gets no
            q_positions then).
        window, softcap, sinks, segments, positions, v_dim: options of that name (`AttentionProblem`), passed as
            keywords when a problem has them (`segments` as q_segments and k_segments, `positions` as q_positions).
    """

    causal: str = "bottom-right"
    full: bool = True
    masked_rows: str = "zero"
    grouped_heads: bool = True
    head_dims: tuple[int, ...] | None = None
    multiple_of: tuple[int, int] = (1, 1)
    lse: str | None = None
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    segments: bool = False
    positions: bool = False
    v_dim: bool = False
    ragged: bool = False

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("causal", self.causal, CAUSAL),
            ("masked_rows", self.masked_rows, MASKED_ROWS),
            ("lse", self.lse, (*LSE, None)),
        ):
            if value not in allowed:
                message = f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}"
                raise ValueError(message)

    def lacking(self, problem: AttentionProblem) -> str | None:  # noqa: PLR0911  one per limit
        """Why a problem asks for more than this; None if it does not."""
        for option in problem.features:
            named = _FEATURE_OF.get(option, option)
            within = named == "positions" and self.ragged and aligned_within_segments(problem)
            if not (getattr(self, named) or within):
                return f"no {named}"
        if problem.causal and self.causal == "never":
            return "no causal mask"
        if problem.causal and self.causal == "square" and problem.q_len != problem.kv_len:
            return f"causal only for q_len = kv_len, got {problem.q_len} and {problem.kv_len}"
        if not problem.causal and not self.full:
            return "only with a causal mask"
        if problem.heads != problem.kv_heads and not self.grouped_heads:
            return f"no grouped heads, got {problem.heads} and {problem.kv_heads}"
        if self.head_dims is not None and problem.head_dim not in self.head_dims:
            return f"head_dim must be one of {', '.join(map(str, self.head_dims))}, got {problem.head_dim}"
        for name, size, unit in zip(
            ("q_len", "kv_len"), (problem.q_len, problem.kv_len), self.multiple_of, strict=True
        ):
            if size % unit:
                return f"{name} must be a multiple of {unit}, got {size}"
        return None


_FEATURE_OF = {"q_segments": "segments", "q_positions": "positions"}


@dataclasses.dataclass(frozen=True)
class Domain:
    """For which inputs a kernel promises something.

    Attributes:
        words: the promise, as a user would read it.
        contains: for a problem, True or False, or one of them per row `[batch, heads, q_len]`.
    """

    words: str
    contains: Callable[[AttentionProblem], bool | Bool[np.ndarray, "batch heads q_len"]]


def _finite(problem: AttentionProblem) -> bool:
    return all(bool(np.isfinite(x.astype(np.float32)).all()) for x in (problem.q, problem.k, problem.v))


EVERYWHERE = Domain("every input; docs/semantics.md says what is due for NaN and infinities", lambda _: True)
FINITE = Domain("finite inputs", _finite)


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A kernel under judgement.

    Attributes:
        name: shown in verdicts and records.
        call: `call(q, k, v, *, causal, scale, ...)` on jax arrays in `layout`; further keywords are the options that
            `features` declares, and `config`, `interpret` if the signature has them.  Returns out (BF16 or FP32, in the
            layout of q), or (out, lse) if `features.lse` says so (lse in the layout without d).
        layout: one of `verify.subjects.layouts.LAYOUTS`.
        features: what it can do.
        domain: for which inputs it promises something; rows outside are not judged by value.
        arithmetic: the roundings that its algorithm may add to the machine's.
        package: the distribution whose version a record states; None for code of no package.
        modules: what must be importable for it to run.
        contract: what its documentation promises, with the place; empty if it promises nothing.
        notes: what an adapter does on the kernel's behalf.
        takes_problem: `call(problem, *, config, interpret)` takes the problem itself and returns a `SubjectResult`.
        operation: "attention"; or "attention_gradients", then `call(q, k, v, d_out, *, causal, scale, ...)` takes the
            cotangent of the output (BF16, in the layout of q) and returns (dq, dk, dv), with dsinks as a fourth where
            the problem has sinks.
    """

    name: str
    call: Callable[..., Any]
    layout: str = "bhtd"
    features: Features = dataclasses.field(default_factory=Features)
    domain: Domain = FINITE
    arithmetic: Arithmetic = dataclasses.field(default_factory=Arithmetic)
    package: str | None = None
    modules: tuple[str, ...] = ()
    contract: str = ""
    notes: tuple[str, ...] = ()
    takes_problem: bool = False
    operation: str = "attention"

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            message = f"layout must be one of {', '.join(LAYOUTS)}, got {self.layout!r}"
            raise ValueError(message)
        if self.operation not in OPERATIONS:
            message = f"operation must be one of {', '.join(OPERATIONS)}, got {self.operation!r}"
            raise ValueError(message)
        if self.operation != ATTENTION and self.features.lse is not None:
            message = f"features.lse must be None for {self.operation}, got {self.features.lse!r}"
            raise ValueError(message)

    @property
    def version(self) -> str:
        """Version of the package; empty without one."""
        if self.package is None or self.missing() is not None:
            return ""
        return importlib.metadata.version(self.package)

    def missing(self) -> str | None:
        """Why it cannot run here; None if it can."""
        for module in self.modules:
            if importlib.util.find_spec(module) is None:
                return f"{module} is not installed (uv sync --group peers)"
        return None

    def unsupported(self, problem: AttentionProblem) -> str | None:
        """Why it cannot be judged on a problem; None if it can."""
        return self.missing() or self.features.lacking(problem)

    def __call__(
        self, problem: AttentionProblem, *, config: tuple[int, int, int] = (0, 0, 0), interpret: str = "fast"
    ) -> SubjectResult:
        """Run the kernel; `config` and `interpret` reach only a kernel whose signature has them.

        Raises:
            TypeError: it returned something else than it declares.
        """
        offered = {"config": config, "interpret": interpret}
        taken = {name: value for name, value in offered.items() if name in self._keywords()}
        if self.takes_problem:
            return self.call(problem, **taken)
        if "b" in self.layout:
            arrays = (jnp.asarray(to_layout(x, self.layout)) for x in (problem.q, problem.k, problem.v))
            return SubjectResult(*self._read(self.call(*arrays, **_options(problem, self.features, None), **taken)))

        def entry(number: int, *rows: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
            arrays = (jnp.asarray(to_layout(x, self.layout)) for x in rows)
            return self._read(self.call(*arrays, **_options(problem, self.features, number), **taken))

        return SubjectResult(*per_batch_entry(entry, (problem.q, problem.k, problem.v)))

    def gradients(
        self,
        problem: AttentionProblem,
        d_out: np.ndarray,
        *,
        config: tuple[int, int, int] = (0, 0, 0),
        interpret: str = "fast",
    ) -> GradientResult:
        """Run a backward kernel.

        Raises:
            TypeError: it returned something else than it declares.
        """
        offered = {"config": config, "interpret": interpret}
        taken = {name: value for name, value in offered.items() if name in self._keywords()}
        count = 3 if problem.sinks is None else 4
        given = (problem.q, problem.k, problem.v, d_out)
        if self.takes_problem:
            return self.call(problem, d_out, **taken)
        if "b" in self.layout:
            arrays = (jnp.asarray(to_layout(x, self.layout)) for x in given)
            return self._read_gradients(self.call(*arrays, **_options(problem, self.features, None), **taken), count)
        entries = []
        for number in range(problem.batch):
            arrays = (jnp.asarray(to_layout(x[number], self.layout)) for x in given)
            returned = self.call(*arrays, **_options(problem, self.features, number), **taken)
            entries.append(self._read_gradients(returned, count))
        dq, dk, dv = (np.stack([getattr(entry, name) for entry in entries]) for name in ("dq", "dk", "dv"))
        of_sinks = [entry.dsinks for entry in entries if entry.dsinks is not None]
        return GradientResult(dq, dk, dv, np.sum(of_sinks, axis=0, dtype=np.float32) if of_sinks else None)

    def _read_gradients(self, returned: object, count: int) -> GradientResult:
        if not isinstance(returned, (tuple, list)) or len(returned) != count:
            wanted = ("dq", "dk", "dv", "dsinks")[:count]
            size = len(returned) if isinstance(returned, (tuple, list)) else type(returned).__name__
            message = f"{self.name} must return ({', '.join(wanted)}), got {size}"
            raise TypeError(message)
        dq, dk, dv = (self._array(name, x, self.layout) for name, x in zip(("dq", "dk", "dv"), returned, strict=False))
        return GradientResult(dq, dk, dv, np.asarray(returned[3]) if count > 3 else None)

    def _keywords(self) -> Mapping[str, inspect.Parameter]:
        try:
            return inspect.signature(self.call).parameters
        except (TypeError, ValueError):  # a callable without a signature takes what every subject takes
            return {}

    def _read(self, returned: object) -> tuple[np.ndarray, np.ndarray | None]:
        """(out, lse) in the suite's layout."""
        pair = isinstance(returned, (tuple, list)) and len(returned) == 2
        if self.features.lse is None and not hasattr(returned, "shape"):
            message = (
                f"{self.name} must return one array, as Features(lse=None) declares, got {type(returned).__name__}"
            )
            raise TypeError(message)
        if self.features.lse is not None and not pair:
            declared = f"Features(lse={self.features.lse!r})"
            message = f"{self.name} must return (out, lse), as {declared} declares, got {type(returned).__name__}"
            raise TypeError(message)
        out, lse = returned if self.features.lse is not None else (returned, None)  # type: ignore[misc]
        out = self._array("out", out, self.layout)
        return out, None if lse is None else self._array("lse", lse, self.layout.replace("d", ""))

    def _array(self, name: str, x: Any, layout: str) -> np.ndarray:  # noqa: ANN401  whatever a kernel returns
        array = np.asarray(x)
        if array.ndim != len(layout):
            message = f"{name} of {self.name} must have the axes {layout}, got shape {array.shape}"
            raise TypeError(message)
        return from_layout(array, layout)


def _options(problem: AttentionProblem, features: Features, entry: int | None) -> dict[str, Any]:
    """Keywords of a call: causal and scale always, others when the problem has them."""
    options: dict[str, Any] = {"causal": problem.causal, "scale": problem.scale}
    for name in ("window", "softcap"):
        if getattr(problem, name) is not None:
            options[name] = getattr(problem, name)
    if problem.sinks is not None:
        options["sinks"] = jnp.asarray(problem.sinks)
    given = ("q_segments", "k_segments", "q_positions") if features.positions else ("q_segments", "k_segments")
    for name in given:
        x = getattr(problem, name)
        if x is not None:
            options[name] = jnp.asarray(x if entry is None else x[entry])
    return options


def subject(
    *,
    name: str | None = None,
    layout: str = "bhtd",
    features: Features | None = None,
    domain: Domain = FINITE,
    arithmetic: Arithmetic | None = None,
    package: str | None = None,
    contract: str = "",
    operation: str = ATTENTION,
) -> Callable[[Callable[..., Any]], Subject]:
    """Declare a function as a subject; the arguments are the attributes of `Subject`."""

    def declare(call: Callable[..., Any]) -> Subject:
        return Subject(
            name=name or f"{call.__module__}:{call.__qualname__}",
            call=call,
            layout=layout,
            features=features or Features(),
            domain=domain,
            arithmetic=arithmetic or Arithmetic(),
            package=package,
            contract=contract,
            operation=operation,
        )

    return declare
