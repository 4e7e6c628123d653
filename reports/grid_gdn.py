"""Calls of Gated DeltaNet layers, and matrices of the chunk's inverse: families of keys, write strengths and decays.

All calls of a precision share one compiled kernel, which takes 16 seconds to compile: tokens, sequences and slots are
filled up to `FILLED`, lengths are traced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuzz.gdn.inverse_case import FAMILIES, InverseCase
from fuzz.gdn.layer_case import LayerCase
from reports.item import INVERSE, LAYER, Item
from verify.gdn.cases import DECAYS, KEYS

if TYPE_CHECKING:
    from collections.abc import Sequence

PRECISIONS = ("bf16", "bf16x3")
LAYER_SUBJECT = "flywheel.gdn.fused_conv1d_gdn"
INVERSE_SUBJECT = "flywheel.gdn.triangular_inverse"
FILLED = {"tokens": 512, "sequences": 8, "slots": 8}
HEADS = (1, 2)

SERIES = {
    "random": (1, 7, 63, 64, 65, 128, 129, 256, 512),
    "near-duplicate": (1, 64, 65, 128, 256),
    "low-rank": (1, 64, 65, 128, 256),
}
"""Lengths of ordinary calls per family of keys."""

BETAS = ("up to 1", "1", "constant", "tiny or 1")
"""Write strengths of a sigmoid; strengths up to 2 are another compiled kernel."""

ADVERSARIAL_LENGTH = 65
"""A whole chunk and one token more, so that the state's hand-over counts."""

OTHERS_SAMPLE = (
    "length-64-random-keys",
    "length-129-random-keys",
    "length-128-near-duplicate-keys",
    "six-packed-sequences",
)

INVERSE_BETAS = (("constant", 0.5), ("constant", 1.0), ("uniform", 1.0), ("ends", 1.0))
INVERSE_BETAS_ABOVE = (("constant", 2.0), ("uniform", 2.0))
INVERSE_DECAYS = (1.0, 0.9375)
INVERSE_WIDTH = 128


def layer_items() -> list[Item]:
    """Everything that the standard grid asks of the layer, in both precisions."""
    return [
        _layer_item(f"{LAYER_SUBJECT}[{precision}]", family, case)
        for precision in PRECISIONS
        for family, case in _layers()
    ]


def inverse_items() -> list[Item]:
    """Everything that it asks of the inverse; `bf16` promises nothing for strengths above 1."""
    return [
        Item(
            "ordinary" if case.family == "random" else "adversarial",
            case.name,
            "fast",
            case,
            f"inverse {precision}",
            f"{INVERSE_SUBJECT}[{precision}]",
            INVERSE,
            weight=0.5,
        )
        for precision in PRECISIONS
        for case in _matrices(above_one=precision == "bf16x3")
    ]


def layer_sample(subject: str) -> list[Item]:
    """What another layer kernel is asked, ours in further configurations or a peer: each shape is a compilation."""
    return [_layer_item(subject, family, case) for family, case in _layers() if case.name in OTHERS_SAMPLE]


def _layer_item(subject: str, family: str, case: LayerCase) -> Item:
    return Item(family, case.name, "fast", case, f"layer {subject}", subject, LAYER, weight=8.0)


def _layers() -> list[tuple[str, LayerCase]]:
    ordinary = [
        ("ordinary", _one(f"length-{n}-{keys}-keys", n, keys=keys, decay="mild", seed=n))
        for keys, lengths in SERIES.items()
        for n in lengths
    ]
    return [*ordinary, *(("adversarial", case) for case in _families()), *(("boundary", case) for case in _packings())]


def _one(name: str, length: int, **fields: object) -> LayerCase:
    return LayerCase(name, lengths=(length,), heads=HEADS, **fields)  # type: ignore[arg-type]


def _families() -> list[LayerCase]:
    """Every family of keys with every write strength, and decays in turn, so that each meets every strength."""
    decays = list(DECAYS)
    return [
        _one(
            f"{keys} keys, beta {beta}, decay {decay}",
            ADVERSARIAL_LENGTH,
            keys=keys,
            beta=beta,
            decay=decay,
            seed=len(BETAS) * k + b,
        )
        for k, keys in enumerate(KEYS)
        for b, beta in enumerate(BETAS)
        for decay in [decays[(k + 2 * b) % len(decays)]]
    ]


def _packings() -> list[LayerCase]:
    """Packing, slots, initial states, padding, and gates whose factors overflow before their product."""
    lengths = (13, 0, 3, 1, 70, 20)
    six = tuple(range(6))

    def case(name: str, **fields: object) -> LayerCase:
        given = {
            "keys": "near-duplicate", "decay": "mild", "seed": 1, "lengths": lengths, "heads": HEADS,
            "initial": (1,) * 6, "reads": six, "writes": six, "slots": 6,
        } | fields  # fmt: skip
        return LayerCase(name, **given)  # type: ignore[arg-type]

    gates = [
        _one(f"gates-{name.replace(', ', '-').replace(' ', '-')}", 65, gates=name, seed=3)
        for name in ("a_log 88, dt -200", "a_log 88, dt 5", "a_log -80")
    ]
    return [
        case("six-packed-sequences"),
        case("six-packed-without-initial-states", initial=(0,) * 6),
        case("slots-read-apart-from-written", reads=(0, 2, 1, 4, -1, 4), writes=(0, 2, 1, -1, 3, 5)),
        case("nan-in-padding-and-unread-slots", initial=(1, 0, 1, 1, 0, 1), padding=30, poison=True),
        case("eight-sequences-of-one-token", lengths=(1,) * 8, initial=(1,) * 8, reads=tuple(range(8)),
             writes=tuple(range(8)), slots=8),
        case("boundaries-off-the-8-row-grid", lengths=(7, 9, 63, 1, 65, 15)),
        _one("projection-2^8", 65, size=8, seed=4),
        _one("projection-2^-8", 65, size=-8, seed=5),
        *gates,
    ]  # fmt: skip


def _matrices(*, above_one: bool) -> list[InverseCase]:
    betas: Sequence[tuple[str, float]] = (*INVERSE_BETAS, *(INVERSE_BETAS_ABOVE if above_one else ()))
    return [
        InverseCase(
            f"{family}-keys-beta-{kind}-{beta:g}-decay-{decay:g}",
            width=INVERSE_WIDTH,
            family=family,
            period=3,
            beta_kind=kind,
            beta_max=beta.hex(),
            decay=decay.hex(),
            seed=1,
        )
        for family in FAMILIES
        for kind, beta in betas
        for decay in INVERSE_DECAYS
    ]
