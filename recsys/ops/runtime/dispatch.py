"""Chooses the implementation of an op for each call, and explains the choice.

Every op has a list of backends, fastest first and `reference` last. A backend is the module `<op
package>.<backend>` with `run(...)` and, unless it takes every call, `supports(facts) -> Support`. A backend
whose module needs Triton answers by `supports_<backend>(facts)` in the op's package instead, which works on
every machine; its module is imported to run, and ahead where a GPU can run it. `facts` are the op's static
facts (device, dtype, sizes, kind of mask), never tensor values, so the same question can be asked when a
config is loaded.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from recsys.ops.runtime import triton_support
from recsys.ops.runtime.triton_support import SUPPORTED, Support

logger = logging.getLogger(__name__)

FORCED_BACKEND = os.environ.get("RECSYS_BACKEND")
"""Backend that replaces "auto" in every op that has a backend of this name; for debugging."""

EXPLAIN = "explain"
"""Name in place of a backend with which `Op.select` raises what `explain` returns."""

_OPS: dict[str, Op] = {}

_MODULES = {"sm90": "hopper"}
"""Module names of the backends whose module has a different name."""

_PRELOADS = {"triton": triton_support.preload, "sm90": triton_support.preload_gluon}
"""Functions that import the modules of kernels ahead, by backend."""


@dataclass(frozen=True)
class Explanation:
    """Answers of an op's backends about one call, in the order in which "auto" asks them."""

    op: str
    rows: tuple[tuple[str, Support], ...]

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows)
        lines = [
            f"  {name:<{width}}  {'usable' if support.ok else 'no: ' + support.reason}"
            for name, support in self.rows
        ]
        return "\n".join([self.op, *lines])


class _Explained(Exception):
    """Carries the answer to `explain` out of the public function of an op, whose checks it needs."""

    def __init__(self, explanation: Explanation) -> None:
        super().__init__(str(explanation))
        self.explanation = explanation


class Op:
    """An op: its name and its backends."""

    def __init__(self, name: str, package: str, backends: Sequence[str]) -> None:
        """Registers the op for `explain` and `last_backend`.

        Args:
            name: also the name of the public function, which checks its arguments, calls `select` and runs
                what that returns.
            package: the package that holds the function, and one module per backend.
            backends: names of the backends, fastest first.
        """
        self.name = name
        self.package = package
        self.backends = tuple(backends)
        self.last_backend: str | None = None
        self.fallbacks: Counter[tuple[str, str]] = Counter()
        """Number of times that "auto" skipped a backend, by (backend, reason)."""
        self._watcher: Callable[..., None] | None = None
        self._modules: dict[str, ModuleType] = {}
        self._paths = {backend: f"{package}.{_MODULES.get(backend, backend)}" for backend in self.backends}
        answers = ((backend, f"supports_{backend}") for backend in self.backends)
        home = vars(sys.modules[package])
        self._kernel_supports = {backend: home[name] for backend, name in answers if name in home}
        """`supports` of the backends whose modules need Triton."""
        for backend in self.backends[:-1]:
            with contextlib.suppress(ImportError):  # `_ask` reports it when this backend is requested
                if backend in self._kernel_supports:
                    _PRELOADS[backend](self._paths[backend])
                else:
                    self._load(backend)
        self._load(self.backends[-1])  # always importable; a traced call could not import it
        _OPS[name] = self

    def select(self, facts: Any, backend: str = "auto") -> ModuleType:
        """Returns the module that will run: the first usable one for "auto", otherwise exactly the named one.

        Raises:
            ValueError: the backend is unknown, or named and unable to run this call; it never falls back.
        """
        if backend == EXPLAIN:
            raise _Explained(self.explain(facts))
        if backend == "auto" and FORCED_BACKEND is not None:
            if FORCED_BACKEND in self.backends:
                backend = FORCED_BACKEND
            else:
                self._count_fallback(FORCED_BACKEND, "RECSYS_BACKEND does not name a backend of this op")
        if backend != "auto" and backend not in self.backends:
            raise ValueError(
                f"{self.name} has no backend {backend!r}; it has {', '.join(('auto', *self.backends))}"
            )
        for name in self.backends if backend == "auto" else (backend,):
            support = self._ask(name, facts)
            if backend == "auto" and not support.auto:
                continue
            if support.ok:
                self.last_backend = name
                return self._load(name)
            if backend != "auto":
                raise ValueError(
                    f"backend {name!r} of {self.name} cannot run this: {support.reason}; "
                    "backend='auto' takes one that can"
                )
            self._count_fallback(name, support.reason)
        raise ValueError(f"no backend can run this call.\n{self.explain(facts)}")

    @contextlib.contextmanager
    def watched(self, watcher: Callable[..., None]) -> Iterator[None]:
        """Within the block, passes `watcher` the arguments of each untraced call, by name."""
        before, self._watcher = self._watcher, watcher
        try:
            yield
        finally:
            self._watcher = before

    def show(self, **arguments: Any) -> None:
        """Passes the arguments of a call that is about to run to the watcher, if there is one."""
        if self._watcher is not None and not torch.compiler.is_compiling():
            self._watcher(**arguments)

    def explain(self, facts: Any) -> Explanation:
        """Returns the answers of all backends about `facts`."""
        return Explanation(self.name, tuple((name, self._ask(name, facts)) for name in self.backends))

    def _ask(self, name: str, facts: Any) -> Support:
        if name in self._kernel_supports:
            return self._kernel_supports[name](facts)
        try:
            module = self._load(name)
        except ImportError as error:
            return Support(False, f"it needs a package that is not installed ({error})")
        return module.supports(facts) if hasattr(module, "supports") else SUPPORTED

    def _load(self, name: str) -> ModuleType:
        if name in self._kernel_supports:
            return triton_support.load(self._paths[name])
        if name not in self._modules:
            self._modules[name] = importlib.import_module(self._paths[name])
        return self._modules[name]

    def _count_fallback(self, name: str, reason: str) -> None:
        if torch.compiler.is_dynamo_compiling():  # else a guard on the count would recompile every call
            return
        self.fallbacks[name, reason] += 1
        if self.fallbacks[name, reason] == 1:
            logger.warning("%s: backend %s is not used: %s", self.name, name, reason)


@torch.compiler.assume_constant_result
def is_exporting() -> bool:
    """Returns `torch.compiler.is_exporting()`, corrected for the compiler of PyTorch 2.11, which sets it in
    all its graphs."""
    return torch.compiler.is_exporting()


def explain(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Explains which backends of an op can run this call, and why the others cannot.

    Args:
        op: name of the op, or the function itself; the other arguments are those of that function.

    Raises:
        ValueError: there is no op of this name.
    """
    registered = _op(op if isinstance(op, str) else op.__name__)
    function = getattr(sys.modules[registered.package], registered.name)
    try:
        function(*args, **{**kwargs, "backend": EXPLAIN})
    except _Explained as answer:
        return answer.explanation
    raise RuntimeError(f"{registered.name} has not asked which backend to run")


def last_backend(op: str) -> str | None:
    """Returns the backend that the latest call of `op` in this process used, or None before the first call.

    Raises:
        ValueError: there is no op of this name.
    """
    return _op(op).last_backend


def _op(name: str) -> Op:
    if name not in _OPS:
        raise ValueError(f"no op {name!r}; there are {', '.join(sorted(_OPS))}")
    return _OPS[name]
