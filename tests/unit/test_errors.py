from __future__ import annotations

import msgspec
import pytest

from ckpt import errors
from ckpt.errors import (
    CkptError,
    LayoutError,
    MissingState,
    RankFailure,
    UnsupportedLayout,
    from_wire,
    is_damage,
    to_wire,
    with_all_problems,
)


def tree(root: type[CkptError] = CkptError) -> list[type[CkptError]]:
    return [
        root,
        *(found for child in root.__subclasses__() if child.__module__ == "ckpt.errors" for found in tree(child)),
    ]


def example(cls: type[CkptError]) -> CkptError:
    if cls is RankFailure:
        return RankFailure("write", {3: "StoreFull: no space", 0: "did not arrive"})
    if cls is MissingState:
        return MissingState("differs", ("a",), ("b", "c"), ("d",))
    if issubclass(cls, LayoutError):
        return cls("no whole", ("gap in w", "overlap in v"))
    if issubclass(cls, errors.StoreError):
        return cls("no space", "steps/1/x")
    return cls("what failed")


def over_the_wire(error: BaseException) -> CkptError:
    return from_wire(msgspec.json.decode(msgspec.json.encode(to_wire(error))))


@pytest.mark.parametrize("cls", tree(), ids=lambda c: c.__name__)
def test_every_error_arrives_on_other_ranks_as_itself(cls):
    sent = example(cls)
    got = over_the_wire(sent)
    assert type(got) is cls
    assert str(got) == str(sent)
    assert vars(got) == vars(sent)
    assert got.exit_code == sent.exit_code
    assert got.args, "repr and logs show the message"
    assert str(over_the_wire(got)) == str(sent), "and again"


@pytest.mark.parametrize("cls", tree(), ids=lambda c: c.__name__)
def test_every_error_is_caught_by_the_base_and_has_an_exit_code(cls):
    assert issubclass(cls, CkptError)
    assert 1 <= cls.exit_code <= 12
    assert cls.__doc__


def test_the_table_of_exit_codes():
    """Scripts depend on these numbers: docs/cli.md and the tree in the docstring list them."""
    assert {c.__name__: c.exit_code for c in tree() if c.__base__ is CkptError or c.__name__ == "NoSuchCheckpoint"} == {
        "ConfigError": 2,
        "IntegrityError": 3,
        "LayoutError": 4,
        "PlanError": 5,
        "StoreError": 6,
        "RepositoryError": 7,
        "ReplayError": 8,
        "RankFailure": 9,
        "NoSuchCheckpoint": 10,
        "FormatError": 12,
        # Of a live job only; no command raises them.
        "SaveInFlight": 1,
        "SaveCancelled": 1,
    }
    for cls in tree():
        assert cls.__name__ in errors.__doc__, "the drawing is complete"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad"), "ValueError: bad"),
        (KeyError("k"), "KeyError: 'k'"),
        (RuntimeError(), "RuntimeError: RuntimeError"),
        (KeyboardInterrupt(), "KeyboardInterrupt: KeyboardInterrupt"),
        (OSError(28, "No space"), "OSError: [Errno 28] No space"),
    ],
    ids=repr,
)
def test_a_foreign_error_keeps_its_type_and_text(error, text):
    got = over_the_wire(error)
    assert type(got) is CkptError
    assert str(got) == text


def test_a_message_that_is_not_utf8_can_be_sent():
    """A file name of other bytes must not make the report of the failure fail: the peers would wait for nothing."""
    got = over_the_wire(errors.StoreFull("put 'x' in /data/\udcff\ud800: No space"))
    assert str(got).startswith("put 'x' in /data/\\udcff\\ud800")


def test_builtin_handlers_work_too():
    for cls, builtin in (
        (errors.ConfigError, ValueError),
        (errors.ObjectNotFound, FileNotFoundError),
        (errors.ObjectExists, FileExistsError),
        (errors.AccessDenied, PermissionError),
    ):
        with pytest.raises(builtin):
            raise cls("x")


def test_lists_stand_one_a_line():
    error = MissingState("differs", ("a",), ("b",), ("c",))
    assert str(error).splitlines() == ["differs", "  - missing: a", "  - unexpected: b", "  - dtype differs: c"]


def test_a_job_of_thousands_does_not_print_thousands_of_lines():
    error = RankFailure("write", dict.fromkeys(range(4000), "X: y"))
    assert len(str(error).splitlines()) == 10
    assert "and 3992 more ranks" in str(error)
    assert len(over_the_wire(error).failures) == 4000


@pytest.mark.parametrize("cls", tree(), ids=lambda c: c.__name__)
def test_damage_is_what_waiting_or_another_user_does_not_change(cls):
    expected = cls is not RankFailure and issubclass(
        cls, (errors.FormatError, errors.IntegrityError, errors.StoreError)
    )
    expected &= cls not in (errors.AccessDenied, errors.ObjectExists, errors.StoreFull, errors.StoreUnavailable)
    assert is_damage(example(cls)) == expected
    text = f"{cls.__name__}: x"
    assert is_damage(RankFailure("s", {0: text, 1: "DigestMismatch: x"})) == expected
    assert is_damage(over_the_wire(RankFailure("s", {0: text}))) == expected


def test_what_may_succeed_later_is_no_damage():
    busy = errors.StoreError("503", "k")
    assert is_damage(busy)
    busy.transient = True
    assert not is_damage(busy)
    assert not is_damage(RankFailure("s", {0: "did not arrive"}))


def test_caused_by_needs_every_rank():
    both = RankFailure("s", {0: "DigestMismatch: x", 1: "MissingChunk: y"})
    assert both.caused_by(errors.IntegrityError)
    assert not both.caused_by(errors.DigestMismatch)
    for other in ("did not arrive", "OSError: x", "StoreFull: x"):
        assert not RankFailure("s", {0: "DigestMismatch: x", 1: other}).caused_by(errors.IntegrityError)


@pytest.mark.parametrize("error", [errors.StoreUnavailable("x", "k"), errors.StoreFull("x", "k")], ids=repr)
def test_transient_is_known_after_the_wire(error):
    assert over_the_wire(error).transient == isinstance(error, errors.StoreUnavailable)


def test_what_each_rank_found_becomes_one_error():
    mine, other = UnsupportedLayout("engine", ("a", "b")), UnsupportedLayout("engine", ("b", "c"))
    joined = with_all_problems(other, [to_wire(mine), to_wire(other)])
    assert isinstance(joined, UnsupportedLayout)
    assert joined.problems == ("a", "b", "c")
    assert str(joined) == "engine\n  - a\n  - b\n  - c"
    assert with_all_problems(mine, [to_wire(mine), to_wire(mine)]) is mine
