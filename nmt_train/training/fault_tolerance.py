"""Runs this process as a rank until training ends; if processes of other ranks end, it continues with the survivors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from nmt_train import device
from nmt_train.config import Config
from nmt_train.launch.stop_request import StopRequest
from nmt_train.modes.resolve import fit
from nmt_train.training.prepared_run import PreparedRun
from nmt_train.training.recovery import RecoveredState, SurvivorState, recover
from nmt_train.training.setup import follow, lead
from nmt_train.training.worker import Make
from nmt_train.transport import Ended, Transport

Signals = Callable[[Any], AbstractContextManager[None]]


@dataclass
class Rank:
    """The parts of a rank that stay the same when its number changes.

    make: builds a worker from a config and a transport. signals: a context manager that passes stop signals to its argument.
    take_over: opens the run folder if this rank replaces a lost rank 0; its argument says whether training had begun.
    """

    config: Config
    make: Make
    signals: Signals
    take_over: Callable[[bool], AbstractContextManager[PreparedRun]]

    def train(self, transport: Transport, prepared: PreparedRun | None = None) -> int:
        """Train until the run is over and close the transport; returns the exit status. prepared: the run, given on rank 0.

        Raises UserError if the mode or the corpus is wrong, and Lost if ranks end and the survivors cannot continue.
        """
        first, ranks, stop_request = transport, [transport.rank], StopRequest()
        survivor: SurvivorState | None = None
        with ExitStack() as opened, self.signals(stop_request.ask):
            while True:
                recovered: RecoveredState | None = None
                try:
                    with transport.watched(self.config.transport.deadline):
                        worker = self.make(fit(self.config, transport.nodes), transport)
                        recovered = recover(worker, survivor) if survivor else None
                        worker.forget = survivor.forget if survivor else None
                        if prepared is None and transport.rank == 0:
                            prepared = opened.enter_context(self.take_over(recovered is not None))
                        status = (
                            lead(worker, prepared, stop_request, recovered)
                            if prepared is not None
                            else follow(worker, stop_request, recovered)
                        )
                        transport.close()
                        return status
                except Ended:
                    pass
                except (Exception, KeyboardInterrupt) as error:
                    if transport is not first:  # the caller reports errors on the first transport
                        transport.fail(error)
                    raise
                interrupted = False
                if survivor is None or worker.leader is not None:  # all ranks have trained since the last failure, if any
                    survivor = SurvivorState.of(worker, ranks)
                else:
                    survivor.lost, interrupted = recovered.lost if recovered else survivor.lost, True
                transport = transport.regroup()  # when it returns, the worker's tasks have ended
                ranks.append(transport.rank)
                survivor.let_go()
                if interrupted and worker.has_part:  # other ranks may already have continued from this state
                    survivor.recovery_pieces += worker.strategy.pieces()
                stop_request.untell()
                del worker  # free its memory, because the next worker needs as much
                device.release()
