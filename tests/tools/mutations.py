"""Copies of a kernel that each lack one synchronisation statement, for `gluon_emulator`.

Statements are found by what they call, in the kernel and in all jitted functions that it reaches; the names
of the kernel's own helpers do not matter.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import triton

SYNCHRONISATION = {
    "mbarrier.init",
    "mbarrier.wait",
    "mbarrier.arrive",
    "mbarrier.expect",
    "fence_async_shared",
    "gl.thread_barrier",
    "tma.store_wait",
    "warpgroup_mma_wait",
}

HARDWARE_BARRIER = "bar."
"""Inline assembly of a hardware barrier begins with this."""


class Mutation(NamedTuple):
    """A function of a kernel without one of its statements."""

    function: FunctionType
    line: int
    statement: str
    code: CodeType

    @property
    def name(self) -> str:
        return f"{self.function.__name__}: {self.statement}"


def functions_of(kernel: Any) -> list[FunctionType]:
    """The kernel and all jitted functions that it calls, directly or not."""
    reached: list[FunctionType] = []
    waiting = [kernel.fn]
    while waiting:
        function = waiting.pop()
        if function in reached:
            continue
        reached.append(function)
        for name in function.__code__.co_names + tuple(_names_inside(function.__code__)):
            value = function.__globals__.get(name)
            if isinstance(value, triton.JITFunction):
                waiting.append(value.fn)
    return reached


def mutations(kernel: Any) -> list[Mutation]:
    """One for each synchronisation statement; a call of a helper that only synchronises is one, too."""
    functions = functions_of(kernel)
    trees = {function: _tree(function) for function in functions}
    helpers = set(SYNCHRONISATION)
    while new := {f.__name__ for f in functions if _only_synchronises(trees[f], helpers)} - helpers:
        helpers |= new
    made = []
    for function in functions:
        for number, node in enumerate(_statements(trees[function])):
            if _synchronises(node, helpers):
                code = _without(function, number)
                made.append(Mutation(function, node.lineno, " ".join(ast.unparse(node).split()), code))
    return made


def _names_inside(code: CodeType) -> list[str]:
    """Global names in comprehensions of a function."""
    nested = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return [name for inner in nested for name in (*inner.co_names, *_names_inside(inner))]


def _tree(function: FunctionType) -> ast.FunctionDef:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    return tree


def _statements(tree: ast.FunctionDef) -> list[ast.stmt]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node is not tree]


def _called(node: ast.stmt) -> ast.Call | None:
    value = node.value if isinstance(node, ast.Expr | ast.Assign) else None
    return value if isinstance(value, ast.Call) else None


def _synchronises(node: ast.stmt, helpers: set[str]) -> bool:
    call = _called(node)
    if call is None:
        return False
    if ast.unparse(call.func) in helpers:
        return True
    texts = [part.value for part in ast.walk(call) if isinstance(part, ast.Constant)]
    return any(isinstance(text, str) and text.startswith(HARDWARE_BARRIER) for text in texts)


def _only_synchronises(tree: ast.FunctionDef, helpers: set[str]) -> bool:
    """True if a function only waits or signals, perhaps under a condition, and returns nothing."""
    statements = [node for node in _statements(tree) if not isinstance(node, ast.If)]
    if ast.get_docstring(tree) is not None:
        statements.remove(tree.body[0])
    return bool(statements) and all(_synchronises(node, helpers) for node in statements)


def _without(function: FunctionType, number: int) -> CodeType:
    """The code of a function, its statement number `number` replaced by nothing."""
    tree = _tree(function)
    gone = _statements(tree)[number]
    for parent in ast.walk(tree):
        for field in ("body", "orelse"):
            block = getattr(parent, field, None)
            if isinstance(block, list) and gone in block:
                block[block.index(gone)] = ast.copy_location(ast.Pass(), gone)
    tree.decorator_list = []
    module = compile(ast.fix_missing_locations(ast.Module([tree], [])), f"<{function.__name__}>", "exec")
    return next(constant for constant in module.co_consts if isinstance(constant, CodeType))
