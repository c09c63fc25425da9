"""The rules of the house that a program can check: one door to the driver, and imports that run one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import drvkit

PACKAGE = Path(drvkit.__file__).resolve().parent

# In the order in which data goes through them: each imports only from those before it.
ORDER = (
    *(
        "native",
        "driver",
        "lifetime",
        "device",
        "dlpack",
        "scalars",
        "memory",
        "source",
        "build",
        "signature",
        "attributes",
    ),
    *(
        "module",
        "node",
        "show",
        "graph",
        "replay",
        "buckets",
        "world",
        "rendezvous",
        "symmetric",
        "channel",
        "nccl",
        "records",
        "rope",
        "quants",
        "gguf",
        "models",
        "weights",
        "account",
        "ref",
        "ops",
        "latent_attention",
        "llama",
        "cpu",
        "pytest_plugin",
    ),
)


def imports(path: Path) -> set[str]:
    """The modules of drvkit that a file imports when it is imported itself."""
    found = set()
    for node in ast.parse(path.read_text()).body:  # what stands in functions or under TYPE_CHECKING does not count
        if isinstance(node, ast.ImportFrom) and node.level:
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "drvkit":
            found.add((node.module or "").partition(".")[2].split(".")[0])
    return found


def test_every_file_has_its_place_in_the_order() -> None:
    files = {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert files - {"__init__", "__main__"} == set(ORDER)


def test_imports_run_one_way() -> None:
    for place, name in enumerate(ORDER):
        single, folder = PACKAGE / f"{name}.py", PACKAGE / name
        if single.exists():
            assert imports(single) <= set(ORDER[:place]), name
        for path in folder.glob("*.py"):
            inside = {other.stem for other in folder.iterdir() if other.suffix == ".py" or other.is_dir()} | set(
                vars(__import__(f"drvkit.{name}", fromlist=[""]))
            )
            assert imports(path) <= set(ORDER[:place]) | inside, path.name


def test_only_the_door_imports_the_bindings() -> None:
    importers = {
        path.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cuda.bindings")
    }
    assert importers == {"driver.py", "base.py"}  # base.py: the CPU device has the enums and structs of the bindings


def test_importing_drvkit_loads_no_driver() -> None:
    code = "import sys, drvkit; sys.exit(any('cuda.bindings' in name for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0
