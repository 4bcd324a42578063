"""The house rules of ``ckpt/``: who may import whom, what nobody may use, how long a file may be.

The rules read source with ``ast`` and return every violation as one line, so that a failure is a to-do list. They are
tested themselves on small bad trees: a checker that cannot fail proves nothing.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

REPO = Path(__file__).resolve().parents[1]

# Imports point down: a part may import from itself and from parts of a lower number, never from a sibling.
LEVEL = {
    "errors": 0, "words": 0,
    "layout": 1, "report": 1,
    "store": 2, "format": 2, "analysis": 2,
    "repo": 3, "plan": 3, "describe": 3,
    "runtime": 4, "engine": 4,
    "convert": 5,  # reads, packs and commits as a save does
    "gradlog": 5,  # hooks into engines, and its ranks meet as those of a save do
    "saving": 6, "loading": 6, "auditing": 6, "analyzing": 6,
    "compact": 6,  # replays a log, and writes as a conversion does
    "preempting": 7, "checkpointer": 7,
    "cli": 8,
    "__main__": 9, "__init__": 9,
}  # fmt: skip

# Tighter than their level: an adapter knows nothing of plans and bytes, a store nothing but keys and bytes.
ONLY = {"engine": {"layout", "errors"}, "store": {"errors"}}

# Inside these a file may import its contract, what all families share (shared_state), its own family (same first word:
# deepspeed, deepspeed_zero) and no other.
FAMILIES = {"engine": "base"}
SHARED = "shared"
CHOOSERS = {"engine/find.py"}  # picks the adapter, so it knows them all

TORCH_PARTS = {"engine", "runtime", "gradlog", "convert", "compact"}
TORCH_FREE = ("errors", "layout", "analysis", "plan", "format", "store", "repo", "describe")
FRAMEWORKS = {"deepspeed": "engine/deepspeed", "megatron": "engine/megatron"}  # file name prefix; inside functions only
ONE_FILE = {"boto3": "boto3", "botocore": "boto3", "fsspec": "fsspec", "xxhash": "xxhash", "zstandard": "zstandard"}
PICKLES = {"pickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
OBJECT_COLLECTIVES = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip
MAX_LINES = 400


class Import(NamedTuple):
    """One imported module, absolute. ``lazy``: inside a function, or for the type checker only."""

    module: str
    line: int
    lazy: bool


def imports_of(tree: ast.Module) -> Iterator[Import]:
    """Yield every import; ``from a import b`` yields ``a.b``, whether ``b`` is a module or not."""

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                inside = True
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                module = "." * child.level + (child.module or "")
                yield from (Import(f"{module}.{alias.name}", child.lineno, lazy) for alias in child.names)
            elif isinstance(child, ast.Call) and ast.unparse(child.func) in ("__import__", "importlib.import_module"):
                yield from (Import(str(a.value), child.lineno, lazy) for a in child.args if isinstance(a, ast.Constant))
            yield from visit(child, inside)

    return visit(tree, False)


def sources(root: Path) -> Iterator[tuple[str, str, ast.Module]]:
    """Yield (path below ``ckpt/``, text, syntax tree) of every file of the package."""
    for path in sorted((root / "ckpt").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        yield path.relative_to(root / "ckpt").as_posix(), text, ast.parse(text, str(path))


def part_of(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def check_layers(root: Path) -> list[str]:
    """Imports inside the package point down, and only to what each part may see."""
    problems = []
    for path, _, tree in sources(root):
        part = part_of(path)
        if part not in LEVEL:
            problems.append(f"{path}: {part!r} has no place in the house (LEVEL in tests/test_architecture.py)")
            continue
        for module, line, _ in imports_of(tree):
            if module.startswith("."):
                problems.append(f"{path}:{line}: relative import, expected an absolute one")
            if module.split(".")[0] != "ckpt":
                continue
            target = module.split(".")[1] if "." in module else ""
            if target == part:
                problems += check_family(path, line, module)
            elif target not in LEVEL:  # `import ckpt`, `from ckpt import SaveReport`
                if part not in ("__main__", "cli"):
                    problems.append(f"{path}:{line}: imports {module}: the public namespace is for users")
            elif LEVEL[target] >= LEVEL[part]:
                problems.append(f"{path}:{line}: {part} imports {module}: imports point down only")
            elif target not in ONLY.get(part, {target}):
                problems.append(f"{path}:{line}: {part} imports {module}, it may see {sorted(ONLY[part])} only")
    return sorted(set(problems))


def check_family(path: str, line: int, module: str) -> list[str]:
    """Adapters do not know each other."""
    part, *names = module.split(".")[1:]
    if part not in FAMILIES or not names or path in CHOOSERS:
        return []
    family, target = (name.split("_")[0] for name in (Path(path).stem, names[0]))
    if target in (family, FAMILIES[part], SHARED):
        return []
    return [f"{path}:{line}: imports {module}: adapters see ckpt.{part}.{FAMILIES[part]} and their own family only"]


def check_third_party(root: Path) -> list[str]:
    """Heavy or risky dependencies live in the few files that own them."""
    problems, users = [], {}
    for path, _, tree in sources(root):
        for module, line, lazy in imports_of(tree):
            package = module.split(".")[0]
            where = f"{path}:{line}"
            if package == "torch" and part_of(path) not in TORCH_PARTS:
                problems.append(f"{where}: imports torch outside {sorted(TORCH_PARTS)}")
            if package in FRAMEWORKS:
                if not path.startswith(FRAMEWORKS[package]):
                    problems.append(f"{where}: imports {package} outside ckpt/{FRAMEWORKS[package]}*.py")
                if not lazy:
                    problems.append(f"{where}: imports {package} at module level, expected inside a function")
            if package in ONE_FILE:
                users.setdefault(ONE_FILE[package], set()).add(path)
            if package in PICKLES:
                problems.append(f"{where}: imports {package}")
    for package, files in users.items():
        if len(files) > 1:
            problems.append(f"{package} is imported by {sorted(files)}, expected one file")
    return sorted(set(problems))


def check_forbidden(root: Path) -> list[str]:
    """No unpickling, no validation that ``python -O`` removes."""
    problems = []
    for path, _, tree in sources(root):
        for node in ast.walk(tree):
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Assert):
                problems.append(f"{where}: assert, expected an error of ckpt.errors")
            elif isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.save", "torch.load"):
                problems.append(f"{where}: {ast.unparse(node)}")
            elif isinstance(node, ast.ImportFrom) and node.module == "torch":
                problems += [f"{where}: torch.{a.name}" for a in node.names if a.name in ("save", "load")]
            elif isinstance(node, ast.Attribute) and node.attr in OBJECT_COLLECTIVES:
                problems.append(f"{where}: {ast.unparse(node)} pickles, expected ckpt.runtime.comm")
    return problems


def check_shape(root: Path) -> list[str]:
    """Every folder is a package, only the top one's ``__init__.py`` has content, no file is too long to read."""
    problems = []
    for path, text, _ in sources(root):
        lines = text.count("\n")
        if lines > MAX_LINES:
            problems.append(f"{path}: {lines} lines, at most {MAX_LINES}")
        if path.endswith("/__init__.py") and text.strip():
            problems.append(f"{path}: has content, only ckpt/__init__.py may")
        if not (root / "ckpt" / path).with_name("__init__.py").exists():
            problems.append(f"{path}: its folder has no __init__.py")
    return problems


