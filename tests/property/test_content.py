"""The content report against counting by hand, on random collections of chunks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpt.analysis.content import CONSTANT, VALUE, ContentReport, ContentTensor, RankContent

ELEMENTS = 2
LETTERS = "abcd0"  # "0" stands for a constant chunk


@st.composite
def jobs(draw: st.DrawFn) -> list[list[str]]:
    """For each rank its tensors; a letter is a chunk's content. One shape for all: rows of one chunk."""
    tensor = st.text(LETTERS, max_size=4)
    return draw(st.lists(st.lists(tensor, max_size=4), min_size=1, max_size=3))


def report(job: list[list[str]]) -> ContentReport:
    ranks = []
    for tensors in job:
        listed = tuple(ContentTensor(f"t{i}", "float32", (len(text), ELEMENTS)) for i, text in enumerate(tensors))
        chunks = "".join(tensors)
        kinds = tuple(CONSTANT if letter == "0" else VALUE for letter in chunks)
        ranks.append(RankContent(listed, tuple(letter.encode() for letter in chunks), kinds))
    return ContentReport(tuple(ranks), ELEMENTS)


@given(jobs())
def test_every_byte_is_of_one_class(job):
    sizes = report(job).sizes
    size = ELEMENTS * 4
    flat = ["".join(tensors) for tensors in job]
    everything = "".join(flat)
    assert sizes["held"] == size * len(everything)
    assert sizes["constant"] == size * everything.count("0")
    letters = set(everything) - {"0"}
    assert sizes["unique"] == size * len(letters)
    assert sizes["within"] == size * sum(text.count(one) - (one in text) for text in flat for one in letters)
    assert sizes["held"] == sum(sizes.values()) - sizes["held"]


@given(jobs())
def test_groups_name_exactly_the_places_with_equal_content(job):
    found = report(job)
    content = {}
    for rank, tensors in enumerate(job):
        for i, text in enumerate(tensors):
            content[f"t{i}", rank] = text
    for group in found.duplicates:
        texts = {
            content[place.name, rank][place.start // ELEMENTS : place.stop // ELEMENTS]
            for place in group.places
            for rank in place.ranks
        }
        assert len(texts) == 1
        (text,) = texts
        assert set(text) != {"0"}
        assert group.nbytes == len(text) * ELEMENTS * 4
        if group.whole:
            assert all(content[p.name, r] == text for p in group.places for r in p.ranks)
            assert group.copies == sum(other == text for other in content.values())
    covered = {
        (p.name, r, k) for g in found.duplicates for p in g.places for r in p.ranks
        for k in range(p.start // ELEMENTS, p.stop // ELEMENTS)
    }  # fmt: skip
    everything = "".join(content.values())
    for (name, rank), text in content.items():
        for k, letter in enumerate(text):
            if letter != "0" and everything.count(letter) > 1:
                assert (name, rank, k) in covered, "every copy is named"


@given(jobs(), st.data())
def test_combined_probes_know_only_what_was_always_equal(job, data):
    shapes = [[len(text) for text in tensors] for tensors in job]
    second = [[data.draw(st.text(LETTERS, min_size=n, max_size=n)) for n in mine] for mine in shapes]
    both = report(job) & report(second)
    pairs = [list(zip("".join(a), "".join(b), strict=True)) for a, b in zip(job, second, strict=True)]
    flat = [pair for rank in pairs for pair in rank if pair != ("0", "0")]
    assert both.sizes["unique"] == ELEMENTS * 4 * len(set(flat))
    assert both.sizes["constant"] == ELEMENTS * 4 * sum(rank.count(("0", "0")) for rank in pairs)
    assert both.probes == 2
