"""The policy object in one process: what it keeps, what ends a log, what it refuses, and what comes back."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckpt
from ckpt.errors import CkptError, ConfigError, ReplayError
from ckpt.format.frames import HEADER
from ckpt.gradlog.costs import Costs
from tests.harness.logged_jobs import LoggedJob

if TYPE_CHECKING:
    from pathlib import Path


class Loop:
    """A small training loop whose batches depend on the step alone."""

    def __init__(self, seed: int = 0, optimizer: Any = torch.optim.AdamW, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
        self.optimizer = optimizer(self.model.parameters(), **{"lr": 1e-2, **options})
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)

    @property
    def engine(self) -> Any:
        return self.model, self.optimizer, self.scheduler

    def train(self, steps: int, start: int, keeper: ckpt.Checkpointer | None = None) -> None:
        for step in range(start, start + steps):
            torch.manual_seed(1000 + step)
            self.optimizer.zero_grad()
            self.model(torch.randn(5, 6)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
            self.optimizer.step()
            self.scheduler.step()
            if keeper is not None:
                keeper.step()

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = {name: value.clone() for name, value in self.model.state_dict().items()}
        for i, one in enumerate(self.optimizer.state.values()):
            found |= {f"{i}.{name}": torch.as_tensor(value).clone() for name, value in one.items()}
        found["lr"] = torch.tensor(self.optimizer.param_groups[0]["lr"], dtype=torch.float64)
        found["epoch"] = torch.tensor(self.scheduler.last_epoch)
        return found


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def kept(root: Path, steps: int, seed: int = 0, **options: Any) -> Loop:
    """Train with a log that is closed in the end; return the loop."""
    loop = Loop(seed)
    with ckpt.Checkpointer(loop.engine, root, **{"full_every": 100, **options}) as keeper:
        loop.train(steps, keeper.number, keeper)
    return loop


def loaded(root: Path, **options: Any) -> tuple[Loop, ckpt.LoadReport]:
    loop = Loop(seed=9)
    return loop, ckpt.load(loop.engine, root, **options)


def segments(root: Path) -> list[Path]:
    return sorted(root.glob("log/*/rank*/*.log"))


def test_every_logged_step_can_be_loaded(tmp_path: Path) -> None:
    kept(tmp_path, 6)
    for step in range(7):
        loop, report = loaded(tmp_path, step=step)
        other = Loop()
        other.train(step, 0)
        assert (report.step, report.replayed) == (step, step)
        assert report.exact is (True if step else None)
        assert equal(loop.state(), other.state()) if step else True
    assert "replayed from the log, bit for bit" in str(report)


def test_a_job_goes_on_in_a_log_of_its_own(tmp_path: Path) -> None:
    kept(tmp_path, 5)
    second = Loop(seed=3)
    with ckpt.Checkpointer(second.engine, tmp_path, full_every=100) as keeper:
        assert keeper.resumed is not None
        assert keeper.resumed.step == keeper.number == 5
        second.train(4, 5, keeper)
    loop, report = loaded(tmp_path)
    whole = Loop()
    whole.train(9, 0)
    assert (report.step, report.base, report.exact) == (9, 0, True)
    assert equal(loop.state(), whole.state())


def test_what_was_given_up_does_not_come_back(tmp_path: Path) -> None:
    kept(tmp_path, 8)
    second = Loop(seed=3)
    with ckpt.Checkpointer(second.engine, tmp_path, full_every=100, load_options={"step": 4}) as keeper:
        second.train(1, 77, keeper)  # another history from step 4 on
    loop, report = loaded(tmp_path)
    assert report.step == 5
    assert equal(loop.state(), second.state())


def test_replay_false_takes_the_checkpoint(tmp_path: Path) -> None:
    kept(tmp_path, 5, full_every=3)
    _, report = loaded(tmp_path, replay=False)
    assert (report.step, report.base, report.replayed) == (3, None, 0)


def test_full_saves_come_as_asked_and_old_ones_go_with_their_logs(tmp_path: Path) -> None:
    loop = Loop()
    with ckpt.Checkpointer(loop.engine, tmp_path, full_every=4, keep=2) as keeper:
        for step in range(17):
            loop.train(1, step, keeper)
            if step % 4 == 3:
                handle = keeper._handle
                assert handle is not None
                handle.durable.wait(30)
    assert ckpt.steps(tmp_path) == [12, 16]
    packs = {int(one.parts[-4]) for one in tmp_path.glob("steps/*/*/packs/*")}
    assert packs <= {0, 12, 16}  # what has not changed since the first full save stays where it is
    assert [int(one.stem) for one in segments(tmp_path)] == [13, 17]
    again, report = loaded(tmp_path)
    assert (report.step, report.base) == (17, 16)
    assert equal(again.state(), loop.state())


def test_without_gradients_old_full_saves_go_too_and_others_stay(tmp_path: Path) -> None:
    loop = Loop()
    ckpt.save(loop.engine, tmp_path, step=1000)
    with ckpt.Checkpointer(loop.engine, tmp_path, full_every=2, keep=2, gradients=False, resume=False) as keeper:
        for step in range(8):
            loop.train(1, step, keeper)
            if keeper._handle is not None:
                keeper._handle.durable.wait(30)
    assert ckpt.steps(tmp_path) == [6, 8, 1000]
    again = Loop(seed=3)
    with ckpt.Checkpointer(again.engine, tmp_path, full_every=100, load_options={"step": 8}) as keeper:
        again.train(2, 8, keeper)  # now with a log, which begins at a full save that had none
    last, report = loaded(tmp_path, step=10)
    assert (report.step, report.base, report.exact) == (10, 8, True)
    assert equal(last.state(), again.state())


def test_full_saves_before_a_log_that_has_ended_are_kept_and_removed_like_others(tmp_path: Path) -> None:
    loop = Loop()
    with ckpt.Checkpointer(loop.engine, tmp_path, full_every=4, keep=2) as keeper:
        for step in range(14):
            if step == 5:
                loop.model[0].weight.data[0, 0] += 1.0
            loop.train(1, step, keeper)
            if keeper._handle is not None:
                keeper._handle.durable.wait(30)
            if step == 6:  # the log ended at step 5, and a full save followed at step 6
                assert 4 in ckpt.steps(tmp_path)
                assert 6 in ckpt.steps(tmp_path)
    assert ckpt.steps(tmp_path) == [10, 14]
    again, report = loaded(tmp_path)
    assert (report.step, report.replayed) == (14, 0)
    assert equal(again.state(), loop.state())


def test_without_gradients_it_saves_only(tmp_path: Path) -> None:
    loop = kept(tmp_path, 9, full_every=4, gradients=False, keep=None)
    assert ckpt.steps(tmp_path) == [0, 4, 8]
    assert not (tmp_path / "log").exists()
    assert loop.scheduler.last_epoch == 9


def test_a_learning_rate_set_by_hand_is_replayed(tmp_path: Path) -> None:
    loop = Loop()
    with ckpt.Checkpointer(loop.engine, tmp_path, full_every=100) as keeper:
        loop.train(2, 0, keeper)
        loop.optimizer.param_groups[0]["lr"] = 0.3
        loop.train(2, 2, keeper)
    again, report = loaded(tmp_path)
    assert report.exact
    assert equal(again.state(), loop.state())


def test_steps_that_a_gradient_scaler_skips_are_counted_and_replayed_as_skipped(tmp_path: Path) -> None:
    def run(loop: Loop, scaler: Any, steps: range, keeper: ckpt.Checkpointer | None = None) -> None:
        for step in steps:
            torch.manual_seed(step)
            loop.optimizer.zero_grad()
            loss = loop.model(torch.randn(5, 6)).square().mean() * (float("inf") if step in (1, 4) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(loop.optimizer)
            scaler.update()
            if keeper is not None:
                keeper.step()

    def scaler() -> Any:
        return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    first, one = Loop(), scaler()
    with ckpt.Checkpointer((first.model, first.optimizer, one), tmp_path, full_every=100) as keeper:
        run(first, one, range(6), keeper)
    again, two = Loop(seed=9), scaler()
    report = ckpt.load((again.model, again.optimizer, two), tmp_path)
    assert (report.step, report.exact) == (6, True)
    assert two.state_dict() == one.state_dict()
    assert equal(again.state(), first.state())
    run(first, one, range(6, 9))
    run(again, two, range(6, 9))
    assert equal(again.state(), first.state())


@pytest.mark.parametrize("how", ["parameter", "optimizer", "missed", "loaded"])
def test_what_the_log_cannot_explain_ends_it_and_is_followed_by_a_full_save(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop()
    words = {
        "parameter": "was changed by other means than a step",
        "optimizer": "was changed by other means than a step",
        "missed": "2 steps between two calls",
        "loaded": "was changed by other means than a step",
    }[how]
    with ckpt.Checkpointer(loop.engine, tmp_path, full_every=100) as keeper, caplog.at_level(logging.WARNING):
        loop.train(3, 0, keeper)
        if how == "parameter":
            loop.model[0].weight.data[0, 0] += 1.0
        elif how == "optimizer":
            loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
        elif how == "missed":
            loop.train(1, 50)
        else:
            ckpt.save(loop.engine, tmp_path / "other", step=1)
            loop.model[0].weight.data.zero_()
            ckpt.load(loop.engine, tmp_path / "other")
            loop.model[0].weight.data.mul_(2.0)
        loop.train(1, 3, keeper)
        assert words in caplog.text
        assert ckpt.steps(tmp_path)[:1] == [0]
        if how == "optimizer":  # what the engine was made of is not what is trained any more
            return
        assert keeper.last_full == 4
        loop.train(2, 4, keeper)
    again, report = loaded(tmp_path)
    assert (report.step, report.base) == (6, 4)
    assert equal(again.state(), loop.state())


def test_a_kill_before_that_full_save_brings_back_the_last_explained_step(tmp_path: Path) -> None:
    loop = Loop()
    keeper = ckpt.Checkpointer(loop.engine, tmp_path, full_every=100)
    loop.train(3, 0, keeper)
    keeper.flush()
    before = loop.state()
    loop.model[0].weight.data[0, 0] += 1.0
    log = keeper._log
    assert log is not None
    loop.train(1, 3)
    log.end_step(4, {})
    assert log.broken is not None
    again, report = loaded(tmp_path)
    assert report.step == 3
    assert equal(again.state(), before)
    keeper.close()


class Spread(torch.optim.AdamW):
    """Somebody's own."""