CHECKS = [check_layers, check_third_party, check_forbidden, check_shape]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_house_rules(check) -> None:
    assert check(REPO) == []


# ------------------------------------------------------------------------------------------ the checkers can fail


def house(root: Path, files: dict[str, str]) -> Path:
    """Write a small package ``ckpt`` of these files below ``root``."""
    for name, text in {"__init__.py": "", **files}.items():
        path = root / "ckpt" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name("__init__.py").touch()
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("check", "files", "expected"),
    [
        (
            check_layers,
            {"layout/box.py": "import ckpt.format.pack"},
            "layout imports ckpt.format.pack: imports point down",
        ),
        (check_layers, {"layout/box.py": "def f():\n    from ckpt import repo"}, "layout imports ckpt.repo"),
        (check_layers, {"store/local.py": "from ckpt.format import pack"}, "store imports ckpt.format"),
        (check_layers, {"store/local.py": "from ckpt.layout.box import Box"}, "it may see ['errors'] only"),
        (check_layers, {"engine/fsdp.py": "from ckpt.plan import save_plan"}, "engine imports ckpt.plan"),
        (check_layers, {"engine/fsdp.py": "from ckpt.engine.deepspeed import x"}, "their own family only"),
        (check_layers, {"runtime/comm.py": "from ckpt.engine.base import x"}, "runtime imports ckpt.engine.base"),
        (check_layers, {"loading.py": "from ckpt.saving import x"}, "loading imports ckpt.saving"),
        (check_layers, {"layout/box.py": "from . import spec"}, "relative import"),
        (check_layers, {"saving.py": "import ckpt"}, "public namespace"),
        (check_layers, {"helpers.py": ""}, "no place in the house"),
        (check_third_party, {"plan/save_plan.py": "import torch.nn"}, "imports torch outside"),
        (check_third_party, {"engine/fsdp.py": "def f():\n    import deepspeed"}, "outside ckpt/engine/deepspeed*.py"),
        (check_third_party, {"engine/deepspeed.py": "import deepspeed"}, "at module level"),
        (
            check_third_party,
            {"store/a.py": "import boto3", "store/b.py": "import botocore.config"},
            "expected one file",
        ),
        (check_third_party, {"format/pack.py": "from pickle import loads"}, "imports pickle"),
        (check_third_party, {"format/pack.py": "x = __import__('cloudpickle')"}, "imports cloudpickle"),
        (check_forbidden, {"engine/base.py": "import torch\ntorch.load('x')"}, "engine/base.py:2: torch.load"),
        (check_forbidden, {"engine/base.py": "from torch import save"}, "torch.save"),
        (check_forbidden, {"runtime/comm.py": "dist.all_gather_object(a, b)"}, "pickles"),
        (check_forbidden, {"errors.py": "assert True"}, "errors.py:1: assert"),
        (check_shape, {"errors.py": "\n" * 401}, "401 lines"),
        (check_shape, {"layout/__init__.py": "X = 1"}, "layout/__init__.py: has content"),
    ],
)
def test_a_bad_house_is_found(tmp_path: Path, check, files, expected) -> None:
    problems = check(house(tmp_path, files))
    assert len(problems) == 1, problems
    assert expected in problems[0]


