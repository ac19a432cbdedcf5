"""Heads, one file each; importing the package registers them under their messages of `pb.Head`."""

from recsys.modules.heads.fusion import FusionHead

__all__ = ["FusionHead"]
