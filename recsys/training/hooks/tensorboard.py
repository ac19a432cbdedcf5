"""Writes a run for TensorBoard: `tensorboard --logdir <run folder>/tensorboard`.

`tensorboard --logdir runs` shows several runs side by side; its HParams page compares their settings.
"""

from collections.abc import Callable

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.image.metadata import create_summary_metadata
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from recsys.training.hooks.attention_image import describe, pixels, png
from recsys.training.hooks.base import Diagnosed, Evaluated, Hook, Outcome, Run, Trained
from recsys.training.hooks.projector import Items
from recsys.training.hooks.scalars import train_scalars, validation_scalars


class TensorBoard(Hook):
    """Writes scalars, history lengths, config, attention pictures and item vectors for TensorBoard.

    Args:
        items: called at the end, returns the items that the embedding projector shows, or None for no
            projector.
    """

    def __init__(self, items: Callable[[], Items | None]) -> None:
        self._items = items
        self._run: Run | None = None
        self._writer: SummaryWriter | None = None

    def started(self, run: Run) -> None:
        """Opens the event file and writes the config. Later steps of an interrupted run are hidden."""
        self._run = run
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.first_step + 1)
        self._writer.add_text("config", "```\n" + run.config_text + "\n```", run.first_step + 1)

    def trained(self, record: Trained) -> None:
        """Writes losses, learning rates, gradient norm, speed, memory and history lengths."""
        self._write(train_scalars(record), record.step)
        if record.history_lengths is not None:
            self._open.add_histogram("data/history_length", record.history_lengths, record.step)

    def evaluated(self, record: Evaluated) -> None:
        """Writes all metrics."""
        self._write(validation_scalars(record), record.step)

    def diagnosed(self, record: Diagnosed) -> None:
        """Writes pictures of attention."""
        for picture in record.results.pictures:
            tag = f"attention, layer {picture.layer}/{picture.sample}"
            image = _image(tag, pixels(picture), describe(picture))
            self._open.file_writer.add_summary(image, record.step)

    def finished(self, outcome: Outcome) -> None:
        """Writes hyperparameters with the best metric, and the items of the projector."""
        if self._run is None:
            raise ValueError("TensorBoard.started has not been called")
        best = {} if outcome.best is None else {f"best/{outcome.best.metric}": outcome.best.value}
        self._write(best, outcome.step)
        # `SummaryWriter.add_hparams` would create a second run in another folder.
        for summary in hparams(self._run.hyperparameters, best):
            self._open.file_writer.add_summary(summary, outcome.step)
        items = self._items()
        if items is not None:
            # The projector shows the first column beside a point.
            labels = [
                [_one_line(name or item_id), item_id]
                for name, item_id in zip(items.names, items.ids, strict=True)
            ]
            self._open.add_embedding(
                items.vectors, labels, global_step=outcome.step, tag="items", metadata_header=["name", "id"]
            )

    def close(self) -> None:
        """Writes pending events and closes the file."""
        if self._writer is not None:
            self._writer.close()

    def _write(self, scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._open.add_scalar(name, value, step)

    @property
    def _open(self) -> SummaryWriter:
        if self._writer is None:
            raise ValueError("TensorBoard.started has not been called")
        return self._writer


def _image(tag: str, image: Tensor, description: str) -> Summary:
    """Makes a summary of uint8 [height, width, 3] with a description, which `SummaryWriter.add_image` lacks.

    Source: `tf.summary.image`, whose tensor holds width, height and file.
    """
    height, width, _ = image.shape
    tensor = TensorProto(
        dtype=DT_STRING,
        tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=3)]),
        string_val=[str(width).encode(), str(height).encode(), png(image)],
    )
    metadata = create_summary_metadata(display_name=tag, description=description)
    return Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])


def _one_line(text: str) -> str:
    """Removes tabs and line breaks, which separate the cells of the projector's table."""
    return " ".join(text.split())
