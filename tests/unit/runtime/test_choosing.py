from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner

import ckpt
from ckpt.cli.main import cli
from ckpt.errors import ConfigError
from ckpt.repo.repository import Repository
from ckpt.repo.verify import verify
from ckpt.runtime import choosing
from ckpt.runtime.choosing import NONE, ZSTD, Choice, Sample, check_asked, choose, decide, measure, observe, rate_of
from ckpt.store.limited import Limited
from ckpt.store.local import LocalStore
from ckpt.store.memory import MemoryStore
from tests.property.fake import engines, load_all, save_all, small_model, zero1

if TYPE_CHECKING:
    from ckpt.format.manifest import CommitBody

MB = 1e6
SAMPLE = Sample(raw=1_000_000, stored=800_000, seconds=0.001)  # ratio 1.25; 1000 MB/s, half of it with half a core


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(choosing, "_rates", {})
    monkeypatch.setattr(choosing, "_chosen", {})
    choosing._encoders.clear()


def one(store: float | None, sample: Sample | None = SAMPLE, on: bool = False, **options) -> Choice:
    before = {"param": Choice(ZSTD if on else NONE, "")}
    return choose({"param": sample}, None if store is None else store * MB, before=before, **options)["param"]


def test_a_slow_store_gets_the_codec_and_the_reason_has_the_numbers():
    assert one(95) == Choice(ZSTD, "store 95 MB/s is slower than the codec 500 MB/s, ratio 1.25")


def test_a_fast_disk_does_not():
    assert one(1200) == Choice(NONE, "codec 500 MB/s is too slow for the store 1,200 MB/s")
    assert one(500).codec == NONE


def test_bytes_that_do_not_get_smaller_stay_raw():
    assert one(95, Sample(10_000, 9_900, 1e-6)) == Choice(NONE, "ratio 1.01 is too low")
    assert one(95, Sample(10_000, 10_000, 1e-6), on=True).codec == NONE


def test_what_is_not_known_is_not_guessed():
    assert one(None) == Choice(NONE, "the store's speed is not known yet")
    assert one(95, None).codec == NONE
    assert one(95, Sample(0, 0, 0.0)) == one(95, Sample(4, 1, 0.0)) == Choice(NONE, "too few bytes to measure")


@pytest.mark.parametrize("store", [455, 470, 480])
def test_near_the_limit_the_last_choice_stands(store):
    """Half a GB/s of codec against these: a gain of 9 to 4 %, too little to begin, enough to go on."""
    assert one(store, on=False).codec == NONE
    assert one(store, on=True).codec == ZSTD


@pytest.mark.parametrize(("store", "codec"), [(440, ZSTD), (490, NONE)])
def test_far_from_it_the_last_choice_does_not_matter(store, codec):
    assert one(store, on=False).codec == one(store, on=True).codec == codec


def test_how_fast_the_encoder_really_was_counts_more_than_a_sample():
    assert one(200).codec == ZSTD
    assert one(200, encoder_rate=2000 * MB).codec == ZSTD
    assert one(200, encoder_rate=190 * MB) == Choice(NONE, "codec 190 MB/s is too slow for the store 200 MB/s")


def test_roles_are_judged_one_by_one_and_the_same_numbers_give_the_same_choice():
    samples = {"param": SAMPLE, "exp_avg": Sample(10_000, 9_990, 1e-6)}
    assert {r: c.codec for r, c in choose(samples, 95 * MB).items()} == {"param": ZSTD, "exp_avg": NONE}
    assert choose(samples, 95 * MB) == choose(samples, 95 * MB)


def test_a_wish_is_a_wish():
    samples = {"param": SAMPLE, "master": None, "exp_avg": SAMPLE}
    assert choose(samples, None, "zstd") == dict.fromkeys(samples, Choice(ZSTD, "asked for"))
    assert choose(samples, 1 * MB, "none") == dict.fromkeys(samples, Choice(NONE, "asked for"))
    mixed = choose(samples, 95 * MB, {"master": "zstd", "exp_avg": "none"})
    assert {r: c.codec for r, c in mixed.items()} == {"param": ZSTD, "master": ZSTD, "exp_avg": NONE}


@pytest.mark.parametrize("asked", ["auto", "none", "zstd", {}, {"param": "zstd", "master": "auto"}])
def test_what_may_be_asked_for(asked):
    assert check_asked(asked) == asked
    assert check_asked(asked, ["master", "param"]) == asked


@pytest.mark.parametrize("asked", ["", "lz4", None, True, 3, ["zstd"], {"param": "zstd9"}, {"param": None}, b"zstd"])
def test_what_may_not(asked):
    with pytest.raises(ConfigError, match="expected one of auto, none, zstd, or a mapping of roles to these"):
        check_asked(asked)


