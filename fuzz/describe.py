"""What is special about a case, in a sentence; and the case as a pytest test to paste."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import numpy as np

from verify.attention.cases import AttentionCase
from verify.attention.problem import AttentionProblem, widen

if TYPE_CHECKING:
    from fuzz.case import Case

TEST = '''\
"""Found by `python -m fuzz run {hunt}`: {sentence}"""

import json

import verify  # noqa: F401  it sets JAX's flags: before anything else
from fuzz.case import Case
from fuzz.hunts import find

CASE = r"""
{body}
"""


def test_{name}() -> None:
    """{sentence}"""
    case = Case.from_json(json.loads(CASE))
    hunt = find(case.hunt)
    record = hunt.evaluate()(case, subject=hunt.attacks.load({subject!r}), name={subject!r}, reproduce="")
    assert record is not None, "the kernel does not take the case"
    assert record["root"] is None, record["reason"]
'''


def sentence(case: Case) -> str:
    """What is special about a case, from its bits and from what is asked of it."""
    asked = [f"{name} {value}" for name, value in case.ask]
    parts = _attention(case.problem, case.inputs) if isinstance(case.problem, AttentionProblem) else [case.inputs.name]
    words = [*parts, *([f"asked with {', '.join(asked)}"] if asked else [])]
    return "; ".join(words) + "."


def _attention(problem: AttentionProblem, inputs: object) -> list[str]:
    """Shape, scores and values in plain words."""
    shape = (
        f"{problem.heads} heads on {problem.kv_heads}, {problem.q_len} queries, {problem.kv_len} keys, "
        f"head_dim {problem.head_dim}{', causal' if problem.causal else ''}"
    )
    if isinstance(inputs, AttentionCase) and any(inputs.config):
        shape += f", blocks {inputs.config[0]} x {inputs.config[1]} in fragments of {inputs.config[2]}"
    return [shape, *_masks(problem), *_scores(problem), *_values(problem)]


def _masks(problem: AttentionProblem) -> list[str]:
    parts = []
    if problem.window is not None:
        parts.append(f"window {problem.window}")
    if problem.softcap is not None:
        parts.append(f"soft cap {problem.softcap:g}")
    if problem.sinks is not None:
        parts.append(f"sinks {', '.join(f'{x:g}' for x in problem.sinks)}")
    if problem.q_segments is not None:
        parts.append(f"{np.unique(problem.q_segments).size} segment ids")
    blind = sum(int((~problem.mask(b).any(axis=1)).sum()) for b in range(problem.batch))
    return [*parts, *([f"{blind} rows see no key"] if blind else [])]


def _scores(problem: AttentionProblem) -> list[str]:
    """The largest jump over what stands before it, of any row."""
    best: tuple[float, int, int, int] | None = None
    flat = True
    mask = problem.mask(0)
    for h in range(problem.heads):
        with np.errstate(all="ignore"):
            s = widen(problem.q[0, h]) @ widen(problem.k[0, problem.kv_head(h)]).T * problem.scale
        s = np.where(mask, s, -np.inf)
        seen = mask.any(axis=1)
        if not seen.any():
            continue
        first = s[np.arange(len(s)), mask.argmax(axis=1)]
        with np.errstate(invalid="ignore"):
            above = np.where(seen, s.max(axis=1) - first, -np.inf)
            flat &= bool((np.where(mask, np.abs(s - first[:, None]), 0.0) == 0.0).all())
        row = int(np.nanargmax(above)) if np.isfinite(above[seen]).any() else -1
        if row >= 0 and (best is None or above[row] > best[0]):
            best = float(above[row]), h, row, int(s[row].argmax())
    if flat:
        return ["all visible logits of a row are equal"]
    if best is None or best[0] <= 0:
        return []
    return [
        f"the largest logit of row {best[2]} (head {best[1]}) is key {best[3]}'s, {best[0]:.6g} nats above its first"
    ]


def _values(problem: AttentionProblem) -> list[str]:
    v = widen(problem.v)
    odd = int((~np.isfinite(v)).sum())
    parts = [f"{odd} values are not finite"] if odd else []
    finite = np.abs(v[np.isfinite(v)])
    if finite.size and finite.max() == finite.min():
        return [*parts, f"every |v| is {finite.max():.6g}"]
    if finite.size and finite.max() > 0:
        return [*parts, f"|v| up to 2^{math.log2(finite.max()):.1f}"]
    return [*parts, "V is zero"]


def pytest_source(case: Case, subject: str) -> str:
    """A test, ready to paste, that fails as long as the case does."""
    name = "".join(c if c.isalnum() else "_" for c in f"{case.hunt}_{case.sha256[:12]}").lower()
    said = sentence(case).replace("\\", "/").replace('"', "'")
    body = json.dumps(case.to_json(), indent=1)
    return TEST.format(hunt=case.hunt, sentence=said, body=body, name=name, subject=subject)
