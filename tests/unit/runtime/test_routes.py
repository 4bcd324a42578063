from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpt.plan.read_plan import chain_from
from ckpt.runtime.routes import Route, route_of


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=9), st.sets(st.sampled_from("abcd")), st.data())
def test_every_rank_of_a_chain_gets_the_unit_once_from_one_that_gives_it(names, sharing, data):
    members = data.draw(st.lists(st.integers(0, len(names) - 1), min_size=1, unique=True).map(sorted))
    reader = data.draw(st.sampled_from(members))
    chain = chain_from(reader, members, names)
    routes = {rank: route_of(chain, rank, names, sharing) for rank in chain}
    assert routes[reader].source is None
    for rank in chain[1:]:
        given_by = [r for r in chain if routes[r].onward == rank or rank in routes[r].mates]
        assert given_by == [routes[rank].source]
        near = rank in routes[given_by[0]].mates
        assert near is routes[rank].near is (names[given_by[0]] == names[rank] and names[rank] in sharing)
    into = [
        names[routes[r].onward] for r in chain if routes[r].onward is not None and names[routes[r].onward] != names[r]
    ]
    assert len(into) == len(set(into))  # the bytes enter each host once


def test_where_nothing_is_shared_the_chain_is_the_route():
    assert route_of((2, 0, 1), 0, ["a", "a", "a"], ()) == Route(2, False, 1, ())


def test_the_first_of_a_host_lends_to_the_others_and_sends_to_the_next_host():
    names = ["a", "a", "b", "b"]
    chain = (1, 0, 3, 2)
    assert route_of(chain, 1, names, {"a", "b"}) == Route(None, False, 3, (0,))
    assert route_of(chain, 0, names, {"a", "b"}) == Route(1, True, None, ())
    assert route_of(chain, 3, names, {"a", "b"}) == Route(1, False, None, (2,))
    assert route_of(chain, 3, names, {"b"}) == Route(0, False, None, (2,))
