"""Puts a changed module of the runtime in the place of the shipped one, and executes anew what depends on it.

Only modules of `g4conformance.runtime` are executed anew. Whoever imported one before, the checks and what the buffers
are expected to hold among them, keeps the functions of the unchanged one: a mutant must not change its own judge.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = "g4conformance.runtime"
FOLDER = Path(importlib.import_module(PACKAGE).__path__[0])


def source_of(module: str) -> str:
    """The shipped source of a module of the runtime, such as `cache`."""
    return (FOLDER / f"{module}.py").read_text()


def install(module: str, tree: ast.Module) -> None:
    """Executes `tree` as the runtime's `module`, then every module that depends on it.

    Raises:
        Exception: whatever a changed module raises when it is imported.
    """
    for name in dependents(module):
        _execute(name, tree if name == module else ast.parse(source_of(name)))


def dependents(module: str) -> list[str]:
    """`module` and those of the runtime's modules that import it, however indirectly, each after what it imports."""
    imports = {path.stem: _imports(ast.parse(path.read_text())) for path in FOLDER.glob("*.py")}
    affected = {module}
    for name in (order := list(TopologicalSorter(imports).static_order())):
        if imports[name] & affected:
            affected.add(name)
    return [name for name in order if name in affected]


def _imports(tree: ast.Module) -> set[str]:
    """Which of the runtime's modules a module imports."""
    names = [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {name.removeprefix(f"{PACKAGE}.") for name in names if name.startswith(f"{PACKAGE}.")}


def _execute(name: str, tree: ast.Module) -> None:
    full_name = f"{PACKAGE}.{name}"
    spec = importlib.util.find_spec(full_name)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[full_name] = module
    setattr(sys.modules[PACKAGE], name, module)
    exec(compile(tree, str(FOLDER / f"{name}.py"), "exec"), module.__dict__)
