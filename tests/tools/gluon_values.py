"""Values in the registers of a Gluon kernel, for `gluon_emulator`: numbers, blocks and pointers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


class Number:
    """A scalar."""

    def __init__(self, value: Any) -> None:
        self.value = value.value if isinstance(value, Number) else value

    def to(self, dtype: torch.dtype) -> Number:
        return Number(float(self.value) if dtype.is_floating_point else int(self.value))

    def __bool__(self) -> bool:
        return bool(self.value)

    def __index__(self) -> int:
        assert isinstance(self.value, int)
        return self.value


class Block:
    """A tensor in the registers of a partition."""

    def __init__(self, data: torch.Tensor, layout: Any = None) -> None:
        self.data = data
        self.type = SimpleNamespace(layout=layout)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def reshape(self, shape: list[int]) -> Block:
        return Block(self.data.reshape(shape), self.type.layout)

    def permute(self, dims: tuple[int, ...]) -> Block:
        return Block(self.data.permute(dims), self.type.layout)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Block:
        return Block(self.data.view(dtype) if bitcast else self.data.to(dtype), self.type.layout)


def raw(x: Any) -> Any:
    """The Python number or PyTorch tensor inside `x`."""
    return x.value if isinstance(x, Number) else x.data if isinstance(x, Block) else x


def _operator(name: str) -> None:
    def apply(self: Any, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        left, right = raw(self), raw(other)
        if isinstance(self, Number) and isinstance(other, Block):
            return NotImplemented
        if name in ("__floordiv__", "__rfloordiv__") and isinstance(left, int):
            assert left >= 0 and right > 0, "C and Python divide negative numbers differently"
        result = getattr(left, name)(right)
        if result is NotImplemented and isinstance(right, float):
            result = getattr(float(left), name)(right)
        return Block(result, self.type.layout) if isinstance(self, Block) else Number(result)

    for owner in (Number, Block):
        setattr(owner, name, apply)


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor"):
    _operator(f"__{_name}__")
    _operator(f"__r{_name}__")
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _operator(f"__{_name}__")


class Pointer:
    """Points to one element of a tensor."""

    def __init__(self, tensor: torch.Tensor, offset: int = 0) -> None:
        elements = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        self.flat, self.offset = torch.as_strided(tensor, (elements,), (1,)), offset

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.flat.dtype)

    def to(self, dtype: torch.dtype) -> Number:
        """The address, for inline assembly."""
        assert dtype == torch.int64
        return Number(self.flat.data_ptr() + self.offset * self.flat.element_size())

    def __add__(self, other: Any) -> Pointer | Pointers:
        if isinstance(other, Block):
            return Pointers(self.flat, self.offset + other.data)
        return Pointer(self.flat, self.offset + int(raw(other)))


class Pointers:
    """A block of pointers into one tensor."""

    def __init__(self, flat: torch.Tensor, offset: torch.Tensor) -> None:
        self.flat, self.offset = flat, offset

    def load(self, mask: Block | None, other: float | None) -> Block:
        if mask is None:
            assert (self.offset >= 0).all() and (self.offset < len(self.flat)).all()
            return Block(self.flat[self.offset], None)
        assert (self.offset[mask.data] >= 0).all() and (self.offset[mask.data] < len(self.flat)).all()
        values = self.flat[self.offset.clamp(0, len(self.flat) - 1)]
        return Block(torch.where(mask.data, values, torch.full_like(values, other)), None)

    def store(self, value: Block, mask: Block) -> None:
        assert value.data.dtype == self.flat.dtype
        offset = self.offset[inside := mask.data.expand(self.offset.shape)]
        assert (offset >= 0).all() and (offset < len(self.flat)).all()
        self.flat[offset] = value.data[inside]