def test_a_missing_init_is_found(tmp_path: Path) -> None:
    (house(tmp_path, {"layout/box.py": ""}) / "ckpt/layout/__init__.py").unlink()
    assert check_shape(tmp_path) == ["layout/box.py: its folder has no __init__.py"]


def test_a_good_house_passes(tmp_path: Path) -> None:
    files = {
        "errors.py": "",
        "layout/box.py": "from ckpt.errors import ConfigError",
        "store/s3.py": "import boto3, botocore\nfrom ckpt.store.base import Store",
        "engine/base.py": "import torch\nfrom ckpt.layout.box import Box",
        "engine/deepspeed_zero.py": "def f():\n    import deepspeed\nfrom ckpt.engine.base import X",
        "engine/deepspeed.py": "from ckpt.engine.deepspeed_zero import f",
        "saving.py": "from ckpt.engine import deepspeed\nfrom ckpt.runtime.comm import step",
        "cli/main.py": "import ckpt\nfrom ckpt.repo.repository import Repository",
        "__main__.py": "from ckpt.cli.main import main",
    }
    house(tmp_path, files)
    assert [check(tmp_path) for check in CHECKS] == [[], [], [], []]


# ------------------------------------------------------------------------------------------------- what imports what


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=REPO, capture_output=True, text=True, timeout=120, check=False
    )


def modules(*parts: str) -> list[str]:
    paths = [path for path, _, _ in sources(REPO) if part_of(path) in parts]
    return [("ckpt." + path.removesuffix(".py").replace("/", ".")).removesuffix(".__init__") for path in paths]


def test_the_pure_parts_import_without_torch() -> None:
    names = modules(*TORCH_FREE)
    assert len(names) > len(TORCH_FREE)
    blocked = "import sys; sys.modules.update(dict.fromkeys(['torch', 'deepspeed'])); import importlib\n"
    done = python(blocked + f"for name in {names}: importlib.import_module(name)")
    assert done.returncode == 0, done.stderr


def test_the_command_line_imports_without_torch() -> None:
    done = python("import sys; sys.modules['torch'] = None; import ckpt.cli.main")
    assert done.returncode == 0, done.stderr


def test_the_package_imports_without_deepspeed() -> None:
    done = python("import sys; sys.modules['deepspeed'] = None; import ckpt; [getattr(ckpt, n) for n in ckpt.__all__]")
    assert done.returncode == 0, done.stderr


def test_all_names_exactly_what_type_checkers_see() -> None:
    import ckpt

    tree = ast.parse((REPO / "ckpt/__init__.py").read_text(encoding="utf-8"))
    seen = [m.split(".")[-1] for m, _, _ in imports_of(tree) if m.startswith("ckpt.")]
    assert sorted(seen) == sorted(ckpt.__all__)


def test_public_names_are_never_the_submodules_of_the_same_name() -> None:
    # Importing a submodule binds it in its package: `ckpt.save` must stay the function, whatever was imported before.
    check = """
import importlib, types, ckpt
for name in ckpt.__all__ * 2:
    assert not isinstance(getattr(ckpt, name), types.ModuleType), f"ckpt.{name} is a module"
"""
    for before in ("", f"import {', '.join(modules('saving', 'loading', 'cli'))}"):
        done = python(before + check)
        assert done.returncode == 0, (before, done.stderr)
