// Python's view of gated FFNs and routed experts. Every shape is checked here.
#include "bindings_experts.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <utility>

using namespace strata::binding;
using namespace strata::cpu;

static int interleaved_rows(int width) { return 2 * ((width + 7) / 8 * 8); }

namespace strata::binding {

Matrix RecordShape::gate_up(const uint8_t* at) const {
    return make_matrix(at, gate_up_code, interleaved_rows(slice_width), hidden);
}

Matrix RecordShape::down(const uint8_t* at) const { return make_matrix(at, down_code, hidden, slice_width); }

void RecordShape::check() const {
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
bool RecordShape::biases_inside() const {
    const int64_t bias_bytes = int64_t{4} * slices * interleaved_rows(slice_width);
    return gate_up_bias_offset >= slices * slice_bytes && down_bias_offset >= gate_up_bias_offset &&
           bias_bytes <= down_bias_offset - gate_up_bias_offset && record_bytes >= down_bias_offset &&
           int64_t{4} * hidden <= record_bytes - down_bias_offset && gate_up_bias_offset % 4 == 0 &&
           down_bias_offset % 4 == 0;
}

int64_t RecordShape::payload_bytes() const {
    return biases ? down_bias_offset + int64_t{4} * hidden : slices * slice_bytes;
}

FfnSlice RecordShape::slice(int i, const uint8_t* part, const uint8_t* tail) const {
    FfnSlice found{gate_up(part), down(part + down_offset), nullptr, nullptr};
    if (!biases) return found;
    const int64_t begin = slices * slice_bytes;
    found.gate_up_bias = reinterpret_cast<const float*>(tail + (gate_up_bias_offset - begin)) +
                         i * interleaved_rows(slice_width);
    if (i == 0) found.down_bias = reinterpret_cast<const float*>(tail + (down_bias_offset - begin));
    return found;
}

std::vector<U8> RecordShape::slices_of(const py::object& record, FfnSlice* out) const {
    const int64_t tail_bytes = record_bytes - slices * slice_bytes;
    std::vector<U8> kept;
    if (!py::isinstance<py::tuple>(record)) {
        kept.push_back(record.cast<U8>());
        expect("bytes of an expert's record are", kept[0].size(), "its layout needs", record_bytes);
        const uint8_t* at = kept[0].data();
        for (int i = 0; i < slices; i++) out[i] = slice(i, at + i * slice_bytes, at + slices * slice_bytes);
        return kept;
    }
    for (const py::handle piece : record) kept.push_back(piece.cast<U8>());
    expect("pieces of an expert's record are", kept.size(), "its layout needs", slices + 1);
    expect("bytes after an expert's slices are", kept[slices].size(), "its layout needs", tail_bytes);
    for (int i = 0; i < slices; i++) {
        expect("bytes of an expert's slice are", kept[i].size(), "its layout needs", slice_bytes);
        out[i] = slice(i, kept[i].data(), kept[slices].data());
    }
    return kept;
}

ExpertTable::ExpertTable(const RecordShape& shape, int experts, py::function record, int copies)
    : shape_(shape), record_(std::move(record)), copies_(copies) {
    check_side("experts of a layer are", experts);
    check_side("copies of an expert are", copies);
    records_.resize(experts);
    slices_.resize(product("experts", {static_cast<size_t>(experts), static_cast<size_t>(copies),
                                       static_cast<size_t>(shape.slices)}));
    known_.resize(experts);
}

void ExpertTable::touch(int32_t id) {
    if (!is_expert(id))
        throw py::value_error("expert " + std::to_string(id) + " was routed to, the layer has " +
                              std::to_string(known_.size()));
    if (known_[id] != nullptr) return;
    FfnSlice* slices = &slices_[static_cast<size_t>(id) * copies_ * shape_.slices];
    const py::object found = record_(id);
    std::vector<U8> kept;
    if (copies_ > 1 && py::isinstance<py::tuple>(found)) {
        const auto each = found.cast<py::tuple>();
        expect("copies of an expert's record are", each.size(), "the table has", copies_);
        for (int c = 0; c < copies_; c++)
            for (U8& part : shape_.slices_of(each[c], slices + c * shape_.slices))
                kept.push_back(std::move(part));
    } else {
        kept = shape_.slices_of(found, slices);
        for (int c = 1; c < copies_; c++) std::copy_n(slices, shape_.slices, slices + c * shape_.slices);
    }
    records_[id] = std::move(kept);
    known_[id] = slices;
}

void ExpertTable::touch_all(const int32_t* ids, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (is_expert(ids[i]) && known_[ids[i]] != nullptr) continue;
        const py::gil_scoped_acquire acquire;
        touch(ids[i]);
    }
}

void ExpertTable::prepare(const I32& ids, const F32& weights, int rows, const Active& active) {
    expect("dimensions of ids are", ids.ndim(), "wanted are", 2);
    expect("rows of ids are", ids.shape(0), "rows of x are", rows);
    expect("routing weights are", weights.size(), "ids are", ids.size());
    for (const int32_t *id = ids.data(), *end = id + ids.size(); id != end; ++id)
        if (!active || !is_expert(*id)) touch(*id);
    if (!active) return;
    for (size_t i = 0; i < active->size(); i++) {
        if (i > 0 && (*active)[i - 1] >= (*active)[i]) throw py::value_error("active experts do not ascend");
        touch((*active)[i]);
    }
}

Routes ExpertTable::routes(Arena& arena, const I32& ids, const F32& weights, const Active& active) const {
    Routes found = routes(ids.data(), weights.data(), ids.shape(0), ids.shape(1));
    if (active) {
        const FfnSlice** wanted = arena.take<const FfnSlice*>(known_.size());
        std::fill_n(wanted, known_.size(), nullptr);
        for (const int32_t id : *active) wanted[id] = known_[id];
        found.slices = wanted;
    }
    return found;
}

Gating make_gating(const std::string& kind, float alpha, float limit) {
    const char* const names[] = {"silu", "gelu_tanh", "swiglu_clamped"};
    for (int i = 0; i < 3; i++)
        if (kind == names[i]) return {static_cast<Gate>(i), alpha, limit};
    throw py::value_error("no gated activation is called " + kind);
}

FfnSlice dense_slice(const PackedMatrix& gate_up, const PackedMatrix& down) {
    expect("rows of down are", down.matrix.rows, "columns of gate_up are", gate_up.matrix.cols);
    expect("rows of gate_up are", gate_up.matrix.rows, "for down's columns",
           interleaved_rows(down.matrix.cols));
    return {gate_up.matrix, down.matrix, nullptr, nullptr};
}

}  // namespace strata::binding

