"""A worker in this process: what it finds, how small it gets, and what it does not call a failure."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import fuzz_subjects
import pytest

from fuzz.attention.buckets import BUCKETS
from fuzz.attention.moves import MOVES
from fuzz.case import Case, load_case
from fuzz.kinds import BITS, EVOLVE, GRADIENT
from fuzz.search import reduced
from fuzz.store import NOT_SHRUNK, SHRUNK, Store
from fuzz.tally import Tally
from fuzz.worker import FINISH, STOP, Assignment, Broken, Report, Round, Stop, Worker
from verify import records
from verify.attention.cases import AttentionCase, Edit
from verify.subjects import Subject

if TYPE_CHECKING:
    from pathlib import Path

SMALL = "128x200-d256"
"""The cheapest bucket."""


class Pipe:
    """The parent's end of the pipe, in memory."""

    def __init__(self) -> None:
        self.sent: list[Report] = []
        self.orders: list[Any] = []

    def poll(self) -> bool:
        """Whether an order waits that a worker must see between two cases."""
        return bool(self.orders) and isinstance(self.orders[0], str)

    def recv(self) -> Any:
        """The next order."""
        if not self.orders:
            raise EOFError
        return self.orders.pop(0)

    def send(self, report: Report) -> None:
        """Keep the report."""
        self.sent.append(report)

    @property
    def total(self) -> Tally:
        """All reports together."""
        tally = Tally()
        for report in self.sent:
            tally.merge(report.tally)
        return tally


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """A function that makes a worker for a subject of `fuzz_subjects`."""

    def worker(subject: str, *buckets: str, known: dict | None = None) -> Worker:
        Store(tmp_path).prepare()
        assignment = Assignment(tmp_path, 0, "token", buckets or (SMALL,), f"fuzz_subjects:{subject}", known or {})
        return Worker(Pipe(), assignment)  # pyright: ignore[reportArgumentType]

    return worker


