"""The PTX that adds the bias and sums the gradients of its tables, executed line by line on a CPU."""

import re
from typing import NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

from recsys.ops.hstu_attention.bias import ptx as bias_ptx
from recsys.ops.hstu_attention.bias.kernels import time_edges
from recsys.ops.hstu_attention.bias.packed import record_numbers
from recsys.ops.relative_bias import relative_positions, time_bucket
from tests.tools import ptx

THREADS = 32 * bias_ptx.WARPS
POSITIONS = 700
ALPHA = 0.7


class Block(NamedTuple):
    """The place of a block of scores in a sample."""

    first_row: int
    first_key: int
    history_end: int
    group_size: int
    length: int


BLOCKS = [
    Block(1024, 64, 2000, 1, 2000),  # far from the diagonal
    Block(192, 128, 2000, 1, 2000),
    Block(256, 256, 300, 1, 300),  # on it, and past the end of the sample
    Block(192, 64, 150, 1, 237),  # rows that are targets
    Block(192, 192, 200, 5, 251),
    Block(0, 0, 20, 1, 23),
]


def times_of(kind: str, size: int) -> np.ndarray:
    """int64 [size], seconds."""
    random = np.random.default_rng(3)
    now = 1_700_000_000
    made = {
        "days": lambda: now + np.cumsum(np.exp(random.random(size) * 11)),
        "minutes": lambda: now + np.cumsum(random.integers(1, 90, size)),
        "years": lambda: now + np.cumsum(np.exp(random.random(size) * 18)),
        "equal": lambda: np.full(size, now),
        "anywhere": lambda: random.integers(-(2**40), 2**40, size),
        "missing": lambda: np.where(random.random(size) < 0.1, 0, now + 1000 * np.arange(size)),
        "backward": lambda: 2**34 - np.cumsum(random.integers(1, 2**20, size)),
        "in no order": lambda: now + random.permutation(np.cumsum(random.integers(1, 99999, size))),
    }
    return made[kind]().astype(np.int64)


KINDS = ["days", "minutes", "years", "equal", "anywhere", "missing", "backward", "in no order"]


