"""Which memory nodes new pages come from: libnuma's interleaving, through py-libnuma.

Free memory and distances are read from /sys instead (`numa.py`): py-libnuma's `node_memory_info` keeps 32
bits of a node's size, and none of what is free.
"""

from __future__ import annotations

from collections.abc import Sequence


def interleave(nodes: Sequence[int]) -> str:
    """From now on, pages that this thread and threads it starts touch first lie on these nodes in turn.

    That holds for memory and for files that are mapped, unless another process brought them into memory.
    Returns why not, "" when it was done.
    """
    try:
        from numa import memory  # asks the linker for libnuma, which takes 50 ms
    except (ImportError, OSError, AttributeError):  # AttributeError: py-libnuma without the library
        return "libnuma is not installed"
    try:
        memory.set_interleave_nodes(*nodes)
        found = memory.get_interleave_nodes()
    except Exception as error:  # py-libnuma raises nothing more specific
        return f"libnuma: {error}"
    wanted = sorted(set(nodes))
    return "" if sorted(found) == wanted else f"nodes {wanted} were asked for, libnuma took {sorted(found)}"
