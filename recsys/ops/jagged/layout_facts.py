"""Facts of a `SequenceLayout`: its constructors, their checks, and what follows for every token.

`layout` adds the layouts that are derived from another layout.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys.ops.runtime import triton_support
from recsys.ops.runtime.dispatch import is_exporting

if TYPE_CHECKING:
    from typing_extensions import Self

CONTEXTUAL, UIH, TARGET = 0, 1, 2
"""Values of `SequenceLayout.kinds()`."""

KERNELS = "recsys.ops.jagged.layout_kernels"
"""Module whose kernels replace operations on [T] on a GPU."""

_T = TypeVar("_T")
_Layout = TypeVar("_Layout", bound="LayoutFacts")


class PaddedIndex(NamedTuple):
    """Padded view of a layout."""

    index: Tensor  # int64 [B, max_len], row of the jagged tensor, -1 for padding
    valid: Tensor  # bool [B, max_len], index >= 0


class HostCopy(NamedTuple):
    """Lengths on the host, kept when a layout moves to a device, so that totals of derived layouts need no
    wait."""

    lengths: Tensor
    num_targets: Tensor


class Tokens(NamedTuple):
    """Per-token facts, int64 [T] each, as the methods of `SequenceLayout` with these names return them."""

    sample_ids: Tensor
    positions: Tensor
    assemble_index: Tensor
    disassemble_index: Tensor


class LayoutFacts:
    """Facts that `SequenceLayout` documents, without the layouts that are derived from them."""

    lengths: Tensor
    offsets: Tensor
    num_targets: Tensor
    num_contextual: int
    total_len: int
    max_len: int
    total_targets: int
    parts: tuple[Self, ...]
    _host: HostCopy | None
    _memo: dict[Hashable, Any]

    def __init__(self, lengths: Tensor, num_targets: Tensor | None = None, num_contextual: int = 0) -> None:
        """Build and validate a layout. Intended for host tensors; a device tensor costs one copy to the host.

        Args:
            lengths: int32 or int64 [B].
            num_targets: int32 or int64 [B]; None means no targets.
            num_contextual: number of contextual tokens of every sample.

        Raises:
            TypeError: an argument is not an integer or not an integer tensor.
            ValueError: a number is negative, a sample is shorter than its contextual and target tokens, or
                totals exceed int64.
        """
        device = require_int_vector("lengths", lengths).device
        host_lengths = lengths.detach().to("cpu", torch.int64)
        if num_targets is None:
            host_targets = torch.zeros_like(host_lengths)
        else:
            host_targets = require_int_vector("num_targets", num_targets).detach().to("cpu", torch.int64)
        check_samples(host_lengths, host_targets, num_contextual)
        self._count(host_lengths.numpy(), host_targets.numpy(), num_contextual)
        self.lengths, self.offsets = self.lengths.to(device), self.offsets.to(device)
        self.num_targets = self.num_targets.to(device)

    @classmethod
    def counted(
        cls: type[_Layout],
        lengths: NDArray[np.int64],
        num_targets: NDArray[np.int64],
        num_contextual: int,
    ) -> _Layout:
        """Make the constructor's layout, on the host, of numbers that need no checks: those of a reader."""
        layout = cls.__new__(cls)
        layout._count(lengths, num_targets, num_contextual)
        return layout

    def _count(self, lengths: NDArray[np.int64], num_targets: NDArray[np.int64], num_contextual: int) -> None:
        """Set all attributes, on the host. Every batch comes here: NumPy is faster on a few numbers."""
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        self.lengths, self.offsets = torch.from_numpy(lengths), torch.from_numpy(offsets)
        self.num_targets = torch.from_numpy(num_targets)
        self.num_contextual = num_contextual
        self.total_len = int(offsets[-1])
        self.max_len = int(lengths.max(initial=0))
        self.total_targets = int(num_targets.sum())
        self.parts = ()
        self._host = HostCopy(self.lengths, self.num_targets)
        self._memo = {}

    @classmethod
    def from_offsets(
        cls: type[_Layout],
        offsets: Tensor,
        num_targets: Tensor | None = None,
        num_contextual: int = 0,
        *,
        total_len: int | None = None,
    ) -> _Layout:
        """Build and validate the layout of `offsets`, int32 or int64 [B + 1].

        Args:
            total_len: number of rows of the values that the offsets point into; checked against `offsets[-1]`
                when given.

        Raises:
            TypeError, ValueError: as for the constructor; also if offsets do not start at 0, decrease (as
                int32 sums do once they wrap around), or do not end at `total_len`.
        """
        host = require_int_vector("offsets", offsets).detach().to("cpu", torch.int64)
        if len(host) == 0 or host[0] != 0:
            raise ValueError(f"offsets must have B + 1 entries and start at 0, got {host[:4].tolist()}...")
        lengths = host.diff()
        if (sample := first_true(lengths < 0)) is not None:
            raise ValueError(
                f"offsets must not decrease, but sample {sample} runs from {int(host[sample])} "
                f"to {int(host[sample + 1])}"
            )
        if total_len is not None and int(host[-1]) != total_len:
            raise ValueError(f"offsets end at {int(host[-1])}, but total_len = {total_len}")
        return cls(lengths.to(offsets.device), num_targets, num_contextual)

    @classmethod
    def trusted(
        cls: type[_Layout],
        lengths: Tensor,
        offsets: Tensor,
        num_targets: Tensor,
        num_contextual: int,
        total_len: int,
        max_len: int,
        total_targets: int,
    ) -> _Layout:
        """Make a layout whose totals are known, without reading or checking the tensors.

        This is for code that is traced (`torch.export`, `torch.compile`): the lengths are graph inputs there,
        and the totals are sizes of other inputs, possibly symbolic. All tensors are int64; `max_len` may be
        any upper bound.
        """
        layout = cls.__new__(cls)
        layout.lengths = lengths
        layout.offsets = offsets
        layout.num_targets = num_targets
        layout.num_contextual = num_contextual
        layout.total_len = total_len
        layout.max_len = max_len
        layout.total_targets = total_targets
        layout.parts = ()
        layout._host = None
        layout._memo = {}
        return layout

    @property
    def batch_size(self) -> int:
        """Number of samples, B."""
        return self.lengths.shape[0]

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.lengths.device

    @property
    def num_uih(self) -> Tensor:
        """int64 [B], number of history tokens of each sample."""
        return self.lengths - self.num_targets - self.num_contextual

    @property
    def history_end(self) -> Tensor:
        """int64 [B], position of the first target in each sample: `num_contextual + num_uih`."""
        return self.lengths - self.num_targets

    @property
    def host_copy(self) -> HostCopy | None:
        """Lengths on the host if reading them waits for no device, otherwise None."""
        if self._host is None and self.lengths.device.type == "cpu":
            return HostCopy(self.lengths, self.num_targets)
        return self._host

    @property
    def host_lengths(self) -> Tensor | None:
        """int64 [B] on the host; None under the same conditions as `host_copy`."""
        return None if self.host_copy is None else self.host_copy.lengths

    def __repr__(self) -> str:
        names = ("batch_size", "total_len", "max_len", "num_contextual", "total_targets", "device")
        return f"SequenceLayout({', '.join(f'{name}={getattr(self, name)}' for name in names)})"

    def on_host(self: _Layout) -> _Layout:
        """Return the same layout with its tensors on the host, without waiting for a device.

        Raises:
            ValueError: the lengths exist only on a device.
        """
        if self.lengths.device.type == "cpu":
            return self
        if self._host is None:
            raise ValueError(f"the lengths are on {self.device} only; take a layout built on the host")
        host = self._host
        return self.memo(
            "on_host",
            lambda: self.trusted(
                host.lengths,
                offsets_from_lengths(host.lengths),
                host.num_targets,
                self.num_contextual,
                self.total_len,
                max_or_zero(host.lengths),
                self.total_targets,
            ),
        )

    def to(self: _Layout, device: torch.device | str, non_blocking: bool = False) -> _Layout:
        """Return the same layout with its tensors on `device`; it keeps the host copy of its lengths."""
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def memo(self, key: Hashable, build: Callable[[], _T]) -> _T:
        """Return `build()`, cached under `key`, so that all layers share what an op derives.

        A traced graph caches nothing; its compiler removes repeated computations.
        """
        return build() if torch.compiler.is_compiling() else self._kept(key, build)

    def fact(self, key: Hashable, build: Callable[[], _T]) -> _T:
        """Return `memo(key, build)` for a key of constants, cached in exported graphs, too.

        A repeated computation takes an export about 10 ms per operation. A layout that is made in the graph
        does not outlive it, so that what is cached cannot be read elsewhere.
        """
        if is_exporting() and type(self.lengths) is not Tensor:
            return self._kept(key, build)
        return self.memo(key, build)

    def _kept(self, key: Hashable, build: Callable[[], _T]) -> _T:
        try:
            is_kept = key in self._memo
        except TypeError:  # the key has a symbolic size
            return build()
        if not is_kept:
            self._memo[key] = build()
        return self._memo[key]

    def sample_ids(self) -> Tensor:
        """Return int64 [T], the sample of each token."""
        if triton_support.has_kernels(self.device):
            return self._tokens().sample_ids
        return self.fact(
            "sample_ids", lambda: torch.repeat_interleave(self.lengths, output_size=self.total_len)
        )

    def positions(self) -> Tensor:
        """Return int64 [T], the index of each token in its sample, contextual tokens first."""
        if triton_support.has_kernels(self.device):
            return self._tokens().positions

        def build() -> Tensor:
            return torch.arange(self.total_len, device=self.device) - self._per_token(self.offsets[:-1])

        return self.fact("positions", build)

    def kinds(self) -> Tensor:
        """Return int8 [T]: 0 contextual, 1 uih, 2 target."""
        positions = self.positions()
        past_contextual = (positions >= self.num_contextual).to(torch.int8)
        past_history = (positions >= self._per_token(self.history_end)).to(torch.int8)
        return past_contextual + past_history

    def padded_index(self) -> PaddedIndex:
        """Return the jagged row of each token of the padded tensor [B, max_len, ...]."""
        position = torch.arange(self.max_len, device=self.device)
        valid = position < self.lengths[:, None]
        return PaddedIndex(torch.where(valid, self.offsets[:-1, None] + position, -1), valid)

    def _tokens(self) -> Tokens:
        return self.memo("tokens", lambda: triton_support.load(KERNELS).tokens_of(self))

    def _per_token(self, per_sample: Tensor) -> Tensor:
        """Repeat each sample's number for its tokens: [B] to [T]."""
        return per_sample.index_select(0, self.sample_ids())

    def map_tensors(self: _Layout, move: Callable[[Tensor], Tensor]) -> _Layout:
        """Return the same layout with `move` of each of its tensors; it keeps the host copy."""
        moved = self.trusted(
            move(self.lengths),
            move(self.offsets),
            move(self.num_targets),
            self.num_contextual,
            self.total_len,
            self.max_len,
            self.total_targets,
        )
        moved._host = self._host
        moved.parts = tuple(part.map_tensors(move) for part in self.parts)
        return moved