@pytest.mark.parametrize(
    ("optimizer", "options", "words"),
    [(Spread, {}, "not known to work by element"), (torch.optim.Adafactor, {}, "sums over rows and columns")],
)
def test_optimizers_that_cannot_be_replayed_are_refused_at_the_start(optimizer, options, words, tmp_path) -> None:
    loop = Loop(optimizer=optimizer, **options)
    with pytest.raises(ConfigError, match=words):
        ckpt.Checkpointer(loop.engine, tmp_path)
    if optimizer is Spread:  # Adafactor's own state has another shape than its parameters: it cannot be saved yet
        with ckpt.Checkpointer(loop.engine, tmp_path, gradients=False, full_every=2) as keeper:
            loop.train(2, 0, keeper)
        assert ckpt.steps(tmp_path)[-1] == 2


def test_another_optimizer_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    kept(tmp_path, 3)
    loop = Loop(seed=4, optimizer=torch.optim.Adam)
    before = {name: value.clone() for name, value in loop.model.state_dict().items()}
    with pytest.raises(ReplayError, match=r"made by torch\.optim\.adamw\.AdamW, the engine's optimizer is .*Adam;"):
        ckpt.load(loop.engine, tmp_path)
    assert all(torch.equal(before[name], value) for name, value in loop.model.state_dict().items())
    loop.model(torch.randn(2, 6))
    ckpt.load(loop.engine, tmp_path, replay=False)


