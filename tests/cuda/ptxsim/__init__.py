"""Executes the PTX that NVRTC emitted, on numpy: all threads of a block at once, blocks one after the other.

It sees what the host emulator cannot: the GPU side of the inline-PTX wrappers, what the compiler made of the
code, bank conflicts of shared memory and sectors of global memory. Limits: no races (threads move in
lockstep, the lowest program counter first), no local memory, no calls, no atomics' contention; approximate
instructions (ex2, rcp, rsqrt) are exact here.
"""
