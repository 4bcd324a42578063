"""A log replayed without the job: the new base is what the job had, and nothing is lost on the way."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckpt
from ckpt.compact import cuts, job
from ckpt.compact.job import Options, compact
from ckpt.compact.kernels import Kernel
from ckpt.errors import BudgetTooSmall, ConfigError, DigestMismatch, NoSuchCheckpoint, ReplayError
from ckpt.repo.gc import collect
from ckpt.repo.holders import graph_of_index
from ckpt.repo.repository import Repository
from ckpt.repo.verify import verify
from ckpt.store.memory import MemoryStore
from ckpt.store.open import open_store
from tests.unit.compact.jobs import Trained, kept, loaded, trained

if TYPE_CHECKING:
    from pathlib import Path

MAKERS: dict[str, Any] = {
    "AdamW": lambda g: torch.optim.AdamW(g, lr=1e-2),
    "AdamW fused": lambda g: torch.optim.AdamW(g, lr=1e-2, fused=True),
    "AdamW foreach": lambda g: torch.optim.AdamW(g, lr=1e-2, foreach=True, amsgrad=True),
    "AdamW with a tensor as rate": lambda g: torch.optim.AdamW(
        [{**one, "lr": torch.tensor(one.get("lr", 1e-2))} for one in g], lr=torch.tensor(1e-2)
    ),
    "SGD": lambda g: torch.optim.SGD(g, lr=1e-4, momentum=0.9, nesterov=True),
    "Adagrad": lambda g: torch.optim.Adagrad(g, lr=1e-2),
    "RMSprop": lambda g: torch.optim.RMSprop(g, lr=1e-3, centered=True, momentum=0.5),
    "NAdam": lambda g: torch.optim.NAdam(g, lr=1e-3),
    "Rprop": lambda g: torch.optim.Rprop(g, lr=1e-3),
}


def logs(root: Path) -> list[str]:
    """Return the files of records."""
    return sorted(path.name for path in root.rglob("*.log"))


@pytest.mark.parametrize(("name", "full_every"), [*((name, 5) for name in MAKERS), ("AdamW", 100), ("Rprop", 100)])
def test_the_new_base_is_what_the_job_had(name: str, full_every: int, tmp_path: Path) -> None:
    make = MAKERS[name]
    expected = trained(tmp_path, full_every=full_every, make=make).state()
    done = compact(open_store(tmp_path))
    assert (done.base, done.step, done.exact, done.notes) == (0 if full_every > 9 else 5, 9, True, [])
    assert done.judged.compared
    assert not done.judged.off
    assert logs(tmp_path) == []
    assert verify(Repository(open_store(tmp_path))).findings == []
    report, back = loaded(tmp_path, make)
    assert (report.step, report.replayed, report.notes, report.extra) == (9, 0, (), {"mark": 3})
    assert back.state() == expected


def test_a_job_that_diverged(tmp_path: Path) -> None:
    def make(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=10.0)

    trained(tmp_path, make=make)
    assert compact(open_store(tmp_path)).step == 9
    assert not loaded(tmp_path, make)[1].model.gain.isfinite()


def test_half_precision_and_encoded_gradients(tmp_path: Path) -> None:
    expected = trained(tmp_path, dtype=torch.bfloat16, log_codec="zstd").state()
    assert compact(open_store(tmp_path)).exact is True
    assert loaded(tmp_path, dtype=torch.bfloat16)[1].state() == expected


def test_cut_into_slices_it_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(tmp_path).state()
    monkeypatch.setattr(cuts, "GRAIN", 64)
    monkeypatch.setattr(job, "elements_of", lambda source, memory: 200)
    done = compact(open_store(tmp_path))
    assert done.bundles > 5
    assert done.exact is True
    assert loaded(tmp_path)[1].state() == expected


def test_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(tmp_path).state()
    monkeypatch.setattr(cuts, "MOST_SLICES", 2)
    seen: list[tuple[int, int]] = []
    done = compact(open_store(tmp_path), Options(workers=2, memory=256 << 20, progress=lambda *said: seen.append(said)))
    assert (done.exact, done.bundles) == (True, 4)
    assert seen[-1][0] == seen[-1][1]
    assert loaded(tmp_path)[1].state() == expected


def test_what_was_cut_otherwise_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(tmp_path).state()

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    for most in (2, 3):
        monkeypatch.setattr(cuts, "MOST_SLICES", most)
        with pytest.raises(KeyboardInterrupt):
            compact(open_store(tmp_path), Options(progress=stop))
        assert loaded(tmp_path)[0].step == 9
    done = compact(open_store(tmp_path))
    assert (done.exact, done.resumed) == (True, 1)
    assert loaded(tmp_path)[1].state() == expected


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_what_no_step_has_changed_is_not_copied(codec: str, tmp_path: Path) -> None:
    expected = trained(tmp_path, codec=codec).state()
    done = compact(open_store(tmp_path), Options(keep=1))
    assert done.removed == [0, 5]
    assert done.bytes_kept == 64 * 4 + 5 * 4  # frozen, and without a gradient
    store = open_store(tmp_path)
    collect(store, 0)
    assert verify(Repository(store)).findings == []
    assert Repository(store).steps() == [9]
    assert loaded(tmp_path)[1].state() == expected


def test_who_holds_what_is_told_as_a_save_tells_it(tmp_path: Path) -> None:
    saved = trained(tmp_path / "a", full_every=9)
    assert saved
    trained(tmp_path / "b", full_every=100)
    compact(open_store(tmp_path / "b"))
    indexes = [Repository(open_store(tmp_path / name)).read_index(9) for name in "ab"]
    assert graph_of_index(indexes[0]) == graph_of_index(indexes[1])
    first, second = (one.commit.totals for one in indexes)
    assert {k: first[k] for k in ("bytes_held", "bytes_unique")} == {
        k: second[k] for k in ("bytes_held", "bytes_unique")
    }


def test_an_earlier_step_leaves_what_is_behind_it(tmp_path: Path) -> None:
    expected = trained(tmp_path, full_every=100).state()
    done = compact(open_store(tmp_path), Options(step=4))
    assert (done.base, done.step, done.dropped.files) == (0, 4, 0)
    report, back = loaded(tmp_path)
    assert (report.base, report.step, report.exact) == (4, 9, True)
    assert back.state() == expected
    done = compact(open_store(tmp_path))
    assert (done.base, done.step, done.exact, logs(tmp_path)) == (4, 9, True, [])
    assert loaded(tmp_path)[1].state() == expected


def test_a_job_goes_on_from_there(tmp_path: Path) -> None:
    trained(tmp_path)
    compact(open_store(tmp_path))
    going = Trained(7)
    with kept(going, tmp_path, full_every=100) as keeper:
        assert keeper.resumed.step == 9
        going.train(3, 9, keeper.step)
    other = Trained()
    other.train(12, 0)
    done = compact(open_store(tmp_path))
    assert (done.base, done.step, done.exact) == (9, 12, True)
    assert loaded(tmp_path)[1].state() == other.state()


def test_a_job_that_is_alive_loses_nothing(tmp_path: Path) -> None:
    alive = Trained()
    with kept(alive, tmp_path, full_every=100) as keeper:
        alive.train(4, 0, keeper.step)
        keeper.flush()
        done = compact(open_store(tmp_path))
        assert (done.step, done.exact, done.dropped.files, done.dropped.in_use) == (4, True, 0, 1)
        assert "a job appends to them" in done.notes[0]
        alive.train(3, 4, keeper.step)
    report, back = loaded(tmp_path)
    assert (report.base, report.step, report.exact) == (4, 7, True)
    assert back.state() == alive.state()


def test_steps_that_were_skipped(tmp_path: Path) -> None:
    from tests.harness.logged_jobs import LoggedJob

    job = LoggedJob(tmp_path, scale=2.0**16, overflows=frozenset({2, 5})).train(5)
    weights = job.close()
    done = compact(open_store(tmp_path))
    assert (done.step, done.exact) == (5, True)
    again = LoggedJob(tmp_path, scale=1.0, gradients=False)
    assert again.keeper.resumed is not None
    assert again.keeper.resumed.step == 5
    assert again.weights() == weights
    again.close()


def test_nothing_to_do_and_what_is_only_told(tmp_path: Path) -> None:
    trained(tmp_path)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    done = compact(open_store(tmp_path), Options(dry_run=True))
    assert (done.base, done.step, done.steps, done.dropped.files) == (5, 9, 4, 2)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    done = compact(open_store(tmp_path), Options(keep_log=True))
    assert (done.exact, done.dropped.files, len(logs(tmp_path))) == (True, 0, 2)
    done = compact(open_store(tmp_path), Options(keep_log=True))
    assert (done.base, done.step, done.steps) == (9, 9, 0)
    done = compact(open_store(tmp_path))  # as behind a run that was killed before it could drop the log
    assert (done.steps, done.dropped.files, logs(tmp_path)) == (0, 2, [])
    trained(tmp_path / "other", steps=5)
    assert compact(open_store(tmp_path / "other")).dropped.files == 0


def test_damage_is_named_and_what_is_sound_can_be_had(tmp_path: Path) -> None:
    trained(tmp_path, full_every=100)
    (path,) = tmp_path.rglob("*.log")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ReplayError, match=r"record of step 5 is not what was written.*step=4 is as far as"):
        compact(open_store(tmp_path))
    assert Repository(open_store(tmp_path)).steps() == [0]
    with pytest.raises(ReplayError, match="record of step 5"):
        compact(open_store(tmp_path), Options(step=7))
    done = compact(open_store(tmp_path), Options(sound=True))
    assert (done.step, done.exact) == (4, True)
    assert "record of step 5" in done.notes[0]
    job = Trained()
    job.train(4, 0)
    assert loaded(tmp_path, step=4)[1].state() == job.state()


def test_a_damaged_base_is_named_by_whichever_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path)
    (path,) = (tmp_path / "steps/5").rglob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    monkeypatch.setattr(cuts, "MOST_SLICES", 2)
    with pytest.raises(DigestMismatch, match=path.name):
        compact(open_store(tmp_path), Options(workers=2))
    assert Repository(open_store(tmp_path)).steps() == [0, 5]
    assert len(logs(tmp_path)) == 2


def test_another_kernel_is_refused_or_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path)
    (head,) = tmp_path.rglob("head.json")
    said = json.loads(head.read_text())
    said["software"]["device"] = "NVIDIA H200"
    head.write_text(json.dumps(said))
    options = Kernel.options  # a kernel that computes something else
    monkeypatch.setattr(Kernel, "options", lambda *given: {**options(*given), "eps": 0.5})
    with pytest.raises(ReplayError, match=r"off by up to .* first in step 6.*Nothing was committed"):
        compact(open_store(tmp_path))
    assert Repository(open_store(tmp_path)).steps() == [0, 5]
    done = compact(open_store(tmp_path), Options(tolerance=math.inf))
    assert done.exact is False
    assert done.judged.first == 6
    assert done.kernels[0]["why"] == ["it was stepped on NVIDIA H200, here on the CPU"]
    assert "not bit for bit what the job had (it was stepped on NVIDIA H200" in done.notes[0]


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    trained(tmp_path)
    (head,) = tmp_path.rglob("head.json")
    said = json.loads(head.read_text())
    for name, found in (
        ("torch.optim.nadam.NAdam", r"step 6: torch.optim.nadam.NAdam has failed: KeyError"),
        ("mine.Lamb", r"log 1 was made by mine.Lamb, whose steps cannot be repeated"),
    ):
        said["kernels"][0]["class"] = name
        head.write_text(json.dumps(said))
        with pytest.raises(ReplayError, match=found):
            compact(open_store(tmp_path))
    assert Repository(open_store(tmp_path)).steps() == [0, 5]


def test_another_torch_is_named(tmp_path: Path) -> None:
    trained(tmp_path)
    (head,) = tmp_path.rglob("head.json")
    said = json.loads(head.read_text())
    said["software"]["torch"] = "1.0"
    head.write_text(json.dumps(said))
    done = compact(open_store(tmp_path))
    assert done.exact is True  # proved, whatever was to be expected
    assert done.kernels[0]["why"] == [f"torch was 1.0, here it is {torch.__version__}"]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoSuchCheckpoint):
        compact(open_store(tmp_path))
    trained(tmp_path)
    store = open_store(tmp_path)
    for wrong in ({"workers": 0}, {"tolerance": -1.0}, {"keep": 0}):
        with pytest.raises(ConfigError, match="expected"):
            compact(store, Options(**wrong))
    with pytest.raises(BudgetTooSmall, match="memory budget of 1000 bytes"):
        compact(store, Options(memory=1000))
    with pytest.raises(ReplayError, match="step 12 cannot be reached"):
        compact(store, Options(step=12))


def test_an_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    job = Trained()
    with kept(job, store, full_every=100) as keeper:  # type: ignore[arg-type]
        job.train(3, 0, keeper.step)
        keeper.flush()
        done = compact(store)
        assert (done.exact, done.dropped.files, done.dropped.in_use) == (True, 3, 0)
        job.train(2, 3, keeper.step)
    other = Trained(7)
    report = ckpt.load(other.engine, store, extra={"mark": 0})
    assert (report.base, report.step, report.exact) == (3, 5, True)
    assert other.state() == job.state()
