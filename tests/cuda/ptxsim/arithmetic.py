"""Instructions that compute: each handler reads operands of all threads and writes the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxsim.block import Block, Handler
from ptxsim.parse import Instruction, PtxError, names_in
from ptxsim.values import (
    U32,
    U64,
    UNSIGNED,
    bf16_to_f32,
    f16_to_f32,
    f32_to_bf16,
    f32_to_f16,
    halves,
    join_halves,
    numpy_type,
)

Operation = Callable[..., Any]


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind == "f":
        return a / b
    safe = np.where(b == 0, 1, b)
    return np.trunc(a.astype(np.float64) / safe).astype(a.dtype)


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.fmod(a, np.where(b == 0, 1, b)).astype(a.dtype)


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) * b + c).astype(np.float32)


# fmin and fmax return the operand that is a number, as PTX does; on integers they are min and max.
OPERATIONS: dict[str, Operation] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": np.fmin,
    "max": np.fmax,
    "div": _divide,
    "rem": _remainder,
    "neg": np.negative,
    "abs": np.abs,
    "fma": _fma,
    "mad": lambda a, b, c: a * b + c,
    "ex2": np.exp2,
    "lg2": np.log2,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: (1.0 / np.sqrt(a.astype(np.float64))).astype(np.float32),
    "rcp": lambda a: np.float32(1.0) / a,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "popc": lambda a: np.bitwise_count(a).astype(np.uint32),
}

COMPARISONS: dict[str, Operation] = {
    "lt": np.less,
    "lo": np.less,
    "le": np.less_equal,
    "ls": np.less_equal,
    "gt": np.greater,
    "hi": np.greater,
    "ge": np.greater_equal,
    "hs": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}


def compute(block: Block, what: Instruction) -> None:
    """add, mul, fma and their like."""
    kind, ptx_type = what.opcode[0], what.type
    if ptx_type == "pred":
        block.write(what.operands[0], OPERATIONS[kind](*map(block.predicate, what.operands[1:])))
    elif ptx_type in ("f16x2", "bf16x2"):
        _packed(block, what)
    elif "wide" in what.opcode:
        _widening(block, what)
    elif kind in ("mul", "mad") and "hi" in what.opcode:
        a, b = (block.read(name, ptx_type) for name in what.operands[1:3])
        wide = np.dtype(a.dtype.kind + "8")
        block.write(what.operands[0], ((a.astype(wide) * b.astype(wide)) >> wide.type(32)).astype(a.dtype))
    else:
        values = [block.read(name, ptx_type) for name in what.operands[1:]]
        with np.errstate(all="ignore"):
            block.write(what.operands[0], OPERATIONS[kind](*values))


def _packed(block: Block, what: Instruction) -> None:
    widen, narrow = (f16_to_f32, f32_to_f16) if what.type == "f16x2" else (bf16_to_f32, f32_to_bf16)
    pairs = [halves(block.read(name, "u32")) for name in what.operands[1:]]
    with np.errstate(all="ignore"):
        results = [narrow(OPERATIONS[what.opcode[0]](*(widen(pair[i]) for pair in pairs))) for i in range(2)]
    block.write(what.operands[0], join_halves(*results))


def _widening(block: Block, what: Instruction) -> None:
    """mul.wide and mad.wide: the product has twice the width."""
    a, b = (block.read(name, what.type) for name in what.operands[1:3])
    wide = np.dtype(a.dtype.kind + str(a.dtype.itemsize * 2))
    result = a.astype(wide) * b.astype(wide)
    if what.opcode[0] == "mad":
        result = result + block.read(what.operands[3], what.type[0] + str(wide.itemsize * 8))
    block.write(what.operands[0], result)


def move(block: Block, what: Instruction) -> None:
    """mov, also to and from vectors of parts."""
    target, source = what.operands
    if what.type == "pred":
        block.write(target, block.predicate(source))
    elif target.startswith("{"):
        _unpack(block, what)
    elif source.startswith("{"):
        _pack(block, what)
    else:
        block.write(target, block.read(source, what.type))


UNDEFINED = "0xffffffff"


def _unpack(block: Block, what: Instruction) -> None:
    parts = names_in(what.operands[0])
    value = block.read(what.operands[1], what.type)
    bits = value.dtype.itemsize * 8 // len(parts)
    for i, part in enumerate(parts):
        block.write(part, (value >> value.dtype.type(bits * i)).astype(UNSIGNED[bits // 8]))


def _pack(block: Block, what: Instruction) -> None:
    parts, whole = names_in(what.operands[1]), numpy_type(what.type)
    bits = whole.itemsize * 8 // len(parts)
    total = np.zeros(block.threads, whole)
    for i, part in enumerate(parts):
        # The compiler packs registers that it never wrote when only the other half is used: NaN stands there.
        known = not part.startswith("%") or part in block.registers
        value = block.read(part if known else UNDEFINED, f"u{bits}")
        total |= value.astype(whole) << whole.type(bits * i)
    block.write(what.operands[0], total)


def compare(block: Block, what: Instruction) -> None:
    """setp, with an optional predicate joined by and, or, xor."""
    a, b = (block.read(name, what.type) for name in what.operands[1:3])
    result = COMPARISONS[what.opcode[1]](a, b)
    if len(what.operands) > 3:
        result = OPERATIONS[what.opcode[2]](result, block.predicate(what.operands[3]))
    names = what.operands[0].split("|")
    block.write(names[0], result)
    if len(names) > 1:
        block.write(names[1], ~result)


def select(block: Block, what: Instruction) -> None:
    _, a, b, condition = what.operands
    chosen = np.where(block.predicate(condition), block.read(a, what.type), block.read(b, what.type))
    block.write(what.operands[0], chosen)


def shift(block: Block, what: Instruction) -> None:
    """Amounts beyond the width give 0, or the sign."""
    value, amount = block.read(what.operands[1], what.type), block.read(what.operands[2], "u32")
    width = value.dtype.itemsize * 8
    clamped = np.minimum(amount, width - 1).astype(value.dtype)
    result = value << clamped if what.opcode[0] == "shl" else value >> clamped
    keeps_sign = what.opcode[0] == "shr" and value.dtype.kind == "i"
    gone = np.zeros_like(amount, bool) if keeps_sign else amount >= width
    block.write(what.operands[0], np.where(gone, 0, result).astype(value.dtype))


def logic3(block: Block, what: Instruction) -> None:
    """lop3: a truth table of three inputs."""
    a, b, c = (block.read(name, "b32") for name in what.operands[1:4])
    table, result = int(what.operands[4], 0), np.zeros(block.threads, U32)
    for i in range(8):
        if table >> i & 1:
            result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    block.write(what.operands[0], result)


def permute_bytes(block: Block, what: Instruction) -> None:
    """prmt in its default mode; the sign mode is not used."""
    low, high, selector = (block.read(name, "u32") for name in what.operands[1:4])
    both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    result = np.zeros(block.threads, U32)
    for i in range(4):
        nibble = selector >> np.uint32(4 * i) & np.uint32(15)
        if (nibble & 8).any():
            raise PtxError(f"sign mode of {what}")
        byte = both >> (nibble.astype(np.uint64) * np.uint64(8)) & np.uint64(255)
        result |= byte.astype(U32) << np.uint32(8 * i)
    block.write(what.operands[0], result)


def extract_bits(block: Block, what: Instruction) -> None:
    """bfe."""
    value = block.read(what.operands[1], what.type)
    start, count = (block.read(name, "u32").astype(np.int64) for name in what.operands[2:4])
    field = value.astype(np.int64) >> start & (1 << count) - 1
    if value.dtype.kind == "i":
        field = field - (field >> count - 1 << count)
    block.write(what.operands[0], field.astype(value.dtype))


def insert_bits(block: Block, what: Instruction) -> None:
    """bfi: the low bits of the first operand over a field of the second."""
    wide = "u64" if what.type == "b64" else "u32"
    source, base = (block.read(name, wide).astype(U64) for name in what.operands[1:3])
    start, count = (block.read(name, "u32").astype(U64) for name in what.operands[3:5])
    one = np.uint64(1)
    mask = (one << count) - one << start
    block.write(what.operands[0], (base & ~mask | source << start & mask).astype(numpy_type(wide)))


def dot4(block: Block, what: Instruction) -> None:
    """dp4a of signed bytes."""
    a, b = (
        block.read(name, "u32").view(np.int8).reshape(-1, 4).astype(np.int32) for name in what.operands[1:3]
    )
    block.write(what.operands[0], (a * b).sum(axis=1, dtype=np.int32) + block.read(what.operands[3], "s32"))


_ROUNDINGS = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


def convert(block: Block, what: Instruction) -> None:
    """cvt between numbers; packed targets take the high half first."""
    to, origin = what.opcode[-2], what.opcode[-1]
    target = what.operands[0]
    if to in ("bf16x2", "f16x2"):
        narrow = f32_to_bf16 if to == "bf16x2" else f32_to_f16
        high, low = (narrow(block.read(name, "f32")) for name in what.operands[1:3])
        block.write(target, join_halves(low, high))
        return
    value = block.read(what.operands[1], origin)
    if origin == "bf16":
        value = bf16_to_f32(value)
    if to in ("bf16", "f16"):
        narrow = f32_to_bf16 if to == "bf16" else f32_to_f16
        block.write(target, narrow(value.astype(np.float32)))
        return
    block.write(target, _to_number(block, value, what, to))


def _to_number(block: Block, value: np.ndarray, what: Instruction, to: str) -> np.ndarray:
    wanted = numpy_type(to)
    if value.dtype.kind == "f" and wanted.kind in "iu":
        rounding = next(mode for mode in what.opcode if mode in _ROUNDINGS)
        limits = np.iinfo(wanted)
        value = np.clip(np.nan_to_num(_ROUNDINGS[rounding](value.astype(np.float64))), limits.min, limits.max)
    modes = [mode for mode in what.opcode if mode in _ROUNDINGS]
    if value.dtype.kind == "f" and wanted.kind == "f" and modes:
        value = _ROUNDINGS[modes[0]](value)  # rintf and its like
    result = value.astype(wanted)
    if wanted.itemsize < 4 and wanted.kind in "iu":  # a wider register is filled with the sign or zeros
        size = "4" if what.operands[0].startswith("%r") and not what.operands[0].startswith("%rs") else "2"
        result = result.astype(np.dtype(wanted.kind + size))
    return result


def _copy(block: Block, what: Instruction) -> None:
    block.write(what.operands[0], block.read(what.operands[1], "u64"))


ARITHMETIC: dict[str, Handler] = {
    **dict.fromkeys(OPERATIONS, compute),
    "mov": move,
    "cvta": _copy,
    "setp": compare,
    "selp": select,
    "shl": shift,
    "shr": shift,
    "lop3": logic3,
    "prmt": permute_bytes,
    "bfe": extract_bits,
    "bfi": insert_bits,
    "dp4a": dot4,
    "cvt": convert,
}
