"""Measuring: one record per case, nothing lost, nothing twice."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from report_records import deadly_judge, quick_judge, record

from fuzz.gdn.inverse_case import FAMILIES, InverseCase
from reports import cli, grid, grid_gdn, grid_ragged, judges, measure, resume
from reports.cli import main
from reports.item import ATTENTION, LAYER, Item
from verify import records
from verify.attention.cases import AttentionCase, CaseError, save_case
from verify.gdn import steps
from verify.gdn.cases import DECAYS, KEYS
from verify.gdn.judge import GdnResult
from verify.gdn.problem import GdnProblem, final_conv_state
from verify.subjects import gdn_ours
from verify.subjects.gdn import GdnSubject
from verify.subjects.registry import FLYWHEEL


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spawned workers find the judges of `report_records`."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def items(*names: str) -> list[Item]:
    """Items of two groups that only a judge of a test can take."""
    return [
        Item("ordinary", name, "fast", None, f"group {n % 2}", "flywheel.attention") for n, name in enumerate(names)
    ]


def run(work: list[Item], path: Path, judge=quick_judge, **options) -> list[dict]:  # noqa: ANN001, ANN003
    """Measure, and return what was reported."""
    seen: list[dict] = []
    defaults = {"code": "c", "workers": 2, "until": None, "on_record": seen.append}
    measure.measure(work, path, judge=judge, **(defaults | options))
    return seen


def test_every_item_gets_one_record(tmp_path: Path) -> None:
    """Two workers share the groups, and each record carries the code it was measured with."""
    path = tmp_path / "records.jsonl"
    names = [f"case-{n}" for n in range(7)]
    seen = run(items(*names), path)
    found = list(records.read(path))
    assert sorted(body["case"] for body in found) == names
    assert {body["code"] for body in found} == {"c"}
    assert len(seen) == 7


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    """After an interrupt, and with a torn last line, only what has no record is measured."""
    path = tmp_path / "records.jsonl"
    work = items(*(f"case-{n}" for n in range(6)))
    count = 0

    def stop(_: dict) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(work, path, on_record=stop)
    with path.open("a", encoding="utf-8") as handle:
        handle.write('{"format": "flywheel-rec')
    done, aside = resume.prepare(path, "c")
    assert len(done) == 3
    assert aside is None
    run([item for item in work if item.key not in done], path)
    assert sorted(body["case"] for body in records.read(path)) == [item.name for item in work]


def test_a_dead_worker_costs_its_item_only(tmp_path: Path) -> None:
    """A process that is killed leaves a failure with its exit code; the rest goes on, and a resumed run tries again."""
    path = tmp_path / "records.jsonl"
    run(items("a", "b", "deadly", "c", "d", "e"), path, judge=deadly_judge, workers=1)
    found = {body["case"]: body for body in records.read(path)}
    assert sorted(found) == ["a", "b", "c", "d", "deadly", "e"]
    assert found["deadly"]["verdict"] == "fail"
    assert "exit code -9" in found["deadly"]["reason"]
    done, _ = resume.prepare(path, "c")
    assert ("flywheel.attention", "ordinary", "deadly", "fast") not in done
    assert len(done) == 5


def test_time_is_up(tmp_path: Path) -> None:
    """No item is started after the time given."""
    assert run(items("a", "b"), tmp_path / "records.jsonl", until=0.0) == []


def test_records_of_other_code_are_set_aside(tmp_path: Path) -> None:
    """Results of changed code are neither mixed with new ones nor lost; nor are those that a fresh run replaces."""
    path = tmp_path / "records.jsonl"
    records.append(path, record() | {"code": "old"})
    assert resume.prepare(path, "new") == (set(), tmp_path / "records.1.jsonl")
    assert len(list(records.read(tmp_path / "records.1.jsonl"))) == 1
    records.append(path, record() | {"code": "new"})
    assert resume.prepare(path, "new", fresh=True) == (set(), tmp_path / "records.2.jsonl")
    assert not path.exists()


def test_code_digest_covers_the_kernel() -> None:
    """The digest is stable within a checkout, and does not depend on where it is called."""
    assert resume.code_digest() == resume.code_digest()
    assert (resume.ROOT / "flywheel" / "attention" / "kernel.py").is_file()


@pytest.mark.parametrize("name", grid.GRIDS)
def test_grids_name_every_case_once(name: str) -> None:
    """A name finds one case; real tensors, adversarial and non-finite inputs are in every grid."""
    plan = grid.plan(name)
    keys = [item.key for item in plan]
    assert len(set(keys)) == len(keys)
    cases = {item.name: item.case for item in plan}
    assert all(cases[item.name] == item.case for item in plan)
    assert {"ordinary", "adversarial", "non-finite", "trace"} <= {item.family for item in plan}
    assert sorted(item.name for group in grid.groups(plan) for item in group) == sorted(item.name for item in plan)


def test_further_kernels_get_a_part_of_the_grid() -> None:
    """Each other kernel is asked for ordinary and for named cases, under its own name, which its command repeats."""
    assert grid.FLYWHEEL == FLYWHEEL
    assert FLYWHEEL not in grid.others()
    own, both = grid.plan("standard"), grid.plan("standard", ["jax.splash_attention"])
    more = both[len(own) :]
    assert {item.subject for item in more} == {"jax.splash_attention"}
    assert {item.name for item in more if item.family != "ordinary"} == set(grid.OTHERS_SAMPLE)
    assert len({item.key for item in both}) == len(both)
    assert all("--subject jax.splash_attention" in item.reproduce for item in more)
    assert "corpus" in {item.family for item in own}


def test_the_standard_grid_covers_what_it_says() -> None:
    """Every length and head_dim, both masks, GQA, and a sample in the interpreter that finds races."""
    plan = grid.plan("standard")
    dense = [item.case for item in plan if item.operation == ATTENTION and item.case is not None]
    shapes = {case.shape for case in dense}
    assert {(n, d) for n in grid.LENGTHS for d in grid.HEAD_DIMS} <= {(shape[4], shape[5]) for shape in shapes}
    assert set(grid.GQA_SHAPES) <= {shape[1:3] for shape in shapes}
    assert {case.causal for case in dense} == {True, False}
    assert sorted(item.name for item in plan if item.interpret == "tpu") == sorted(grid.RACE_SAMPLE)
    with pytest.raises(ValueError, match="grid must be one of quick, standard, got 'huge'"):
        grid.plan("huge")


@pytest.mark.smoke
def test_the_standard_grid_has_the_other_kernels() -> None:
    """Packed attention, layers and inverses: lengths around a chunk, every family, both precisions, slots, padding."""
    plan = grid.plan("standard")
    named = {subject: [item.case for item in plan if item.subject == subject] for subject in {i.subject for i in plan}}
    assert {grid_ragged.RAGGED, grid_ragged.INVARIANT} <= set(named)
    for precision in grid_gdn.PRECISIONS:
        layers = named[f"{grid_gdn.LAYER_SUBJECT}[{precision}]"]
        assert {1, 63, 64, 65, 128, 129} <= {case.lengths[0] for case in layers}
        assert {case.keys for case in layers} == set(KEYS)
        assert {case.decay for case in layers} == set(DECAYS)
        assert {case.beta for case in layers} == set(grid_gdn.BETAS)
        assert any(not all(case.initial) for case in layers)
        assert any(case.reads != case.writes for case in layers)
        assert any(case.poison for case in layers)
        matrices = named[f"{grid_gdn.INVERSE_SUBJECT}[{precision}]"]
        assert {case.family for case in matrices} == set(FAMILIES)
        above = {float.fromhex(case.beta_max) > 1.0 for case in matrices}
        assert above == ({False, True} if precision == "bf16x3" else {False})
    for subject in (grid_ragged.RAGGED, grid_ragged.INVARIANT):
        batches = named[subject]
        assert {case.config for case in batches} == {(grid_ragged.BLOCK, 0, 0)}
        assert len({case.shape for case in batches}) <= len(grid_ragged.HEAD_DIMS)
        assert any(case.cu_seqlens_q != case.cu_seqlens_k for case in batches)


def test_calls_of_one_group_share_a_compiled_kernel() -> None:
    """Tokens, sequences and slots of every layer fit the shape to which all are filled up."""
    for item in grid.plan("standard"):
        if item.operation == LAYER:
            case = item.case
            assert sum(case.lengths) + case.padding <= grid_gdn.FILLED["tokens"]
            assert max(len(case.lengths), case.slots) <= grid_gdn.FILLED["slots"]
            assert case.heads == grid_gdn.HEADS


@pytest.mark.parametrize("precision", grid_gdn.PRECISIONS)
def test_an_inverse_is_judged_end_to_end(precision: str, tmp_path: Path) -> None:
    """Our inverse on a matrix of the grid: a record with its profile, and a page with its figures."""
    subject = f"{grid_gdn.INVERSE_SUBJECT}[{precision}]"
    work = [item for item in grid.plan("standard") if item.subject == subject and "0.5-decay-1" in item.name]
    found = [measure.judge(item) for item in work]
    assert {body["verdict"] for body in found} == {"pass"}
    assert {body["operation"] for body in found} == {"triangular_inverse"}
    assert all(body["profile"]["heat"]["rows"][-1] == 64 for body in found)
    for body in found:
        records.append(tmp_path / "records.jsonl", body)
    assert main(["build", "--from", str(tmp_path / "records.jsonl"), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "index.html").read_text("utf-8")
    assert "Share of the bound by family of keys" in page
    assert "the whole matrix" in page
    assert "query blocks replayed" not in page


def test_a_layer_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's record has the judge's verdict, and a profile of what the judge compares: out by head, and states."""
    item = next(item for item in grid.plan("standard") if item.name == "nan-in-padding-and-unread-slots")
    exact = GdnSubject(item.subject, emulated, steps=gdn_ours.steps("bf16"))
    monkeypatch.setattr(judges, "load", lambda _: exact)
    body = measure.judge(item)
    assert body["verdict"] == "pass", body["reason"]
    assert body["shape"]["longest"] == 70
    assert body["drawn"] == {"keys": "near-duplicate", "beta": "up to 1", "decay": "mild"}
    compared = {name: sum(count for _, count in body["profile"][name]["ulp"]) for name in ("out", "state")}
    assert compared == {name: body["measures"][name]["count"] for name in ("out", "state")}
    assert body["profile"]["heat"]["head"] in (0, 1)
    json.dumps(body, allow_nan=False)


