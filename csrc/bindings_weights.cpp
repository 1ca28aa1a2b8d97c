// Python's view of packed matrices, linear ops and expert FFNs. Every shape is checked here.
#include "bindings_weights.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "cpu/experts.h"
#include "cpu/grouping.h"
#include "cpu/linear.h"

namespace py = pybind11;
using namespace strata::cpu;

namespace {

using F32 = py::array_t<float, py::array::c_style>;
using I32 = py::array_t<int32_t, py::array::c_style>;
using U8 = py::array_t<uint8_t, py::array::c_style>;

// E.g. ("linear: columns of x are", 3, "columns of the weight are", 4): both numbers end in the message.
void expect(const char* what, int64_t found, const char* other, int64_t wanted) {
    if (found == wanted) return;
    throw py::value_error(std::string(what) + " " + std::to_string(found) + ", " + other + " " +
                          std::to_string(wanted));
}

// Ceiling of a matrix's sides: block sizes and offsets of all kernels then fit their integers.
constexpr int kMaxSide = 1 << 24;

void check_side(const char* what, int64_t size) {
    if (size <= 0 || size > kMaxSide)
        throw py::value_error(std::string(what) + " " + std::to_string(size) + ", allowed are 1 to " +
                              std::to_string(kMaxSide));
}

int rows_of(const F32& x, int64_t cols) {
    expect("dimensions of x are", x.ndim(), "wanted are", 2);
    expect("columns of x are", x.shape(1), "the weight's are", cols);
    if (x.shape(0) > kMaxSide) throw py::value_error("rows of x are " + std::to_string(x.shape(0)));
    return static_cast<int>(x.shape(0));
}

void check_code(int code) {
    if (code < 0 || code >= kFormatCount)
        throw py::value_error("no weight format has code " + std::to_string(code));
}

// A packed matrix that keeps its bytes alive.
struct PackedMatrix {
    PackedMatrix(U8 bytes, int code, int rows, int cols) : keep(std::move(bytes)) {
        check_code(code);
        check_side("rows of a packed matrix are", rows);
        check_side("columns of a packed matrix are", cols);
        matrix = make_matrix(keep.data(), code, rows, cols);
        expect("bytes of the packed matrix are", keep.size(), "its shape needs", matrix.bytes);
    }
    U8 keep;
    Matrix matrix;
};

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
    const int tokens = static_cast<int>(ids.size());
    const int32_t* id = ids.data();
    for (int i = 0; i < tokens; i++)
        if (id[i] < 0 || id[i] >= weight.matrix.rows)
            throw py::value_error("token id " + std::to_string(id[i]) + ", rows of the embedding are " +
                                  std::to_string(weight.matrix.rows));
    F32 y({tokens, weight.matrix.cols});
    float* out = y.mutable_data();
    const py::gil_scoped_release release;
    const OpGuard guard(cpu);
    embedding(cpu, weight.matrix, id, tokens, scale, out);
    return y;
}

int interleaved_rows(int width) { return 2 * ((width + 7) / 8 * 8); }

F32 run_ffn(Cpu& cpu, const F32& x, const PackedMatrix& gate_up, const PackedMatrix& down,
            const Gating& gating, bool exact) {
    const int tokens = rows_of(x, gate_up.matrix.cols), hidden = down.matrix.rows;
    expect("rows of down are", hidden, "columns of gate_up are", gate_up.matrix.cols);
    expect("rows of gate_up are", gate_up.matrix.rows, "for down's columns",
           interleaved_rows(down.matrix.cols));
    F32 y({tokens, hidden});
    const float* in = x.data();
    float* out = y.mutable_data();
    const py::gil_scoped_release release;
    const OpGuard guard(cpu);
    std::vector<int32_t> all(tokens);
    for (int t = 0; t < tokens; t++) all[t] = t;
    const std::vector<float> ones(tokens, 1.0f);
    const FfnSlice slice{gate_up.matrix, down.matrix, nullptr, nullptr};
    const ExpertWork work{&slice, all.data(), ones.data(), tokens};
    gated_ffn(cpu, in, tokens, hidden, &work, tokens > 0 ? 1 : 0, 1, gating, exact, out);
    return y;
}

// Where the parts of an expert's record stand: the numbers of formats.ExpertLayout.
struct RecordShape {
    int gate_up_code, down_code, hidden, slice_width, slices;
    int64_t slice_bytes, down_offset, gate_up_bias_offset, down_bias_offset, record_bytes;
    bool biases;

    Matrix gate_up(const uint8_t* at) const {
        return make_matrix(at, gate_up_code, interleaved_rows(slice_width), hidden);
    }
    Matrix down(const uint8_t* at) const { return make_matrix(at, down_code, hidden, slice_width); }

    void check() const {
        check_code(gate_up_code);
        check_code(down_code);
        check_side("the hidden size of an expert record is", hidden);
        check_side("the slice width of an expert record is", slice_width);
        check_side("slices of an expert record are", slices);
        const int64_t gate_up_bytes = gate_up(nullptr).bytes, down_bytes = down(nullptr).bytes;
        expect("bytes of gate_up are", gate_up_bytes, "down begins at", down_offset);
        expect("bytes of a slice are", gate_up_bytes + down_bytes, "the layout says", slice_bytes);
        if (slices > record_bytes / slice_bytes || (biases && !biases_inside()))
            throw py::value_error("an expert record's parts do not fit " + std::to_string(record_bytes));
    }

