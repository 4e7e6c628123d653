"""What a subject declares, and how it is called."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import inspect
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from verify.attention.subjects import SubjectResult
from verify.subjects.arithmetic import Arithmetic
from verify.subjects.layouts import LAYOUTS, from_layout, per_batch_entry, to_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jaxtyping import Bool

    from verify.attention.problem import AttentionProblem

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
            if not getattr(self, _FEATURE_OF.get(option, option)):
                return f"no {_FEATURE_OF.get(option, option)}"
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
        operation: "attention", the only one so far.
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
        if self.operation != "attention":
            message = f"operation must be attention, got {self.operation!r}"
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
            return SubjectResult(*self._read(self.call(*arrays, **_options(problem, None), **taken)))

        def entry(number: int, *rows: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
            arrays = (jnp.asarray(to_layout(x, self.layout)) for x in rows)
            return self._read(self.call(*arrays, **_options(problem, number), **taken))

        return SubjectResult(*per_batch_entry(entry, (problem.q, problem.k, problem.v)))

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


def _options(problem: AttentionProblem, entry: int | None) -> dict[str, Any]:
    """Keywords of a call: causal and scale always, others when the problem has them."""
    options: dict[str, Any] = {"causal": problem.causal, "scale": problem.scale}
    for name in ("window", "softcap"):
        if getattr(problem, name) is not None:
            options[name] = getattr(problem, name)
    if problem.sinks is not None:
        options["sinks"] = jnp.asarray(problem.sinks)
    for name in ("q_segments", "k_segments", "q_positions"):
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
        )

    return declare
