"""The house rules that can be read from the sources: who imports whom, what is packed, and what no file may hold."""

import ast
import io
import re
import subprocess
import sys
import tarfile
import tokenize
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[1]
ROOMS: Final = ("validators", "adapters", "telemetry", "dashboards", "proxy")

MAY_IMPORT: Final = {
    "validators": {"validators"},
    "adapters": {"adapters", "validators"},
    "telemetry": {"telemetry", "validators"},
    "dashboards": set(),
    "proxy": set(ROOMS),
    "simulator": {"proxy.simulator"},
}
"""Which room may import which. The simulator judges by code of its own, so it stands apart."""

IMPURE: Final = {
    *("asyncio", "socket", "selectors", "ssl", "time", "datetime", "random", "secrets", "uuid", "threading"),
    *(
        "multiprocessing",
        "subprocess",
        "logging",
        "os",
        "pathlib",
        "tempfile",
        "sqlite3",
        "duckdb",
        "aiohttp",
    ),
}
"""What the pure rooms never touch: no clock, no chance, no disk, no network, no other thread."""

PROVIDERS: Final = re.compile(
    r"openai|anthropic|claude|\bgpt|gemini|mistral|deepseek|ollama|vllm|azure|bedrock|groq", re.IGNORECASE
)
WORK_MARKS: Final = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")


NOT_OURS = {"namespace", "__pycache__", ".sdks", "node_modules"}
"""Links, what Python makes, and what is installed below tests/."""


def sources(*folders: str) -> list[Path]:
    """The Python files of these folders, links left out."""
    return [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not NOT_OURS & set(path.parts)
    ]


def room(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return "simulator" if parts[:2] == ("proxy", "simulator") else parts[0]


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(module, how many dots) of every import anywhere in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((name.name, 0) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module == "turngate":  # a room, or the package's own (`__version__`)
                rooms = [name.name for name in node.names if name.name in ROOMS]
                yield from ((f"turngate.{name}", node.level) for name in rooms or [""])
            else:
                yield module, node.level


CODE = sources(*ROOMS)
ALL = sources(*ROOMS, "tests")


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_sources_are_found() -> None:
    assert {room(path) for path in CODE} == set(MAY_IMPORT)
    assert len(CODE) > 30


@pytest.mark.parametrize("path", CODE, ids=named)
def test_a_room_imports_only_the_rooms_it_may(path: Path) -> None:
    allowed = MAY_IMPORT[room(path)]
    for module, _ in imports(path):
        if module.startswith("turngate.") and module != "turngate.":
            inner = module.removeprefix("turngate.")
            assert any(inner == name or inner.startswith(f"{name}.") for name in allowed), module


@pytest.mark.parametrize("path", ALL, ids=named)
def test_imports_are_absolute_and_name_the_package(path: Path) -> None:
    for module, dots in imports(path):
        assert dots == 0, module
        assert module.split(".")[0] not in ROOMS, f"{module}: import turngate.{module}"


@pytest.mark.parametrize("path", sources("validators", "adapters"), ids=named)
def test_the_pure_rooms_know_no_clock_chance_disk_or_network(path: Path) -> None:
    assert not {module.split(".")[0] for module, _ in imports(path)} & IMPURE
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert not {call.func.id for call in calls if isinstance(call.func, ast.Name)} & {
        "open",
        "print",
        "input",
        "eval",
    }


@pytest.mark.parametrize("path", ALL, ids=named)
def test_every_file_says_what_it_is_for(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring is not None
    assert len(docstring.splitlines()[0]) >= 10


@pytest.mark.parametrize("path", ALL, ids=named)
def test_nothing_is_left_to_be_done_and_nothing_is_swallowed(path: Path) -> None:
    text = path.read_text()
    if path != Path(__file__):
        assert not WORK_MARKS.search(text)
    handlers = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ExceptHandler)]
    assert all(handler.type is not None for handler in handlers), "a bare except"


def code_without_comments(path: Path) -> str:
    """Names, operators and strings of a file, without comments and docstrings."""
    tree = ast.parse(path.read_text())
    documented = {
        node.value.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return " ".join(
        token.string
        for token in tokens
        if token.type != tokenize.COMMENT
        and not (token.type == tokenize.STRING and token.start[0] in documented)
    )


@pytest.mark.parametrize("path", sources("validators"), ids=named)
def test_the_rules_name_no_provider(path: Path) -> None:
    assert not PROVIDERS.findall(code_without_comments(path))


def test_the_search_for_provider_names_would_find_one() -> None:
    assert PROVIDERS.findall(code_without_comments(ROOT / "adapters" / "levels.py"))


# -- the package ----------------------------------------------------------------------------------------------------

PYPROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS: Final[dict[str, Any]] = PYPROJECT["tool"]["setuptools"]


def package_of(folder: Path) -> str:
    parts = folder.relative_to(ROOT).parts
    return "turngate" if parts == ("proxy", "_root") else ".".join(("turngate", *parts))


def test_the_packages_are_the_folders_with_code() -> None:
    assert sorted(SETUPTOOLS["packages"]) == sorted({package_of(path.parent) for path in CODE})
    assert all((ROOT / folder / "__init__.py").is_file() for folder in SETUPTOOLS["package-dir"].values())


def test_every_data_file_is_packed() -> None:
    """What lies in the rooms and is neither code nor made by tools must be named as package data."""
    packed = {
        path
        for package, patterns in SETUPTOOLS["package-data"].items()
        for pattern in patterns
        for path in folder_of(package).glob(pattern)
    }
    found = {
        path
        for name in ROOMS
        for path in (ROOT / name).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc") and "__pycache__" not in path.parts
    }
    assert {named(path) for path in packed if path.is_file()} == {named(path) for path in found}


def folder_of(package: str) -> Path:
    inner = package.removeprefix("turngate").lstrip(".")
    return ROOT / inner.replace(".", "/") if inner else ROOT / "proxy" / "_root"


def test_every_room_can_be_checked_under_its_installed_name() -> None:
    links = ROOT / "tests" / "namespace" / "turngate"
    assert {link.name for link in links.iterdir()} >= set(ROOMS)
    for name in ROOMS:
        assert (links / name).resolve() == ROOT / name


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel and source distribution, built from a copy so that nothing is left behind in the tree."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a checkout: the package is not built from here")
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        if path.is_file() and not name.startswith("tests/"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Warning" not in done.stderr
    return out


def test_the_wheel_holds_one_top_level_name_and_everything_that_is_read_at_run_time(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"turngate"}
    assert "turngate/py.typed" in names
    scenarios = {path.name for path in (ROOT / "proxy" / "simulator" / "scenarios").iterdir()}
    assert {f"turngate/proxy/simulator/scenarios/{name}" for name in scenarios} <= set(names)
    inside = {name.removeprefix("turngate/") for name in names if name.endswith(".py")}
    wanted = {named(path).removeprefix("proxy/_root/") for path in CODE}
    assert inside == wanted


def test_the_wheel_names_its_command_and_licence(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    assert "turngate = turngate.proxy.cli:main" in archive.read(entry_points).decode()
    assert any(name.endswith("LICENSE") for name in archive.namelist())


def test_the_source_distribution_holds_what_it_is_built_from(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {named(path) for path in CODE} | {"pyproject.toml", "README.md", "LICENSE"} <= names