    // Differences, because sums of such numbers may wrap around; slices * slice_bytes is known to fit.
    bool biases_inside() const {
        const int64_t bias_bytes = int64_t{4} * slices * interleaved_rows(slice_width);
        return gate_up_bias_offset >= slices * slice_bytes && down_bias_offset >= gate_up_bias_offset &&
               bias_bytes <= down_bias_offset - gate_up_bias_offset && record_bytes >= down_bias_offset &&
               int64_t{4} * hidden <= record_bytes - down_bias_offset && gate_up_bias_offset % 4 == 0 &&
               down_bias_offset % 4 == 0;
    }

    void slices_of(const uint8_t* record, FfnSlice* out) const {
        const float* up_bias = reinterpret_cast<const float*>(record + gate_up_bias_offset);
        const float* bias = reinterpret_cast<const float*>(record + down_bias_offset);
        for (int i = 0; i < slices; i++) {
            const uint8_t* part = record + i * slice_bytes;
            out[i] = {gate_up(part), down(part + down_offset),
                      biases ? up_bias + i * interleaved_rows(slice_width) : nullptr,
                      biases && i == 0 ? bias : nullptr};
        }
    }
};

std::vector<FfnSlice> all_slices(const RecordShape& shape, const std::vector<U8>& records) {
    std::vector<FfnSlice> slices(records.size() * shape.slices);
    for (size_t i = 0; i < records.size(); i++) {
        expect("bytes of an expert's record are", records[i].size(), "its layout needs", shape.record_bytes);
        shape.slices_of(records[i].data(), &slices[i * shape.slices]);
    }
    return slices;
}

F32 run_experts(Cpu& cpu, const F32& x, const I32& ids, const F32& weights,
                const std::vector<int32_t>& active, const std::vector<U8>& records, const RecordShape& shape,
                const Gating& gating, bool exact) {
    const int tokens = rows_of(x, shape.hidden);
    expect("dimensions of ids are", ids.ndim(), "wanted are", 2);
    expect("rows of ids are", ids.shape(0), "rows of x are", tokens);
    expect("routing weights are", weights.size(), "ids are", ids.size());
    expect("records are", records.size(), "active experts are", active.size());
    for (size_t i = 1; i < active.size(); i++)  // routes are looked up by bisection: others would be lost
        if (active[i - 1] >= active[i]) throw py::value_error("active experts do not ascend");
    const std::vector<FfnSlice> slices = all_slices(shape, records);
    F32 y({tokens, shape.hidden});
    const int64_t top_k = ids.shape(1);
    const float *in = x.data(), *weight = weights.data();
    const int32_t* id = ids.data();
    float* out = y.mutable_data();
    const py::gil_scoped_release release;
    const OpGuard guard(cpu);
    const Grouping groups = group_tokens(id, weight, tokens, top_k, active);
    std::vector<ExpertWork> works;
    for (size_t i = 0; i < active.size(); i++) {
        const ExpertWork work = groups.work(i, &slices[i * shape.slices]);
        if (work.count > 0) works.push_back(work);
    }
    const int count = static_cast<int>(works.size());
    gated_ffn(cpu, in, tokens, shape.hidden, works.data(), count, shape.slices, gating, exact, out);
    return y;
}

Gating make_gating(const std::string& kind, float alpha, float limit) {
    const char* const names[] = {"silu", "gelu_tanh", "swiglu_clamped"};
    for (int i = 0; i < 3; i++)
        if (kind == names[i]) return {static_cast<Gate>(i), alpha, limit};
    throw py::value_error("no gated activation is called " + kind);
}

RecordShape make_record_shape(int gate_up_code, int down_code, int hidden, int slice_width, int slices,
                              int64_t slice_bytes, int64_t down_offset, int64_t gate_up_bias_offset,
                              int64_t down_bias_offset, int64_t record_bytes, bool biases) {
    const RecordShape shape{gate_up_code,     down_code,    hidden,      slice_width,
                            slices,           slice_bytes,  down_offset, gate_up_bias_offset,
                            down_bias_offset, record_bytes, biases};
    shape.check();
    return shape;
}

void bind_matrices(py::module_& m) {
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

void bind_experts(py::module_& m) {
    py::class_<Gating>(m, "Gating")
        .def(py::init(&make_gating), py::arg("kind"), py::arg("alpha"), py::arg("limit"));
    py::class_<RecordShape>(m, "RecordShape")
        .def(py::init(&make_record_shape), py::kw_only(), py::arg("gate_up_code"), py::arg("down_code"),
             py::arg("hidden"), py::arg("slice_width"), py::arg("slices"), py::arg("slice_bytes"),
             py::arg("down_offset"), py::arg("gate_up_bias_offset"), py::arg("down_bias_offset"),
             py::arg("record_bytes"), py::arg("biases"));
    m.def("ffn", run_ffn, py::arg("cpu"), py::arg("x").noconvert(), py::arg("gate_up"), py::arg("down"),
          py::arg("gating"), py::arg("exact"));
    m.def("experts", run_experts, py::arg("cpu"), py::arg("x").noconvert(), py::arg("ids").noconvert(),
          py::arg("weights").noconvert(), py::arg("active"), py::arg("records"), py::arg("shape"),
          py::arg("gating"), py::arg("exact"));
}

}  // namespace

void bind_weight_ops(py::module_& m) {
    bind_matrices(m);
    bind_experts(m);
}