namespace {

F32 run_ffn(Cpu& cpu, const F32& x, const PackedMatrix& gate_up, const PackedMatrix& down,
            const Gating& gating, bool exact) {
    const int tokens = rows_of(x, gate_up.matrix.cols);
    const DenseFfn part{dense_slice(gate_up, down), gating};
    F32 y({tokens, down.matrix.rows});
    const float* in = x.data();
    float* out = y.mutable_data();
    const py::gil_scoped_release release;
    const OpGuard guard(cpu);
    dense_ffn(cpu, part, in, tokens, exact, out);
    return y;
}

F32 run_experts(Cpu& cpu, const F32& x, const I32& ids, const F32& weights, ExpertTable& table,
                const Gating& gating, bool exact, const Active& active) {
    const RecordShape& shape = table.shape();
    const int tokens = rows_of(x, shape.hidden);
    table.prepare(ids, weights, tokens, active);
    F32 y({tokens, shape.hidden});
    const float* in = x.data();
    float* out = y.mutable_data();
    const py::gil_scoped_release release;
    const OpGuard guard(cpu);
    const ExpertWorks found = group_tokens(cpu.arena, table.routes(cpu.arena, ids, weights, active));
    gated_ffn(cpu, in, tokens, shape.hidden, found.works, found.count, shape.slices, gating, exact, out,
              OutputRows::kSummed, table.copies());
    return y;
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

}  // namespace

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
    py::class_<ExpertTable>(m, "ExpertTable")
        .def(py::init<const RecordShape&, int, py::function, int>(), py::arg("shape"), py::arg("experts"),
             py::arg("record"), py::arg("copies") = 1);
    m.def("experts", run_experts, py::arg("cpu"), py::arg("x").noconvert(), py::arg("ids").noconvert(),
          py::arg("weights").noconvert(), py::arg("table"), py::arg("gating"), py::arg("exact"),
          py::arg("active") = py::none());
}
