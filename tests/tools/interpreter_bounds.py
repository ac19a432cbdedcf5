"""Lets Triton's interpreter refuse accesses outside of a kernel's arguments.

NumPy reads whatever lies at an address. A GPU does, too, until the address is behind all that its process
has mapped: then one run of many ends with an illegal access.
"""

import numpy as np
import pytest
import torch

_PADDED: dict[int, torch.Tensor] = {}
"""Tensors that `forbid_padding` got in this test, by the address of their memory, which is not used again
while they are here."""


def forbid_padding(inside: torch.Tensor) -> torch.Tensor:
    """Lets `check_bounds` refuse accesses to what lies around a contiguous tensor in its memory; returns the
    tensor."""
    _PADDED[inside.untyped_storage().data_ptr()] = inside
    return inside


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns address and bytes of a contiguous tensor."""
    return tensor.data_ptr(), tensor.nbytes


def check_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks each access of `tl.load`, `tl.store` and atomics until the end of the test.

    An access may be anywhere in the memory (`untyped_storage`) of any tensor that was passed to the kernel,
    but not in its padding. Call it in the interpreter's process only.
    """
    from triton.runtime import interpreter

    _PADDED.clear()

    launched: list[list[tuple[int, int]]] = []
    call = interpreter.GridExecutor.__call__

    def launch(self, *arguments, **named):
        launched.append(sorted(_memory(interpreter, [*arguments, *named.values()])))
        try:
            return call(self, *arguments, **named)
        finally:
            launched.pop()

    def check(pointers, mask) -> None:
        # The interpreter's descriptors pass arrays, whose `data` is a memoryview. Some masks are integers.
        places, kept = np.asarray(pointers.data), np.asarray(mask.data)
        places = places if kept.all() else places[kept.astype(bool)]
        if places.size:
            size = np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize
            _require_inside(places, size, launched[-1])

    builder = interpreter.InterpreterBuilder
    load, store, atomic = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw

    def checked_load(self, pointers, mask, *rest, **named):
        check(pointers, mask)
        return load(self, pointers, mask, *rest, **named)

    def checked_store(self, pointers, value, mask, *rest):
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def checked_atomic(self, operation, pointers, value, mask, *rest):
        check(pointers, mask)
        return atomic(self, operation, pointers, value, mask, *rest)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    monkeypatch.setattr(builder, "create_masked_load", checked_load)
    monkeypatch.setattr(builder, "create_masked_store", checked_store)
    monkeypatch.setattr(builder, "create_atomic_rmw", checked_atomic)


def _memory(interpreter, arguments):
    """Yields first and last address, the latter exclusive, of the memory of each tensor."""
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from _memory(interpreter, argument)
        elif isinstance(argument, interpreter.TensorDescriptor):
            yield from _memory(interpreter, [argument.base])
        elif hasattr(argument, "data_ptr"):
            storage = interpreter._unwrap_tensor(argument).untyped_storage()
            inside = _PADDED.get(storage.data_ptr())
            first, size = (storage.data_ptr(), storage.nbytes()) if inside is None else _place(inside)
            yield first, first + size


def _require_inside(places: np.ndarray, size: int, memory: list[tuple[int, int]]) -> None:
    first, last = int(places.min()), int(places.max()) + size
    if any(start <= first and last <= end for start, end in memory):
        return
    inside = np.zeros(places.shape, bool)
    for start, end in memory:
        inside |= (places >= start) & (places + np.uint64(size) <= end)
    outside = places[~inside]
    if outside.size:
        distance = min((int(outside[0]) - end for _, end in memory), key=abs)
        raise IndexError(
            f"{outside.size} accesses outside of all tensors, the first {distance} bytes behind one"
        )
