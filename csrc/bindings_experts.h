// Gated FFNs and the records of routed experts as Python holds them.
#pragma once

#include <vector>

#include "bindings_weights.h"
#include "cpu/experts.h"
#include "cpu/feed_forward.h"
#include "cpu/grouping.h"

namespace strata::binding {

// Where the parts of an expert's record stand: the numbers of formats.ExpertLayout.
struct RecordShape {
    int gate_up_code, down_code, hidden, slice_width, slices;
    int64_t slice_bytes, down_offset, gate_up_bias_offset, down_bias_offset, record_bytes;
    bool biases;

    cpu::Matrix gate_up(const uint8_t* at) const;
    cpu::Matrix down(const uint8_t* at) const;
    // ValueError for numbers that cannot be.
    void check() const;
    // Without the padding at the end.
    int64_t payload_bytes() const;
    // The record's slices, out[slices]. record: u8 [record_bytes], or a tuple of pieces that lie on several
    // memory nodes: u8 [slice_bytes] for each slice, and then what follows the slices in a record. Returns
    // what must be kept while they are used; ValueError for other sizes.
    std::vector<U8> slices_of(const py::object& record, cpu::FfnSlice* out) const;

  private:
    bool biases_inside() const;
    // Slice i at `part`; tail: what follows the slices.
    cpu::FfnSlice slice(int i, const uint8_t* part, const uint8_t* tail) const;
};

using Active = std::optional<std::vector<int32_t>>;

// The experts of one layer. A record is asked for when a token is first routed to its expert, and then kept:
// decoding asks for hundreds of them per token, which in Python cost more than some of the arithmetic.
class ExpertTable {
  public:
    // record(index) -> what RecordShape::slices_of takes. copies > 1: or a tuple of so many of those, one for
    // the workers of each node.
    ExpertTable(const RecordShape& shape, int experts, py::function record, int copies);

    const RecordShape& shape() const { return shape_; }
    int copies() const { return copies_; }
    // Sees to it that every expert wanted stands in the table; needs the GIL. active: the ones wanted,
    // ascending; none = all routed to. ValueError for ids that are no experts, for ids or weights of another
    // shape than [rows, top_k], and for active experts that do not ascend.
    void prepare(const I32& ids, const F32& weights, int rows, const Active& active);
    // The same for ids of a router of ours, without the GIL, which is taken when a record must be asked for.
    void touch_all(const int32_t* ids, size_t count);
    size_t count() const { return known_.size(); }
    // All experts that `prepare` or `touch_all` have seen to, for group_tokens; needs no GIL.
    cpu::Routes routes(const int32_t* ids, const float* weights, int64_t rows, int64_t top_k) const {
        return {ids, weights, rows, top_k, known_.data(), static_cast<int>(known_.size())};
    }
    // Only the active ones.
    cpu::Routes routes(cpu::Arena& arena, const I32& ids, const F32& weights, const Active& active) const;

  private:
    bool is_expert(int32_t id) const { return id >= 0 && static_cast<size_t>(id) < known_.size(); }
    void touch(int32_t id);

    RecordShape shape_;
    py::function record_;
    int copies_;
    std::vector<std::vector<U8>> records_;     // by expert; keep their bytes alive
    std::vector<cpu::FfnSlice> slices_;        // [experts][copies][shape.slices]
    std::vector<const cpu::FfnSlice*> known_;  // by expert; null until its record was asked for
};

// ValueError for an unknown kind.
cpu::Gating make_gating(const std::string& kind, float alpha, float limit);

// Columns and rows must agree with each other.
cpu::FfnSlice dense_slice(const PackedMatrix& gate_up, const PackedMatrix& down);

}  // namespace strata::binding

// Registers all of it with the module that bindings.cpp opens.
void bind_experts(pybind11::module_& m);
