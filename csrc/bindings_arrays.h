// Arrays of Python at the border of the extension: what every binding checks before a pointer goes on.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

namespace strata::binding {

namespace py = pybind11;

using F32 = py::array_t<float, py::array::c_style>;
using I32 = py::array_t<int32_t, py::array::c_style>;
using I64 = py::array_t<int64_t, py::array::c_style>;
using U8 = py::array_t<uint8_t, py::array::c_style>;

inline size_t size_of(const py::array& array) { return static_cast<size_t>(array.size()); }

// E.g. "attention: page id is 7, expected 4".
inline void require(bool ok, const char* op, const char* what, size_t have, size_t want) {
    if (!ok)
        throw py::value_error(std::string(op) + ": " + what + " is " + std::to_string(have) + ", expected " +
                              std::to_string(want));
}

// E.g. ("columns of x are", 3, "the weight's are", 4): both numbers end in the message.
inline void expect(const char* what, int64_t found, const char* other, int64_t wanted) {
    if (found == wanted) return;
    throw py::value_error(std::string(what) + " " + std::to_string(found) + ", " + other + " " +
                          std::to_string(wanted));
}

// pybind11 would copy an array of another dtype or layout and then write results into the copy.
inline float* writable(F32& array, const char* op) {
    if (!array.writeable()) throw py::value_error(std::string(op) + ": the array is read-only");
    return array.mutable_data();
}

// Sizes are multiplied to find where elements lie; none may wrap around.
inline size_t product(const char* op, std::initializer_list<size_t> sizes) {
    size_t result = 1;
    for (const size_t size : sizes)
        if (__builtin_mul_overflow(result, size, &result))
            throw py::value_error(std::string(op) + ": the product of its sizes, one being " +
                                  std::to_string(size) + ", is beyond 64 bits");
    return result;
}

inline const float* data_or_null(const std::optional<F32>& array) { return array ? array->data() : nullptr; }

}  // namespace strata::binding
