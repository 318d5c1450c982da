"""A cluster to simulate: its machines, devices and network, and how long each kind of work takes."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from nmt_train.codec import CODECS
from nmt_train.common.section import STRICT, one_of
from nmt_train.simulation.units import Bandwidth, Count, Seconds, Size
from nmt_train.strategy.plan import AlonePlan, PeersPlan, Plan, ReplicasPlan, ServerPlan

_WITH_COSTS = dict.fromkeys(("low-bit", "powersgd", *CODECS))  # the first two are exchanges with codecs of their own


def _nodes(text: Any) -> Any:
    """Parse `1000 x 1`, that is, 1000 machines with one device each. A list of device counts is returned unchanged."""
    if not isinstance(text, str):
        return text
    match = re.fullmatch(r"(\d{1,5})\s*x\s*(\d{1,5})", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a list of machines: write the devices of each, as in [2, 2, 1], or 1000 x 1")
    return [int(match[2])] * int(match[1])


@dataclass(frozen=True, config=STRICT)
class Cost:
    """How long one piece of work takes on a device: `seconds`, plus `per_unit` for each token, byte or element."""

    seconds: Seconds = Field(default=0.0, description="fixed time of each piece of work")
    per_unit: Seconds = Field(
        default=0.0, description="time for each target token (forward, backward), byte (carry) or element (the others)"
    )

    def of(self, units: float) -> float:
        return self.seconds + self.per_unit * units


@dataclass(frozen=True, config=STRICT)
class CodecConfig:
    """How long a codec takes."""

    encode: Cost = Field(description="instead of `encode` of the device")
    decode: Cost = Field(description="instead of `decode` of the device")


@dataclass(frozen=True, config=STRICT)
class DeviceConfig:
    """How long each kind of work takes on a rank's device, which its tasks share. `nmt-simulate --measure` measures it."""

    forward: Cost = Field(default_factory=Cost, description="forward pass of a batch, by its target tokens")
    backward: Cost = Field(default_factory=Cost, description="backward pass of a batch, by its target tokens")
    swap: Cost = Field(default_factory=Cost, description="copying a gradient out and parameters in, by elements")
    update: Cost = Field(default_factory=Cost, description="updating parameters, by elements")
    encode: Cost = Field(default_factory=Cost, description="encoding a vector to be sent, by its elements")
    decode: Cost = Field(default_factory=Cost, description="decoding a received vector, by its elements")
    carry: Cost = Field(
        default_factory=Cost,
        description="a message to or from another machine, by its bytes, if the processor that carries it also computes",
    )
    response: Seconds = Field(
        default=0.0,
        description="time until a device that computes notices a message from another machine, if above the latency",
    )
    parameters: Count | None = Field(
        default=None, description="of the model whose forward and backward pass were measured; null: of any model"
    )
    codecs: dict[Annotated[str, one_of(_WITH_COSTS)], CodecConfig] = Field(
        default_factory=dict, description="`encode` and `decode` of codecs, and of exchanges with codecs of their own"
    )


@dataclass(frozen=True, config=STRICT)
class LinkConfig:
    """The speed, in each direction, of a network card or of a device's connection to the other devices of its machine."""

    bandwidth: Bandwidth = Field(description="in each direction; shared by all transfers in that direction")
    latency: Seconds = Field(default=0.0, description="time from the last byte sent to the last byte received")


@dataclass(frozen=True, config=STRICT)
class Crash:
    """The failure of a machine."""

    node: int = Field(ge=0, description="number of the machine, counted from 0")
    at: Seconds = Field(description="virtual time of the failure")


@dataclass(frozen=True, config=STRICT)
class Kill:
    """The failure of one process, whose machine keeps running."""

    rank: int = Field(ge=0, description="rank of the process, counted from 0 over all machines")
    at: Seconds = Field(description="virtual time of the failure")


@dataclass(frozen=True, config=STRICT)
class Cut:
    """A temporary network outage of one machine."""

    node: int = Field(ge=0, description="number of the machine, counted from 0")
    at: Seconds = Field(description="virtual time at which the outage begins")
    until: Seconds = Field(description="virtual time at which the outage ends")


@dataclass(frozen=True, config=STRICT)
class Straggler:
    """A device that is slower than the others."""

    rank: int = Field(ge=0, description="rank of the device, counted from 0 over all machines")
    factor: float = Field(gt=0, le=1e6, description="factor by which the duration of all its work is multiplied")


