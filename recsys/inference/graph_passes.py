"""Makes a captured graph smaller before it is compiled, since compilation takes time for each node."""

import torch
from torch import fx
from torch._functorch.compile_utils import fx_graph_cse
from torch.export import ExportedProgram

_ATEN = torch.ops.aten


def shrink(captured: ExportedProgram) -> None:
    """Removes nodes that compute nothing or what another node computes, in place; results keep every bit.

    These are about 40 % of a captured model: casts to the dtype that a tensor has, a check of the dtype
    before each cast, and index arithmetic that parts of the model repeat. `Program` checks inputs' dtypes.
    """
    for module in captured.graph_module.modules():
        if isinstance(module, fx.GraphModule):  # the program, and parts of it under autocast
            _shrink(module)


def _shrink(module: fx.GraphModule) -> None:
    graph = module.graph
    outputs = set(graph.output_node().all_input_nodes)  # the program's signature has their names
    for node in list(graph.nodes):
        if node.target is _ATEN._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node not in outputs and _is_no_cast(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    module.graph = fx_graph_cse(graph)
    module.graph.eliminate_dead_code()
    module.recompile()


def _is_no_cast(node: fx.Node) -> bool:
    """Returns whether a node casts a tensor to the dtype that it has, and does not copy it."""
    if node.target is not _ATEN.to.dtype or len(node.args) != 2 or node.kwargs:
        return False
    return node.args[0].meta["val"].dtype == node.args[1]
