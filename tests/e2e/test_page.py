"""The page of ``ckpt analyze --html``, looked at in a headless Chromium."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from ckpt.cli.main import cli
from tests.harness.browser import Page, browser

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SHAPES = """
name: tiny
layers: 3
tensors:
  embed.weight: {shape: [16, 8], kind: embedding}
  'blocks.{layer}.w': {shape: [8, 8]}
"""
ATTACK = "</script><img src=x onerror=\"document.title='executed'\"><script>document.title='executed'</script>"
HOSTILE = json.dumps(
    {"name": ATTACK, "tensors": {ATTACK: {"shape": [8, 8]}, "z<!--<script>{{data}}.w": {"shape": [4]}}}
)


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as one:
        yield one


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """Return a function that writes the page of a layout."""

    def make(*arguments: str, shapes: str = SHAPES) -> Path:
        (tmp_path / "model.yaml").write_text(shapes)
        model = () if "--preset" in arguments else ("--model", str(tmp_path / "model.yaml"))
        path = tmp_path / "page.html"
        done = CliRunner().invoke(cli, ["analyze", *model, *arguments, "--html", str(path)])
        assert done.exit_code == 0, (done.output, done.exception)
        return path

    return make


class Looking:
    """A loaded page, and where its cells are."""

    def __init__(self, page: Page, path: Path, **options: Any) -> None:
        page.requests.clear()
        page.complaints.clear()
        self.page = page
        page.open(path, **options)
        assert page.complaints == []
        assert page.requests == [path.as_uri()]  # and nothing else was asked for
        self.cells = page.run("Object.assign({}, document.getElementById('cells').dataset)")

    @property
    def count(self) -> int:
        return int(self.cells["cells"])

    @property
    def columns(self) -> list[tuple[float, float]]:
        """Where each layer begins and ends."""
        return list(pairwise(float(edge) for edge in self.cells["edges"].split(",")))

    def _place(self, row: int, layer: int) -> tuple[float, float]:
        left, right = self.columns[layer]
        return left + 0.4 * (right - left), (row + 0.3) * float(self.cells["cellHeight"])

    def colour(self, row: int, layer: int) -> str:
        x, y = self._place(row, layer)
        found = self.page.run(
            f"Array.from(document.getElementById('cells').getContext('2d').getImageData({x}, {y}, 1, 1).data)"
        )
        return "#{:02x}{:02x}{:02x}".format(*found[:3])

    def style(self, name: str) -> str:
        return self.page.run(f"getComputedStyle(document.documentElement).getPropertyValue('{name}').trim()")

    def hover(self, row: int, layer: int) -> str:
        x, y = self._place(row, layer)
        box = "document.getElementById('cells').getBoundingClientRect()"
        self.page.run(f"window.scrollBy(0, {box}.top + {y} - 400)")
        left, top = self.page.run(f"[{box}.left, {box}.top]")
        self.page.point(left + x, top + y)
        return self.tip

    @property
    def tip(self) -> str:
        return self.page.run("(tip => tip.hidden ? '' : tip.innerText)(document.getElementById('tip'))")

    def text(self, selector: str) -> str:
        return self.page.run(f"document.querySelector({selector!r}).innerText")


def test_cells_have_the_colour_of_their_number_of_copies(page: Page, made: Any) -> None:
    ddp = Looking(page, made("--engine", "ddp", "--dp", "4"))
    assert ddp.count == 4 * 4  # four ranks, the embedding and three blocks
    assert ddp.colour(0, 0) == ddp.colour(3, 3) == ddp.style("--c3")
    sharded = Looking(page, made("--engine", "fsdp2", "--dp", "4"))
    assert sharded.count == 4 * 4
    assert sharded.colour(0, 0) == sharded.style("--c1")
    many = Looking(page, made("--engine", "ddp", "--dp", "100", "--ranks-per-host", "10"))
    assert many.colour(5, 1) == many.style("--c7")
    assert len({many.style(f"--c{number}") for number in range(8)}) == 8


def test_what_a_rank_does_not_hold_has_no_cell(page: Page, made: Any) -> None:
    stages = Looking(page, made("--pp", "2", "--stages", "1,2"))
    assert stages.count == 2 + 2
    assert stages.colour(0, 2) == stages.style("--empty") != stages.colour(1, 2)  # blocks.1 is of the second stage
    assert "holds nothing of this layer" in stages.hover(0, 2)


def test_pointing_at_a_cell_says_who_and_what(page: Page, made: Any) -> None:
    seen = Looking(page, made("--dp", "4", "--zero", "1", "--ranks-per-host", "2"))
    assert seen.tip == ""
    tip = seen.hover(2, 2)
    for text in ("rank 2", "host 1", "blocks.1", "must be written"):
        assert text in tip, tip
    assert re.search(r"param\s+4\s+2", tip)  # copies, hosts
    assert re.search(r"\d+ B", tip)
    page.point(1, 1)
    assert seen.tip == ""


def test_the_keyboard_reaches_every_cell(page: Page, made: Any) -> None:
    seen = Looking(page, made("--engine", "ddp", "--dp", "4"))
    page.run("document.getElementById('count').focus()")
    page.press("Tab")
    assert "rank 0" in seen.tip
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        page.press(key)
    assert "rank 2" in seen.tip
    assert "blocks.1" in seen.tip
    assert "survives any 3 ranks" in seen.tip
    page.press("Escape")
    assert seen.tip == ""


def test_one_role_can_be_looked_at_alone(page: Page, made: Any) -> None:
    seen = Looking(page, made("--dp", "4", "--zero", "1", "--optimizer", "ds_adam"))
    before = seen.colour(0, 1)
    page.run(
        "(choice => { choice.value = 'param'; choice.dispatchEvent(new Event('change')); })"
        "(document.getElementById('role'))"
    )
    page.settle()
    assert before == seen.style("--c1")
    assert seen.colour(0, 1) == seen.style("--c3")  # the parameter is everywhere


def test_legend_summary_and_survival_are_there(page: Page, made: Any) -> None:
    seen = Looking(page, made("--preset", "yi-34b", "--lose", "host:3"))
    legend = seen.text("#legend").split("\n")
    assert [one.strip() for one in legend] == [
        "0: nobody has it", "1 copy", "2", "3–4", "5–8", "9–16", "17–64", "65 and more",
        "a lost rank", "a layer that lost elements for good",
    ]  # fmt: skip
    assert (
        page.run("document.querySelectorAll('#legend li:not(.unused)').length") == 4
    )  # 1 copy, 3 to 4, and what a loss adds
    main = seen.text("main")
    for text in ("412.67 GB", "ranks on 16 hosts", "93.75 %", "Loss of ranks 24-31 (host 3)", "the paper's number"):
        assert text in main, text


def test_lost_rows_and_layers_that_cannot_be_rebuilt_are_marked(page: Page, made: Any) -> None:
    def barred(seen: Looking) -> list[bool]:
        bottom = page.run("document.getElementById('axis').height - 4")
        pen = "document.getElementById('axis').getContext('2d')"
        return [page.run(f"{pen}.getImageData({(a + b) / 2}, {bottom}, 1, 1).data[3]") > 0 for a, b in seen.columns]

    def struck(seen: Looking, row: int) -> bool:
        middle = (row + 0.5) * float(seen.cells["cellHeight"]) - 1
        pen = "document.getElementById('cells').getContext('2d')"
        return page.run(f"Array.from({pen}.getImageData(200, {middle}, 1, 1).data)")[:3] == [0, 0, 0]

    seen = Looking(page, made("--engine", "fsdp2", "--dp", "2", "--lose", "rank:1"))
    assert [struck(seen, row) for row in (0, 1)] == [False, True]
    assert barred(seen) == [True] * 4  # of each layer a half was on rank 1 alone
    assert "lost\n" in seen.hover(1, 1)
    assert "lost\n" not in seen.hover(0, 1)
    assert "of it cannot be rebuilt" in seen.tip
    unused = "document.querySelector('#legend li:last-child').classList.contains('unused')"
    assert not page.run(unused)
    seen = Looking(page, made("--engine", "ddp", "--dp", "2", "--lose", "rank:1"))
    assert [struck(seen, row) for row in (0, 1)] == [False, True]
    assert barred(seen) == [False] * 4  # rank 0 has everything
    assert "of it cannot be rebuilt" not in seen.hover(1, 1)
    assert page.run(unused)


def test_layers_stand_in_the_order_of_the_model_and_their_names_apart(page: Page, made: Any) -> None:
    seen = Looking(page, made("--preset", "llama3-405b"))
    of_first, of_last = ([seen.hover(row, n).split("\n")[2] for n in (0, 1, 126, 127, 128)] for row in (0, 511))
    assert of_first == of_last == ["model.embed_tokens", "model.layers.0", "model.layers.125", "model.norm", "lm_head"]
    assert min(right - left for left, right in seen.columns[-2:]) >= 12  # as wide as a letter is high


def test_a_job_of_16384_ranks_fits_into_the_page(page: Page, made: Any) -> None:
    path = made("--preset", "llama3-405b")
    assert path.stat().st_size < 5_000_000
    seen = Looking(page, path)
    assert 1000 < seen.count <= 512 * 128
    tip = seen.hover(0, 3)
    assert re.search(r"ranks 0-\d+", tip)
    assert "model.layers.2\n" in tip  # behind the embedding


def test_both_colour_schemes_are_readable(page: Page, made: Any) -> None:
    path = made("--engine", "fsdp2", "--dp", "4")
    grounds = []
    for dark in (False, True):
        seen = Looking(page, path, dark=dark)
        assert seen.colour(0, 0) == seen.style("--c1")
        paper, ink = (int(seen.style(name)[1:3], 16) for name in ("--paper", "--ink"))
        assert abs(paper - ink) > 128
        grounds.append(paper)
    assert grounds[0] > grounds[1]


def test_names_are_text_and_never_run(page: Page, made: Any) -> None:
    path = made("--dp", "2", "--zero", "1", "--lose", "rank:0", shapes=HOSTILE)
    seen = Looking(page, path)
    page.settle()
    assert page.complaints == []
    assert page.run("document.title") == f"{ATTACK} · ckpt analyze"
    assert seen.text("h1") == ATTACK
    assert page.run("document.querySelectorAll('img').length") == 0
    assert page.run("document.scripts.length") == 2  # the data, and the one that draws it
    assert "onerror" in seen.hover(0, 0) + seen.hover(0, 1)  # shown as the text that it is


def test_a_script_that_is_not_ours_is_refused_by_the_page(page: Page, made: Any, tmp_path: Path) -> None:
    """The second lock: were a name to get through as markup after all."""
    path = made("--dp", "2")
    injected = "<script>document.title = 'executed'</script><img src='http://localhost:9/x.png'></body>"
    path.write_text(path.read_text().replace("</body>", injected))
    page.requests.clear()
    page.complaints.clear()
    page.open(path)
    assert page.run("document.title") == "tiny · ckpt analyze"
    assert len([one for one in page.complaints if "Content Security Policy" in one]) == 2
