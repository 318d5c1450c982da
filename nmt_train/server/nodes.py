"""Which ranks share a node."""

from __future__ import annotations

from collections.abc import Sequence


def first_ranks(nodes: Sequence[int]) -> list[int]:
    """The first rank of every node, which exchanges for the node (server.per: node); nodes: the node of each rank."""
    return [rank for rank, node in enumerate(nodes) if nodes.index(node) == rank]


def dense_ranks(rank: int, nodes: Sequence[int], bypass: str) -> frozenset[int]:
    """With which ranks a rank exchanges messages in full precision: with bypass `node`, those of its node, and itself."""
    return frozenset(other for other, node in enumerate(nodes) if bypass == "node" and node == nodes[rank])


def by_node(ranks: Sequence[int], nodes: Sequence[int]) -> list[list[int]]:
    """Group ranks by their nodes, in the order of each node's first rank in `ranks`; at least one group, which may be empty."""
    groups: dict[int, list[int]] = {}
    for rank in ranks:
        groups.setdefault(nodes[rank], []).append(rank)
    return list(groups.values()) or [[]]
