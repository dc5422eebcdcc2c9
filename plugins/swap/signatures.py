"""How a module's forward is called and what it returns, read from its signature and its source."""

import ast
import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

from torch import nn

UNREAD = "?"
WEIGHTS = ("att", "weight", "prob", "score", "none")  # in the names of what an adapter returns None for


@dataclass(frozen=True)
class Signature:
    """Of a forward.

    names     arguments that may stand without their name, in order
    required  those that must be given, the first one apart
    returns   None if it returns a tensor, else the expressions of the tuple that it returns; UNREAD where they can't be told
    """

    names: tuple[str, ...]
    required: tuple[str, ...]
    returns: tuple[str, ...] | None

    @classmethod
    def of(cls, module: nn.Module) -> "Signature":
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        given = parameters(module)
        names = [p.name for p in given if p.kind in positional]
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needed = [p.name for p in given if p.default is p.empty and p.kind not in variable]
        return cls(tuple(names), tuple(name for name in needed if name not in names[:1]), _returns(module))

    def others(self) -> list[str]:
        """What is returned beside y and is not attention's weights."""
        beside = (self.returns or ())[1:]
        return [name for name in beside if not any(word in name.lower() for word in WEIGHTS)]


def parameters(module: nn.Module) -> list[inspect.Parameter]:
    """Of its forward; none where they can't be told, as of what is written in C."""
    try:
        return list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return []


def _returns(module: nn.Module, cls: type | None = None) -> tuple[str, ...] | None:
    """What the forward of `cls` returns, by default that of the module's own class."""
    cls = cls or type(module)
    forward: Any = next(each.__dict__["forward"] for each in cls.__mro__ if "forward" in each.__dict__)
    if forward is nn.MultiheadAttention.forward:  # whose fast way is in C
        return ("attn_output", "attn_weights")
    try:
        source = inspect.getsource(inspect.unwrap(forward))
        (function,) = ast.parse(textwrap.dedent(source)).body
    except (OSError, TypeError, SyntaxError):  # written in C, or at a prompt; a part of a statement
        return None
    found: list[tuple[str, ...] | None] = []
    for node in _own_nodes(function):
        if isinstance(node, ast.Return) and node.value is not None:
            found += _values(node.value, function, module, cls)
    # the shortest: the others come if weights are asked for, which an adapter refuses
    return min(found, key=lambda names: 0 if names is None else len(names), default=None)


def _values(
    value: ast.expr, function: ast.stmt, module: nn.Module, cls: type
) -> list[tuple[str, ...] | None]:
    """What an expression may be: the parts of a tuple, or None for a tensor."""
    if isinstance(value, ast.IfExp):
        return _values(value.body, function, module, cls) + _values(value.orelse, function, module, cls)
    if isinstance(value, ast.Tuple):
        return [tuple(map(ast.unparse, value.elts))]
    if isinstance(value, ast.Name):
        assigned = [
            node.value
            for node in _own_nodes(function)
            if isinstance(node, ast.Assign) and any(ast.unparse(t) == value.id for t in node.targets)
        ]
        tuples = [a for a in assigned if isinstance(a, (ast.Tuple, ast.IfExp))]
        return [v for a in tuples for v in _values(a, function, module, cls)] or [None]
    if isinstance(value, ast.BinOp):
        sides = _values(value.left, function, module, cls) + _values(value.right, function, module, cls)
        return [("y", UNREAD)] if any(side is not None for side in sides) else [None]
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "super().forward":
        # where this forward stands, and the next one above
        own = [each for each in cls.__mro__ if "forward" in each.__dict__]
        return [_returns(module, own[1])]
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        called = getattr(module, value.func.attr, None) if ast.unparse(value.func.value) == "self" else None
        return [_returns(called)] if isinstance(called, nn.Module) else [None]
    return [None]


def _own_nodes(function: ast.stmt) -> list[ast.AST]:
    """The nodes of a function without those of functions inside of it."""
    nodes: list[ast.AST] = []
    rest = list(ast.iter_child_nodes(function))
    while rest:
        node = rest.pop()
        nodes.append(node)
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            rest += ast.iter_child_nodes(node)
    return nodes
