"""Faults planted in the attention kernel, one textual change each.

The suite must notice every one of them, and the audit of acceptance rules asks which rule lets it pass.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

HOME = Path("flywheel") / "attention"
"""Where a fault's file stands, below the root of a checkout."""


class FaultError(ValueError):
    """A fault that cannot be planted: the code has changed."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One textual change of one file; `before` must occur exactly `times` times."""

    name: str
    file: str
    before: str
    after: str
    times: int = 1

    def plant(self, root: Path) -> None:
        """Change the kernel below `root`.

        Raises:
            FaultError: the text to change does not occur as often as the fault says.
        """
        target = root / HOME / self.file
        text = target.read_text(encoding="utf-8")
        if text.count(self.before) != self.times:
            found = text.count(self.before)
            message = f"{self.name}: the text to change occurs {found} times in {self.file}: plant it anew"
            raise FaultError(message)
        target.write_text(text.replace(self.before, self.after), encoding="utf-8")


FAULTS = (
    Fault(
        "replay dropped",
        "kernel.py",
        "@pl.when(refs.control[FLAG] != 0)",
        "@pl.when(refs.control[FLAG] == 77)",
    ),
    Fault(
        "final check of o dropped",
        "finish.py",
        "jnp.maximum(tile.denominator_unsound(l), tile.overflow_marks(o))",
        "tile.denominator_unsound(l)",
    ),
    Fault(
        "sums compared with > instead of not <=",
        "tile.py",
        "jnp.where(sums <= LANE_LIMIT, 0.0, 1.0)",
        "jnp.where(sums > LANE_LIMIT, 1.0, 0.0)",
    ),
    Fault("sums not checked between blocks", "block.py", "        block.check_sums()", "        pass"),
    Fault("stale l on replay", "replay.py", "(refs.acc, refs.sums, refs.marks)", "(refs.acc, refs.marks)"),
    Fault("stale o on replay", "replay.py", "(refs.acc, refs.sums, refs.marks)", "(refs.sums, refs.marks)"),
    Fault(
        "state not cleared for the next query block",
        "kernel.py",
        "    refs.sums[...] = jnp.zeros_like(refs.sums)\n",
        "",
    ),
    Fault(
        "anchor from a masked key",
        "kernel.py",
        "tile.choose_anchor(s, visible)",
        "tile.choose_anchor(s, None)",
    ),
    Fault(
        "anchor moves after it was chosen",
        "tile.py",
        "jnp.where((anchor == UNSET) & some,",
        "jnp.where(some,",
    ),
    Fault(
        "anchors sought too late",
        "schedule.py",
        "return min(max(_down(max(start - lower, 0)), first), stop)",
        "return min(max(_up(max(start - lower, 0) + 1), first), stop)",
    ),
    Fault(
        "scale in BF16",
        "tile.py",
        "            return dot * jnp.float32(self.scale * LOG2_E)",
        "            return dot.astype(jnp.bfloat16).astype(jnp.float32) * jnp.float32(self.scale * LOG2_E)",
    ),
    Fault(
        "soft cap after the mask's units", "tile.py", "jnp.float32(self.softcap * LOG2_E)", "jnp.float32(self.softcap)"
    ),
    Fault(
        "heads mapped by tile instead of repeat",
        "kernel.py",
        'return b, lax.div(h, jnp.int32(spec.group)), unpack_field(steps[n], "j"), 0',
        'return b, lax.rem(h, jnp.int32(operands.k.shape[1])), unpack_field(steps[n], "j"), 0',
    ),
    Fault(
        "replay reads another head",
        "replay.py",
        "kv_head = lax.div(site.h, jnp.int32(site.spec.group))",
        "kv_head = site.h * 0",
    ),
    Fault(
        "replay reads another batch entry",
        "replay.py",
        "refs.k_hbm.at[site.b, kv_head",
        "refs.k_hbm.at[site.b * 0, kv_head",
    ),
    Fault(
        "replay skips the first visited block",
        "replay.py",
        "begin, end = refs.control[FIRST_BLOCK] * per_block,",
        "begin, end = (refs.control[FIRST_BLOCK] + 1) * per_block,",
    ),
    Fault(
        "mask off by one", "spec.py", "visible = keys <= rows + band.upper", "visible = keys <= rows + band.upper + 1"
    ),
    Fault("window one too wide", "spec.py", "keys >= rows + band.lower", "keys >= rows + band.lower - 1"),
    Fault(
        "segments ignored in the replay",
        "replay.py",
        "        visible &= key_ids_on_sublanes(ids, cell.width) == refs.q_ids[0, :, cell.queries]\n",
        "",
    ),
    Fault(
        "P not masked after exp2",
        "tile.py",
        "    return p if visible is None else jnp.where(visible, p, 0.0)\n\n\ndef partial_sums",
        "    return p\n\n\ndef partial_sums",
    ),
    Fault(
        "values beyond the last key not cleared",
        "block.py",
        "if keys_left < cell.size:",
        "if keys_left < 0:",
    ),
    Fault(
        "sink left out of the sum",
        "finish.py",
        "    if site.spec.sinks:\n        l = l",
        "    if site.spec.sinks:\n        l = 0 * l",
    ),
    Fault("LSE in log2 units", "tile.py", "shift * LN2 + jnp.log(l)", "shift + jnp.log2(l)"),
    Fault(
        "accumulator rounded to BF16",
        "block.py",
        "        acc[:, queries] = product\n",
        "        acc[:, queries] = product.astype(jnp.bfloat16).astype(jnp.float32)\n",
    ),
    Fault("floor not checked", "tile.py", "(l >= SUM_FLOOR) & (l <= LANES * LANE_LIMIT)", "l <= LANES * LANE_LIMIT"),
    Fault(
        "last fragments dropped",
        "block.py",
        "    while pending:\n        block.add_values(pending.popleft())\n",
        "",
    ),
    Fault(
        "queries finished before their last product",
        "schedule.py",
        "begins = [0, *(fragment.first for fragment in fragments[1:]), self.block_q]",
        "begins = [0, *(fragment.stop for fragment in fragments[:-1]), self.block_q]",
    ),
    Fault(
        "queries finished before their last key block",
        "schedule.py",
        "_down(j * self.block_kv - i * self.block_q - self.band.upper)",
        "_down(j * self.block_kv - i * self.block_q - self.band.upper) + LANE_GRID",
    ),
    Fault("every body starts the sums anew", "schedule.py", "body in self.opening and fragment", "fragment"),
    Fault("a piece whose mask has one bound goes without", "schedule.py", "upper >= keys - 1:", "upper >= 0:"),
    Fault(
        "a block fetched ahead overwrites the one in use",
        "fetch.py",
        "return self.spec.tiling.lookahead + 1",
        "return self.spec.tiling.lookahead",
    ),
    Fault(
        "keys fetched once for two groups of heads",
        "fetch.py",
        "lax.rem(place.h, jnp.int32(self.spec.group)) == 0",
        "lax.rem(place.h, jnp.int32(2 * self.spec.group)) == 0",
    ),
    Fault(
        "replay's next tile overwrites this one",
        "replay.py",
        "refs, stage = site.refs, lax.rem(n, 2)",
        "refs, stage = site.refs, 0 * n",
    ),
    Fault("non-finite values not restored", "tile.py", "jnp.where((marks == 0) | (out != out), out, special)", "out"),
    Fault(
        "clamp dropped",
        "tile.py",
        "jnp.minimum(jnp.maximum(o * (0.5 / l), -HALF_BF16_MAX), HALF_BF16_MAX)",
        "o * (0.5 / l)",
    ),
)
