"""Memory instructions and warp collectives. Fragment layouts: PTX ISA 8.x, as in csrc/emu/matrix_ops.cpp."""

from __future__ import annotations

import numpy as np

from ptxsim.block import Block, Handler
from ptxsim.parse import Instruction, PtxError, names_in
from ptxsim.values import U16, U32, bf16_to_f32, f16_to_f32, numpy_type

_ROW, _PAIR = np.arange(32) // 4, np.arange(32) % 4


def _space(what: Instruction) -> str:
    known = [part for part in what.opcode if part in ("global", "shared", "param", "local")]
    if known[:1] == ["local"]:
        raise PtxError(f"local memory (a spill or a dynamic index): {what}")
    return known[0] if known else "global"


def load(block: Block, what: Instruction) -> None:
    """ld of parameters, shared and global memory, scalars and vectors."""
    space = _space(what)
    name = what.operands[1].strip("[] ")
    if space == "param" and name in block.arguments:
        value = block.arguments[name]
        block.write(what.operands[0], np.full(block.threads, value).astype(numpy_type(what.type)))
        return
    if space == "param":  # of a struct: its name stands for its address
        space = "global"
    targets = names_in(what.operands[0])
    size = numpy_type(what.type).itemsize
    values = block.memory.load(block.address(what.operands[1]), size, len(targets), space, block.active, what)
    for i, target in enumerate(targets):
        block.write(target, _widened(values[:, i], what, target))


def _widened(values: np.ndarray, what: Instruction, target: str) -> np.ndarray:
    """Bytes and halves land in wider registers, signed ones with their sign."""
    typed = np.ascontiguousarray(values).view(numpy_type(what.type))
    if typed.dtype.itemsize == 4 and target.startswith("%rd"):
        return typed.astype(typed.dtype.kind + "8")
    if typed.dtype.itemsize == 1:
        return typed.astype(np.dtype(typed.dtype.kind + ("2" if target.startswith("%rs") else "4")))
    return typed


def store(block: Block, what: Instruction) -> None:
    sources = names_in(what.operands[1])
    values = np.stack([block.read(source, what.type) for source in sources], axis=1)
    block.memory.store(
        block.address(what.operands[0]), np.ascontiguousarray(values), _space(what), block.active, what
    )


def async_copy(block: Block, what: Instruction) -> None:
    """cp.async, its commit and its wait."""
    if "commit_group" in what.opcode:
        block.memory.commit()
    elif "wait_group" in what.opcode:
        block.memory.wait(int(what.operands[0]))
    else:
        valid = block.read(what.operands[3], "u32") == 16
        shared = block.address(what.operands[0]) & 0xFFFFFFFF
        block.memory.begin_copy(shared, block.address(what.operands[1]), valid, block.active, what)


def reduce_atomically(block: Block, what: Instruction) -> None:
    """atom and red: add, max, inc; threads in ascending order; the old value goes to atom's target."""
    is_atom = what.opcode[0] == "atom"
    place, source = what.operands[1:3] if is_atom else what.operands[:2]
    addresses, values = block.address(place), block.read(source, what.type)
    old = np.zeros_like(values)
    operation = {"add": np.add, "max": np.maximum, "inc": _counted}[what.opcode[-2]]
    for thread in np.flatnonzero(block.active):
        only = np.arange(block.threads) == thread
        raw = block.memory.load(addresses, values.dtype.itemsize, 1, _space(what), only, what)
        old[thread] = raw.view(values.dtype)[thread, 0]
        new = np.full((block.threads, 1), operation(old[thread], values[thread]), values.dtype)
        block.memory.store(addresses, new, _space(what), only, what)
    if is_atom:
        block.write(what.operands[0], old)


