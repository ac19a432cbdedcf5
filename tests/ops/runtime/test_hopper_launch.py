"""The short way to launch a Hopper kernel, with stand-ins for the kernel and the driver: when it is taken."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

import triton

from recsys.ops import AttentionMask
from recsys.ops.hstu_attention.hopper import backward, forward, two_pass
from recsys.ops.hstu_attention.hopper.backward import backward_kernel, round_kernel
from recsys.ops.hstu_attention.hopper.forward import forward_kernel
from recsys.ops.hstu_attention.hopper.two_pass import keys_kernel, rows_kernel
from recsys.ops.hstu_attention.hopper.wide import wide_keys_kernel
from recsys.ops.hstu_attention.problem import Problem
from recsys.ops.runtime import hopper_launch
from recsys.ops.runtime.descriptors import Boxes, gluon_descriptor, with_loadable_rows
from recsys.ops.runtime.hopper_launch import launch as launch_kernel
from recsys.ops.runtime.hopper_launch import launch_specialized, require_one_code
from tests.ops.cases import layout_of, samples


class Kernel:
    """Counts launches by Triton's way; `launched` holds the arguments of those by the short way."""

    def __init__(self):
        self.pre_run_hooks, self.slow, self.launched = [], [], []

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.slow.append((grid, arguments, constants))

    def launch(self, *arguments):
        if any(isinstance(argument, int) and argument == 2**40 for argument in arguments):
            raise OverflowError
        self.launched.append(arguments)


@pytest.fixture
def kernel(monkeypatch):
    kernel, encoding = Kernel(), hopper_launch._Encoding(3, 2, 10, (1, 1, 64, 64))

    def compiled(kernel, made, device):
        encode = lambda address, *rest: ("map", address, rest)  # noqa: E731
        return hopper_launch._Compiled(kernel, kernel.launch, 7, (4, 1, 0), (encoding,), encode, (None, None))

    monkeypatch.setattr(hopper_launch, "_COMPILED", {})
    monkeypatch.setattr(hopper_launch, "_compiled", compiled)
    monkeypatch.setattr(hopper_launch.triton, "JITFunction", Kernel)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of the CPU
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 11, raising=False)
    return kernel


def rows(total_len=8, dtype=torch.bfloat16):
    return torch.zeros(total_len, 2, 64, dtype=dtype)


def call(kernel, key="key", tensor=None, pointer=None, number=5):
    tensor = rows() if tensor is None else tensor
    pointer = torch.zeros(4, dtype=torch.int32) if pointer is None else pointer
    launch_kernel(kernel, key, 3, (Boxes(tensor, 64, 64),), (pointer,), (number, 0.5), lambda: {"D": 64})
    return tensor, pointer


def test_the_first_launch_is_tritons_and_the_next_goes_straight(kernel):
    call(kernel)
    tensor, pointer = call(kernel, number=6)
    assert len(kernel.slow) == len(kernel.launched) == 1
    grid, arguments, constants = kernel.slow[0]
    assert grid == (3,) and arguments[2:] == (5, 0.5) and constants == {"D": 64}
    given = kernel.launched[0]
    descriptor = gluon_descriptor(Boxes(tensor, 64, 64))
    assert given[:6] == (3, 1, 1, 11, 7, False) and given[9] == (4, 1, 0)
    assert given[13][1] == tensor.data_ptr() and given[13][2][-3:-1] == (
        tuple(descriptor.shape),
        tuple(descriptor.strides),
    )
    assert list(given[14:22]) == [*descriptor.shape, *descriptor.strides]
    assert given[22:] == (pointer.data_ptr(), 6, 0.5, None, None)


def test_another_key_or_kernel_is_tritons(kernel):
    call(kernel, "one")
    call(kernel, "other")
    call(Kernel(), "one")
    assert len(kernel.slow) == 2 and not kernel.launched


@pytest.mark.parametrize("why", ["a hook", "a profiler", "an address", "64 bits", "the device"])
def test_what_the_short_way_cannot_do_is_tritons(kernel, why, monkeypatch):
    call(kernel)
    given = {}
    if why == "a hook":
        kernel.pre_run_hooks.append(print)
    if why == "a profiler":
        runtime = SimpleNamespace(
            launch_enter_hook=SimpleNamespace(calls=[print]), launch_exit_hook=SimpleNamespace(calls=[])
        )
        monkeypatch.setattr(hopper_launch, "knobs", SimpleNamespace(runtime=runtime))
    if why == "an address":
        given["pointer"] = torch.zeros(5, dtype=torch.int32)[1:]
    if why == "64 bits":
        given["number"] = 2**40
    if why == "the device":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    call(kernel, **given)
    assert len(kernel.slow) == 2 and not kernel.launched


def test_a_first_launch_with_an_odd_address_is_not_remembered(kernel):
    for _ in range(2):
        call(kernel, pointer=torch.zeros(5, dtype=torch.int32)[1:])
    assert len(kernel.slow) == 2 and not kernel.launched