def offsets_from_lengths(lengths: Tensor) -> Tensor:
    """Return int64 [B + 1]: 0, then the running sum of `lengths` [B]."""
    return torch.cat([lengths.new_zeros(1, dtype=torch.int64), lengths.cumsum(0, dtype=torch.int64)])


def max_or_zero(values: Tensor) -> int:
    """Return the largest value, or 0 for an empty tensor."""
    return int(values.max()) if len(values) else 0


_MAX_INDEX = 2**63 - 1


def require_int_vector(name: str, value: object) -> Tensor:
    """Return the value if it is a one-dimensional int32 or int64 tensor.

    Raises:
        TypeError, ValueError: the value is something else; the message contains `name`.
    """
    if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64):
        actual = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be an int32 or int64 tensor, got {actual}")
    if value.dim() != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(value.shape)}")
    return value


def check_samples(lengths: Tensor, num_targets: Tensor, num_contextual: int) -> None:
    """Check that a layout can have these lengths and targets, int64 [B] on the host.

    Raises:
        TypeError, ValueError: naming the sample.
    """
    if isinstance(num_contextual, bool) or not isinstance(num_contextual, int):
        raise TypeError(f"num_contextual must be an int, got {type(num_contextual).__name__}")
    if num_contextual < 0:
        raise ValueError(f"num_contextual must be >= 0, got {num_contextual}")
    if num_targets.shape != lengths.shape:
        raise ValueError(
            f"num_targets must have one entry a sample: {len(num_targets)} for {len(lengths)} lengths"
        )
    if _are_valid(lengths.numpy(), num_targets.numpy(), num_contextual):
        return
    for name, values in (("lengths", lengths), ("num_targets", num_targets)):
        if (sample := first_true(values < 0)) is not None:
            raise ValueError(f"{name} must be >= 0, but {name}[{sample}] = {int(values[sample])}")
    if len(lengths) and int(lengths.max()) > _MAX_INDEX // len(lengths):
        raise ValueError(
            f"lengths must add up to less than 2**63; the longest of {len(lengths)} is {int(lengths.max())}"
        )
    if (sample := first_true(lengths - num_targets < num_contextual)) is not None:
        raise ValueError(
            f"sample {sample} has lengths[{sample}] = {int(lengths[sample])} tokens, fewer than "
            f"num_contextual = {num_contextual} plus num_targets[{sample}] = {int(num_targets[sample])}"
        )


def _are_valid(lengths: NDArray[np.int64], num_targets: NDArray[np.int64], num_contextual: int) -> bool:
    """Return whether lengths pass all checks of `check_samples`. Every batch does this: NumPy is faster than
    PyTorch on a few numbers."""
    if not len(lengths):
        return True
    if int(lengths.min()) < 0 or int(num_targets.min()) < 0:
        return False
    fits = int(lengths.max()) <= _MAX_INDEX // len(lengths)
    return fits and int((lengths - num_targets).min()) >= num_contextual


def first_true(bad: Tensor) -> int | None:
    """Return the index of the first True of a host tensor, or None."""
    return int(bad.int().argmax()) if bool(bad.any()) else None
