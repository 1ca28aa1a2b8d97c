// Packed matrices as Python holds them.
#pragma once

#include "bindings_arrays.h"
#include "cpu/formats.h"

namespace strata::binding {

// Ceiling of a matrix's sides: block sizes and offsets of all kernels then fit their integers.
constexpr int kMaxSide = 1 << 24;

void check_side(const char* what, int64_t size);
void check_code(int code);

// Rows of x, f32 [rows, cols]; ValueError for another shape.
int rows_of(const F32& x, int64_t cols);

// A packed matrix that keeps its bytes alive.
struct PackedMatrix {
    PackedMatrix(U8 bytes, int code, int rows, int cols);
    U8 keep;
    cpu::Matrix matrix;
};

// ValueError where an id is no row of the embedding.
void check_ids(const PackedMatrix& embedding, const I32& ids);

}  // namespace strata::binding

// Registers matrices and linear ops with the module that bindings.cpp opens.
void bind_weight_ops(pybind11::module_& m);
