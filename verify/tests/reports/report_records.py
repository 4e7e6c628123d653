"""Records made by hand, and judges that workers of a test can import."""

from __future__ import annotations

import hashlib
import os
import signal
from typing import TYPE_CHECKING, Any

from verify.records import FORMAT, encode_number

if TYPE_CHECKING:
    from reports.item import Item

ENVIRONMENT = {
    "backend": "cpu",
    "device_model": "cpu-interpret",
    "interpret": "fast",
    "versions": {"python": "3.13.0", "jax": "0.12.0"},
    "date": "2026-11-29T10:00:00+00:00",
}


def worst(value: float, *, got: float = 1.0078125, want: float = 1.0, rank: int = 4) -> dict[str, Any]:
    """A worst element as `verify.attention.examine` writes it."""
    return {
        "value": encode_number(value),
        "index": list(range(rank)),
        "got": encode_number(got),
        "want": encode_number(want),
        "got_bits": "0x3f81",
        "want_bits": "0x3f80",
    }


def measures(
    share: float,
    *,
    array: str = "out",
    ulp: float = 1.0,
    count: int = 128,
    rank: int | None = None,
    **element: float,
) -> dict[str, Any]:
    """Measures of one array."""
    rank = rank or (4 if array == "out" else 3)
    return {
        "format": "BF16" if array == "out" else "FP32",
        "count": count,
        "mismatches": 0,
        "absolute": worst(0.0078125, rank=rank, **element),
        "relative": worst(0.0078125, rank=rank, **element),
        "ulp": worst(ulp, rank=rank, **element),
        "share": worst(share, rank=rank, **element),
        "bias": {
            "normalised_by": "bound", "elements": count, "rows": 4, "total": 0.1, "squares": 1.0, "lean": 0.5,
            "lean_limit": 6.65, "mean_square": 0.1, "mean_square_limit": "inf", "false_alarm_rate": 1e-9,
            "alarm": False,
        },
    }  # fmt: skip


def profile(share: float, *, array: str = "out", rows: int = 128) -> dict[str, Any]:
    """A profile of one array whose 30th-worst row uses `share` of its bound."""
    nth = {"rank": 30, "rows": rows, "share": encode_number(share)}
    found: dict[str, Any] = {array: {"ulp": [[0.0, 5], [0.25, 70], [0.5, 40], [2.0, 12], ["nan", 1]], "nth_row": nth}}
    if array == "out":
        cells = [[encode_number(share * (r + c) / 4) for c in range(3)] for r in range(2)]
        found["heat"] = {"batch": 0, "head": 1, "rows": [0, 64, 128], "columns": [0, 20, 40, 64], "cells": cells}
    return found


def record(case: str = "plain", share: float = 0.5, **fields: Any) -> dict[str, Any]:
    """A whole record; `fields` replace parts of it."""
    body: dict[str, Any] = {
        "format": FORMAT,
        "subject": "flywheel.attention",
        "case": case,
        "family": "ordinary",
        "sha256": hashlib.sha256(case.encode()).hexdigest(),
        "shape": {
            "batch": 1, "heads": 2, "kv_heads": 1, "q_len": 128, "kv_len": 128, "head_dim": 64,
            "causal": True, "scale": 0.125,
        },
        "features": {},
        "verdict": "pass",
        "reason": "out: 128 elements within their bound",
        "measures": {"out": measures(share), "lse": measures(share / 10, array="lse")},
        "replays": 1,
        "query_blocks": 2,
        "replay_map": [[[0], [1]]],
        "seconds": 0.25,
        "environment": dict(ENVIRONMENT),
        "reproduce": f"uv run python -m reports case {case}",
        "case_spec": {"format": "flywheel-attention-case/1", "name": case},
    }  # fmt: skip
    return body | fields


def layer_record(case: str = "length-64", share: float = 0.5, *, length: int = 64, **drawn: str) -> dict[str, Any]:
    """A record of a Gated DeltaNet layer; `drawn` replaces families."""
    return record(
        case,
        subject="flywheel.gdn.fused_conv1d_gdn[bf16]",
        operation="gated_delta_net",
        shape={"tokens": length, "sequences": 1, "longest": length, "heads": [1, 2, 128, 128], "slots": 1},
        drawn={"keys": "random", "beta": "up to 1", "decay": "mild"} | drawn,
        measures={"out": measures(share, rank=3), "state": measures(share / 2, array="state", rank=4)},
        profile=profile(share),
        replays=None,
        query_blocks=None,
        replay_map=None,
        case_spec={"format": "flywheel-layer-case/1", "name": case, "lengths": [length], "keys": "low-rank"},
    )


def inverse_record(case: str = "random keys", share: float = 0.5, **drawn: str) -> dict[str, Any]:
    """A record of a chunk's inverse."""
    return layer_record(case, share, **drawn) | {
        "subject": "flywheel.gdn.triangular_inverse[bf16]",
        "operation": "triangular_inverse",
        "shape": {"chunk": 64},
        "measures": {"inverse": measures(share, array="inverse", rank=2)},
        "case_spec": {"format": "flywheel-inverse-case/1", "name": case, "family": "random"},
    }


def packed_record(case: str = "packed", share: float = 0.5, *, length: int = 64) -> dict[str, Any]:
    """A record of packed attention."""
    shape = record()["shape"] | {"sequences": 8, "longest": length, "kv_len": 8 * length, "q_len": 8 * length}
    return record(
        case, share, subject="flywheel.ragged_attention", shape=shape, features={"segments": {"q": 8, "k": 8}}
    )


def quick_judge(item: Item) -> dict[str, Any]:
    """A judge that passes everything at once."""
    return record(item.name, family=item.family)


def deadly_judge(item: Item) -> dict[str, Any]:
    """A judge whose process is killed by items called `deadly`."""
    if item.name == "deadly":
        os.kill(os.getpid(), signal.SIGKILL)
    return record(item.name, family=item.family)
