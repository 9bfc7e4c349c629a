"""The import graph of the rooms: arrows go down, stages do not know each other, scripts are thin."""

import ast
from pathlib import Path

import pytest

from scripts.lib.ground.provenance import project_imports

REPO = Path(__file__).parents[1]
LIB = REPO / "scripts/lib"
FLOORS = [
    {"ground"},
    {"chat", "sources", "fixtures", "watching", "sharing"},
    {"targets", "formats", "engines", "serving"},
    {"eagle3", "states", "generation", "mixing", "vocabulary", "inspecting"},
    {"training", "speculation", "calibrating"},
    {"doctor"},
    {"benchmark"},
    {"reporting"},
    {"deploying"},
]
FLOOR = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
# Two rooms of one floor that need each other's lower part: who may read whom.
SIDEWAYS = {("states", "eagle3")}
STAGES = ["target", "fetch", "prepare", "plan", "generate", "encode", "merge", "vocab", "hidden", "train", "benchmark", "report", "deploy"]


def room_of(path: str) -> str | None:
    """The room of a module path below the repository, None outside the rooms."""
    parts = Path(path).parts
    return parts[2] if len(parts) > 3 and parts[:2] == ("scripts", "lib") else None


def arrows() -> set[tuple[str, str]]:
    """Every (room, imported room) of the project."""
    found = set()
    for file in LIB.rglob("*.py"):
        path = str(file.relative_to(REPO))
        found |= {(room_of(path), room_of(other)) for other in project_imports(path)}
    return {(a, b) for a, b in found if a and b and a != b}


def test_every_room_has_a_floor():
    rooms = {path.name for path in LIB.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms == set(FLOOR)


def test_imports_go_down():
    upward = {(a, b) for a, b in arrows() if FLOOR[b] >= FLOOR[a]}
    assert upward - SIDEWAYS == set()


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_has_one_name_everywhere(stage):
    rules = "\n".join(path.read_text() for path in (REPO / "rules").glob("*.smk"))
    assert f"rule {stage}:" in rules
    assert (REPO / f"scripts/{stage}.py").is_file()
    assert list((REPO / "tests").glob(f"test_{stage}*.py"))


@pytest.mark.parametrize("script", sorted((REPO / "scripts").glob("*.py")), ids=lambda path: path.stem)
def test_scripts_are_thin(script):
    assert len(script.read_text().splitlines()) <= 60


def test_no_module_is_imported_by_a_computed_name():
    for file in LIB.rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        names = {node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "") for node in calls}
        assert not names & {"import_module", "__import__"}, f"{file}: the code closure cannot see it"
