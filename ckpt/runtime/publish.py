"""What rank 0 does at the end of a save: look that every file is there, write the index root, commit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from ckpt.errors import SplitRoot
from ckpt.format.digest import from_raw
from ckpt.format.manifest import CODEC, VERSION, CommitBody, Divergence, IndexRoot, RoleCodec
from ckpt.repo.holders import holder_table
from ckpt.repo.repository import Repository

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ckpt.format.holders import HolderTable
    from ckpt.format.manifest import FileRef, PackRef
    from ckpt.runtime.agree import JobPlan
    from ckpt.runtime.writing import Attempt, Done
    from ckpt.store.base import Store

LOOKS = 16
"""Files that rank 0 asks the store for at once."""


def check_written(attempt: Attempt, done: Sequence[Done], beat: Callable[[], None]) -> None:
    """Raise :class:`SplitRoot` if rank 0 does not see every file that a rank says it has written."""
    files: list[tuple[int, FileRef | PackRef]] = [(rank, one.part) for rank, one in enumerate(done)]
    files += [(rank, pack) for rank, one in enumerate(done) for pack in one.packs]
    for (rank, file), size in zip(files, _sizes(attempt.store, [file.key for _, file in files]), strict=True):
        beat()
        if size != file.nbytes:
            raise SplitRoot(
                f"{file.key}: rank {rank} wrote {file.nbytes} bytes, rank 0 finds "
                f"{'nothing' if size is None else f'{size} bytes'} in {attempt.store.url}"
            )


def _sizes(store: Store, keys: Sequence[str]) -> Iterator[int | None]:
    """Yield the sizes of objects; of many several at once, since a thousand answers of an object store take minutes."""
    if len(keys) <= LOOKS:
        yield from map(store.size, keys)
        return
    pool = ThreadPoolExecutor(LOOKS, "ckpt-look")
    try:
        yield from pool.map(store.size, keys)
    finally:
        pool.shutdown(cancel_futures=True)


def totals_of(job: JobPlan, done: Sequence[Done], divergences: Sequence[Divergence]) -> dict[str, int]:
    """Return what a commit tells of the whole step, in bytes and counts."""
    return {
        "bytes_held": job.graph.bytes_held(),
        "bytes_unique": job.graph.bytes_unique(),
        "bytes_written": sum(d.written for d in done),
        "bytes_reused": sum(d.reused for d in done),
        "bytes_derived": sum(d.derived for d in done),
        "chunks": len(job.plan.chunks),
        "divergences": len(divergences),
    }


def publish(
    attempt: Attempt,
    job: JobPlan,
    engine: str,
    hosts: tuple[str, ...],
    done: Sequence[Done],
    divergences: Sequence[Divergence],
    totals: dict[str, int],
    *,
    again: bool = False,
    degrees: Mapping[str, int] | None = None,
    log: int | None = None,
) -> int:
    """Write the index root and commit. Returns the bytes of both.

    ``engine``: kind of the adapter. ``hosts``: name of each rank's host; empty if not known. ``again``: an earlier run
    of the same attempt may have written the root already. ``degrees``: of a conversion's target. ``log``: number of the
    gradient log that passes through this state.
    """
    repo = Repository(attempt.store)
    root = IndexRoot(
        format=VERSION,
        step=attempt.step,
        attempt=attempt.name,
        world=job.graph.world,
        layout=from_raw(job.layout),
        specs=tuple((s.fqn, s.role, s.dtype, s.shape) for s in job.graph.specs),
        derived=tuple(sorted(job.graph.derived)),
        aliases=job.graph.aliases,
        parts=tuple(d.part for d in done),
        divergences=tuple(divergences),
        holders=_holders_of(job, hosts),
    )
    index = repo.write_index(attempt.key("index/root.json.zst"), root, overwrite=again)
    body = CommitBody(
        format=VERSION,
        features=(CODEC,) if any(d.encoded for d in done) else (),
        step=attempt.step,
        attempt=attempt.name,
        world=job.graph.world,
        engine=engine,
        created=now(),
        software=_software(engine),
        totals=totals,
        index=index,
        codecs=_codecs(done),
        degrees=dict(degrees or {}),
        log=log,
    )
    return index.nbytes + repo.commit(body, overwrite=attempt.avoid is not None)


def _codecs(done: Sequence[Done]) -> dict[str, RoleCodec]:
    """Return how the chunks that this save wrote are encoded. Why is the word of the first rank that wrote any."""
    found = {}
    for role in sorted({role for one in done for role in one.codecs}):
        of_role = [one.codecs[role] for one in done if role in one.codecs]
        names = sorted({name for used, _, _ in of_role for name in used})
        raw, stored = sum(raw for _, raw, _ in of_role), sum(stored for _, _, stored in of_role)
        if raw:
            codec = ", ".join(name or "none" for name in names)
            why = next((one.reasons[role] for one in done if role in one.codecs and role in one.reasons), "")
            ratio = round(raw / max(stored, 1), 4)
            found[role] = RoleCodec(codec=codec, raw=raw, stored=stored, ratio=ratio, why=why)
    return found


_last_holders: tuple[JobPlan, tuple[str, ...], HolderTable | None] | None = None


def _holders_of(job: JobPlan, hosts: tuple[str, ...]) -> HolderTable | None:
    """Return who holds what; worked out once for each layout, because rank 0 does it while the others wait."""
    global _last_holders
    if _last_holders is None or _last_holders[0] is not job or _last_holders[1] != hosts:
        _last_holders = (job, hosts, holder_table(job.graph, hosts))
    return _last_holders[2]


def now() -> str:
    """Return the time in UTC, ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _software(engine: str) -> dict[str, str]:
    found = {}
    for name in ("ckpt", "torch", *(n for n in ("deepspeed", "megatron-core") if n.startswith(engine))):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