def test_a_kernel_that_takes_nothing_leaves_a_round_empty(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draw refused is no failure and no end of the campaign: the round is over, with nothing judged."""
    worker = make("oracle")
    monkeypatch.setattr(worker, "_judge", lambda _: None)
    worker.carry_out(Round(0, 1, 4, "anchor"))
    assert worker.pipe.sent[-1].done
    assert worker.pipe.total.cases == 0


def play(worker: Worker, cases: int, seed: int = 7, **more: Any) -> Tally:
    """One round, to its end."""
    worker.pipe.orders += [Round(0, seed, cases, "anchor", **more), None]
    worker.serve()
    return worker.pipe.total


@pytest.mark.deep
def test_planted_fault_is_found_and_shrunk(make: Any) -> None:
    """A check without its replay is found within 300 cases, and shrunk to at most three plants over equal logits."""
    worker = make("skips_replay")
    worker.evaluate = without_bell_logits(worker.evaluate)
    tally = play(worker, 300)
    assert tally.violations > 0
    assert tally.cases <= 300 + 400
    # One file for each root (the output, the LSE, both).
    shrunk = [load_case(path) for path in worker.store.failures.glob("*.json")]
    assert all("searched" in case.provenance for case in shrunk)
    assert all(SHRUNK in case.provenance for case in shrunk)
    # How far Hypothesis gets depends on its constants: to one plant at best, to three that a person can still read.
    case = min((case.inputs for case in shrunk), key=lambda case: len(case.edits))
    jumps = [float(size) for size in re.findall(r"(-?[\d.]+) at key", case.name)]
    assert case.exponents == (None, None, 0)
    assert 1 <= len(jumps) <= 3, case
    assert max(jumps) > 149.0, case.name


def without_bell_logits(evaluate: Any) -> Any:
    """Pass everything whose logits are not equal but for plants, so that only a plant can show the fault."""

    def restricted(case: Any, **options: Any) -> Any:
        record = evaluate(case, **options)
        if record is not None and None not in case.inputs.exponents[:2]:
            record["root"] = None
        return record

    return restricted


@pytest.mark.deep
def test_saved_case_is_judged_the_same_again(make: Any) -> None:
    """The minimal case, read from its file, fails again with the same root and the same worst element."""
    worker = make("skips_replay")
    play(worker, 100)
    for path in worker.store.failures.glob("*.json"):
        case = load_case(path)
        subject = worker.load("attention", "fuzz_subjects:skips_replay")
        first, second = (worker.evaluate(case, subject=subject, name="x", reproduce="") for _ in range(2))
        assert first["root"] is not None
        assert first["root"] in path.name
        assert first["measures"] == second["measures"]
        assert first["reason"] == second["reason"]
        assert first["reason"] in case.provenance


def test_kernels_are_let_go_where_some_were_compiled(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker looks at what its kernels hold after each case that compiled one, and only then."""
    looks: list[int] = []
    monkeypatch.setattr("fuzz.worker.forget_kernels", lambda: looks.append(1))
    worker = make("oracle")
    worker.evaluate = lambda _, **__: setattr(worker, "compiled", len(looks) < 2)
    play(worker, 6)
    assert len(looks) == 2


def test_fault_of_the_real_kernel_is_found(make: Any) -> None:
    """Wrong results of replayed blocks are blamed on the replay."""
    worker = make("stale_denominator")
    play(worker, 100)
    assert [path.name for path in worker.store.failures.glob("*.json")] == ["attention-out-beyond-replayed.json"]


def test_no_false_alarm(make: Any) -> None:
    """A subject without faults passes, and nothing is saved."""
    worker = make("oracle")
    tally = play(worker, 25)
    assert tally.cases == 25
    assert tally.violations == 0
    assert tally.rejected == 0
    assert not list(worker.store.failures.iterdir())
    assert tally.worst is not None
    assert 0.0 < tally.worst.share <= 1.0


def test_every_root_of_a_round_is_shrunk(make: Any) -> None:
    """A round that meets failures of two kinds makes both of them small, not the last one alone."""
    worker = make("raises_two_ways")
    play(worker, 100, seed=9)  # draws that meet both
    cases = {path.name: load_case(path) for path in worker.store.failures.glob("*.json")}
    assert set(cases) == {"attention-raised-OverflowError.json", "attention-raised-ArithmeticError.json"}
    for case in cases.values():
        assert SHRUNK in case.provenance
        assert NOT_SHRUNK not in case.provenance
        assert len(case.inputs.edits) <= 2


def test_exception_is_a_finding(make: Any) -> None:
    """What a subject raises is its result: saved under the exception's name, with the message."""
    worker = make("raises")
    play(worker, 100)
    (path,) = worker.store.failures.glob("*.json")
    assert path.name == "attention-raised-OverflowError.json"
    assert "values too large" in load_case(path).provenance


@pytest.mark.deep
def test_each_finding_is_shrunk_once(make: Any) -> None:
    """Once a root has its minimal case, later rounds count further violations and go on looking for others."""
    worker = make("raises")
    play(worker, 30, seed=1)
    (path,) = worker.store.failures.glob("*.json")
    before = path.read_text(encoding="utf-8")
    sent = len(worker.pipe.sent)
    play(worker, 30, seed=2)
    later = worker.pipe.sent[sent:]
    assert sum(report.tally.cases for report in later) == 30
    assert sum(report.tally.violations for report in later) > 0
    assert not any(report.failures for report in later)
    assert path.read_text(encoding="utf-8") == before


@pytest.mark.deep
def test_slow_first_calls_are_no_failure(make: Any) -> None:
    """A subject that compiles for a second per shape raises no deadline, flakiness or health-check error."""
    fuzz_subjects._first_call.cache_clear()
    worker = make("slow_first_call", SMALL, "300x129-d64", "129x300-d64")
    tally = play(worker, 20)
    assert tally.cases == 20
    assert tally.violations == 0
    assert not list(worker.store.failures.iterdir())


@pytest.mark.deep
def test_real_failure_of_a_slow_subject_is_found(make: Any) -> None:
    """The same slowness hides no fault: it is found and shrunk."""
    fuzz_subjects._first_call.cache_clear()
    worker = make("slow_and_skips_replay")
    assert play(worker, 100).violations > 0
    assert any(SHRUNK in load_case(path).provenance for path in worker.store.failures.glob("*.json"))


def test_every_judged_case_has_a_record(make: Any) -> None:
    """One record per case, with bits, verdict, worst element and the command that judges it again."""
    worker = make("oracle", "300x129-d64")
    tally = play(worker, 12)
    found = list(records.read(worker.store.records))
    assert len(found) == tally.cases == 12
    for record in found:
        assert record["family"] == "fuzz"
        assert record["verdict"] == "pass"
        assert record["subject"] == "fuzz_subjects:oracle"
        assert record["case_spec"]["sha256"] == record["sha256"]
        assert f"#{record['sha256'][:16]}" in record["reproduce"]
        assert record["measures"]["out"]["share"]["got_bits"].startswith("0x")
    assert len({json.dumps(record["case_spec"], sort_keys=True) for record in found}) == 12


def test_a_known_case_is_not_run_again(make: Any) -> None:
    """Totals of the records, given to a new worker, keep it from judging the same draws twice."""
    worker = make("oracle")
    play(worker, 15)
    _, known = worker.store.known()
    assert len(known) == 15
    again = make("oracle", known=known)
    tally = play(again, 10)
    assert tally.cases == 10
    assert len(list(records.read(worker.store.records))) == 25
    assert len(again.known) == 25


def test_case_is_on_disk_while_it_runs(make: Any) -> None:
    """What crashes a worker is left behind as a file that builds the same bits."""
    worker = make("oracle")
    seen: list[Any] = []

    def subject(problem: Any, *, config: Any) -> Any:
        (path,) = (worker.store.directory / "running").glob("*.json")
        left = load_case(path)
        seen.append(left)
        assert left.problem.q.tobytes() == problem.q.tobytes()
        return fuzz_subjects.oracle(problem, config=config)

    worker.load = lambda *_: Subject("watched", subject, takes_problem=True)
    play(worker, 5)
    assert len(seen) == 5
    assert not list((worker.store.directory / "running").iterdir())


def test_stop_comes_before_the_next_case(make: Any) -> None:
    """An order to stop ends the round between two cases; what was judged stays judged."""
    worker = make("oracle")
    inner = worker.load("attention", "fuzz_subjects:oracle")

    def subject(problem: Any, *, config: Any) -> Any:
        worker.pipe.orders.insert(0, STOP)
        return inner(problem, config=config)

    worker.load = lambda *_: Subject("watched", subject, takes_problem=True)
    tally = play(worker, 50)
    assert tally.cases == 1
    assert worker.pipe.sent[-1].done


def test_finish_lets_shrinking_end(make: Any) -> None:
    """When time is up in the middle of shrinking, the minimal case is still found."""
    worker = make("raises")
    inner = worker.evaluate

    def evaluate(*arguments: Any, **options: Any) -> Any:
        record = inner(*arguments, **options)
        if record["root"] is not None and worker.order is None:
            worker.pipe.orders.insert(0, FINISH)
        return record

    worker.evaluate = evaluate
    play(worker, 200)
    (path,) = worker.store.failures.glob("*.json")
    provenance = load_case(path).provenance
    assert SHRUNK in provenance
    assert NOT_SHRUNK not in provenance


def test_a_failing_instrument_is_no_finding(make: Any) -> None:
    """An exception of the judge or an oracle stops the hunt with its message, and is not shrunk like a case."""
    worker = make("oracle")

    def evaluate(*_: Any, **__: Any) -> Any:
        message = "the oracle left its own bound"
        raise RuntimeError(message)

    worker.evaluate = evaluate
    with pytest.raises(Broken, match="the oracle left its own bound"):
        play(worker, 10)
    assert not list(worker.store.failures.iterdir())


def test_orphan_leaves(make: Any) -> None:
    """A worker whose parent is gone stops before its next case."""
    worker = make("oracle")
    worker.pipe.poll = lambda: True
    with pytest.raises(Stop):
        worker._listen()


def test_buckets_are_the_hunts() -> None:
    """Names of buckets are unique and say what their shapes are."""
    for name, bucket in BUCKETS.items():
        assert name.startswith(f"{bucket.q_len}x{bucket.kv_len}-d{bucket.head_dim}")


def test_what_a_search_finds_is_made_smaller(make: Any) -> None:
    """A case that varied elites have found loses the edits that it does not need, and keeps its root."""
    worker = make("skips_replay")
    key = Edit("k", "set", "0x1.2cp+8", start=150, stop=151, lanes=(0, 1))
    noise = tuple(Edit("v", "set", float(n).hex(), start=n, stop=n + 1) for n in range(1, 6))
    lanes = (Edit("k", "set", "0x0p+0", lanes=(0, 1)), Edit("q", "set", "0x1p+0", lanes=(0, 1)))
    bucket = BUCKETS[SMALL]
    inputs = AttentionCase(
        "jump",
        bucket.shape,
        scale=bucket.scale,
        exponents=(None, None, 0),
        edits=(*lanes, key, *noise),
        config=bucket.config,
    )
    case = Case("anchor", inputs)
    outcome = worker._judge(case)
    assert outcome.root is not None
    small, found = reduced(case, outcome, MOVES, worker._judge)
    assert found.root == outcome.root
    assert len(small.inputs.edits) <= 3
    assert key in small.inputs.edits


@pytest.mark.parametrize("kind", [EVOLVE, BITS, GRADIENT])
def test_searches_start_from_elites(make: Any, kind: str) -> None:
    """Each search judges as many new cases as asked for, and never does worse than the elite it starts from."""
    worker = make("oracle")
    first = play(worker, 8)
    elites = tuple(elite.spec for elite in first.archive["anchor"].values())
    before = max(elite.share for elite in first.archive["anchor"].values())
    later = play(worker, 25, kind=kind, elites=elites)
    assert later.cases > 8
    assert later.violations == 0
    assert max(elite.share for elite in later.archive["anchor"].values()) >= before
