// mma, ldmatrix and movmatrix. Fragment layouts: PTX ISA 8.x, "Matrix Fragments for mma.m16n8k16" (16 bit)
// and "mma.m16n8k32" (8 bit), "ldmatrix", "movmatrix". Lane l holds row l / 4 and the column pair l % 4.
#include "emu/machine.h"

namespace strata::emu {

namespace {

struct Inputs {
    u32 a[4], b[2], c[4];
};

Inputs inputs_of(const Warp& warp, unsigned lane) {
    Inputs inputs;
    memcpy(&inputs, warp.in[lane], sizeof inputs);
    return inputs;
}

float element(Collective op, u32 pair, int half) {
    const u16 bits = static_cast<u16>(pair >> 16 * half);
    return op == Collective::mma_bf16 ? to_float(bf16{bits}) : to_float(f16{bits});
}

// Products are exact in f64; the sum is rounded once. Tensor cores round otherwise: tests leave room.
void multiply_16bit(const Warp& warp, Thread* lanes) {
    double a[16][16], b[16][8];
    for (unsigned lane = 0; lane < kLanes; ++lane) {
        const Inputs in = inputs_of(warp, lane);
        const unsigned row = lane / 4, pair = lane % 4 * 2;
        for (unsigned half = 0; half < 2; ++half) {
            for (unsigned r = 0; r < 4; ++r)
                a[row + r % 2 * 8][pair + half + r / 2 * 8] = element(warp.op, in.a[r], half);
            for (unsigned r = 0; r < 2; ++r) b[pair + half + r * 8][row] = element(warp.op, in.b[r], half);
        }
    }
    for (unsigned lane = 0; lane < kLanes; ++lane) {
        float sums[4];
        memcpy(sums, inputs_of(warp, lane).c, 16);
        for (unsigned i = 0; i < 4; ++i) {
            double sum = sums[i];
            for (unsigned k = 0; k < 16; ++k) sum += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
            sums[i] = static_cast<float>(sum);
        }
        memcpy(lanes[lane].result, sums, 16);
    }
}

void multiply_8bit(const Warp& warp, Thread* lanes) {
    int a[16][32], b[32][8];
    for (unsigned lane = 0; lane < kLanes; ++lane) {
        const Inputs in = inputs_of(warp, lane);
        const unsigned row = lane / 4, quad = lane % 4 * 4;
        for (unsigned byte = 0; byte < 4; ++byte) {
            for (unsigned r = 0; r < 4; ++r)
                a[row + r % 2 * 8][quad + byte + r / 2 * 16] = static_cast<i8>(in.a[r] >> 8 * byte);
            for (unsigned r = 0; r < 2; ++r)
                b[quad + byte + r * 16][row] = static_cast<i8>(in.b[r] >> 8 * byte);
        }
    }
    for (unsigned lane = 0; lane < kLanes; ++lane) {
        int sums[4];
        memcpy(sums, inputs_of(warp, lane).c, 16);
        for (unsigned i = 0; i < 4; ++i)
            for (unsigned k = 0; k < 32; ++k)
                sums[i] += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
        memcpy(lanes[lane].result, sums, 16);
    }
}

}  // namespace

void multiply_matrices(const Warp& warp, Thread* lanes) {
    if (warp.op == Collective::mma_s8)
        multiply_8bit(warp, lanes);
    else
        multiply_16bit(warp, lanes);
}

// Lanes 8i..8i+7 give the addresses of the rows of matrix i.
void load_matrices(const Warp& warp, Thread* lanes) {
    for (unsigned lane = 0; lane < kLanes; ++lane) {
        for (unsigned matrix = 0; matrix < 4; ++matrix) {
            const u8* row;
            memcpy(&row, warp.in[matrix * 8 + lane / 4], sizeof row);
            memcpy(lanes[lane].result + 4 * matrix, row + lane % 4 * 4, 4);
        }
    }
}

void transpose_matrix(const Warp& warp, Thread* lanes) {
    for (unsigned lane = 0; lane < kLanes; ++lane) {
        for (unsigned half = 0; half < 2; ++half) {
            const unsigned row = lane % 4 * 2 + half, column = lane / 4;
            memcpy(lanes[lane].result + 2 * half, warp.in[row * 4 + column / 2] + column % 2 * 2, 2);
        }
    }
}

}  // namespace strata::emu
