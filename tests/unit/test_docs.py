"""The documents describe what is: links, packages, errors, commands and options agree with the code."""

import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM
from typer.main import get_command

from slackwater import errors
from slackwater.cli.main import app
from slackwater.clock import SystemClock
from slackwater.engine.torch.architectures import MEMORY
from slackwater.engine.torch.engine import TorchEngine
from slackwater.ids import BootId, ReplicaId, RunId, Version
from slackwater.publish.lineage import read_manifest
from slackwater.publish.publisher import Publisher
from slackwater.replica.canary import canary_off
from slackwater.testing.bucket import MemoryBucket
from slackwater.testing.tiny_model import write_tiny_model
from slackwater.weights.source import FolderSource
from slackwater.weights.state_dict import StateDictSource

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text("utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_the_first_run_stands_by_line_forty() -> None:
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert any("make demo" in line for line in lines[:40])


def test_every_package_has_its_line_in_the_map() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    packages = {path.parent.name for path in (ROOT / "src" / "slackwater").glob("*/__init__.py")}
    rows = set(re.findall(r"^\| `([a-z]+)` \|", text, re.MULTILINE))
    assert rows >= packages
    assert rows - packages <= {"rollout", "weights", "api", "engine", "replica", "hotload", "router", "trainer"}


def test_every_error_is_on_the_error_page() -> None:
    text = (ROOT / "docs" / "errors.md").read_text("utf-8")
    classes = [
        value for value in vars(errors).values() if isinstance(value, type) and value.__module__ == errors.__name__
    ]
    listed = set(re.findall(r"^\| `(\w+)` \| `(\w+)`", text, re.MULTILINE))
    assert listed == {(kind.kind, kind.__name__) for kind in classes if kind is not errors.SlackwaterError}


def test_every_option_is_on_the_settings_page() -> None:
    text = (ROOT / "docs" / "config.md").read_text("utf-8")
    commands = get_command(app).commands.values()  # type: ignore[attr-defined]  # a group has commands
    shown = [command for command in commands if not command.hidden]
    options = {
        name
        for command in shown
        for parameter in command.params
        if parameter.param_type_name == "option" and not parameter.hidden
        for name in parameter.opts
        if name.startswith("--") and name != "--help"
    }
    assert options
    assert not {name for name in options if f"`{name}`" not in text}
    assert not {command.name for command in shown if f"`{command.name}`" not in text}


def test_every_goal_of_the_makefile_that_the_docs_name_exists() -> None:
    goals = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"`make ([a-z-]+)", page.read_text("utf-8")))
        assert named <= goals, page


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = sorted(int(path.name[:4]) for path in (ROOT / "docs" / "decisions").glob("*.md"))
    assert numbers == list(range(1, len(numbers) + 1))


def test_every_architecture_is_in_the_table_by_what_it_remembers() -> None:
    text = (ROOT / "docs" / "engine.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| (rows|states|nothing) \| (.*) \|$", text, re.MULTILINE))
    told = {name: memory for memory, names in rows.items() for name in re.findall(r"`(\w+)`", names)}
    assert told == {name: memory.value for name, memory in MEMORY.items()}


async def test_the_embedded_engine_meets_the_canary_that_the_page_on_checkpoints_makes(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "checkpoints.md").read_text("utf-8")
    snippet = re.search(r"^## Canaries$.*?^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert snippet
    folder, bucket, run = write_tiny_model(tmp_path / "model"), MemoryBucket(), RunId("run")
    publisher = Publisher(bucket, run)
    publisher.publish(FolderSource(folder), step=0)
    names = {
        "prompt": list(b"Once upon a time"),
        "model": AutoModelForCausalLM.from_pretrained(folder, dtype="auto"),
        "publisher": publisher,
        "StateDictSource": StateDictSource,
        "step": 1,
    }
    exec(snippet[1], names)  # it is the page that is tried
    manifest = read_manifest(bucket, run, Version(1))
    assert manifest.canary == names["canary"] is not None
    engine = await TorchEngine.open(
        folder, version=Version(1), run=run, replica=ReplicaId("r0"), boot=BootId("b"), slots=1
    )
    try:
        assert await canary_off(engine, manifest, SystemClock(), 60) is None
    finally:
        await engine.close()
