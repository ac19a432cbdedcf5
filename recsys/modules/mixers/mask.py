"""Converts the attention mask of a config to that of the ops."""

from recsys import protos as pb
from recsys.ops import AttentionMask


def mask_of(config: pb.AttentionMask) -> AttentionMask:
    """Returns the mask for the ops. An absent window means the whole history.

    Raises:
        ValueError: lengths are in events; `config.resolve` converts them to tokens.
    """
    if config.unit == pb.EVENTS:
        raise ValueError("AttentionMask: window and prefix are in events: resolve the config")
    return AttentionMask(
        window=config.window if config.HasField("window") else None,
        prefix=config.prefix,
        target_window=config.target_window,
        target_group_size=config.target_group_size,
        contextual_reads_history=config.contextual_reads_history,
    )
