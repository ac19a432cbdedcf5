"""The emulator of Hopper kernels finds the known faults of programs of a few lines."""

import inspect
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")
if not triton.__version__.startswith("3.6."):
    pytest.skip("the emulator has the Gluon of Triton 3.6", allow_module_level=True)

from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon.language.nvidia import hopper  # noqa: E402

from recsys.ops.hstu_attention.hopper import backward  # noqa: E402
from tests.tools.gluon_clocks import Deadlock, Race  # noqa: E402
from tests.tools.gluon_emulator import language, stand_ins  # noqa: E402
from tests.tools.gluon_machine import Machine, Memory  # noqa: E402
from tests.tools.gluon_values import Block  # noqa: E402

ARRIVE, SYNC = ("bar.arrive $1, $2; mov.u32 $0, 0;", "bar.sync $1, $2; mov.u32 $0, 0;")


@pytest.fixture(params=range(4))
def machine(request):
    """Faults are found whichever partition goes first."""
    return Machine(request.param)


def barriers(machine, *counts, fenced=True):
    memory = language(machine).allocate_shared_memory(torch.int64, [len(counts), 1], None)
    for number, count in enumerate(counts):
        machine.init(memory.index(number), count)
    if fenced:
        machine.fence()
    return memory


def buffer(machine):
    return language(machine).allocate_shared_memory(torch.float32, [4, 4], None)


def block(number=1.0):
    return Block(torch.full((4, 4), number))


def run(machine, *functions):
    """Each function in a warp group of its own."""
    others = len(functions) - 1
    machine.specialize([(function, ()) for function in functions], [4] * others, [24] * others)


def descriptor(tensor):
    elements = tensor.numel()
    return SimpleNamespace(
        base=tensor, elements=elements, shape=tensor.shape, strides=tensor.stride(), block_shape=[4, 4]
    )


def load(machine, barrier, memory, source):
    machine.expect(barrier, 64)
    machine.copy_in(descriptor(source), [0, 0], barrier, memory)


def modelled():
    """Each stand-in that is a function, and what it stands in for."""
    names = stand_ins(Machine(0))
    for name, stand_in in vars(names["gl"]).items():
        if inspect.isroutine(stand_in) and name != "constexpr":
            yield name, stand_in, getattr(gl, name)
    for module in ("mbarrier", "tma"):
        for name, stand_in in vars(names[module]).items():
            yield f"{module}.{name}", stand_in, getattr(getattr(hopper, module), name)
    for name in ("fence_async_shared", "warpgroup_mma", "warpgroup_mma_wait"):
        yield name, names[name], getattr(hopper, name)
    yield "async_add_to_global", names["async_add_to_global"], backward.async_add_to_global
    for name in ("index", "slice", "reshape", "permute", "_reinterpret", "load", "store"):
        yield f"memory.{name}", getattr(Memory, name), getattr(gl.shared_memory_descriptor, name)


def test_parameters_are_those_of_triton():
    """By name, place and default; a stand-in may lack some, which are errors then."""
    for name, stand_in, real in modelled():
        ours, theirs = (
            list(inspect.signature(getattr(function, "fn", function)).parameters.values())
            for function in (stand_in, real)
        )
        if any(parameter.kind == parameter.VAR_POSITIONAL for parameter in ours):
            continue  # a layout, by whatever it is made of
        known = {parameter.name: (place, parameter) for place, parameter in enumerate(theirs)}
        for place, parameter in enumerate(ours):
            assert parameter.name in known, (name, parameter.name)
            expected_place, expected = known[parameter.name]
            if parameter.kind == parameter.POSITIONAL_OR_KEYWORD:
                assert place == expected_place, (name, parameter.name)
            if parameter.default is not parameter.empty:
                assert parameter.default == expected.default, (name, parameter.name)


def test_what_is_not_modelled(machine):
    spoken, memory = language(machine), barriers(machine, 1)
    rest = {"dtype": torch.int32, "is_pure": False, "pack": 1}
    with pytest.raises(NotImplementedError, match="does not know this assembly: bar.red"):
        spoken.inline_asm_elementwise("bar.red.popc.u32 $0, $1, $2;", "=r,r,r", [1, 128], **rest)
    with pytest.raises(NotImplementedError, match="fence.proxy"):
        spoken.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, 0;", "=r", [], **rest)
    with pytest.raises(TypeError, match="multicast"):
        machine.copy_in(
            descriptor(torch.zeros(4, 4)), [0, 0], memory.index(0), buffer(machine), multicast=True
        )
    with pytest.raises(TypeError, match="cluster"):
        machine.fence(cluster=True)
    with pytest.raises(TypeError, match="volatile"):
        spoken.load(None, volatile=True)


def test_predicates(machine):
    full, memory = barriers(machine, 1).index(0), buffer(machine)
    machine.arrive(full, pred=False)
    machine.expect(full, 64, pred=False)
    machine.copy_in(descriptor(torch.ones(4, 4)), [0, 0], full, memory, pred=False)
    machine.wait(full, 0, pred=False)
    assert full.barriers[0].phase == 0 and memory.data.isnan().all()
    with pytest.raises(Deadlock, match="parity 0"):
        machine.wait(full, 0)


