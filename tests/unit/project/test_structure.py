"""The structure of the package: small files, few in a folder, and imports that form no circle."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import autogram

SOURCE = Path(autogram.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
MOST_LINES, MOST_FILES = 350, 10


def file_of(module: str) -> Path | None:
    """The file of a module of the package, or ``None`` if it is none."""
    found = SOURCE.parent.joinpath(*module.split("."))
    for path in (found.with_suffix(".py"), found / "__init__.py"):
        if path.is_file() and SOURCE in path.parents:
            return path
    return None


def imports(path: Path) -> Iterator[Path]:
    """The files that a file imports from, also those that it imports for their types alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [file_of(alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            within = file_of(node.module)
            inner = [file_of(f"{node.module}.{alias.name}") for alias in node.names]
            found = [within if x is None else x for x in inner]
        else:
            continue
        yield from (x for x in found if x not in (None, path))


def in_order(graph: dict[str, set[str]]) -> list[str]:
    """The names in an order in which each comes behind all that it imports."""
    try:
        return list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail("These import one another: " + " <- ".join(error.args[1]))


def test_imports_of_files_form_no_circle() -> None:
    graph = {
        str(x.relative_to(SOURCE)): {str(y.relative_to(SOURCE)) for y in imports(x)} for x in FILES
    }
    assert len(in_order(graph)) == len(FILES)


def test_imports_of_rooms_go_one_way() -> None:
    """Tensors below, then rules, then autograd, then what users call."""
    graph: dict[str, set[str]] = {}
    for path in FILES:
        rooms = [x.relative_to(SOURCE).parts[0] for x in (path, *imports(path))]
        graph.setdefault(rooms[0], set()).update(set(rooms[1:]) - {rooms[0]})
    order = in_order(graph)
    ranks = [order.index(x) for x in ("_blocks", "rules", "_capture", "_jacobian", "_engine")]
    assert ranks == sorted(ranks)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_are_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES


def test_folders_have_few_files() -> None:
    """But for rules, of which there is one for each family of functions."""
    for folder in {path.parent for path in FILES} - {SOURCE / "rules"}:
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= MOST_FILES, folder


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=lambda x: x.name)
def test_the_readme_of_a_folder_names_its_files(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    names = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    if folder.name == "rules":  # whose `__init__` lists all families
        names = {name for name in names if name.startswith("_")}
    missing = [name for name in names if f"`{name}`" not in text]
    assert not missing


def named(path: Path) -> Iterator[tuple[str, str]]:
    """Classes, functions and types that a file names for others, each with its meaning.

    Variables of types have one letter, which says nothing in any file.
    """
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            name, meaning = node.name, str(path)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, meaning = node.targets[0].id, ast.unparse(node.value)  # of types
        else:
            continue
        if not name.startswith("_") and len(name) > 1:
            yield name, meaning


def test_one_name_has_one_meaning() -> None:
    meanings: dict[str, set[str]] = {}
    for path in FILES:
        for name, meaning in named(path):
            meanings.setdefault(name, set()).add(meaning)
    assert not {name: found for name, found in meanings.items() if len(found) > 1}


def test_a_circle_is_found() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"one another: (a <- b <- a|b <- a <- b)"):
        in_order({"a": {"b"}, "b": {"a"}})


TESTS = Path(__file__).parents[1]
OPEN = [
    path
    for path in sorted(TESTS.rglob("*.py"))
    if not any(x.startswith("_") for x in path.relative_to(TESTS).parts[:-1])
]


@pytest.mark.parametrize("path", OPEN, ids=lambda path: str(path.relative_to(TESTS)))
def test_private_names_are_used_in_the_tests_of_their_folder_alone(path: Path) -> None:
    """Tests of what users see hold whatever the private parts become."""
    used = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "autogram":
            names = [*(node.module or "").split("."), *[alias.name for alias in node.names]]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("engine", "jacobian"):
            names = [node.attr]
        else:
            continue
        is_own = path.parent.name in names  # as of `autogram.rules`, in `rules`
        used += [] if is_own else [x for x in names if x.startswith("_") and x[1:2] != "_"]
    assert used == []


FACTORIES = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "logspace", "ones", "rand"}
FACTORIES |= {"randint", "randn", "randperm", "tensor", "zeros"}


def test_each_new_tensor_is_on_a_device_that_is_named() -> None:
    """The default device may be a GPU, where nothing of the host is to be."""
    unnamed = [
        f"{path.relative_to(SOURCE)}:{call.lineno}"
        for path in FILES
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) in {f"torch.{name}" for name in FACTORIES}
        and not {keyword.arg for keyword in call.keywords} & {"device", None}
    ]
    assert unnamed == []