def _counted(old: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Counts up to `last`, then begins anew."""
    return np.where(old >= last, 0, old + 1).astype(old.dtype)


def shuffle(block: Block, what: Instruction) -> None:
    block.require_whole_warps(what)
    value, argument = (
        block.read(what.operands[1], "u32"),
        block.read(what.operands[2], "u32").astype(np.int64),
    )
    lane = {
        "bfly": block.lane ^ argument,
        "idx": argument & 31,
        "down": block.lane + argument,
        "up": block.lane - argument,
    }[what.opcode[2]]
    valid = (lane >= 0) & (lane < 32)
    source = np.where(valid, lane, block.lane) + block.warp * 32
    names = what.operands[0].split("|")
    block.write(names[0], value[source])
    if len(names) > 1:
        block.write(names[1], valid)


def vote(block: Block, what: Instruction) -> None:
    """vote.sync.ballot, any, all."""
    block.require_whole_warps(what)
    by_warp = block.predicate(what.operands[1]).reshape(-1, 32)
    if what.opcode[2] == "ballot":
        bits = (by_warp.astype(U32) << np.arange(32, dtype=U32)).sum(axis=1, dtype=U32)
        block.write(what.operands[0], np.repeat(bits, 32))
    else:
        one = by_warp.any(axis=1) if what.opcode[2] == "any" else by_warp.all(axis=1)
        block.write(what.operands[0], np.repeat(one, 32))


def sync_warp(block: Block, what: Instruction) -> None:
    block.require_whole_warps(what)


def fence(block: Block, what: Instruction) -> None:
    """Blocks run one after the other: everything is visible."""


def load_matrices(block: Block, what: Instruction) -> None:
    """ldmatrix.x4."""
    block.require_whole_warps(what)
    rows = block.memory.load(block.address(what.operands[1]) & 0xFFFFFFFF, 4, 4, "shared", block.active, what)
    by_matrix = rows.reshape(-1, 4, 8, 4)  # warp, matrix, row, pair
    for i, target in enumerate(names_in(what.operands[0])):
        block.write(target, np.ascontiguousarray(by_matrix[:, i, _ROW, _PAIR]).reshape(-1))


def transpose(block: Block, what: Instruction) -> None:
    """movmatrix."""
    block.require_whole_warps(what)
    pairs = np.ascontiguousarray(block.read(what.operands[1], "u32")).view(U16).reshape(-1, 8, 8)
    block.write(what.operands[0], np.ascontiguousarray(pairs.transpose(0, 2, 1)).view(U32).reshape(-1))


def multiply(block: Block, what: Instruction) -> None:
    """mma.m16n8k16 of bf16 and f16 into f32, mma.m16n8k32 of s8 into s32; all warps at once."""
    warps = block.require_whole_warps(what)
    is_s8 = "s8" in what.opcode
    fragments = [
        np.stack([block.read(name, "u32") for name in names_in(operand)], axis=1).reshape(
            -1, 32, len(names_in(operand))
        )
        for operand in what.operands[1:4]
    ]
    a, b = (_matrix(part[warps], what) for part in fragments[:2])
    if block.memory.profile is not None:
        block.memory.profile.products += len(a) * (16 * 8 * 32 // 4 if is_s8 else 16 * 8 * 16)
    number = np.int32 if is_s8 else np.float32
    sums = np.ascontiguousarray(fragments[2][warps]).view(number)
    wide = np.int64 if is_s8 else np.float64
    product = a.astype(wide) @ b.astype(wide).transpose(0, 2, 1)
    for i, target in enumerate(names_in(what.operands[0])):
        result = np.zeros((block.threads // 32, 32), number)
        result[warps] = sums[:, :, i] + product[:, _ROW + i // 2 * 8, _PAIR * 2 + i % 2]
        block.write(target, result.reshape(-1))


def _matrix(fragment: np.ndarray, what: Instruction) -> np.ndarray:
    """`[warps, 32 lanes, registers]` -> `[warps, rows, k]`: four registers are a (16 rows), two are b (8)."""
    count = fragment.shape[2]
    if "s8" in what.opcode:
        elements, step = np.ascontiguousarray(fragment).view(np.int8).reshape(len(fragment), 32, count, 4), 4
    else:
        widen = bf16_to_f32 if "bf16" in what.opcode else f16_to_f32
        pairs = np.ascontiguousarray(fragment).view(U16)
        elements, step = widen(pairs).reshape(len(fragment), 32, count, 2), 2
    rows = 16 if count == 4 else 8
    matrix = np.zeros((len(fragment), rows, step * 8), elements.dtype)
    for register in range(count):
        row = _ROW + (register % 2 * 8 if count == 4 else 0)
        half = register // 2 if count == 4 else register
        for i in range(step):
            matrix[:, row, _PAIR * step + i + half * step * 4] = elements[:, :, register, i]
    return matrix


WARP_OPS: dict[str, Handler] = {
    "ld": load,
    "st": store,
    "cp": async_copy,
    "atom": reduce_atomically,
    "red": reduce_atomically,
    "shfl": shuffle,
    "vote": vote,
    "bar": sync_warp,
    "membar": fence,
    "fence": fence,
    "ldmatrix": load_matrices,
    "movmatrix": transpose,
    "mma": multiply,
}
