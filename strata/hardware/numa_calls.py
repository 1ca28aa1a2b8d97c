"""Linux' calls about memory nodes that py-libnuma does not wrap: mbind, set_mempolicy, move_pages.

Through libc's `syscall`, so that libnuma need not be there. Numbers are those of x86-64 (kernel:
arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/linux/mempolicy.h).
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from enum import IntEnum

_MBIND, _SET_MEMPOLICY, _GET_MEMPOLICY, _MOVE_PAGES = 237, 238, 239, 279
_MODE = (1 << 14) - 1  # above it stand flags
_MOST_NODES = 1 << 10  # a kernel of distributions is built for as many
_MOVE = 1 << 1  # MPOL_MF_MOVE: pages that this process alone maps
_WORD = 64


class Policy(IntEnum):
    """Where new pages come from. DEFAULT, LOCAL: the node of the thread that touches them first; BIND: these
    nodes or nowhere (what the kernel can drop there, it drops); PREFERRED: this node, another one when it is
    full; INTERLEAVE: these in turn."""

    DEFAULT = 0
    PREFERRED = 1
    BIND = 2
    INTERLEAVE = 3
    LOCAL = 4
    PREFERRED_MANY = 5
    WEIGHTED_INTERLEAVE = 6


class NumaCalls:
    """The calls. Tests give others. Every refusal is an OSError; ENOSYS: the kernel knows no nodes."""

    def __init__(self) -> None:
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long

    def bind(self, address: int, nbytes: int, nodes: Sequence[int], policy: Policy) -> None:
        """The policy for pages of this mapping that are not there yet; address is a page's first byte.

        Pages of a mapped file do not obey it: the kernel asks the policy of the thread that reads them in.
        """
        mask, bits = _mask(nodes)
        self._call(_MBIND, address, nbytes, int(policy), mask, bits, 0)

    def set_policy(self, nodes: Sequence[int], policy: Policy) -> None:
        """The policy of this thread, and of threads that it starts from now on."""
        mask, bits = _mask(nodes)
        self._call(_SET_MEMPOLICY, int(policy), mask, bits)

    def policy(self) -> tuple[Policy, tuple[int, ...]]:
        """This thread's policy and its nodes; (DEFAULT, ()) where the kernel does not say."""
        mode, words = ctypes.c_int(0), (ctypes.c_uint64 * (_MOST_NODES // _WORD))()
        try:
            self._call(_GET_MEMPOLICY, ctypes.byref(mode), words, _MOST_NODES, 0, 0)
            found = Policy(mode.value & _MODE)
        except (OSError, ValueError):  # ValueError: a policy that kernels did not have when this was written
            return Policy.DEFAULT, ()
        return found, tuple(node for node in range(_MOST_NODES) if words[node // _WORD] >> node % _WORD & 1)

    def nodes_of(self, addresses: Sequence[int]) -> list[int]:
        """The node of the page at each address; a negative errno where there is none (-ENOENT: untouched)."""
        return self._move_pages(addresses, None)

    def move(self, addresses: Sequence[int], nodes: Sequence[int]) -> list[int]:
        """Move pages, each to its node; where each is afterwards, or why it did not move (negative errno)."""
        return self._move_pages(addresses, nodes)

    def _move_pages(self, addresses: Sequence[int], nodes: Sequence[int] | None) -> list[int]:
        count = len(addresses)
        if count == 0:
            return []
        pages = (ctypes.c_void_p * count)(*addresses)
        wanted = None if nodes is None else (ctypes.c_int * count)(*nodes)
        status = (ctypes.c_int * count)(*[-errno.EIO] * count)
        self._call(_MOVE_PAGES, 0, count, pages, wanted, status, _MOVE if nodes else 0)
        return list(status)

    def _call(self, number: int, *arguments: object) -> None:
        plain = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
        if self._syscall(ctypes.c_long(number), *plain) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _mask(nodes: Sequence[int]) -> tuple[object, int]:
    """The nodes as the kernel reads them, and the length: one bit more, for it leaves the last one out."""
    words = [0] * (max(nodes, default=0) // _WORD + 1)
    for node in nodes:
        words[node // _WORD] |= 1 << node % _WORD
    return (ctypes.c_uint64 * len(words))(*words), _WORD * len(words) + 1


OUTER_POLICY = NumaCalls().policy()
"""What numactl, or whoever started this process, asked for: read before anything here changes it."""
