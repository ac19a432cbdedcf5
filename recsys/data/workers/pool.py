"""Runs a pool of reader processes, each of which reads its share of a schedule of batches.

Batches come back in shared memory. The schedule is a list, or an endless rule that each process follows by
itself. Process i mod n reads batch i, and the batches come back in order. No process is told what to read
next: it knows the schedule from the start and reads on until `ahead` of its batches wait to be taken. So a
batch costs one small message each way. (torch's DataLoader does the same with queues, their threads and an
import of torch in each process; here that cost a third of the throughput.)
"""

import pickle
import signal
from collections.abc import Iterable, Iterator, Sized
from itertools import count, islice
from multiprocessing.connection import Connection

from recsys.data.convert.packer import BatchArrays
from recsys.data.workers import processes
from recsys.data.workers.reader import Reader
from recsys.data.workers.slots import Slot, SlotReader
from recsys.errors import RecsysError

_PATIENCE = 10.0
"""Seconds that a process may take to end by itself after its connection is closed."""
_TAKEN = b""
"""Message with which the training process acknowledges a batch."""


class ReaderPool:
    """The reader processes of one pass over a schedule. Iterate over it once, then close it.

    Args:
        reader: makes the arrays of batches; a copy is sent to each process.
        schedule: (epoch, index) of each batch; a copy is sent to each process. A schedule without a length
            may be endless.
        num_processes: number of processes, at least 1.
        ahead: number of batches that each process may prepare ahead, besides `Reader.more_ahead`.
    """

    def __init__(
        self, reader: Reader, schedule: Iterable[tuple[int, int]], num_processes: int, ahead: int
    ) -> None:
        context = processes.context()
        self._numbers = range(len(schedule)) if isinstance(schedule, Sized) else count()
        self._processes, self._connections = [], []
        work = pickle.dumps((reader, schedule))
        for first in range(num_processes):
            ours, theirs = context.Pipe()
            share = (schedule, first, num_processes)
            process = context.Process(target=_serve, args=(reader, share, theirs, ahead), daemon=True)
            with processes.main_module_not_imported(work):
                process.start()
            # The process now holds the only other end, so its death closes the connection.
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self._slots = SlotReader()

    def __iter__(self) -> Iterator[BatchArrays]:
        """Yields the batches in the order of the schedule.

        Raises:
            RecsysError: a process reported an error or died.
        """
        for number in self._numbers:
            turn = number % len(self._connections)
            connection = self._connections[turn]
            try:
                received = connection.recv()
                if isinstance(received, RecsysError):
                    raise received
                if isinstance(received.buffer, Slot):
                    received = received._replace(buffer=self._slots.take(received.buffer))
                arrays = received.arrays()
                connection.send_bytes(_TAKEN)
            except (EOFError, ConnectionError):
                raise self._died(turn) from None
            yield arrays

    def close(self) -> None:
        """Ends all processes, even in the middle of a pass."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(_PATIENCE)
            if process.exitcode is None:
                process.kill()
                process.join()
        self._slots.close()

    def _died(self, number: int) -> RecsysError:
        process = self._processes[number]
        process.join(_PATIENCE)
        return RecsysError(
            f"a reader process died (pid {process.pid}, exit code {process.exitcode}). If its error is not "
            "shown above, out of memory is the usual cause: lower data.num_workers, data.prefetch_batches or "
            "data.shuffle_row_groups."
        )


def _serve(
    reader: Reader, share: tuple[Iterable[tuple[int, int]], int, int], connection: Connection, ahead: int
) -> None:
    """Serves batches from a reader process until all are taken or the other end is closed."""
    # Ctrl-C reaches every process of a terminal; the training process decides when reading ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.leave_group()
    waiting = 0
    try:
        schedule, first, step = share
        for epoch_and_index in islice(schedule, first, None, step):
            packed = reader[epoch_and_index]
            while waiting >= ahead + reader.more_ahead:
                connection.recv_bytes()
                waiting -= 1
            connection.send(packed)
            waiting += 1
        while waiting:
            connection.recv_bytes()
            waiting -= 1
    except (EOFError, ConnectionError):
        return
