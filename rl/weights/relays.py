"""Tree of the readers of a push: the parent that each reader reads from."""

import threading
from collections import Counter
from dataclasses import dataclass, field

from rl.weights.streams import Address

KEPT = 2  # pushes that readers may be fetching


@dataclass(slots=True, eq=False)
class _Node:
    address: Address | None
    """Address of its server; None for the trainer."""
    host: str
    parent: "_Node | None" = None

    def is_below(self, other: "_Node") -> bool:
        """Whether ``other`` is this node's parent, or the parent of that node, and so on."""
        node = self.parent
        while node is not None and node is not other:
            node = node.parent
        return node is not None


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

        A reader that asks again has lost what it had, so it gets a new place, below none of its
        own descendants: each would wait for the other.
        """
        with self._lock:
            for key in [key for key in self._trees if key[0] <= sequence - 2 * KEPT]:
                del self._trees[key]  # sequence numbers of pushes differ by 2
            root = {-1: _Node(None, self.host)}
            tree = self._trees.setdefault((sequence, group), root)
            node = tree.pop(reader, None) or _Node(address, address.host)
            node.address = address  # the readers below it keep it as their parent
            node.host = address.host
            node.parent = self._parent(tree, node)
            tree[reader] = node
            return node.parent.address if node.parent else None

    def forget(self, reader: int) -> None:
        """Remove this reader as a parent until it asks again."""
        with self._lock:
            for tree in self._trees.values():
                tree.pop(reader, None)

    def _parent(self, tree: dict[int, _Node], child: _Node) -> _Node | None:
        """Return the first node with room that is not below ``child``, on the host of ``child`` if
        a node is there; None if no node has room.
        """
        parents = [(node.parent, node.host) for node in tree.values() if node.parent is not None]
        near = Counter(parent for parent, host in parents if parent.host == host)
        far = Counter(parent for parent, host in parents if parent.host != host)
        first: dict[str, _Node] = {}
        nodes = [node for node in tree.values() if not node.is_below(child)]
        for node in nodes:
            first.setdefault(node.host, node)
            if node.host == child.host and near[node] < self.fan_out:
                return node
        for node in first.values():
            if node.host != child.host and far[node] < self.fan_out:
                return node
        return None