def emulated(problem: GdnProblem) -> GdnResult:
    """The kernel as numpy computes it."""
    found = steps.run(problem, gdn_ours.steps("bf16"))
    return GdnResult(found.out, found.state, final_conv_state(problem))


@pytest.mark.deep
@pytest.mark.parametrize("operation", ["gated_delta_net", "attention"])
def test_the_other_kernels_are_judged_end_to_end(operation: str) -> None:
    """Our layer and our packed attention on cases of the grid that stress their edges."""
    names = {
        "gated_delta_net": ("slots-read-apart-from-written", "nan-in-padding-and-unread-slots"),
        "attention": ("packed-other-lengths-of-keys", "packed-nan-in-a-neighbour"),
    }
    for item in grid.plan("standard"):
        if item.operation == operation and item.name in names[operation]:
            body = measure.judge(item)
            assert body["verdict"] == "pass", body["reason"]


@pytest.mark.parametrize(
    ("name", "elements"),
    [("causal-length-7-d64-spread-4", 7), pytest.param("smollm2-135m/layer00", 100_000, marks=pytest.mark.deep)],
)
def test_the_kernel_is_judged_end_to_end(name: str, elements: int, tmp_path: Path) -> None:
    """A worker process runs the kernel on a case, or on a problem of the trace; the page of it passes."""
    work = [item for item in grid.plan("quick") if item.name == name]
    assert len(work) == 1
    path = tmp_path / "records.jsonl"
    run(work, path, judge=measure.judge, workers=1)
    found = {body["case"]: body for body in records.read(path)}
    assert {body["verdict"] for body in found.values()} == {"pass"}
    assert found[name]["measures"]["out"]["count"] > elements
    assert main(["build", "--from", str(path), "--out", str(tmp_path / "page")]) == 0


