// Python's view of packed matrices and linear ops. Every shape is checked here.
#include "bindings_weights.h"

#include <pybind11/stl.h>

#include "cpu/ends.h"
#include "cpu/linear.h"

using namespace strata::binding;
using namespace strata::cpu;

namespace strata::binding {

void check_side(const char* what, int64_t size) {
    if (size <= 0 || size > kMaxSide)
        throw py::value_error(std::string(what) + " " + std::to_string(size) + ", allowed are 1 to " +
                              std::to_string(kMaxSide));
}

void check_code(int code) {
    if (code < 0 || code >= kFormatCount)
        throw py::value_error("no weight format has code " + std::to_string(code));
}

int rows_of(const F32& x, int64_t cols) {
    expect("dimensions of x are", x.ndim(), "wanted are", 2);
    expect("columns of x are", x.shape(1), "the weight's are", cols);
    if (x.shape(0) > kMaxSide) throw py::value_error("rows of x are " + std::to_string(x.shape(0)));
    return static_cast<int>(x.shape(0));
}

void check_ids(const PackedMatrix& embedding, const I32& ids) {
    const int rows = embedding.matrix.rows;
    for (size_t i = 0; i < size_of(ids); i++)
        if (ids.data()[i] < 0 || ids.data()[i] >= rows)
            throw py::value_error("token id " + std::to_string(ids.data()[i]) +
                                  ", rows of the embedding are " + std::to_string(rows));
}

PackedMatrix::PackedMatrix(U8 bytes, int code, int rows, int cols) : keep(std::move(bytes)) {
    check_code(code);
    check_side("rows of a packed matrix are", rows);
    check_side("columns of a packed matrix are", cols);
    matrix = make_matrix(keep.data(), code, rows, cols);
    expect("bytes of the packed matrix are", keep.size(), "its shape needs", matrix.bytes);
}

}  // namespace strata::binding

namespace {

F32 run_linear(Cpu& cpu, const PackedMatrix& weight, const F32& x, const std::optional<F32>& bias,
               bool exact) {
    const int tokens = rows_of(x, weight.matrix.cols);
    if (bias) expect("values of the bias are", bias->size(), "rows of the weight are", weight.matrix.rows);
    F32 y({tokens, weight.matrix.rows});
    const float *in = x.data(), *bias_in = bias ? bias->data() : nullptr;
    float* out = y.mutable_data();
    const py::gil_scoped_release release;
    const OpGuard guard(cpu);
    linear(cpu, weight.matrix, in, tokens, bias_in, exact, out);
    return y;
}

F32 run_head_linear(Cpu& cpu, const PackedMatrix& weight, const F32& x, int heads, bool exact) {
    if (heads <= 0) throw py::value_error("heads are " + std::to_string(heads));
    expect("rows of the weight are", weight.matrix.rows, "in whole heads",
           weight.matrix.rows / heads * heads);
    const int tokens = rows_of(x, static_cast<int64_t>(weight.matrix.cols) * heads);
    F32 y({tokens, weight.matrix.rows});
    const float* in = x.data();
    float* out = y.mutable_data();
    const py::gil_scoped_release release;
    const OpGuard guard(cpu);
    head_linear(cpu, weight.matrix, in, tokens, heads, exact, out);
    return y;
}

F32 run_embedding(Cpu& cpu, const PackedMatrix& weight, const I32& ids, float scale) {
    check_ids(weight, ids);
    F32 y({size_of(ids), static_cast<size_t>(weight.matrix.cols)});
    const int32_t* id = ids.data();
    float* out = y.mutable_data();
    const py::gil_scoped_release release;
    const OpGuard guard(cpu);
    embed(cpu, weight.matrix, id, size_of(ids), scale, out);
    return y;
}

}  // namespace

void bind_weight_ops(py::module_& m) {
    py::list formats;
    for (const Format& f : kFormats)
        formats.append(py::make_tuple(f.name, f.group, f.scale_bytes, f.minimum));
    m.attr("FORMATS") = formats;
    py::class_<PackedMatrix>(m, "PackedMatrix")
        .def(py::init<U8, int, int, int>(), py::arg("data").noconvert(), py::arg("code"), py::arg("rows"),
             py::arg("cols"))
        .def_property_readonly("rows", [](const PackedMatrix& w) { return w.matrix.rows; })
        .def_property_readonly("cols", [](const PackedMatrix& w) { return w.matrix.cols; })
        .def_property_readonly("block_bytes", [](const PackedMatrix& w) { return w.matrix.block_bytes; });
    m.def("linear", run_linear, py::arg("cpu"), py::arg("weight"), py::arg("x").noconvert(),
          py::arg("bias").noconvert(), py::arg("exact"));
    m.def("head_linear", run_head_linear, py::arg("cpu"), py::arg("weight"), py::arg("x").noconvert(),
          py::arg("heads"), py::arg("exact"));
    m.def("embedding", run_embedding, py::arg("cpu"), py::arg("weight"), py::arg("ids").noconvert(),
          py::arg("scale"));
}
