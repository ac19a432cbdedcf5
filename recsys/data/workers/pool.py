"""Reader processes at work: each reads its share of some batches and hands them over in shared memory.

Which batches is a list, or a rule for them that each process follows by itself, perhaps without end. Batch i
goes to process i mod n, and the batches come back in their order. Nobody tells a process what to read next:
it knows from the start, and reads on until `ahead` of its batches have not been taken. So a batch costs one
small message each way. (torch's DataLoader does the same with queues, their threads and an import of torch in
each process; here that was a third of the throughput.)
"""

import signal
from collections.abc import Iterable, Iterator, Sized
from itertools import count, islice
from multiprocessing.connection import Connection

from recsys.data.workers import processes
from recsys.data.workers.packer import Arrays
from recsys.data.workers.reader import Reader
from recsys.data.workers.slots import SlotReader
from recsys.errors import RecsysError

_PATIENCE = 10.0
"""Seconds that a process has to end by itself, having heard that nobody wants more."""
_TAKEN = b""
"""What the training process answers to a batch."""


class ReaderPool:
    """The processes of one pass; iterate over it once, and close it.

    Args:
        reader: travels to each process.
        places: (epoch, index) of each batch; travels to each process. What has no length is taken from as far
            as there is something in it.
        num_processes: at least 1.
        ahead: batches of each process that may wait to be taken.
    """

    def __init__(
        self, reader: Reader, places: Iterable[tuple[int, int]], num_processes: int, ahead: int
    ) -> None:
        context = processes.context()
        self._numbers = range(len(places)) if isinstance(places, Sized) else count()
        self._processes, self._connections = [], []
        for first in range(num_processes):
            ours, theirs = context.Pipe()
            share = (places, first, num_processes)
            process = context.Process(target=_serve, args=(reader, share, theirs, ahead), daemon=True)
            process.start()
            # The only other end lies in the process: when it dies, we hear of it.
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self._slots = SlotReader()

    def __iter__(self) -> Iterator[Arrays]:
        """The batches in the order of `places`.

        Raises:
            RecsysError: what a process met, or that it died.
        """
        for number in self._numbers:
            turn = number % len(self._connections)
            connection = self._connections[turn]
            try:
                received = connection.recv()
                if isinstance(received, RecsysError):
                    raise received
                arrays = received.arrays(self._slots)
                connection.send_bytes(_TAKEN)
            except (EOFError, ConnectionError):
                raise self._died(turn) from None
            yield arrays

    def close(self) -> None:
        """Ends all processes, also in the middle of a pass."""
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
            f"a reader process died (pid {process.pid}, exit code {process.exitcode}). If its error does not "
            "stand above, out of memory is the usual cause: lower data.num_workers, data.prefetch_batches or "
            "data.shuffle_row_groups."
        )


def _serve(
    reader: Reader, share: tuple[Iterable[tuple[int, int]], int, int], connection: Connection, ahead: int
) -> None:
    """Runs in a reader process until all batches are taken or the other end is closed."""
    # Ctrl-C reaches every process of a terminal; whoever takes the batches decides when the reading ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.leave_group()
    waiting = 0
    try:
        places, first, step = share
        for place in islice(places, first, None, step):
            packed = reader[place]
            if waiting == ahead:
                connection.recv_bytes()
                waiting -= 1
            connection.send(packed)
            waiting += 1
        while waiting:
            connection.recv_bytes()
            waiting -= 1
    except (EOFError, ConnectionError):
        return