class Replacing(torch.nn.Module):
    """A module that puts new buffers in the place of the old ones, and makes one when it first needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.seen = self.seen + len(x)
        return y


def test_buffers_that_are_replaced_are_logged(tmp_path: Path) -> None:
    def made(seed: int) -> Loop:
        loop = Loop(seed)
        torch.manual_seed(seed)
        loop.model = torch.nn.Sequential(Replacing())
        loop.model(torch.zeros(1, 6))  # `seen` is there when the log begins, and when it is loaded
        loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-2)
        loop.scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 3, 0.5)
        return loop

    loop = made(0)
    with ckpt.Checkpointer(loop.engine, tmp_path, full_every=100) as keeper:
        loop.train(4, 0, keeper)
    again = made(9)
    report = ckpt.load(again.engine, tmp_path)
    assert (report.step, report.exact) == (4, True)
    assert int(again.model[0].seen) == 21
    assert equal(again.state(), loop.state())


def test_a_gradient_that_is_computed_inside_of_the_step_ends_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop()

    def closure() -> Any:
        loop.optimizer.zero_grad()
        loss = loop.model(torch.ones(5, 6)).square().mean()
        loss.backward()
        return loss

    with ckpt.Checkpointer(loop.engine, tmp_path, full_every=100) as keeper:
        loop.train(2, 0, keeper)
        loop.optimizer.step(closure)
        keeper.step()
        assert "step(closure) computes the gradient inside" in caplog.text
        assert keeper.last_full == 3
    again, report = loaded(tmp_path)
    assert report.step == 3
    assert again.model[0].weight.equal(loop.model[0].weight)


def test_a_fused_optimizer_that_unscales_by_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run(unscale: bool, root: Path) -> tuple[Loop, Any]:
        loop = Loop(fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        with ckpt.Checkpointer((loop.model, loop.optimizer, scaler), root, full_every=100) as keeper:
            for step in range(5):
                torch.manual_seed(step)
                loop.optimizer.zero_grad()
                loss = loop.model(torch.randn(5, 6)).square().mean() * (float("inf") if step == 2 else 1.0)
                scaler.scale(loss).backward()
                if unscale:
                    scaler.unscale_(loop.optimizer)
                scaler.step(loop.optimizer)
                scaler.update()
                keeper.step()
        return loop, scaler

    for unscale in (True, False):
        root = tmp_path / str(unscale)
        loop, scaler = run(unscale, root)
        again, other = Loop(seed=9, fused=True), torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        report = ckpt.load((again.model, again.optimizer, other), root)
        # Without unscale_ the log ends at once, a full save follows, and the next one would not be told anything else.
        assert (report.step, report.exact) == ((5, True) if unscale else (1, None))
        assert not unscale or equal(again.state(), loop.state())
        assert not unscale or other.state_dict() == scaler.state_dict()
        assert ("call scaler.unscale_(optimizer) before" in caplog.text) is not unscale


def test_what_was_stepped_and_is_frozen_now_is_an_error_before_anything_is_touched(tmp_path: Path) -> None:
    loop = kept(tmp_path, 3)
    again = Loop(seed=9)
    again.model[2].bias.requires_grad_(False)
    before = again.model[0].weight.clone()
    with pytest.raises(ReplayError, match=r"log 1 has steps of 2\.bias, which no optimizer of this engine steps"):
        ckpt.load(again.engine, tmp_path, strict=False)
    assert torch.equal(again.model[0].weight, before)
    assert ckpt.load(Loop().engine, tmp_path).step == 3
    assert loop.scheduler.last_epoch == 3


def test_weights_that_are_changed_behind_their_step_show_in_the_replay(tmp_path: Path) -> None:
    loop = Loop()
    with ckpt.Checkpointer(loop.engine, tmp_path, full_every=100) as keeper:
        loop.train(2, 0, keeper)
        before = loop.state()
        loop.train(1, 2)
        loop.model[0].weight.data.clamp_(-0.05, 0.05)  # between the step and the call: as if it were the step's
        keeper.step()
        loop.train(1, 3, keeper)
    with pytest.raises(ReplayError, match=r"step 3, repeated, is not what it was: .* step=2 is as far"):
        loaded(tmp_path)
    again, report = loaded(tmp_path, step=2)
    assert report.exact
    assert equal(again.state(), before)
    _, report = loaded(tmp_path, strict=False)
    assert (report.step, report.exact) == (4, False)
    assert any("with a deviation" in note for note in report.notes)


def test_records_of_another_run_do_not_pass(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("other", 4)):
        kept(tmp_path / name, 5, seed)
    (mine,), (theirs,) = segments(tmp_path / "one"), segments(tmp_path / "other")
    mine.write_bytes(theirs.read_bytes())
    with pytest.raises(ReplayError, match=r"the record of step 1: of run [0-9a-f]{32}, expected [0-9a-f]{32}"):
        loaded(tmp_path / "one")


def test_a_lost_end_between_two_logs_is_named(tmp_path: Path) -> None:
    kept(tmp_path, 5)
    second = Loop(seed=3)
    with ckpt.Checkpointer(second.engine, tmp_path, full_every=100) as keeper:
        second.train(3, 5, keeper)
    cut(segments(tmp_path)[0], 1000)
    with pytest.raises(ReplayError, match="log 1 ends behind step 4, and what follows it begins at 5"):
        loaded(tmp_path)
    _, report = loaded(tmp_path, fallback=True)
    assert (report.step, report.exact) == (4, True)


def test_a_loop_that_ends_every_log_does_not_save_in_full_at_every_step(tmp_path: Path) -> None:
    loop = Loop()
    with ckpt.Checkpointer(loop.engine, tmp_path, full_every=1000, keep=None) as keeper:
        for step in range(60):
            loop.train(1, 2 * step)
            loop.train(1, 2 * step + 1, keeper)  # two steps a call
    assert 3 <= len(ckpt.steps(tmp_path)) <= 6


def cut(path: Path, nbytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-nbytes])


def flip(path: Path, record: int) -> None:
    """Change a byte in a record in the middle of a file."""
    data = bytearray(path.read_bytes())
    at = 0
    for _ in range(record):
        nbytes = int.from_bytes(data[at + 16 : at + 24], "little")
        at += HEADER + nbytes + -nbytes % 8
    data[at + HEADER + 3000] ^= 1
    path.write_bytes(bytes(data))


def test_a_torn_tail_is_a_shorter_log(tmp_path: Path) -> None:
    kept(tmp_path, 5)
    cut(segments(tmp_path)[0], 1000)
    loop, report = loaded(tmp_path)
    other = Loop()
    other.train(4, 0)
    assert report.step == 4
    assert equal(loop.state(), other.state())


def test_a_corrupt_record_in_the_middle_is_named_and_the_sound_prefix_offered(tmp_path: Path) -> None:
    kept(tmp_path, 6)
    flip(segments(tmp_path)[0], 3)
    with pytest.raises(ReplayError, match=r"record of step 4 is not what was written.*step=3 is as far") as caught:
        loaded(tmp_path)
    assert segments(tmp_path)[0].name in str(caught.value)
    other = Loop()
    other.train(3, 0)
    for options in ({"step": 3}, {"fallback": True}):
        loop, report = loaded(tmp_path, **options)
        assert (report.step, report.exact) == (3, True)
        assert equal(loop.state(), other.state())
    assert any("step 4" in note for note in report.notes)


def test_a_gap_is_named(tmp_path: Path) -> None:
    kept(tmp_path, 9, full_every=3, keep=None)
    assert len(segments(tmp_path)) > 2
    for step in (3, 6, 9):  # as if these full saves had never been
        if (tmp_path / f"steps/{step}/commit.json").exists():
            (tmp_path / f"steps/{step}/commit.json").unlink()
    segments(tmp_path)[1].unlink()
    with pytest.raises(ReplayError, match=r"behind step 3 comes step 7: a gap.*step=3 is as far"):
        loaded(tmp_path)


def test_a_log_of_another_checkpoint_is_not_replayed(tmp_path: Path) -> None:
    kept(tmp_path, 3)
    loop = Loop(seed=5)
    ckpt.save(loop.engine, tmp_path, step=0, overwrite=True)  # another state under the number of the log's base
    again, report = loaded(tmp_path)
    assert (report.step, report.replayed) == (0, 0)
    assert equal(
        {k: v for k, v in again.state().items() if not k[0].isdigit() or "." not in k},
        {k: v for k, v in loop.state().items() if not k[0].isdigit() or "." not in k},
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"full_every": 0}, "full_every=0"),
        ({"full_every": "often"}, "full_every='often'"),
        ({"keep": 0}, "keep=0"),
        ({"flush_every": 1.5}, "flush_every=1.5"),
        ({"log_codec": "gzip"}, "log_codec='gzip'|codec='gzip'"),
        ({"log_budget": -1}, "log_budget=-1"),
        ({"mtbf": -1.0}, "mtbf"),
        ({"mtbf": float("nan")}, "mtbf"),
        ({"on_divergence": "hm"}, "on_divergence"),
        ({"budget": 3}, "budget"),
    ],
)
def test_wrong_arguments_are_told_at_once(options, words, tmp_path) -> None:
    with pytest.raises(CkptError, match=words):
        ckpt.Checkpointer(Loop().engine, tmp_path, **options)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{"flush_every": 4}, {"log_codec": "zstd"}, {"log_budget": 1}])
def test_ways_of_writing_make_no_difference(options, tmp_path: Path) -> None:
    first = kept(tmp_path, 7, **options)
    again, report = loaded(tmp_path)
    assert (report.step, report.exact) == (7, True)
    assert equal(again.state(), first.state())


def test_a_full_disk_ends_the_log_and_not_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from ckpt.errors import StoreFull
    from ckpt.store.local_appender import LocalAppender

    loop, append = Loop(), LocalAppender.append
    with ckpt.Checkpointer(loop.engine, tmp_path, full_every=100) as keeper:
        loop.train(2, 0, keeper)
        keeper.flush()

        def full(self: LocalAppender, data: Any) -> None:
            raise StoreFull("no space left", self.key)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalAppender, "append", full)
            loop.train(1, 2, keeper)
            with pytest.raises(ReplayError, match="no space left"):
                keeper.flush()
        assert LocalAppender.append is append
        loop.train(3, 3, keeper)
    again, report = loaded(tmp_path)
    assert report.step == 6
    assert equal(again.state(), loop.state())
    assert "ends behind step" in caplog.text


@pytest.mark.parametrize(
    ("step", "cost", "mtbf", "every"),
    [(0.5, 2.0, 86_400.0, 1662), (0.5, 8.0, 86_400.0, 3325), (1.0, 2.0, 86_400.0, 831), (0.5, 2.0, 3_600.0, 339)],
)
def test_full_saves_are_as_far_apart_as_loses_the_least_time(
    step: float, cost: float, mtbf: float, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F = sqrt(2 C / (rate x T x r)), with a replayed step r of half a step."""
    now = 0.0
    monkeypatch.setattr("ckpt.gradlog.costs.time.monotonic", lambda: now)
    costs = Costs()
    for _ in range(40):
        costs.step(saving=False)
        now += step
    assert costs.best(mtbf, 77) > 0
    for _ in range(4):  # beside a full save steps take longer
        now += cost / 4
        costs.step(saving=True)
        now += step
    assert costs.best(mtbf, 77) == every
    assert Costs().best(mtbf, 77) == 77  # nothing is measured yet


