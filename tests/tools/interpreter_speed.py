"""Makes Triton's interpreter faster, by keeping descriptions of shapes and types.

The interpreter describes the shape and the type of each tensor anew, which takes most of the time of tests
with small tensors. Its checks of shapes still run, once for each shape.
"""

import functools
import math

import pytest


def speed_up_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps descriptions of shapes and types until the end of the test.

    Call it in the interpreter's process only.
    """
    from triton.language import core, semantic
    from triton.runtime import interpreter

    _compute_types_of_tuples_when_asked(monkeypatch, core)
    _keep_shapes(monkeypatch, core)
    _keep_numpy_types(monkeypatch, interpreter)
    _leave_equal_shapes_alone(monkeypatch, semantic.TritonSemantic)
    _leave_equal_types_alone(monkeypatch, core, semantic.TritonSemantic)
    _keep_constants(monkeypatch, semantic.TritonSemantic)
    _call_builtins_directly(monkeypatch, core, interpreter, semantic.TritonSemantic)


def _compute_types_of_tuples_when_asked(monkeypatch, core) -> None:
    """Tuples describe the types of their values when they are made, and the interpreter never reads that."""
    by_name = core.tuple.__getattr__

    def init(self, args, type=None):
        self.values = list(args)
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def getattr_(self, name):
        if name != "type":
            return by_name(self, name)
        self.type = core._type_for_tuple_values(self.values)
        return self.type

    monkeypatch.setattr(core.tuple, "__init__", init)
    monkeypatch.setattr(core.tuple, "__getattr__", getattr_)


def _keep_shapes(monkeypatch, core) -> None:
    """Tensors and types of blocks of the same shape share its description, which nobody changes."""
    equal = core.dtype.__eq__

    @functools.cache
    def checked(shape: tuple[int, ...]):
        block = object.__new__(core.block_type)
        block_init(block, core.float32, list(shape))
        return block.shape, block.numel, str(block.shape)

    @functools.cache
    def described(shape: tuple[int, ...]):
        return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(size) for size in shape])

    block_init = core.block_type.__init__

    def init_block(self, element_ty, shape):
        sizes = tuple(shape.values if isinstance(shape, core.tuple) else shape)
        if not all(type(size) is int for size in sizes):
            sizes = tuple(core._unwrap_shape(sizes))
        self.element_ty = element_ty
        self.shape, self.numel, name = checked(sizes)
        self.name = f"<{name}, {element_ty}>"

    def init_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = described(tuple(type.shape.values) if type.is_block() else ())

    monkeypatch.setattr(core.block_type, "__init__", init_block)
    monkeypatch.setattr(core.tensor, "__init__", init_tensor)
    monkeypatch.setattr(core.dtype, "__eq__", lambda self, other: self is other or equal(self, other))


def _keep_numpy_types(monkeypatch, interpreter) -> None:
    """Keeps NumPy's type for each name of a type: the interpreter builds a table of all types each time. That
    a number fits into a type is checked once for each pair of types."""
    look_up, by_name = interpreter._get_np_dtype, {}
    check, fitting = interpreter.TensorHandle.__post_init__, set()

    def kept(triton_type):
        name = triton_type.scalar.name
        if name not in by_name:
            by_name[name] = look_up(triton_type)
        return by_name[name]

    def check_once(self):
        key = self.data.dtype.char, self.dtype.name
        if key not in fitting:
            check(self)
            fitting.add(key)

    monkeypatch.setattr(interpreter, "_get_np_dtype", kept)
    monkeypatch.setattr(interpreter.TensorHandle, "__post_init__", check_once)


def _leave_equal_shapes_alone(monkeypatch, semantic) -> None:
    """Returns operands of the same shape at once: the interpreter compares lists of constants."""
    broadcast = semantic.broadcast_impl_value

    def faster(self, lhs, rhs):
        shapes = [side.type.shape.values if side.type.is_block() else None for side in (lhs, rhs)]
        return (lhs, rhs) if shapes[0] == shapes[1] else broadcast(self, lhs, rhs)

    monkeypatch.setattr(semantic, "broadcast_impl_value", faster)


def _keep_constants(monkeypatch, semantic) -> None:
    """Numbers of a kernel's text become a tensor once, and a block once for each shape, read-only."""
    constant, broadcast = semantic.scalar_constant, semantic.broadcast_impl_value
    constants, blocks, by_id = {}, {}, {}

    def kept(self, value, dtype):
        key = type(value), repr(value), dtype.name  # -0.0 is not 0.0, and NaN is NaN
        if key not in constants:
            constants[key] = made = read_only(constant(self, value, dtype))
            by_id[id(made)] = made
        return constants[key]

    def read_only(tensor):
        tensor.handle.data.flags.writeable = False
        return tensor

    def spread(self, number, block):
        key = id(number), tuple(block.shape.values)
        if key not in blocks:
            blocks[key] = read_only(broadcast(self, number, self.full(block.shape, 0, block.scalar))[0])
        return blocks[key]

    def faster(self, lhs, rhs):
        if id(rhs) in by_id and lhs.type.is_block():
            return lhs, spread(self, rhs, lhs.type)
        if id(lhs) in by_id and rhs.type.is_block():
            return spread(self, lhs, rhs.type), rhs
        return broadcast(self, lhs, rhs)

    monkeypatch.setattr(semantic, "scalar_constant", kept)
    monkeypatch.setattr(semantic, "broadcast_impl_value", faster)


def _leave_equal_types_alone(monkeypatch, core, semantic) -> None:
    """Numbers of the same type need no common type, but for a division, whose result may have another one."""
    checked = semantic.binary_op_type_checking_impl

    def faster(
        self,
        lhs,
        rhs,
        allow_lhs_ptr=False,
        allow_rhs_ptr=False,
        arithmetic_check=True,
        div_or_mod=False,
    ):
        if not div_or_mod and type(lhs) is core.tensor and type(rhs) is core.tensor:
            scalar = lhs.dtype
            if scalar is rhs.dtype and not scalar.is_ptr():
                return self.broadcast_impl_value(lhs, rhs)
        return checked(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    monkeypatch.setattr(semantic, "binary_op_type_checking_impl", faster)


def _call_builtins_directly(monkeypatch, core, interpreter, semantic_of) -> None:
    """Leaves out the check that functions of the language are called from a kernel, which they are here."""
    checks = core.builtin(len).__code__

    def patch_attr(obj, name, member, builder, scope):
        semantic = semantic_of(builder)
        inner = member.__wrapped__ if getattr(member, "__code__", None) is checks else member

        def call(*arguments, **options):
            options["_semantic"] = semantic
            return inner(*arguments, **options)

        scope.set_attr(obj, name, call)

    monkeypatch.setattr(interpreter, "_patch_attr", patch_attr)