def test_an_exception_of_the_kernel_is_a_failure() -> None:
    """What the kernel raises becomes the record, with its text."""
    item = grid.of_case("ordinary", AttentionCase("odd-head-dim", (1, 1, 1, 8, 8, 80)))
    body = measure.judge(item)
    assert body["verdict"] == "fail"
    assert "head_dim must be one of 64, 128, 192, 256, got 80" in body["reason"]
    json.dumps(body, allow_nan=False)


def test_one_case_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`case` judges a case by its name or from its file, and refuses a name that no grid has."""
    assert main(["case", "causal-length-7-d64-spread-4"]) == 0
    by_name = capsys.readouterr().out
    assert by_name.startswith("pass: causal-length-7-d64-spread-4 (ordinary, 1 × 2/1 × 7 × 7 × 64, causal)")  # noqa: RUF001
    case = grid.find("causal-length-7-d64-spread-4").case
    assert case is not None
    save_case(case, tmp_path / "case.json")
    assert main(["case", str(tmp_path / "case.json")]) == 0
    assert main(["case", "no-such-case"]) == 2
    assert "no case is called 'no-such-case'" in capsys.readouterr().out


def test_cases_of_every_operation_are_found(tmp_path: Path) -> None:
    """A name finds its own kernel, another one of the same kind if asked, and a case file tells what it is of."""
    layer = grid.find("six-packed-sequences")
    assert (layer.subject, layer.operation) == (f"{grid_gdn.LAYER_SUBJECT}[bf16]", LAYER)
    assert grid.find("six-packed-sequences", subject=f"{grid_gdn.LAYER_SUBJECT}[bf16x3]").subject.endswith("[bf16x3]")
    assert grid.find("packed-mixed-lengths").subject == grid_ragged.RAGGED
    for name in ("random-keys-beta-constant-1-decay-1", "packed-mixed-lengths", "length-7-random-keys"):
        item = grid.find(name)
        assert item.case is not None
        (tmp_path / "case.json").write_text(json.dumps(item.case.to_json()), "utf-8")
        found = grid.of_file(tmp_path / "case.json")
        assert (found.subject, found.operation, found.case) == (item.subject, item.operation, item.case)
    hunted = {"format": "flywheel-fuzz-case/1", "hunt": "inverse", "ask": {}, "inputs": InverseCase("i").to_json()}
    (tmp_path / "case.json").write_text(json.dumps(hunted), "utf-8")
    with pytest.raises(CaseError, match="a case of the hunt inverse: python -m fuzz replay judges it"):
        grid.of_file(tmp_path / "case.json")


def test_a_full_memory_drops_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above its limit a worker forgets what it has compiled, below it keeps it."""
    dropped = []
    monkeypatch.setattr("jax.clear_caches", lambda: dropped.append(1))
    monkeypatch.setattr(measure, "resident", lambda: measure.MOST_RESIDENT)
    measure._forget_kernels()
    assert not dropped
    monkeypatch.setattr(measure, "resident", lambda: measure.MOST_RESIDENT + 1)
    measure._forget_kernels()
    assert dropped


@pytest.mark.smoke
def test_commands_survive_a_shell() -> None:
    """A name that starts with a dash, or holds what a shell reads, still names its case."""
    dashed = grid.of_case("non-finite", AttentionCase("-inf in v", (1, 1, 1, 1, 1, 64)), interpret="tpu")
    assert dashed.reproduce == "uv run python -m reports case --interpret tpu -- '-inf in v'"
    words = shlex.split(dashed.reproduce)[5:]
    parsed = cli._parser().parse_args(words)
    assert (parsed.name, parsed.interpret) == ("-inf in v", "tpu")


@pytest.mark.smoke
def test_arguments_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """Minutes and workers out of range are refused before anything is started."""
    for arguments, message in (
        (["build", "--minutes", "0"], "must be a positive number of minutes, got 0"),
        (["build", "--workers", "0"], "must be at least 1, got 0"),
        (["build", "--grid", "huge"], "invalid choice: 'huge'"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