def test_an_interval_that_is_chosen(tmp_path: Path) -> None:
    loop = Loop()
    with ckpt.Checkpointer(loop.engine, tmp_path, mtbf=1e-3, keep=None) as keeper:
        assert keeper.full_every == 100
        loop.train(120, 0, keeper)
        assert keeper.full_every == 10
        loop.train(12, 120, keeper)
    assert ckpt.steps(tmp_path)[:3] == [0, 100, 110]
    again, report = loaded(tmp_path)
    assert report.step == 132
    assert equal(again.state(), loop.state())


def test_a_checkpoint_of_a_past_that_was_given_up_is_not_the_newest(tmp_path: Path) -> None:
    LoggedJob(tmp_path, full_every=10).train(25).close()
    weights = LoggedJob(tmp_path, full_every=10, load_options={"step": 13}).train(2).close()
    assert ckpt.steps(tmp_path) == [0, 10, 20]
    job = LoggedJob(tmp_path, full_every=10)
    report = job.keeper.resumed
    assert report is not None
    assert (report.step, report.base, job.weights()) == (15, 10, weights)
    assert any("step 20 is of a past that was given up" in note for note in report.notes)
    weights = job.train(10).close()  # and takes the given-up checkpoint's place
    report = (job := LoggedJob(tmp_path, full_every=10)).keeper.resumed
    assert report is not None
    assert (report.step, report.notes, job.weights()) == (25, (), weights)
    job.close()


def test_what_loads_advise_says_where_a_checkpointer_takes_it(tmp_path: Path) -> None:
    LoggedJob(tmp_path, full_every=10).train(5).close()
    with pytest.raises(CkptError, match="step 9") as caught:  # and never a beginning from nothing
        LoggedJob(tmp_path, load_options={"step": 9})
    assert "load_options" in "".join(caught.value.__notes__)
