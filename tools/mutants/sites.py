"""Where a module's source can be changed: its expressions and statements, each with the way to it.

What does not decide what the program computes is no site: imports, annotations, docstrings, and everything in a `raise`
statement, for a message may say what it likes.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

Node = TypeVar("Node", bound=ast.AST)

Step = tuple[str, int | None]  # a field of a node, and which of the field's nodes if it holds a list

MODULE = "<module>"
_SKIPPED_NODES = (ast.Import, ast.ImportFrom, ast.Raise)
_SKIPPED_FIELDS = ("annotation", "returns", "bases", "type_params")


@dataclass(frozen=True)
class Site:
    """One node of a module.

    Attributes:
        parents: the nodes around it, the module first.
        steps: the way to the node from the module.
        function: names of the classes and functions around it, joined by dots.
        imported: the names that the module's imports bind.
    """

    node: ast.AST
    parents: tuple[ast.AST, ...]
    steps: tuple[Step, ...]
    function: str
    imported: frozenset[str]

    @property
    def parent(self) -> ast.AST:
        return self.parents[-1]

    @property
    def field(self) -> str:
        """The parent's field that holds the node."""
        return self.steps[-1][0]


def sites(tree: ast.Module) -> Iterator[Site]:
    """Every site of `tree`, in the order of the source."""
    imported = frozenset(alias.asname or alias.name for node in tree.body for alias in _imports(node))
    yield from _below((tree,), (), "", imported)


def changed(node: Node, **fields: Any) -> Node:
    """A copy of `node` with other values of `fields`."""
    copied = copy.copy(node)
    for name, value in fields.items():
        setattr(copied, name, value)
    return copied


def with_child(parent: Node, step: Step, child: ast.AST) -> Node:
    """A copy of `parent` that has `child` at `step`."""
    name, index = step
    if index is None:
        return changed(parent, **{name: child})
    children = list(getattr(parent, name))
    children[index] = child
    return changed(parent, **{name: children})


def replaced(node: Node, steps: tuple[Step, ...], replacement: ast.AST) -> Node:
    """A copy of `node` with `replacement` at the end of `steps`; what is not on the way is shared."""
    (name, index), *rest = steps
    if not rest:
        return with_child(node, (name, index), replacement)
    child = getattr(node, name) if index is None else getattr(node, name)[index]
    return with_child(node, (name, index), replaced(child, tuple(rest), replacement))


def _below(
    parents: tuple[ast.AST, ...], steps: tuple[Step, ...], function: str, imported: frozenset[str]
) -> Iterator[Site]:
    for step, node in _children(parents[-1]):
        if isinstance(node, _SKIPPED_NODES) or _is_docstring(node) or _is_for_type_checkers(node):
            continue
        way, inside = (*steps, step), function
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            inside = f"{function}.{node.name}".removeprefix(".")
        yield Site(node, parents, way, inside or MODULE, imported)
        yield from _below((*parents, node), way, inside, imported)


def _children(parent: ast.AST) -> Iterator[tuple[Step, ast.AST]]:
    for name, value in ast.iter_fields(parent):
        if name in _SKIPPED_FIELDS:
            continue
        if isinstance(value, ast.AST):
            yield (name, None), value
        elif isinstance(value, list):
            yield from (((name, i), item) for i, item in enumerate(value) if isinstance(item, ast.AST))


def _imports(node: ast.stmt) -> list[ast.alias]:
    return node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else []


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