def test_keys_tell_apart_all_that_the_code_depends_on(monkeypatch):
    """Type, width, kind of mask and sizes; not the batch."""
    keys = []
    monkeypatch.setattr(forward, "launch", lambda kernel, key, *rest: keys.append((kernel.__name__, key)))
    monkeypatch.setattr(backward, "round_to", lambda *rest, **more: None)
    layouts = [layout_of(samples(0, shapes)) for shapes in ([(70, 3)], [(5, 0)] * 9)]
    kinds = [
        AttentionMask(),
        AttentionMask(window=5),
        AttentionMask(window=5, target_window=True),
        AttentionMask(target_group_size=2),
        AttentionMask(contextual_reads_history=False),
    ]
    for layout in layouts:
        for dtype in (torch.bfloat16, torch.float16):
            for dim in (64, 128):
                for mask in kinds:
                    problem = Problem(layout, mask, 1.0, 1.0, None)
                    q = torch.zeros(layout.total_len, 2, dim, dtype=dtype)
                    backward.backward(q, q, q, q, problem)
                    two_pass.backward(q, q, q, q, problem)
                    forward.forward(q, q, q, problem)
    assert len(keys) == 2 * len(set(keys)) == 2 * 2 * 2 * 5 * 4


def test_only_what_a_tensor_map_cannot_describe_is_copied():
    whole = torch.zeros(6, 3 * 2 * 64, dtype=torch.bfloat16)
    part = whole[:, 128:256].view(6, 2, 64)
    assert with_loadable_rows(part) is part
    for odd in (
        whole.view(-1)[1 : 1 + 6 * 128].view(6, 2, 64),  # its address
        torch.zeros(6, 2, 65, dtype=torch.bfloat16)[..., :64],  # its steps
        torch.zeros(2, 6, 64, dtype=torch.bfloat16).transpose(0, 1),  # heads that are not in a row
        torch.zeros(6, 64, 2, dtype=torch.bfloat16).transpose(1, 2),
        torch.zeros(6, 2, 128, dtype=torch.bfloat16)[:, :, ::2],
    ):
        copied = with_loadable_rows(odd)
        assert copied is not odd and copied.is_contiguous() and torch.equal(copied, odd)


@triton.jit(do_not_specialize=["varying"])
def some_kernel(x, boxes, varying, stride, factor, WIDTH: triton.language.constexpr):
    pass


class Specialized(Kernel):
    """With the parameters of `some_kernel`."""

    params = some_kernel.params


def test_numbers_that_triton_compiles_for_are_part_of_the_key(kernel):
    kernel = Specialized()
    x, tensor = torch.zeros(4), rows()

    def call(x=x, tensor=tensor, varying=5, stride=64, factor=0.5, constants=None):
        arguments = [x, Boxes(tensor, 64, 64), varying, stride, factor]
        launch_specialized(
            kernel, 3, arguments, constants or {"WIDTH": 64}, lambda boxes: ("described", boxes)
        )
        return len(kernel.slow)

    assert call() == 1 and call(varying=1, factor=2.0) == 1
    assert kernel.slow[0] == ((3,), (x, ("described", Boxes(tensor, 64, 64)), 5, 64, 0.5), {"WIDTH": 64})
    given = kernel.launched[0][13:]
    assert given[0] == x.data_ptr() and given[1][:2] == ("map", tensor.data_ptr())
    assert given[10:] == (1, 64, 2.0, None, None)
    others = [{"stride": 1}, {"x": x.double()}, {"tensor": rows(dtype=torch.float16)}]
    others.append({"constants": {"WIDTH": 32}})
    for number, changes in enumerate(others):
        assert call(**changes) == call(**changes) == 2 + number
    odd = torch.zeros(5)[1:]
    assert call(x=odd) == 6 and call(x=odd) == 7


FLOATS = ("half_alpha", "inverse_scale", "factor")

KERNELS = {
    "forward": (forward_kernel, 6),
    "backward": (backward_kernel, 9),
    "keys": (keys_kernel, 8),
    "wide keys": (wide_keys_kernel, 8),
    "rows": (rows_kernel, 7),
    "round": (round_kernel, 2),
}
"""Each with how many descriptors and pointers it has."""


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_has_one_code_for_all_numbers(name):
    kernel, first = KERNELS[name]
    numbers = [0.5 if p.name in FLOATS else 1 for p in kernel.params[first:] if not p.is_constexpr]
    assert kernel.params[first].name in ("num_items", "num_lines") and len(numbers) > 1
    require_one_code(kernel, first, tuple(numbers))


def test_a_kernel_that_would_be_compiled_for_a_number_is_refused():
    with pytest.raises(TypeError, match="parameter num_lines belongs into do_not_specialize"):
        require_one_code(triton.jit(round_kernel.fn), 2, (1, 0.5))
