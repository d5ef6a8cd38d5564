"""Tree of the readers of a push: the parent that each reader reads from."""

import threading
from dataclasses import dataclass, field

from rl.weights.streams import Address

KEPT = 2  # pushes that readers may be fetching


@dataclass(slots=True)
class _Node:
    address: Address | None
    """Address of its server; None for the trainer."""
    host: str
    parent: "_Node | None" = None
    near: int = 0
    """Number of children on its host."""
    far: int = 0
    """Number of children on other hosts."""


@dataclass(slots=True)
class RelayTree:
    """Tree of the readers that want the same bytes of a push, with the trainer as its root.

    Readers take their places in the order in which they begin. Each host has one reader that reads
    from another host; the others of the host read from readers there. A node serves up to
    ``fan_out`` hosts, and up to ``fan_out`` readers of its own host. So the bytes that leave the
    trainer's host do not depend on the number of readers. With ``fan_out`` 1 the tree is a chain.
    """

    fan_out: int
    host: str
    """Host of the trainer rank."""
    _trees: dict[tuple[int, int], dict[int, _Node]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def place(self, reader: int, group: int, sequence: int, address: Address) -> Address | None:
        """Give a reader a place in the tree of its ``group`` and push; return the address of its
        parent, None for the trainer.

        A reader that asks again has lost what it had, so it gets a new place.
        """
        with self._lock:
            for key in [key for key in self._trees if key[0] <= sequence - 2 * KEPT]:
                del self._trees[key]  # sequence numbers of pushes differ by 2
            root = {-1: _Node(None, self.host)}
            tree = self._trees.setdefault((sequence, group), root)
            _remove(tree, reader)
            parent = self._parent(tree, address.host)
            tree[reader] = _Node(address, address.host, parent)
            return parent.address if parent else None

    def forget(self, reader: int) -> None:
        """Remove this reader as a parent until it asks again."""
        with self._lock:
            for tree in self._trees.values():
                _remove(tree, reader)

    def _parent(self, tree: dict[int, _Node], host: str) -> _Node | None:
        """Return the first node with room, on ``host`` if a node is there, and count the child;
        None if no node has room.
        """
        first: dict[str, _Node] = {}
        for node in tree.values():
            first.setdefault(node.host, node)
        for node in tree.values():
            if node.host == host and node.near < self.fan_out:
                node.near += 1
                return node
        for node in first.values():
            if node.host != host and node.far < self.fan_out:
                node.far += 1
                return node
        return None


def _remove(tree: dict[int, _Node], reader: int) -> None:
    node = tree.pop(reader, None)
    if node is not None and node.parent is not None:
        if node.parent.host == node.host:
            node.parent.near -= 1
        else:
            node.parent.far -= 1