def test_a_copy_and_its_reader(machine):
    full, memory, seen = barriers(machine, 1).index(0), buffer(machine), []

    def reader():
        machine.wait(full, 0)
        seen.append(memory.load(None).data)

    run(machine, reader, lambda: load(machine, full, memory, torch.ones(4, 4)))
    assert torch.equal(seen[0], torch.ones(4, 4))


@pytest.mark.parametrize("early", ["load", "store", "product"])
def test_a_reader_who_does_not_wait(machine, early):
    full, memory = barriers(machine, 1).index(0), buffer(machine)

    def reader():
        if early == "load":
            memory.load(None)
        elif early == "store":
            memory.store(block())
        else:
            machine.product(block(), memory, block(), is_async=True)

    with pytest.raises(Race):
        run(machine, reader, lambda: load(machine, full, memory, torch.ones(4, 4)))


def test_a_buffer_that_is_still_read(machine):
    """The reader's product has not been waited for when it says that the buffer is free."""
    both, memory = barriers(machine, 1, 1), buffer(machine)
    full, free = both.index(0), both.index(1)

    def reader(waits):
        machine.wait(full, 0)
        total = machine.product(block(), memory, block(0.0), is_async=True)
        if waits:
            machine.product_wait(0, (total,))
        machine.arrive(free)
        machine.product_wait(0, (total,))

    def loader():
        load(machine, full, memory, torch.ones(4, 4))
        machine.wait(free, 0)
        load(machine, full, memory, torch.zeros(4, 4))

    with pytest.raises(Race, match="a copy of loader 1 meets a read"):
        run(machine, lambda: reader(False), loader)


def test_a_product_nobody_has_waited_for(machine):
    memory = buffer(machine)
    memory.store(block(2.0))
    machine.fence()
    first = machine.product(block(), memory, block(), is_async=True)
    second = machine.product(block(), memory, first, is_async=True)
    first_done, still = machine.product_wait(1, (first, second))
    assert torch.equal(first_done.data, torch.full((4, 4), 9.0))
    with pytest.raises(Race, match="nobody has waited for"):
        still * 2.0
    assert torch.equal(machine.product_wait(0, (second,)).data, torch.full((4, 4), 17.0))


def test_a_store_and_a_copy_out(machine):
    memory, out = buffer(machine), torch.zeros(4, 4)
    memory.store(block())
    with pytest.raises(Race, match="no fence since a store"):
        machine.copy_out(descriptor(out), [0, 0], memory)
    machine.fence()
    machine.copy_out(descriptor(out), [0, 0], memory)
    with pytest.raises(Race, match="a store of the kernel meets a read"):
        memory.store(block(2.0))
    with pytest.raises(AssertionError, match="copies that nothing waits for"):
        machine.running.finish()
    machine.store_wait(0)
    memory.store(block(2.0))
    machine.running.finish()
    assert torch.equal(out, torch.ones(4, 4))


def test_a_barrier_whose_init_no_fence_follows(machine):
    full = barriers(machine, 1, fenced=False).index(0)
    with pytest.raises(AssertionError, match="no fence since a barrier's init"):
        load(machine, full, buffer(machine), torch.ones(4, 4))


def test_a_deadlock_names_those_who_wait(machine):
    both = barriers(machine, 1, 1)

    def cautious():
        machine.wait(both.index(0), 0)

    def patient():
        machine.wait(both.index(1), 0)

    with pytest.raises(Deadlock, match="cautious 0 waits for .*; patient 1 waits for"):
        run(machine, cautious, patient)


def test_a_phase_that_passes_by(machine):
    """Nothing keeps the second signal back until the first has been seen."""
    full = barriers(machine, 1).index(0)

    def signals():
        machine.arrive(full)
        machine.arrive(full)

    with pytest.raises(AssertionError, match="a phase (may end|has ended) before"):
        run(machine, lambda: machine.wait(full, 0), signals)


def test_an_arrival_that_may_count_for_the_phase_before(machine):
    full = barriers(machine, 2).index(0)

    def twice():
        machine.arrive(full)
        machine.arrive(full)

    with pytest.raises(AssertionError, match="the phase before|more arrivals"):
        run(machine, twice, lambda: machine.arrive(full), lambda: machine.arrive(full))


def hardware(machine, text, number):
    rest = {"dtype": torch.int32, "is_pure": False, "pack": 1}
    language(machine).inline_asm_elementwise(text, "=r,r,r", [number, 256], **rest)


@pytest.mark.parametrize("signals", [True, False])
def test_hardware_barriers(machine, signals):
    memory, seen = buffer(machine), []

    def writer():
        memory.store(block(3.0))
        if signals:
            hardware(machine, ARRIVE, 8)
        else:
            hardware(machine, ARRIVE, 9)

    def reader():
        hardware(machine, SYNC, 8)
        seen.append(memory.load(None).data)

    if signals:
        run(machine, writer, reader)
        assert torch.equal(seen[0], torch.full((4, 4), 3.0))
    else:
        with pytest.raises(Deadlock, match="hardware barrier 8"):
            run(machine, writer, reader)
