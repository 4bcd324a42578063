"""Conversions for more ranks than are written side by side elsewhere: to files on a disk, of which many may be open."""

from __future__ import annotations

from ckpt.convert.compare import compare_written
from ckpt.convert.deepspeed.read import open_deepspeed
from ckpt.convert.deepspeed.write import write_deepspeed
from ckpt.convert.options import ReadOptions, WriteOptions
from ckpt.convert.ours.plan import plan_ours
from ckpt.convert.ours.read import open_ours
from ckpt.convert.ours.tasks import RANKS
from ckpt.convert.ours.write import write_ours
from ckpt.convert.target import target_of
from ckpt.repo.repository import Repository
from ckpt.repo.verify import verify
from ckpt.store.local import LocalStore
from ckpt.store.memory import MemoryStore
from tests.unit.convert.test_write_deepspeed import source

DP = 40


def test_packs_of_many_ranks_are_written_side_by_side_and_the_source_is_read_once(tmp_path) -> None:
    opened, store = source(), LocalStore(str(tmp_path))
    target = target_of(opened, dp=DP, zero=3)
    few = plan_ours(opened, target)
    many = plan_ours(opened, target, wide=64)
    assert [len(task.packs) for task in few.tasks] == [RANKS] * (DP // RANKS)
    assert [len(task.packs) for task in many.tasks] == [DP]
    done = write_ours(opened, store, target)
    assert done.bytes_read < write_ours(opened, MemoryStore(), target).bytes_read
    assert verify(Repository(store)).findings == []
    rows = compare_written(opened, open_ours(store, "back"), target.specs)
    assert [row for row in rows if row.status != "equal"] == []
    again = write_ours(opened, store, target)
    assert (again.bytes_written, again.bytes_read) == (0, 0)


def test_deepspeeds_files_of_many_ranks_are_the_same_as_few_at_a_time(tmp_path) -> None:
    opened, store, few = source(), LocalStore(str(tmp_path)), MemoryStore()
    target = target_of(opened, dp=DP, zero=3, engine="deepspeed")
    done = write_deepspeed(opened, store, target, WriteOptions())
    assert done.bytes_read < write_deepspeed(opened, few, target, WriteOptions()).bytes_read
    assert {key: store.get(key) for key in few.objects} == few.objects
    rows = compare_written(opened, open_deepspeed(store, "back", options=ReadOptions()), target.specs)
    assert [row for row in rows if row.status != "equal"] == []
