"""Prepares a package to answer requests, whose rows come from several senders and are computed together."""

from recsys import protos as pb


def for_requests(pipeline: pb.Pipeline, store: pb.UserStore | None = None) -> pb.Pipeline:
    """Returns a package's config changed for requests.

    Keys need not be unique and are not read. Bad rows are left out, so that a row of one request costs others
    of its batch nothing: `ColumnBlock.bad_rows` tells the reason.

    Args:
        pipeline: the package's config, which is not changed.
        store: fields that replace those of `predict.user_store`; None to keep what the package says.
    """
    changed = pb.Pipeline()
    changed.CopyFrom(pipeline)
    changed.data.ClearField("key_columns")
    changed.data.bad_rows.policy = pb.BadRows.SKIP
    if store is not None:
        changed.predict.user_store.MergeFrom(store)
    return changed