def test_a_role_that_nobody_has_is_a_typing_error():
    with pytest.raises(ConfigError, match="no role 'masters'; the roles are master, param"):
        check_asked({"masters": "zstd"}, ["param", "master"])
    with pytest.raises(ConfigError, match="no role 3"):
        check_asked({3: "zstd"})


# --------------------------------------------------------------------------------------------------------- measuring


def test_a_sample_tells_sizes_as_they_would_be_stored():
    numbers = (np.random.default_rng(0).standard_normal(1 << 16) * 0.02).astype(np.float32).tobytes()
    found = measure([(numbers, 4), (os.urandom(1000), 1)])
    assert found.raw == len(numbers) + 1000
    assert 1.05 < found.ratio < 1.5
    assert found.seconds > 0
    assert measure([(os.urandom(1000), 1)]).ratio == 1.0, "what does not get smaller is stored raw"
    assert measure([]).raw == 0


# ---------------------------------------------------------------------------------------------------- store by store


def test_a_store_is_known_by_its_last_files():
    for rate in (10, 90, 100, 110, 1000):
        observe("s3://a", int(rate * MB), 1.0)
    assert rate_of("s3://a") == 100 * MB, "one file that met a hiccup, or a cache, does not count"
    assert rate_of("s3://b") is None
    for _ in range(8):
        observe("s3://a", int(300 * MB), 1.0)
    assert rate_of("s3://a") == 300 * MB


@pytest.mark.parametrize(("nbytes", "seconds"), [(1000, 0.1), (2_000_000, 0.02), (10**9, 0.0), (0, 1.0)])
def test_a_little_written_in_no_time_tells_nothing(nbytes, seconds):
    """Two megabytes in 20 ms are a disk that syncs, not one of 100 MB/s."""
    observe("s3://a", nbytes, seconds)
    assert rate_of("s3://a") is None


def test_a_little_that_takes_long_does():
    observe("s3://a", 2_000_000, 2.0)
    assert rate_of("s3://a") == 1 * MB


def test_a_save_that_waited_for_the_encoder_is_no_measurement_of_the_store():
    observe("s3://a", int(95 * MB), 1.0)
    observe("s3://a", int(20 * MB), 1.0, encoding=0.5)
    observe("s3://a", int(110 * MB), 1.0, encoding=0.95)
    assert rate_of("s3://a") == 95 * MB
    observe("s3://a", int(80 * MB), 1.0, encoding=0.3)
    assert rate_of("s3://a") == 87.5 * MB


def test_a_store_that_has_become_fast_is_measured_anew():
    """With the codec on, all that shows is that the store keeps up with the encoder, however fast it is."""
    observe("s3://a", int(95 * MB), 1.0)
    observe("s3://a", int(330 * MB), 1.0, encoding=0.95)
    assert rate_of("s3://a") is None


def test_the_first_save_is_raw_and_the_next_ones_know():
    asked: list[str] = []

    def pieces(role: str):
        return lambda: [asked.append(role) or (np.zeros(1 << 16, np.float32).tobytes(), 4)]

    roles = {role: pieces(role) for role in ("param", "master")}
    assert {r: c.codec for r, c in decide("s3://a", roles).items()} == {"param": NONE, "master": NONE}
    assert asked == [], "nothing is encoded that cannot matter"
    observe("s3://a", int(50 * MB), 1.0)
    assert {r: c.codec for r, c in decide("s3://a", roles).items()} == {"param": ZSTD, "master": ZSTD}
    assert asked == ["param", "master"]
    assert decide("s3://b", roles)["param"].codec == NONE, "another store is another store"
    observe("s3://b", int(1e6 * MB), 1.0)
    assert decide("s3://b", roles, {"param": "none", "master": "zstd"})["master"] == Choice(ZSTD, "asked for")
    assert asked == ["param", "master"]


def test_the_choice_does_not_flip_while_the_speed_wavers():
    sample, on = {"param": SAMPLE}, None
    seen = []
    for rate in (445, 470, 460, 480, 450, 475):
        on = choose(sample, rate * MB, before=on)
        seen.append(on["param"].codec)
    assert seen == [ZSTD] * 6


