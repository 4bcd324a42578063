"""Duplicates among tensors of unknown layout, found by their bytes alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from ckpt.analysis.content import ContentReport, Group
from ckpt.analyzing import analyze
from ckpt.errors import ConfigError
from ckpt.runtime.contents import content_of, flatten
from ckpt.runtime.torch_comm import communicator
from tests.property.fake import comms, each, run_ranks


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def content(states: list[dict[str, Any]], elements: int = 8) -> ContentReport:
    jobs = comms(len(states))

    def work(rank: int) -> ContentReport:
        with jobs[rank].joint("analyze"):
            return content_of(jobs[rank], states[rank], elements)

    found = each(run_ranks(jobs, work))
    assert len({report.to_json() for report in found}) == 1, "the same on every rank"
    sizes = dict(found[0].sizes)
    assert sizes.pop("held") == sum(sizes.values())
    return found[0]


def places(group: Group) -> list[tuple[str, tuple[int, ...], int, int]]:
    return [(p.name, p.ranks, p.start, p.stop) for p in group.places]


def test_whole_copies_are_found_whatever_their_names():
    report = content(
        [
            {"a": values(4, 5), "b": values(4, 5).clone()},
            {"model": {"weight": values(4, 5)}, "other": values(4, 5, seed=1)},
        ]
    )
    (group,) = report.duplicates
    assert group.whole
    assert places(group) == [("a", (0,), 0, 20), ("b", (0,), 0, 20), ("model.weight", (1,), 0, 20)]
    assert (group.nbytes, group.copies) == (80, 3)
    assert dict(report.sizes) == {
        "held": 320, "unique": 160, "derivable": 0, "within": 80, "across": 80, "constant": 0,
    }  # fmt: skip


def test_equal_values_of_another_sign_of_zero_or_shape():
    """Bits count, and shape does not: a flat copy is a copy if it is cut alike."""
    a = torch.tensor([0.0, 1.0])
    assert content([{"a": a, "b": torch.tensor([-0.0, 1.0])}]).duplicates == ()
    (group,) = content([{"a": a.reshape(1, 2), "b": a.clone()}]).duplicates
    assert group.whole


def test_constants_are_counted_apart_and_never_copies():
    report = content([{"m": torch.zeros(10), "v": torch.zeros(10), "one": torch.tensor(3)}, {"m": torch.zeros(10)}])
    assert report.duplicates == ()
    assert report.sizes["constant"] == report.sizes["held"] == 128


def test_a_constant_part_does_not_make_a_copy_of_the_rest():
    a, b = values(16), values(16, seed=1)
    a[:8] = b[:8] = 0.0
    report = content([{"a": a, "b": b}])
    assert report.duplicates == ()
    assert (report.sizes["constant"], report.sizes["unique"]) == (64, 64)


def test_one_memory_under_two_names_is_held_once():
    a = values(6, 4)
    report = content([{"embed": a, "head": a, "view": a[2:4], "copy": a.clone()}])
    assert report.same_memory == ((0, "head", "embed"), (0, "view", "embed"))
    assert report.sizes["held"] == 2 * 96
    (group,) = report.duplicates
    assert places(group) == [("embed", (0,), 0, 24), ("copy", (0,), 0, 24)]


def test_a_slice_of_rows_is_found_where_cuts_align():
    """Rows of at least a chunk are cut each for itself, so any slice of them aligns."""
    full = values(6, 8)
    report = content([{"full": full}, {"shard": full[2:5].clone()}, {"shard": full[2:5].clone()}])
    runs = [g for g in report.duplicates if not g.whole]
    (run,) = runs
    assert places(run) == [("full", (0,), 16, 40), ("shard", (1, 2), 0, 24)]
    assert run.nbytes == 96
    assert report.sizes["across"] == 192
    # Short rows share a chunk: a slice that begins inside one is missed, which is the stated limit.
    short = values(6, 4)
    assert content([{"full": short}, {"shard": short[2:4].clone()}]).duplicates
    assert not content([{"full": short}, {"shard": short[1:3].clone()}]).duplicates


def test_repeated_rows_inside_one_tensor():
    row = values(1, 8)
    report = content([{"a": row.repeat(3, 1)}])
    (group,) = report.duplicates
    assert places(group) == [("a", (0,), 0, 8), ("a", (0,), 8, 16), ("a", (0,), 16, 24)]
    assert dict(report.sizes)["within"] == 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_copies_of_a_master_are_derivations(dtype):
    master = values(5, 8)
    report = content([{"p": master.to(dtype), "fp32": master}, {"p": master.to(dtype)}])
    (one,) = report.derivations
    assert places(one) == [("p", (0, 1), 0, 40)]
    assert [(p.name, p.ranks) for p in one.source] == [("fp32", (0,))]
    assert (report.sizes["derivable"], report.sizes["unique"], report.sizes["across"]) == (80, 160, 80)
    wrong = master.to(dtype)
    wrong[0, 0] += 1
    report = content([{"p": wrong, "fp32": master}])
    assert report.derivations == ()
    assert report.sizes["derivable"] == 64, "the chunks that are casts still are"


def test_the_master_may_be_on_another_rank():
    master = values(5, 8)
    report = content([{"p": master.bfloat16()}, {"fp32": master}])
    (one,) = report.derivations
    assert one.source[0].ranks == (1,)


def test_only_what_is_equal_in_every_probe_counts():
    a, b, c = values(16), values(16), values(16)
    first = content([{"a": a, "b": b, "c": c}])
    assert places(first.duplicates[0])[2][0] == "c"
    c2 = values(16, seed=3)
    second = content([{"a": a, "b": b, "c": c2}])
    for both in (first & second, second & first):
        (group,) = both.duplicates
        assert [p.name for p in group.places] == ["a", "b"]
        assert both.probes == 2
    three = ContentReport.combine([first, second, content([{"a": a, "b": c2, "c": a.clone()}])])
    assert three.duplicates == (), "no two were equal each time"


def test_zeros_that_part_later_are_no_copies_and_those_that_stay_together_are():
    zeros = {"m": torch.zeros(8), "v": torch.zeros(8), "w": torch.zeros(8)}
    before = content([zeros])
    after = content([{"m": values(8), "v": values(8), "w": values(8, seed=1)}])
    (group,) = (before & after).duplicates
    assert [p.name for p in group.places] == ["m", "v"]


def test_probes_of_other_tensors_are_not_combined():
    with pytest.raises(ConfigError, match="of the same tensors"):
        content([{"a": values(3)}]) & content([{"a": values(4)}])


def test_strided_empty_and_odd_tensors():
    state = {
        "t": values(4, 6).t(),
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(1.5),
        "flag": torch.tensor([True, False]),
        "complex": torch.complex(values(3), values(3, seed=1)),
        "grad": torch.nn.Parameter(values(5)),
        7: {"x": values(2)},
    }
    report = content([state, state])
    assert {p.name for g in report.duplicates for p in g.places} == {"t", "flag", "complex", "grad", "7.x"}
    assert json.loads(report.to_json())["world"] == 2


def test_everything_that_is_wrong_is_said_at_once():
    loop: dict[str, Any] = {}
    loop["self"] = loop
    state = {
        "lr": 0.1,
        "list": [torch.ones(1)],
        "meta": torch.empty(2, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
        ("a", "b"): torch.ones(1),
        "x": {"y": torch.ones(1)},
        "x.y": torch.ones(1),
        "loop": loop,
    }
    with pytest.raises(ConfigError) as caught:
        flatten(state)
    text = str(caught.value)
    assert "7 problems" in text
    for part in ("'lr': a float", "'list': a list", "'meta': a meta", "'sparse': a tensor of layout", "('a', 'b')",
                 "'x.y': two leaves", "'loop.self': a mapping that holds itself"):  # fmt: skip
        assert part in text
    for result in run_ranks(comms(2), lambda rank: analyze([{"a": torch.ones(2)}, state][rank])):
        assert "rank 1: ConfigError: state dict: 7 problems" in str(result)


def test_a_sharded_tensor_is_to_be_handed_in_as_its_local_part():
    class Sharded(torch.Tensor):
        def to_local(self) -> torch.Tensor:
            return self

    with pytest.raises(ConfigError, match="a Sharded, expected this rank's own part"):
        flatten({"w": torch.ones(1).as_subclass(Sharded)})


def test_the_public_door_takes_a_state_dict_and_nothing_of_a_layout():
    state = {"w": values(300, 300)}
    (one,) = each(run_ranks(comms(1), lambda rank: analyze(state)))
    assert one.sizes["held"] == 360_000
    for result in run_ranks(comms(2), lambda rank: analyze(state, domains="rank", k=2)):
        assert isinstance(result, ConfigError)
        assert "domains, k: not for a plain state dict" in str(result)
    assert communicator().world == 1
