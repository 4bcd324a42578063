from __future__ import annotations

import pytest

from ckpt.analysis.domains import Domains, spans
from ckpt.errors import ConfigError

HOSTS = Domains.by_host(8, 2)
NAMED = Domains.by_host(4, ["gpu-a", "gpu-a", "gpu-b:1", "gpu-b:1"])


def test_constructors():
    assert Domains.by_rank(3).of_rank == ("0", "1", "2")
    assert HOSTS.of_rank == ("0", "0", "1", "1", "2", "2", "3", "3")
    assert Domains.by_host(5, 2).names == ("0", "1", "2")
    assert NAMED.names == ("gpu-a", "gpu-b:1")
    assert NAMED.number.tolist() == [0, 0, 1, 1]
    racks = Domains.of("rack", 4, {"left": [0, 3], "right": [1, 2]})
    assert racks.of_rank == ("left", "right", "right", "left")
    assert Domains.of("rack", 4, lambda rank: rank % 2).of_rank == ("0", "1", "0", "1")
    assert Domains.of("rack", 2, {0: "x", 1: "y"}).names == ("x", "y")
    assert Domains.by_rank(0).names == ()


@pytest.mark.parametrize(
    ("domains", "text", "ranks"),
    [
        (HOSTS, "host:3,host:1", (2, 3, 6, 7)),
        (HOSTS, "host:3, 0", (0, 1, 6, 7)),
        (HOSTS, "host:0-1", (0, 1, 2, 3)),
        (HOSTS, "2", (4, 5)),
        (HOSTS, "rank:0-3,7", (0, 1, 2, 3, 7)),
        (HOSTS, "rank:0,host:3", (0, 6, 7)),
        (NAMED, "gpu-a", (0, 1)),
        (NAMED, "gpu-b:1", (2, 3)),
        (NAMED, "host:gpu-b:1,rank:0", (0, 2, 3)),
        (NAMED, "rank:1,gpu-b:1", (1, 2, 3)),
        (Domains.by_rank(4), "1-2", (1, 2)),
    ],
)
def test_a_loss_is_parsed(domains, text, ranks):
    assert domains.parse(text) == ranks


def test_all_that_is_wrong_with_a_loss_is_said_at_once():
    with pytest.raises(ConfigError) as caught:
        HOSTS.parse("host:9,rank:0-8,rack:1,host:2-9,host:3-1,host:1")
    message = str(caught.value)
    assert "5 problems" in message
    for part in ("'host:9'", "'rank:0-8'", "'rack:1'", "'host:2-9'", "'host:3-1'"):
        assert part in message
    assert "'host:1'" not in message
    with pytest.raises(ConfigError, match="empty"):
        HOSTS.parse(" , ")


def test_all_that_is_wrong_with_a_mapping_is_said_at_once():
    with pytest.raises(ConfigError) as caught:
        Domains.of("rack", 6, {"a": [0, 1, 9], "b": [1, 2], " ": [3]})
    message = str(caught.value)
    assert "4 problems" in message
    for part in ("rank 9", "ranks 4-5", "rank 1: in several racks: a, b", "rank 3: its rack has an empty name"):
        assert part in message
    with pytest.raises(ConfigError, match="list of its ranks"):
        Domains.of("rack", 2, {"a": "01"})
    with pytest.raises(ConfigError, match="no host is given for rank"):
        Domains.by_host(3, ["a", "b"])
    with pytest.raises(ConfigError, match="at least 1"):
        Domains.by_host(3, 0)
    with pytest.raises(ConfigError, match="one for each of 4 ranks, found 8"):
        HOSTS.check(4)


def test_spans():
    assert [spans(r) for r in ([], [3], [0, 1], [0, 2, 3, 4])] == ["", "3", "0-1", "0,2-4"]