@dataclass(frozen=True, config=STRICT)
class Card:
    """A network card whose bandwidth differs from that of the others."""

    node: int = Field(ge=0, description="number of the machine, counted from 0")
    bandwidth: Bandwidth = Field(description="in each direction")


@dataclass(frozen=True, config=STRICT)
class ScaleConfig:
    """Charge costs as if the model had a different size."""

    parameters: Count = Field(description="model size that transfers, updates, encoding and decoding are charged for")
    network_bytes: float = Field(
        default=1.0,
        gt=0,
        description="fraction of the bytes of messages between machines that is charged, for experiments in which workers send"
        " more than what they are charged for",
    )


@dataclass(frozen=True, config=STRICT, kw_only=True)
class ClusterConfig:
    """A cluster to simulate."""

    nodes: Annotated[list[int], BeforeValidator(_nodes)] = Field(
        min_length=1, description="the number of devices of each machine"
    )
    device: DeviceConfig | None = Field(default=None, description="how long each kind of work takes on a device")
    profile: str | None = Field(
        default=None, description="a file that nmt-simulate --measure printed on one device, instead of `device`"
    )
    network: LinkConfig = Field(description="between machines: the network card of each machine")
    inside: LinkConfig = Field(description="between devices of a machine: the connection of each device")
    host: Bandwidth | None = Field(
        default=None,
        description="bandwidth between a device's memory and its machine's, in each direction; a message to or from another"
        " machine is copied first and last, and these copies use the bus; null: such copies take no time",
    )
    one_client_at_a_time: bool = Field(
        default=False,
        description="the shards of a machine serve one worker of another machine at a time, from the moment when its push"
        " is sent until the answer has left, like the thesis's single server thread of a machine",
    )
    bus: Bandwidth | None = Field(default=None, description="bandwidth of a bus that all transfers inside a machine share")
    transfers: Literal["share", "turns"] = Field(
        default="share",
        description="how simultaneous transfers use a card: share it, as in TCP, or take turns, which simulates faster",
    )
    memory: Size = Field(default=0.0, description="memory of each device, which --compare considers; 0: not known")
    scale: ScaleConfig | None = Field(default=None, description="charge as if the model had another size")
    snapshots: Literal["charged", "free"] = Field(
        default="charged",
        description="free: validations, checkpoints, recovery copies and the initial parameters take no time on the network,"
        " for short runs that stand for long ones",
    )
    jitter: float = Field(default=0.0, ge=0, le=1, description="relative standard deviation of times on devices")
    stragglers: list[Straggler] = Field(default_factory=list, description="slower devices")
    cards: list[Card] = Field(default_factory=list, description="network cards of other speeds than `network`")
    loss: float = Field(default=0.0, ge=0, lt=1, description="probability that a message to another machine is lost")
    resend: Seconds | None = Field(
        default=0.2,
        description="time until a lost message is sent again; null: only gradients are lost, and not sent again",
    )
    crashes: list[Crash] = Field(default_factory=list, description="machines that fail")
    kills: list[Kill] = Field(default_factory=list, description="processes that fail")
    cuts: list[Cut] = Field(default_factory=list, description="temporary network outages of machines")
    seed: int = Field(default=1, ge=0, lt=2**63, description="random seed of jitter and loss")

    def card(self, node: int) -> float:
        """The bandwidth of a machine's network card, in each direction [bytes per second]."""
        return next((card.bandwidth for card in self.cards if card.node == node), self.network.bandwidth)

    def with_codec(self, plan: Plan) -> ClusterConfig:
        """This cluster with the costs of what a plan's workers send or, if that is dense, of what they receive."""
        costs = self.device.codecs if self.device else {}
        match plan.family:
            case ReplicasPlan(reducer=reducer, codec=codec):
                found = costs.get(reducer, costs.get(codec))
            case ServerPlan(up=up, down=down):
                found = costs.get(down if up == "dense" else up)
            case PeersPlan(up=up):
                found = costs.get(up)
            case AlonePlan():
                found = None
        if self.device is None or found is None:
            return self
        return dataclasses.replace(self, device=dataclasses.replace(self.device, **vars(found)))

    def ranks(self) -> tuple[int, ...]:
        """The node of each rank."""
        return tuple(node for node, devices in enumerate(self.nodes) for _ in range(devices))