def places() -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns, [THREADS, 1], of each thread's entry h, b in a block that a Hopper instruction
    leaves."""
    thread = np.arange(THREADS)
    return 16 * (thread // 32) + thread // 4 % 8, 2 * (thread % 4)


def at(entry: int) -> tuple[np.ndarray, np.ndarray]:
    one, other = places()
    return one + 8 * (entry // 2 % 2), other + 8 * (entry // 4) + entry % 2


class Case:
    """One block of one sample in memory."""

    def __init__(self, kind: str, block: Block, num_buckets: int, rows_first: bool) -> None:
        self.block, self.rows_first = block, rows_first
        random = np.random.default_rng(1)
        self.sizes = (bias_ptx.BLOCK_TOKENS,) * 2
        self.scores = random.standard_normal(self.sizes).astype(np.float32)
        self.positions = random.standard_normal(POSITIONS).astype(np.float32)
        self.times_table = random.standard_normal(num_buckets).astype(np.float32)
        self.times = times_of(kind, block.length)
        self.following = np.concatenate([self.times[1:], self.times[-1:] + 60])
        self.first = (block.first_row, block.first_key)
        if not rows_first:
            self.first = self.first[::-1]
        ones, others = np.meshgrid(*(np.arange(n) + f for n, f in zip(self.sizes, self.first, strict=True)))
        ones, others = ones.T, others.T
        rows, keys = (ones, others) if rows_first else (others, ones)
        self.inside = (rows < block.length) & (keys < block.length)
        self.seen = self.inside & (keys <= rows)
        rows, keys = (np.minimum(index, block.length - 1) for index in (rows, keys))
        relative = [
            relative_positions(torch.tensor(index), torch.tensor(block.history_end), block.group_size).numpy()
            for index in (rows, keys)
        ]
        self.distance = np.where(keys >= block.history_end, rows - keys, relative[0] - relative[1])
        self.distance = self.distance.clip(0, POSITIONS - 1)
        self.bucket = time_bucket(torch.tensor(self.following[rows] - self.times[keys]), num_buckets).numpy()

    def offsets(self, times: np.ndarray, size: int, behind: bool) -> np.ndarray:
        """Return what `times_kernel` writes; NaN in places that it leaves alone."""
        offsets = np.full(self.block.length + 128, np.nan, np.float32)
        for first in range(0, self.block.length, size):
            part = times[first : first + size]
            offsets[first : first + len(part)] = part.max() - part if behind else part - part.min()
        return offsets

    def near_buckets(self) -> np.ndarray:
        """Return what `near_buckets_kernel` writes; zeros past the end."""
        last = self.block.length - 1
        near = np.zeros((self.block.length + 64, 3, 4, 8, 2), np.uint8)
        one, n, q, k, b = np.ogrid[: self.block.length, :3, :4, :8, :2]
        other = one // 64 * 64 + 8 * k + 2 * q + b + (-64 * n if self.rows_first else 64 * n)
        row, key = (one, other.clip(0, last)) if self.rows_first else (other.clip(0, last), one)
        seconds = torch.tensor(self.following[row] - self.times[key])
        near[: self.block.length] = time_bucket(seconds, len(self.times_table)).numpy()
        return near

    def record(self) -> np.ndarray:
        """Return what `records_kernel` writes for the block, int32 [4]."""
        row_size, key_size = self.sizes if self.rows_first else self.sizes[::-1]
        rows = self.following[self.block.first_row : self.block.first_row + row_size]
        keys = self.times[self.block.first_key : self.block.first_key + key_size]
        least, most = int(rows.min() - keys.max()), int(rows.max() - keys.min())
        low, high = (int(time_bucket(torch.tensor(end), len(self.times_table))) for end in (least, most))
        few = 0 <= least and most - least < 2**24 and high - low <= 3
        near = 0 <= self.block.first_row - self.block.first_key < 192
        kind = high - low if few else bias_ptx.MANY
        kind = bias_ptx.NEAR if near and kind > 1 else kind
        edges = [time_edges(len(self.times_table))[min(low + n, len(self.times_table))] for n in (1, 2, 3)]
        past = [np.float32(1 - (edge - least)).view(np.int32) for edge in edges]
        return np.array([low % 256 + 256 * kind, *past], np.int32)

    def lookup(self) -> np.ndarray:
        def word(number, value, less):
            if value < 0:
                return np.int64(number).astype(np.int32)
            entry = self.times_table[value] - (self.times_table[less] if less >= 0 else np.float32(0))
            return (np.float32(0.5) * entry).view(np.int32)

        return np.array([word(*numbers) for numbers in record_numbers(len(self.times_table))], np.int32)

    def run(self, assembly: bias_ptx.Assembly, names: tuple[str, ...], scores, sums=()):
        """The threads after the assembly, for its outputs."""
        memory, block, reach = ptx.Memory(), self.block, self.block.length + 128
        distances = self.positions[np.arange(-reach, reach + 1).clip(0, POSITIONS - 1)] * np.float32(0.5)
        row_size, key_size = self.sizes if self.rows_first else self.sizes[::-1]
        pairs = [
            (self.following, self.offsets(self.following, row_size, False)),
            (self.times, self.offsets(self.times, key_size, True)),
        ]
        if not self.rows_first:
            pairs.reverse()
        values = {
            "distances": memory.place(distances) + 4 * reach,
            "lookup": memory.place(self.lookup()),
            "history_end": block.history_end,
            "group_size": block.group_size,
            "near": memory.place(self.near_buckets()),
            "start": 0,
            "record": memory.place(self.record()),
        }
        for name, first, (times, offsets) in zip(("one", "other"), self.first, pairs, strict=True):
            values |= {f"first_{name}": first, f"length_{name}": block.length}
            values |= {f"{name}_times": memory.place(times), f"{name}_offsets": memory.place(offsets)}
        for name, array in zip(bias_ptx.SUMS, sums, strict=False):
            values[name] = memory.place(array) + (4 * reach if name == "position_sums" else 0)
        threads, size = ptx.Threads(THREADS, memory), bias_ptx.SCORES
        registers = {f"arg_{name}": np.full(THREADS, value, np.uint64) for name, value in values.items()}
        registers["arg_alpha"] = ptx.bits(np.full(THREADS, ALPHA, np.float32))
        registers |= {f"in{entry}": ptx.bits(scores[at(entry)]) for entry in range(size)}
        threads.registers |= registers

        def operand(found):
            argument, entry = divmod(int(found[1]), size)
            if argument < 2:
                return f"{('out', 'in')[argument]}{entry}"
            assert entry == 0
            return f"arg_{names[argument - 2]}"

        threads.run(re.sub(r"\$(\d+)", operand, assembly.text))
        return threads


@pytest.mark.parametrize("kind", KINDS)
def test_scores_get_the_bias_of_their_pair(kind):
    """Half of the blocks have their rows first: each of them does with half of the kinds."""
    for number, block in enumerate(BLOCKS):
        rows_first = (number // 2 + KINDS.index(kind)) % 2 == 0
        case = Case(kind, block, (64, 40, 70, 5)[number % 4], rows_first)
        assembly = bias_ptx.add_bias(rows_first)
        begin(case, False)
        threads = case.run(assembly, bias_ptx.ARGUMENTS, case.scores)
        got = np.full(case.sizes, np.nan, np.float32)
        for entry in range(bias_ptx.SCORES):
            got[at(entry)] = threads.registers[f"out{entry}"].astype(np.uint32).view(np.float32)
        want = ALPHA * case.scores + 0.5 * case.positions[case.distance]
        want = want + 0.5 * case.times_table[case.bucket]
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got[case.inside], want[case.inside], atol=2e-6)


def begin(case: Case, sums: bool) -> None:
    threads = ptx.Threads(THREADS, ptx.Memory())
    threads.registers["operand2"] = np.full(THREADS, threads.memory.place(case.lookup()), np.uint64)
    threads.run(bias_ptx.begin(sums).replace("$", "operand"))


def finish_sums(by_bucket: np.ndarray) -> None:
    threads = ptx.Threads(THREADS, ptx.Memory())
    threads.registers["operand2"] = np.full(THREADS, threads.memory.place(by_bucket), np.uint64)
    threads.registers["operand3"] = np.full(THREADS, len(by_bucket), np.uint64)
    threads.run(bias_ptx.finish_sums().replace("$", "operand"))


@pytest.mark.parametrize("kind", KINDS)
def test_sums_by_distance_and_by_bucket(kind):
    names = (*bias_ptx.ARGUMENTS, *bias_ptx.SUMS)
    for number, block in enumerate(BLOCKS):
        case = Case(kind, block, (64, 40, 5)[number % 3], False)
        grad_scores = np.where(case.seen, case.scores, np.float32(0))
        reach = block.length + 128
        by_distance = np.zeros(2 * reach + 1, np.float32)
        by_bucket = np.zeros(len(case.times_table), np.float32)
        assembly = bias_ptx.add_to_tables()
        begin(case, True)
        case.run(assembly, names, grad_scores, (by_distance,))
        finish_sums(by_bucket)
        got = np.pad(by_distance[reach:], (0, POSITIONS))[:POSITIONS]
        got[0] += by_distance[:reach].sum()
        got[-1] += by_distance[reach + POSITIONS :].sum()
        want = np.bincount(case.distance.ravel(), grad_scores.ravel(), POSITIONS)
        np.testing.assert_allclose(got, want, atol=1e-4)
        want = np.bincount(case.bucket.ravel(), grad_scores.ravel(), len(by_bucket))
        np.testing.assert_allclose(by_bucket, want, atol=1e-4)


def test_no_edge_is_next_to_the_end_of_a_cell():
    """Whole seconds past 2^24 are rounded before their cell is found."""
    for edge in time_edges(71)[:-1]:
        if edge > 2**24 - 4:
            near = np.array([edge - 1, edge], np.int64)
            cells = near.astype(np.uint32).astype(np.float32).view(np.uint32) >> 21
            assert cells[0] == cells[1]


def test_records_of_cells_know_every_second_next_to_an_edge():
    for num_buckets in (1, 2, 17, 64, 70):
        words = record_numbers(num_buckets)
        for edge in time_edges(num_buckets)[:-1]:
            for seconds in {max(edge - 1, 1), edge, edge + 1}:
                cell = (np.array([seconds], np.float32).view(np.uint32)[0] >> 21) - bias_ptx.FIRST_CELL
                first, _, _, buckets = (words[bias_ptx.MOST_BUCKETS + 4 * int(cell) + n][0] for n in range(4))
                bucket = buckets >> 16 if seconds >= first % 2**32 else buckets & 0xFFFF
                assert bucket == time_bucket(torch.tensor(seconds), num_buckets)
