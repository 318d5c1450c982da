"""A process as one of the ranks of a run, for as long as it lasts: where others end, with those that are left."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from nmt_train import device
from nmt_train.config import Config
from nmt_train.distributed.transport import Ended, Wire
from nmt_train.modes import build as modes
from nmt_train.training.recovery import Again, Remains, recover
from nmt_train.training.setup import Ready, follow, lead
from nmt_train.training.stop_request import Wish
from nmt_train.training.worker import Worker

Signals = Callable[[Any], AbstractContextManager[None]]


@dataclass
class Rank:
    """What stays the same, whatever the rank's number.

    make: a worker for a config and a wire; signals: gives those that ask for an end to whom it is called with; take_over: opens
    the run folder, if this rank is to lead where another one did.
    """

    config: Config
    make: Callable[[Config, Wire], Worker]
    signals: Signals
    take_over: Callable[[], AbstractContextManager[Ready]]

    def train(self, wire: Wire, ready: Ready | None = None) -> int:
        """Until training is over, and leave the wire; the exit status. ready: where this is rank 0.

        UserError for whatever is wrong with mode or corpus; Lost if ranks end and those that are left cannot go on.
        """
        first, ranks, wish = wire, [wire.rank], Wish()
        remains: Remains | None = None
        with ExitStack() as opened, self.signals(wish.ask):
            while True:
                again: Again | None = None
                try:
                    with wire.watched(self.config.wire.deadline):
                        worker = self.make(modes.fit(self.config, wire.nodes), wire)
                        again = recover(worker, remains) if remains else None
                        worker.forget = remains.forget if remains else None
                        if ready is None and wire.rank == 0:
                            ready = opened.enter_context(self.take_over())
                        status = lead(worker, ready, wish, again) if ready is not None else follow(worker, wish, again)
                        wire.close()
                        return status
                except Ended:
                    pass
                except (Exception, KeyboardInterrupt) as error:
                    if wire is not first:  # which is the caller's
                        wire.fail(error)
                    raise
                if worker.leader is not None or remains is None:
                    remains = Remains.of(worker, ranks)
                else:
                    remains.lost = again.lost if again else remains.lost
                    if worker.placed:  # others may have gone on from this
                        remains.pieces += worker.schedule.exchange.pieces(wire.rank)
                wire = wire.regroup()
                ranks.append(wire.rank)
                remains.let_go()
                wish.untell()
                del worker  # the next one takes as much memory
                device.release()
