// Sums of multiply_tokens into y, f32 [tokens, rows]: y = sums + bias, or y += scale * (sums + bias).
#pragma once

#include "prefill.cuh"

struct PrefillResult {
    const float* bias;
    float* y;
    int rows, tokens, add;
    float scale;

    METHOD void put(int token, int row, float value) const {
        float* const target = y + static_cast<size_t>(token) * rows + row;
        *target = add ? *target + scale * value : value;
    }

    // Both rows of a lane lie side by side; with an even number of rows they are aligned, too.
    METHOD void put_pair(int token, int row, float2 values) const {
        if (rows % 2 != 0) {
            put(token, row, values.x);
            if (row + 1 < rows) put(token, row + 1, values.y);
            return;
        }
        float2* const target = reinterpret_cast<float2*>(y + static_cast<size_t>(token) * rows + row);
        if (add) {
            const float2 old = *target;
            values = make_float2(old.x + scale * values.x, old.y + scale * values.y);
        }
        *target = values;
    }

    METHOD float2 bias_pair(int row) const {
        if (bias == nullptr) return make_float2(0.0f, 0.0f);
        return make_float2(bias[row], row + 1 < rows ? bias[row + 1] : 0.0f);
    }
};

template <int Tiles>
DEVICE void write_tokens(const float (&sums)[Tiles][4], const PrefillResult& result, int first, int row,
                         Lane lane) {
    if (row >= result.rows) return;
    const float2 bias = result.bias_pair(row);
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = first + tile * 8 + 2 * lane.member + i;
            if (token < result.tokens)
                result.put_pair(token, row, make_float2(sums[tile][i] + bias.x, sums[tile][i + 2] + bias.y));
        }
    }
}
