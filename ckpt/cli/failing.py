"""Which ranks fail together, as the command line says it: ``rank``, ``host``, or a file of a user's own domains."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt.analysis.domains import HOST, RANK, Domains
from ckpt.describe.read import MAX_BYTES, parse
from ckpt.errors import ConfigError
from ckpt.layout.parsing import shortened
from ckpt.words import count

if TYPE_CHECKING:
    from ckpt.cli.subject import Subject

DESCRIPTION = "description"


def domains_of(subject: Subject, wanted: str | None) -> Domains:
    """Return the domains of a job.

    Args:
        subject: what is looked at.
        wanted: ``rank``, ``host``, path of a file, or None for hosts as far as they are known, else ranks.

    Raises:
        ConfigError: hosts are wanted and not known, or the file does not describe domains of this job.
    """
    world = subject.holdings.world
    if wanted == RANK:
        return Domains.by_rank(world)
    if wanted in (None, HOST):
        if subject.hosts is not None:
            return subject.hosts
        if wanted == HOST:
            instead = ": give --ranks-per-host" if subject.kind == DESCRIPTION else ""
            raise ConfigError(f"--domains host: the hosts of {subject.name} are not known{instead}")
        return Domains.by_rank(world)
    try:
        with Path(wanted).open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"--domains {wanted!r}: expected rank, host, or a file, which cannot be read: {error.strerror or error}"
        ) from error
    return _domains_in(parse(text, wanted), world, subject.hosts, wanted)


def lost_of(subject: Subject, domains: Domains, wanted: str | None) -> str | tuple[int, ...] | None:
    """Return what is to be lost. Hosts may be named whatever else fails at once.

    Raises:
        ConfigError: hosts are named and not known, or not there.
    """
    if wanted is None or domains.kind == HOST or not re.search(rf"(^|,)\s*{HOST}:", wanted):
        return wanted
    if subject.hosts is None:
        instead = "give --ranks-per-host" if subject.kind == DESCRIPTION else "name ranks (rank:0-7)"
        raise ConfigError(f"--lose {wanted}: hosts are not known: {instead}")
    return subject.hosts.parse(wanted)


def notes_of(subject: Subject, domains: Domains, lose: str | None) -> tuple[str, ...]:
    """Return the notes, without what was assumed of hosts if they play no part."""
    return subject.notes + (subject.assumed if domains.kind != RANK or HOST in (lose or "") else ())


def _domains_in(plain: dict[str, Any], world: int, hosts: Domains | None, where: str) -> Domains:
    """Return the domains that a file describes.

    ::

        kind: rack                                # may be left out, with the line that follows it
        domains:
          a: 0-63                                 # ranks
          b: [64, 65, 66]
          c: host:9-12,host:20                    # or hosts, where they are known
    """
    kind, named = "domain", plain.get("domains", plain)
    if "domains" in plain:
        kind = str(plain.get("kind", kind))
        unknown = sorted(set(plain) - {"kind", "domains"})
        if unknown:
            raise ConfigError(
                f"{where}: unknown key{'s' * (len(unknown) > 1)} beside kind and domains: {', '.join(unknown)}"
            )
    if not (isinstance(named, Mapping) and named):
        raise ConfigError(f"{where}: domains: expected names and their ranks, found {type(named).__name__}")
    if isinstance(named.get("tensors"), Mapping):
        raise ConfigError(f"{where}: expected domains and their ranks, found a file of shapes (for --model)")
    found: dict[str, list[int]] = {}
    problems = []
    for name, members in named.items():
        try:
            found[str(name)] = _ranks(members, world, hosts)
        except ConfigError as error:
            first, *listed = str(error).split("\n  - ")  # a list in a list is hard to read
            problems.append(f"{name}: {'; '.join(listed or [first])}")
    if problems:
        raise ConfigError("\n  - ".join([f"{where}: {count(len(problems), 'problem')}", *problems]))
    return Domains.of(kind, world, found)


def _ranks(members: object, world: int, hosts: Domains | None) -> list[int]:
    if isinstance(members, list) and all(type(member) is int for member in members):
        return members
    if type(members) is int:
        return [members]
    if not isinstance(members, str):
        raise ConfigError(
            f"expected ranks, as a list of numbers or as text (0-7, host:3), found {shortened(repr(members), 60)}"
        )
    named = members if ":" in members.partition(",")[0] else f"{RANK}:{members}"
    return list((hosts or Domains.by_rank(world)).parse(named))