def test_an_encoder_that_proved_slow_is_switched_off_and_stays_off():
    """Cores that are shared slow both, the store by the clock and the encoder; a sample of CPU time shows only one."""
    roles = {"param": lambda: [(bytes(1 << 18), 4)]}
    observe("file:///a", int(100 * MB), 1.0)
    assert decide("file:///a", roles)["param"].codec == ZSTD
    for _ in range(3):
        observe("file:///a", int(60 * MB), 1.6, encoding=1.0, encoded=int(80 * MB))
    assert [decide("file:///a", roles)["param"].codec for _ in range(3)] == [NONE] * 3
    observe("file:///a", int(100 * MB), 1.0)
    assert decide("file:///a", roles)["param"].codec == NONE


def test_the_encoder_is_tried_once():
    roles = {"param": lambda: [(bytes(1 << 18), 4)], "master": lambda: []}
    decide("file:///a", roles)
    assert not choosing._encoders
    observe("file:///a", int(100 * MB), 1.0)
    decide("file:///a", roles)
    tried = list(choosing._encoders)
    decide("file:///a", roles)
    assert len(tried) == 1
    assert list(choosing._encoders) == tried


# ----------------------------------------------------------------------------------------------------- in real saves


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))
    return model, torch.optim.AdamW(model.parameters())


def advance(engine: tuple[torch.nn.Module, torch.optim.Optimizer]) -> None:
    model, optimizer = engine
    model(torch.randn(8, 300)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved(engine, store, step: int, **options) -> CommitBody:
    advance(engine)
    ckpt.save(engine, store, step=step, **options)
    return Repository(store).read_commit(step)


def test_a_slow_store_is_found_out_by_the_first_save_and_helped_from_the_second_on(tmp_path):
    engine, local = trained(), LocalStore(str(tmp_path))
    slow = Limited(local, 3 * MB)
    first = saved(engine, slow, 1)
    assert {one.codec for one in first.codecs.values()} == {"none"}
    assert first.codecs["param"].why == "the store's speed is not known yet"
    assert first.features == ()
    second = saved(engine, slow, 2)
    assert second.features == ("codec",)
    for role in ("param", "exp_avg", "exp_avg_sq"):
        assert second.codecs[role].codec == "shuffle4+zstd"
        assert second.codecs[role].ratio > 1.1
        assert "is slower than the codec" in second.codecs[role].why
    assert second.codecs["step"].codec == "none"

    assert verify(Repository(local)).findings == []
    again = trained()
    ckpt.load(again, local)
    assert all(torch.equal(a, b) for a, b in zip(engine[0].parameters(), again[0].parameters(), strict=True))

    shown = CliRunner().invoke(cli, ["show", str(tmp_path), "--json"])
    of_role = json.loads(shown.stdout)["codecs"]["param"]
    assert of_role == msgspec.to_builtins(second.codecs["param"])
    assert "shuffle4+zstd" in CliRunner().invoke(cli, ["show", str(tmp_path)]).stdout


def test_a_fast_store_stays_raw():
    engine, store = trained(), MemoryStore()
    for _ in range(8):
        observe(store.url, int(100_000 * MB), 1.0)
    for step in (1, 2, 3):
        commit = saved(engine, store, step)
        assert {one.codec for one in commit.codecs.values()} == {"none"}
        assert "is too slow for the store" in commit.codecs["param"].why
        assert commit.features == ()


def test_what_is_asked_for_is_done_role_by_role_and_chunks_are_shared_whatever_their_codec():
    engine, store = trained(), MemoryStore()
    mixed = saved(engine, store, 1, codec={"exp_avg": "zstd", "param": "none"})
    assert {r: one.codec for r, one in mixed.codecs.items() if r != "step"} == {
        "param": "none", "exp_avg": "shuffle4+zstd", "exp_avg_sq": "none",
    }  # fmt: skip
    ckpt.save(engine, store, step=2, codec="none")  # nothing has changed
    again = Repository(store).read_commit(2)
    assert again.totals["bytes_written"] == 0
    assert again.features == ("codec",), "the encoded chunks of the step before are this step's too"
    assert verify(Repository(store)).findings == []
    with pytest.raises(ckpt.CkptError, match="no role 'weights'"):
        ckpt.save(engine, store, step=3, codec={"weights": "zstd"})
    with pytest.raises(ckpt.CkptError, match="expected one of auto, none, zstd"):
        ckpt.save(engine, store, step=3, codec="gzip")


@pytest.mark.parametrize("world", [1, 2, 3])
def test_encoded_chunks_load_into_any_number_of_ranks(world):
    store, model = MemoryStore(), small_model(1)
    save_all(engines(model, zero1(model, 2), 2, filled=True), store, codec="zstd")
    assert verify(Repository(store)).findings == []
    made = engines(model, zero1(model, world), world, filled=False)
    load_all(made, store)
    assert [line for engine in made for line in engine.differences()] == []
