"""Which modes a cluster file excludes."""

from __future__ import annotations

from nmt_train.codec import CODECS
from nmt_train.common.errors import UserError
from nmt_train.config import Config
from nmt_train.modes.resolve import resolve
from nmt_train.simulation.cluster import ClusterConfig
from nmt_train.strategy.plan import ServerPlan
from nmt_train.strategy.update_rules import RULES


def check(cluster: ClusterConfig, config: Config) -> None:
    """Raise UserError if the mode cannot use the cluster's ranks, or does not fit one of its options."""
    plan = resolve(config, cluster.ranks())
    server = plan.family if isinstance(plan.family, ServerPlan) else None
    in_rounds = server is not None and RULES[server.rule].holds
    if cluster.one_client_at_a_time and server is not None and in_rounds:
        raise UserError(
            f"one_client_at_a_time: a machine's answer to one worker waits for the pushes of all others with server.rule"
            f" {server.rule}; set --cluster.one_client_at_a_time false, or choose another mode"
        )
    losses = cluster.loss and cluster.resend is None and len(cluster.nodes) > 1
    if losses and (server is None or in_rounds or not _bears_losses(server)):
        raise UserError(
            f"resend: null: mode {plan.mode} needs every gradient, but lost ones stay lost; choose a mode with a server whose"
            " workers neither wait for each other nor keep their own updates (vanilla, overlap, softsync, downpour ...), or set"
            " --cluster.resend 0.2s"
        )


def _bears_losses(server: ServerPlan) -> bool:
    """False where a delta leaves out the worker's own updates, which the shard would have to have."""
    return not server.keeps_own or CODECS[server.down].lossless
