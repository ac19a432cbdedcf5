"""Draws the initial values of large embedding tables block by block, so that no process needs a whole table.

A block of rows has a random stream of its own, which follows from the seed, the table's name and the block's
number. A row therefore starts with the same values on any number of ranks and however the table is divided.
Parts on a GPU are drawn there, in a fraction of the time, so their values are not those that a CPU draws.
Tables of up to `DRAWN_WHOLE` numbers are drawn by torch's generator instead, together with the other weights.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

DRAWN_WHOLE = 2**26
"""Largest table, in numbers, that every process may hold while a model is built: 256 MiB of float32."""

BLOCK_ROWS, BLOCK_ROWS_ON_A_GPU = 4096, 2**16
"""Rows of a block, on a CPU and on a GPU, for which small ones would be more launches than work. Other
numbers would change the initial values."""


@dataclass(frozen=True)
class BlockNormal:
    """Initial values of one table: normally distributed around 0.

    Attributes:
        table: the table's name.
        width: columns of the whole table.
        std: standard deviation.
        seed: seed of the model's weights.
    """

    table: str
    width: int
    std: float
    seed: int

    def __call__(self, weight: Tensor) -> None:
        """Fills a whole table, unless it is on the meta device; the form of TorchRec's `init_fn`."""
        if not weight.is_meta:
            self.fill(weight)

    def fill(self, part: Tensor, first_row: int = 0, first_column: int = 0) -> None:
        """Fills a part of the table. On a CPU, as many threads draw blocks as the process has cores.

        Args:
            part: [rows, columns] of any floating-point type, on any device.
            first_row, first_column: place of the part in the table.
        """
        rows, columns = part.shape
        if not part.numel():
            return
        size = BLOCK_ROWS_ON_A_GPU if part.is_cuda else BLOCK_ROWS
        blocks = range(first_row // size, -(-(first_row + rows) // size))
        chosen = slice(first_column, first_column + columns)

        def fill_block(block: int) -> None:
            start, end = max(first_row, block * size), min(first_row + rows, (block + 1) * size)
            drawn = self._block_on_a_gpu(block, part.device) if part.is_cuda else self._block(block)
            drawn = drawn[start - block * size : end - block * size]
            with torch.no_grad():
                part[start - first_row : end - first_row].copy_(drawn[:, chosen])

        with ThreadPoolExecutor(1 if part.is_cuda else _cores()) as threads:
            list(threads.map(fill_block, blocks))

    def _block(self, number: int) -> Tensor:
        """Returns the values of a whole block on the CPU, float32 [BLOCK_ROWS, width]."""
        name = int.from_bytes(hashlib.sha256(self.table.encode()).digest()[:8])
        key = np.array([self.seed % 2**64, name], dtype=np.uint64)
        stream = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, number]))
        drawn = stream.standard_normal((BLOCK_ROWS, self.width), dtype=np.float32)
        return torch.from_numpy(drawn * np.float32(self.std))

    def _block_on_a_gpu(self, number: int, device: torch.device) -> Tensor:
        """Returns the values of a whole block on a GPU, float32 [BLOCK_ROWS_ON_A_GPU, width]."""
        name = f"{self.seed} {number} {self.table}"
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % 2**63
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn(BLOCK_ROWS_ON_A_GPU, self.width, generator=generator, device=device).mul_(self.std)


def _cores() -> int:
    """Returns this process's share of the host's cores. torchrun, which sets LOCAL_WORLD_SIZE, gives each
    process a single OpenMP thread, with which a table of 10 GiB would take half a minute."""
    return max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
