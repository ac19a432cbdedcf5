"""Heads, one file each; importing the package registers them under their messages of `pb.Head`.

A head is built with `embedding_dim` E and `num_outputs`, the number of logits of each task. It maps user and
item vectors [N, E] to logits [N, sum of num_outputs], task by task.
"""

from recsys.modules.heads.fusion import FusionHead
from recsys.modules.heads.mmoe import MmoeHead
from recsys.modules.heads.ple import PleHead

__all__ = ["FusionHead", "MmoeHead", "PleHead"]
