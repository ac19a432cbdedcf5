"""The Hopper kernels' logic on a CPU: masks, barriers, buffers, by `tests/tools/gluon_emulator.py`."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

from recsys.ops import AttentionMask
from recsys.ops.hstu_attention.hopper import backward, forward, two_pass
from recsys.ops.jagged.mask import visible_pairs
from tests.ops.cases import MASKS
from tests.ops.hstu_attention.emulated import CAUSAL, CONTEXTUAL, EVERYTHING, LONG_MASKS, PASSES, check
from tests.tools.gluon_emulator import Block, Machine, Number, as_python, stand_ins

pytestmark = pytest.mark.usefixtures("emulated")

SHAPES = [(150, 3), (0, 2), (0, 0), (70, 0), (1, 80)]


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("length", [64, 1, 63, 65, 129])
def test_one_causal_sample(length, dim):
    check([(length, 0)], dim=dim)


@pytest.mark.parametrize(
    ("mask", "contextual"),
    [(mask, CONTEXTUAL[i % 3]) for i, mask in enumerate(MASKS[::11])]
    + [(EVERYTHING, 3), (EVERYTHING, 70), (LONG_MASKS[0], 70)],
    ids=str,
)
def test_masks(mask, contextual):
    """The mask with everything in it meets tokens that precede it within a tile and over several."""
    check(SHAPES, contextual, mask)


@pytest.mark.parametrize(
    ("mask", "contextual"), [(MASKS[20], 70), (EVERYTHING, 3), (EVERYTHING, 130)], ids=str
)
def test_masks_of_wide_heads(mask, contextual):
    """Gradients in two passes, by a kernel of their own for keys."""
    check(SHAPES, contextual, mask, dim=256, passes=("two passes",))


@pytest.mark.parametrize(
    ("mask", "contextual", "tail"),
    [(MASKS[7], 0, 70), (MASKS[35], 3, 1), (LONG_MASKS[0], 3, 70), (EVERYTHING, 0, 1), (EVERYTHING, 70, 70)],
    ids=str,
)
def test_only_the_newest_history_is_read(mask, contextual, tail):
    """Results are right where they are read, with all gradients of keys and values."""
    check([(0, 2), (0, 0), (1, 80), (150, 5)], contextual, mask, tail=tail)


def test_only_the_newest_history_is_read_of_wide_heads():
    check([(200, 5), (20, 0)], 3, AttentionMask(window=40, prefix=9), dim=256, tail=70)


TILES = ((2, 1), (2, 2), (3, 1), (3, 2))
BLOCKS = ((128, 2), (64, 2), (64, 3), (32, 4))


@pytest.mark.parametrize(
    ("block", "tile"), [(block, tile) for block in range(4) for tile in (block, (block + 2) % 4)]
)
def test_sizes(block, tile):
    """Buffers of keys with each number of strips, these with each number of buffers of rows, and the ways of
    the rows of q and the output with all three."""
    strips, q_tiles = TILES[tile]
    sizes = forward.ForwardSizes(*BLOCKS[block], strips, (block + tile // 2) % 2 == 0, 160, 24, q_tiles)
    mask = (AttentionMask(window=100, prefix=10), CAUSAL)[tile % 2]
    check([(270, 5), (3, 0), (70, 60)], 2, mask, passes=("forward",), sizes=sizes)


@pytest.mark.parametrize(("dim", "stages", "v_stages"), [(64, 2, 1), (64, 3, 2), (128, 2, 1), (128, 3, 2)])
def test_sizes_of_the_backward_in_one_pass(dim, stages, v_stages):
    sizes = backward.BackwardSizes(64, stages, v_stages, 240, 24)
    mask = (AttentionMask(window=100, prefix=10), CAUSAL)[(stages + dim // 64) % 2]
    check([(200, 5), (3, 0), (70, 60)], 2, mask, dim, passes=("one pass",), backward_sizes=sizes)


@pytest.mark.parametrize("dim", two_pass.SIZES)
def test_widths_heads_and_many_tiles(dim):
    check([(140, 7), (90, 3), (1, 0)], 2, EVERYTHING if dim == 128 else CAUSAL, dim, heads=2)


@pytest.mark.parametrize(
    ("dim", "seen", "window", "strips", "mask"),
    [(64, 192, None, 2, CAUSAL), (64, 193, None, 3, EVERYTHING), (64, 512, 512, 2, EVERYTHING)]
    + [(128, 192, None, 2, EVERYTHING), (128, 193, None, 3, CAUSAL), (256, 999, None, 2, EVERYTHING)]
    + [(128, 1024, 1024, 2, CAUSAL), (128, 1025, 1025, 3, EVERYTHING)],
    ids=str,
)
def test_sizes_by_how_many_keys_a_row_sees(dim, seen, window, strips, mask):
    sizes = forward.sizes_for(dim, seen, window)
    assert sizes.strips == strips
    check([(300, 7), (0, 1), (193, 0), (64, 70)], 2, mask, dim, passes=("forward",), sizes=sizes)


@pytest.mark.parametrize(("dim", "contextual"), [(64, 130), (256, 70)])
def test_contextual_rows_see_those_in_blocks_behind_their_strip(dim, contextual):
    mask = AttentionMask(contextual_reads_history=False)
    check([(60, 3), (0, 0)], contextual, mask, dim)


def test_a_batch_without_tokens():
    check([(0, 0), (0, 0)], passes=PASSES[2:], dim=256)


@pytest.mark.parametrize("contextual", CONTEXTUAL)
def test_the_mask_by_keys(contextual):
    """Compares all pairs of samples of many kinds with `visible_pairs`."""
    seen_by_keys = as_python(backward.seen_by_keys, stand_ins(Machine(0)))
    for mask in (*MASKS, *LONG_MASKS):
        rule = [Number(n) for n in (contextual, mask.window or 0, mask.prefix, mask.target_group_size)]
        flags = tuple(forward.rules(mask).values())
        for uih, targets in [(150, 3), (0, 2), (0, 0), (40, 150), (1, 30), (300, 0)]:
            end, length = contextual + uih, contextual + uih + targets
            tile = (Number(0), Number(length), Number(end), Number(0))
            score = Block(torch.zeros(max(length - 5, 0), max(length - 7, 0)))
            got = seen_by_keys(score, Number(5), Number(7), tile, rule, flags).data
            want = visible_pairs(mask, torch.tensor([end]), contextual, length)[0].T[5:, 7:]
            assert torch.equal(got, want), (mask, uih, targets)
