"""What can be changed at one site: each mutator yields nodes that could stand there instead.

A change must be one that a person could make and a program could run. What cannot run at all, such as the difference of
two texts, is not made: it would only raise the score.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from itertools import pairwise

from tools.mutants.sites import Site, changed

Mutator = Callable[[Site], Iterator[ast.AST]]

MUTATORS: dict[str, Mutator] = {}

ARITHMETIC: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub, ast.Mult),
    ast.Sub: (ast.Add, ast.Mult),
    ast.Mult: (ast.Div, ast.Add),
    ast.Div: (ast.Mult, ast.FloorDiv),
    ast.FloorDiv: (ast.Div, ast.Mult),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr, ast.BitXor),
    ast.BitOr: (ast.BitAnd, ast.BitXor),
}
COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt, ast.NotEq),
    ast.LtE: (ast.Lt, ast.Gt, ast.Eq),
    ast.Gt: (ast.GtE, ast.Lt, ast.NotEq),
    ast.GtE: (ast.Gt, ast.Lt, ast.Eq),
    ast.Eq: (ast.NotEq, ast.LtE, ast.GtE),
    ast.NotEq: (ast.Eq, ast.Lt, ast.Gt),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ORDERINGS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)

_PAIRS = (("min", "max"), ("amin", "amax"), ("any", "all"), ("argmin", "argmax"), ("zeros", "ones"))
_LIKE_PAIRS = tuple((f"{one}_like", f"{other}_like") for one, other in _PAIRS if one == "zeros")
FUNCTIONS = {name: other for pair in (*_PAIRS, *_LIKE_PAIRS) for name, other in (pair, pair[::-1])}


def mutator(kind: str) -> Callable[[Mutator], Mutator]:
    def register(function: Mutator) -> Mutator:
        MUTATORS[kind] = function
        return function

    return register


@mutator("arithmetic")
def arithmetic(site: Site) -> Iterator[ast.AST]:
    """Another operator, also in `x += y`; a sign or an inversion dropped."""
    node = site.node
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and not any(map(_is_text, ast.iter_child_nodes(node))):
        yield from (changed(node, op=other()) for other in ARITHMETIC.get(type(node.op), ()))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Invert)):
        yield node.operand


@mutator("comparison")
def comparison(site: Site) -> Iterator[ast.AST]:
    """Another comparison; texts and None are only compared for being the same."""
    node = site.node
    if not isinstance(node, ast.Compare):
        return
    unordered = any(_is_text(side) or _is_tuple(side) for side in (node.left, *node.comparators))
    for i, operator in enumerate(node.ops):
        for other in COMPARISONS[type(operator)]:
            if not (unordered and other in _ORDERINGS):
                yield changed(node, ops=[*node.ops[:i], other(), *node.ops[i + 1 :]])


@mutator("logic")
def logic(site: Site) -> Iterator[ast.AST]:
    """`and` for `or`, one side of `and`, `or`, `&` or `|` dropped, a `not` dropped."""
    node = site.node
    if isinstance(node, ast.BoolOp):
        yield changed(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        for i in range(len(node.values)):
            rest = [*node.values[:i], *node.values[i + 1 :]]
            yield rest[0] if len(rest) == 1 else changed(node, values=rest)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
        yield from (node.left, node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand


@mutator("condition")
def condition(site: Site) -> Iterator[ast.AST]:
    """The condition of a branch, an early end or a filter holds always, or never."""
    if site.field in ("test", "ifs") and not isinstance(site.node, ast.Constant):
        yield from (ast.Constant(True), ast.Constant(False))


@mutator("number")
def number(site: Site) -> Iterator[ast.AST]:
    """A number is one more, one less, or zero."""
    value = site.node.value if isinstance(site.node, ast.Constant) else None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield from (ast.Constant(other) for other in (value + 1, value - 1, type(value)(0)))


@mutator("flag")
def flag(site: Site) -> Iterator[ast.AST]:
    """True for False."""
    if isinstance(site.node, ast.Constant) and isinstance(site.node.value, bool):
        yield ast.Constant(not site.node.value)


@mutator("text")
def text(site: Site) -> Iterator[ast.AST]:
    """Another text, also as a part of a formatted one."""
    if isinstance(site.node, ast.Constant) and isinstance(site.node.value, str):
        yield ast.Constant(f"{site.node.value}?")


@mutator("slice")
def bounds(site: Site) -> Iterator[ast.AST]:
    """A bound of a slice is dropped, or is one more or less."""
    node = site.node
    if not isinstance(node, ast.Slice):
        return
    for side in ("lower", "upper"):
        bound = getattr(node, side)
        if bound is None:
            continue
        yield changed(node, **{side: None})
        if not isinstance(bound, ast.Constant):  # those are numbers
            yield from (changed(node, **{side: one}) for one in _neighbours(bound))


@mutator("index")
def index(site: Site) -> Iterator[ast.AST]:
    """The next or the last element instead of the one asked for by a name or a calculation."""
    node = site.node
    if isinstance(node, ast.Subscript) and isinstance(node.slice, (ast.Name, ast.Attribute, ast.BinOp)):
        yield from (changed(node, slice=one) for one in _neighbours(node.slice))


@mutator("swap")
def swap(site: Site) -> Iterator[ast.AST]:
    """Two neighbouring arguments change places: positional ones, or the values of named ones."""
    node = site.node
    if not isinstance(node, ast.Call):
        return
    yield from (changed(node, args=args) for args in _swapped(node.args))
    for values in _swapped([keyword.value for keyword in node.keywords]):
        pairs = zip(node.keywords, values, strict=True)
        yield changed(node, keywords=[changed(keyword, value=value) for keyword, value in pairs])


@mutator("order")
def order(site: Site) -> Iterator[ast.AST]:
    """Two neighbouring elements of a tuple or a list change places: returned, unpacked into, or indexed with."""
    if isinstance(site.node, (ast.Tuple, ast.List)):
        yield from (changed(site.node, elts=elements) for elements in _swapped(site.node.elts))


@mutator("call")
def dropped_call(site: Site) -> Iterator[ast.AST]:
    """What a function was given, first or last, or what a method was called on, instead of what it yields."""
    node = site.node
    if not isinstance(node, ast.Call) or isinstance(site.parent, ast.Expr) or _is_class(node.func):
        return
    if isinstance(node.func, ast.Attribute) and _is_method_of_value(node.func, bool(node.args), site.imported):
        yield node.func.value
    else:
        ends = (*node.args[:1], *node.args[1:][-1:])
        yield from (arg for arg in ends if not (isinstance(arg, ast.Starred) or _is_text(arg)))


@mutator("keyword")
def keyword(site: Site) -> Iterator[ast.AST]:
    """A named argument is left to its default."""
    node = site.node
    if isinstance(node, ast.Call):
        for i in range(len(node.keywords)):
            yield changed(node, keywords=[*node.keywords[:i], *node.keywords[i + 1 :]])


@mutator("statement")
def statement(site: Site) -> Iterator[ast.AST]:
    """A call for its effect is left out, or the writing of an attribute or an element.

    In a constructor every attribute is written because something reads it, which would only be seen to be missing.
    """
    node = site.node
    writes = isinstance(node, ast.Assign) and all(isinstance(t, (ast.Attribute, ast.Subscript)) for t in node.targets)
    if writes and site.function.endswith("__init__"):
        return
    if writes or isinstance(node, (ast.Expr, ast.AugAssign)):
        yield ast.Pass()


@mutator("function")
def function(site: Site) -> Iterator[ast.AST]:
    """The least for the greatest, any for all, ones for zeros."""
    node = site.node
    if site.field != "func":
        return
    if isinstance(node, ast.Name) and node.id in FUNCTIONS:
        yield changed(node, id=FUNCTIONS[node.id])
    if isinstance(node, ast.Attribute) and node.attr in FUNCTIONS:
        yield changed(node, attr=FUNCTIONS[node.attr])


def _neighbours(value: ast.expr) -> Iterator[ast.expr]:
    yield from (ast.BinOp(value, operator(), ast.Constant(1)) for operator in (ast.Add, ast.Sub))


def _swapped(items: list[ast.expr]) -> Iterator[list[ast.expr]]:
    for i, (one, other) in enumerate(pairwise(items)):
        if ast.dump(one) != ast.dump(other) and _is_text(one) == _is_text(other):
            yield [*items[:i], other, one, *items[i + 2 :]]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_tuple(node: ast.AST) -> bool:
    return isinstance(node, ast.Tuple)


def _is_class(function: ast.expr) -> bool:
    """Whether what is called is a class, by its name: what a constructor is given is no stand-in for what it makes."""
    return isinstance(function, ast.Name) and function.id[:1].isupper()


def _is_method_of_value(method: ast.Attribute, has_arguments: bool, imported: frozenset[str]) -> bool:
    """Whether `method` turns the value that it is called on into another: not what was imported, nor a part of `self`.

    Parts of `self` are called with what they turn into something else; without arguments they are that themselves.
    """
    root: ast.expr = method
    while isinstance(root, ast.Attribute):
        root = root.value
    if not isinstance(root, ast.Name):
        return ast.unparse(root) != "super()"
    if root.id in imported or ast.unparse(method.value) == "self":
        return False
    return root.id != "self" or not has_arguments
