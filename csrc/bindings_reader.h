// Reads the dataclasses of strata/backends/parts.py.
#pragma once

#include <vector>

#include "bindings_experts.h"
#include "cpu/parts.h"

namespace strata::binding {

// The arrays and matrices that C++ points into. Not the part itself: it would then keep itself alive.
using Keep = std::vector<py::object>;

class Reader {
  public:
    Reader(py::object part, Keep& keep) : part_(std::move(part)), keep_(keep) {}

    Reader at(const char* name) const { return {part_.attr(name), keep_}; }
    bool has(const char* name) const { return !part_.attr(name).is_none(); }
    const py::object& object() const { return part_; }

    template <class T>
    T get(const char* name) const {
        return part_.attr(name).cast<T>();
    }

    // f32 values, kept; ValueError when their number or layout is another.
    const float* vector(const char* name, size_t size) const {
        const py::object found = part_.attr(name);
        if (!py::isinstance<F32>(found))
            throw py::value_error(std::string(name) + ": no contiguous f32 array");
        const F32 array = found;
        require(size_of(array) == size, "part", name, size_of(array), size);
        keep_.push_back(found);
        return array.data();
    }

    // The same, null for None.
    const float* vector_if(const char* name, size_t size) const {
        return has(name) ? vector(name, size) : nullptr;
    }

    // The matrix that a weight's handle holds, kept.
    const PackedMatrix& packed(const char* name) const {
        keep_.push_back(part_.attr(name).attr("packed"));
        return keep_.back().cast<const PackedMatrix&>();
    }

    // Its sides must be these.
    cpu::Matrix matrix(const char* name, size_t rows, size_t cols) const {
        const cpu::Matrix found = packed(name).matrix;
        require(static_cast<size_t>(found.rows) == rows, "part", name, found.rows, rows);
        require(static_cast<size_t>(found.cols) == cols, "part", name, found.cols, cols);
        return found;
    }

    cpu::Norm norm(const char* name) const {
        const Reader norm = at(name);
        const size_t dim = size_of(norm.get<py::array>("weight"));
        return {norm.vector("weight", dim), dim, norm.get<float>("eps")};
    }

    cpu::Gating gating() const {
        const Reader gating = at("gating");
        return make_gating(gating.get<std::string>("kind"), gating.get<float>("alpha"),
                           gating.get<float>("limit"));
    }

    cpu::DenseFfn dense_ffn() const {
        const cpu::FfnSlice slice = dense_slice(packed("gate_up"), packed("down"));
        require(static_cast<size_t>(slice.down.cols) == get<size_t>("width"), "part", "columns of down",
                slice.down.cols, get<size_t>("width"));
        return {slice, gating()};
    }

  private:
    py::object part_;
    Keep& keep_;
};

}  // namespace strata::binding
