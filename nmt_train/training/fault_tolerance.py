"""A process as one of the ranks of a run, for as long as it lasts: where others end, with those that are left."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from nmt_train import device
from nmt_train.config import Config
from nmt_train.distributed.transport import Ended, Transport
from nmt_train.modes import build as modes
from nmt_train.training.recovery import RecoveredState, SurvivorState, recover
from nmt_train.training.setup import PreparedRun, follow, lead
from nmt_train.training.stop_request import StopRequest
from nmt_train.training.worker import Worker

Signals = Callable[[Any], AbstractContextManager[None]]


@dataclass
class Rank:
    """What stays the same, whatever the rank's number.

    make: a worker for a config and a transport; signals: gives those that ask for an end to whom it is called with;
    take_over: opens the run folder, if this rank is to lead where another one did.
    """

    config: Config
    make: Callable[[Config, Transport], Worker]
    signals: Signals
    take_over: Callable[[], AbstractContextManager[PreparedRun]]

    def train(self, transport: Transport, prepared: PreparedRun | None = None) -> int:
        """Until training is over, and leave the transport; the exit status. ready: where this is rank 0.

        UserError for whatever is wrong with mode or corpus; Lost if ranks end and those that are left cannot go on.
        """
        first, ranks, stop_request = transport, [transport.rank], StopRequest()
        survivor: SurvivorState | None = None
        with ExitStack() as opened, self.signals(stop_request.ask):
            while True:
                recovered: RecoveredState | None = None
                try:
                    with transport.watched(self.config.transport.deadline):
                        worker = self.make(modes.fit(self.config, transport.nodes), transport)
                        recovered = recover(worker, survivor) if survivor else None
                        worker.forget = survivor.forget if survivor else None
                        if prepared is None and transport.rank == 0:
                            prepared = opened.enter_context(self.take_over())
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
                    if transport is not first:  # which is the caller's
                        transport.fail(error)
                    raise
                if worker.leader is not None or survivor is None:
                    survivor = SurvivorState.of(worker, ranks)
                else:
                    survivor.lost = recovered.lost if recovered else survivor.lost
                    if worker.placed:  # others may have gone on from this
                        survivor.recovery_pieces += worker.schedule.exchange.recovery_pieces(transport.rank)
                transport = transport.regroup()
                ranks.append(transport.rank)
                survivor.let_go()
                stop_request.untell()
                del worker  # the next one takes as much memory
                device.release()
