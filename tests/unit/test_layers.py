"""Who may import whom: the table of ARCHITECTURE.md, held against the code."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "slackwater"
BASE = {"errors", "ids", "clock", "config", "telemetry"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "ids": {"errors"},
    "clock": set(),
    "config": {"errors", "ids"},
    "telemetry": {"errors", "ids"},
    "rollout": set(),
    "checkpoint": set(),
    "bucket": set(),
    "weights": {"checkpoint"},
    "api": {"rollout"},
    "publish": {"checkpoint", "weights", "bucket"},
    "delivery": {"checkpoint", "weights", "bucket"},
    "engine": {"rollout", "checkpoint", "weights"},
    "replica": {"delivery", "engine", "api", "rollout", "checkpoint", "weights"},
    "hotload": {"checkpoint", "bucket", "api"},
    "router": {"api", "rollout"},
    "fleet": {"replica", "router", "hotload"},
    "trainer": {"publish", "api", "rollout", "checkpoint", "weights"},
    "testing": {"rollout", "checkpoint", "bucket", "engine", "api", "weights", "hotload"},
    "dashboard": set(),
}
PURE = [
    "checkpoint", "rollout", "publish/plan.py", "publish/merge.py", "publish/naming.py", "publish/retention.py",
    "replica/swap.py", "replica/extent.py", "hotload/operation.py", "hotload/rollout.py", "hotload/groups.py",
    "hotload/keep.py", "hotload/lag.py", "hotload/witness.py", "hotload/recovery.py", "hotload/foreign.py",
    "router/policy.py", "router/pool.py", "router/resume.py",
    "engine/placement.py", "trainer/samples.py", "trainer/align.py",
]  # fmt: skip
IMPURE_IMPORTS = {"asyncio", "threading", "socket", "time", "torch", "aiohttp", "obstore", "starlette", "subprocess"}


@cache
def imported(path: Path) -> frozenset[str]:
    """Every module that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return frozenset(names)


def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT or path.stem != "__init__")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_its_package_may(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if package == "cli":
        return
    own = {name.split(".")[1] for name in imported(path) if name.startswith("slackwater.")}
    wrong = own - ALLOWED[package] - BASE - {package}
    assert not wrong, f"{path.relative_to(ROOT)} may not import {sorted(wrong)}"


@pytest.mark.parametrize("place", PURE)
def test_pure_modules_know_no_clock_socket_thread_or_torch(place: str) -> None:
    where = ROOT / place
    for path in where.rglob("*.py") if where.is_dir() else [where]:
        roots = {name.split(".")[0] for name in imported(path)}
        assert not roots & IMPURE_IMPORTS, f"{path.relative_to(ROOT)} is pure but imports {roots & IMPURE_IMPORTS}"
        waits = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Await)]
        assert not waits, f"{path.relative_to(ROOT)} is pure but awaits"


def test_the_compiler_is_known_where_kernels_and_instructions_are_made() -> None:
    compiling = {path for path in modules() if {name.split(".")[0] for name in imported(path)} & {"numba", "llvmlite"}}
    instructions = ROOT / "engine" / "torch" / "kernels"
    made = {instructions / name for name in ("tiles.py", "atomics.py", "transposing.py")}
    assert compiling == {ROOT / "checkpoint" / "jit.py", *made}


def test_the_check_sees_a_wrong_import(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def f() -> None:\n    from slackwater.engine import base\n")
    assert "slackwater.engine" in imported(wrong)


def test_nothing_unpickles() -> None:
    for path in modules():
        text = path.read_text("utf-8")
        roots = {name.split(".")[0] for name in imported(path)}
        assert not roots & {"pickle", "dill", "marshal", "shelve", "cloudpickle"}, path
        assert "torch.load(" not in text, path
        assert "trust_remote_code=True" not in text, path


def test_no_module_is_a_drawer() -> None:
    names = {path.stem for path in modules()} | {path.name for path in ROOT.rglob("*") if path.is_dir()}
    assert not names & {"utils", "util", "common", "helpers", "helper", "misc", "types"}
