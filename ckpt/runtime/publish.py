"""What rank 0 does at the end of a save: look that every file is there, write the index root, commit."""

from __future__ import annotations

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
    from collections.abc import Callable, Sequence

    from ckpt.format.holders import HolderTable
    from ckpt.runtime.agree import Hello, JobPlan
    from ckpt.runtime.writing import Attempt, Done


def check_written(attempt: Attempt, done: Sequence[Done], beat: Callable[[], None]) -> None:
    """Raise :class:`SplitRoot` if rank 0 does not see every file that a rank says it has written."""
    for rank, one in enumerate(done):
        for key, nbytes in ((one.part.key, one.part.nbytes), *((p.key, p.nbytes) for p in one.packs)):
            size = attempt.store.size(key)
            beat()
            if size != nbytes:
                raise SplitRoot(
                    f"{key}: rank {rank} wrote {nbytes} bytes, rank 0 finds "
                    f"{'nothing' if size is None else f'{size} bytes'} in {attempt.store.url}"
                )


def publish(
    attempt: Attempt,
    job: JobPlan,
    hellos: Sequence[Hello],
    done: Sequence[Done],
    divergences: Sequence[Divergence],
    totals: dict[str, int],
) -> int:
    """Write the index root and commit. Returns the bytes of both."""
    repo, engine = Repository(attempt.store), hellos[0].engine
    root = IndexRoot(
        format=VERSION,
        step=attempt.step,
        attempt=attempt.name,
        world=len(hellos),
        layout=from_raw(job.layout),
        specs=tuple((s.fqn, s.role, s.dtype, s.shape) for s in job.graph.specs),
        derived=tuple(sorted(job.graph.derived)),
        aliases=job.graph.aliases,
        parts=tuple(d.part for d in done),
        divergences=tuple(divergences),
        holders=_holders_of(job, tuple(h.host for h in hellos)),
    )
    index = repo.write_index(attempt.key("index/root.json.zst"), root)
    body = CommitBody(
        format=VERSION,
        features=(CODEC,) if any(d.encoded for d in done) else (),
        step=attempt.step,
        attempt=attempt.name,
        world=len(hellos),
        engine=engine,
        created=now(),
        software=_software(engine),
        totals=totals,
        index=index,
        codecs=_codecs(done),
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
