// The token ops of the extension, and what fused ops take from their bindings.
#pragma once

#include "bindings_arrays.h"
#include "cpu/heads.h"
#include "cpu/router.h"

namespace strata::binding {

// From a RouterSpec; ValueError for numbers that C++ would index with and that cannot be.
cpu::RouterArgs router_args(const py::object& spec);

// Without rotation. norm: [dim], [heads * dim] or none.
cpu::HeadsSpec heads_spec(size_t heads, size_t dim, const std::optional<F32>& norm, float eps,
                          std::optional<float> clip);

void check_rotary(size_t rotary_dim, size_t dim);

}  // namespace strata::binding

// Registers the token ops with the module that bindings.cpp opens.
void bind_token_ops(pybind11::module_& m);
