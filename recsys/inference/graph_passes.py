"""Makes a captured graph smaller before it is compiled, since compilation takes time for each node."""

import operator
import sys

import torch
from torch import fx
from torch._functorch.compile_utils import fx_graph_cse
from torch.export import ExportedProgram

_ATEN = torch.ops.aten


def shrink(captured: ExportedProgram) -> None:
    """Removes nodes that compute nothing or what another node computes, in place; results keep every bit.

    These are about 40 % of a captured model: casts to the dtype that a tensor has, a check of the dtype
    before each cast, dropout, slices of all rows, and index arithmetic that parts of the model repeat.
    `Program` checks inputs' dtypes.
    """
    for module in captured.graph_module.modules():
        if isinstance(module, fx.GraphModule):  # the program, and parts of it under autocast
            _shrink(module)


def _shrink(module: fx.GraphModule) -> None:
    graph = module.graph
    outputs = set(graph.output_node().all_input_nodes)  # the program's signature has their names
    written = _written(graph)
    for node in list(graph.nodes):
        if node.target is _ATEN._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node not in outputs and (equal := _equal_input(node)) is not None:
            if node.target is _ATEN.cat.default and {node, equal} & written:  # the copy is needed
                continue
            node.replace_all_uses_with(equal)
            graph.erase_node(node)
    module.graph = fx_graph_cse(graph)
    module.graph.eliminate_dead_code()
    module.recompile()


def _written(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes whose tensors operations in place may write, through views or directly."""
    written: set[fx.Node] = set()
    for node in graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        for place, argument in enumerate(node.target._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            changed = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            while isinstance(changed, fx.Node) and changed not in written:
                written.add(changed)
                changed = changed.args[0] if changed.args else None
    return written


def _equal_input(node: fx.Node) -> fx.Node | None:
    """Returns the node whose tensor this node returns as it is, if there is one."""
    arguments = node.args
    if node.kwargs or not arguments:
        return None
    if node.target is _ATEN.to.dtype and len(arguments) == 2:
        return arguments[0] if arguments[0].meta["val"].dtype == arguments[1] else None
    if node.target is _ATEN.dropout.default:
        return None if arguments[2] else arguments[0]
    if node.target is _ATEN.slice.Tensor:
        return arguments[0] if arguments[2:] == (0, sys.maxsize) else None
    if node.target is _ATEN.cat.default:
        return _split_input(*arguments)
    return None


def _split_input(parts: list[fx.Node], dim: int = 0) -> fx.Node | None:
    """Returns the node of whose tensor these are the parts, all in their order, if there is one."""
    if any(part.target is not operator.getitem for part in parts):
        return None
    split = parts[0].args[0]
    if split.target is not _ATEN.split_with_sizes.default or (*split.args[2:], 0)[0] != dim:
        return None
    every = [(split, number) for number in range(len(split.args[1]))]
    return split.args[0] if [part.args for part in parts] == every else None
