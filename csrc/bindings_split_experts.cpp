// Python's view of routed experts whose weights come one after the other, in any order.
#include "bindings_split_experts.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "bindings_experts.h"
#include "cpu/expert_sum.h"

using namespace strata::binding;
using namespace strata::cpu;

namespace {

// The routed experts of one layer and step. Experts are computed when their records are there; outputs are
// added in ascending order of the experts, each as soon as all before it have been. So the result is the bits
// of `experts`, whatever came first, and outputs that wait are the only thing kept.
class SplitExperts {
  public:
    // wanted: the experts that will be computed, ascending. What is routed to others is left out.
    SplitExperts(const RecordShape& shape, int experts, I32 ids, F32 weights, std::vector<int32_t> wanted)
        : shape_(shape),
          ids_(std::move(ids)),
          weights_(std::move(weights)),
          wanted_(std::move(wanted)),
          slices_(product("experts", {static_cast<size_t>(experts), static_cast<size_t>(shape.slices)})),
          here_(experts),
          waiting_(experts) {
        expect("dimensions of ids are", ids_.ndim(), "wanted are", 2);
        expect("routing weights are", weights_.size(), "ids are", ids_.size());
        for (const int32_t *id = ids_.data(), *end = id + ids_.size(); id != end; ++id) check(*id);
        for (size_t i = 0; i < wanted_.size(); i++) {
            check(wanted_[i]);
            if (i > 0 && wanted_[i - 1] >= wanted_[i]) throw py::value_error("experts do not ascend");
        }
        y_ = F32({ids_.shape(0), static_cast<py::ssize_t>(shape_.hidden)});
        std::fill_n(y_.mutable_data(), y_.size(), 0.0f);
    }

    // Computes some of the experts; their records are not needed afterwards. x: f32 [rows, hidden].
    void compute(Cpu& cpu, const F32& x, const std::vector<int32_t>& active,
                 const std::vector<py::object>& records, const Gating& gating, bool exact) {
        const int tokens = rows_of(x, shape_.hidden);
        expect("rows of ids are", ids_.shape(0), "rows of x are", tokens);
        expect("records are", records.size(), "experts are", active.size());
        std::vector<std::vector<U8>> kept;
        for (size_t i = 0; i < active.size(); i++) kept.push_back(place(active[i], records[i]));
        const float* in = x.data();
        float* out = y_.mutable_data();
        {
            const py::gil_scoped_release release;
            const OpGuard guard(cpu);
            run(cpu, in, tokens, gating, exact);
            add_finished(cpu, out);
        }
        for (const int32_t id : active) here_[id] = nullptr;
    }

    // The sum, f32 [rows, hidden]; ValueError while experts are missing.
    F32 sum() const {
        expect("experts computed are", next_, "wanted are", wanted_.size());
        return y_;
    }

  private:
    // Outputs of one call of compute. They go when the last of its experts has been added.
    struct Outputs {
        std::unique_ptr<float[]> values;
        std::vector<int32_t> tokens;
    };
    struct Waiting {
        std::shared_ptr<Outputs> owner;
        ExpertOutputs view{nullptr, nullptr, 0};
        bool computed = false;
    };

    void check(int32_t id) const {
        if (id < 0 || static_cast<size_t>(id) >= here_.size())
            throw py::value_error("expert " + std::to_string(id) + " was routed to, the layer has " +
                                  std::to_string(here_.size()));
    }

    std::vector<U8> place(int32_t id, const py::object& record) {
        check(id);
        if (!std::binary_search(wanted_.begin(), wanted_.end(), id) || waiting_[id].computed)
            throw py::value_error("expert " + std::to_string(id) + " is not wanted, or not any more");
        FfnSlice* const slices = &slices_[static_cast<size_t>(id) * shape_.slices];
        std::vector<U8> kept = shape_.slices_of(record, slices);
        here_[id] = slices;
        waiting_[id].computed = true;
        return kept;
    }

    // Every slice of every expert writes rows of its own: expert after expert, slice after slice.
    void run(Cpu& cpu, const float* x, int tokens, const Gating& gating, bool exact) {
        const ExpertWorks found =
            group_tokens(cpu.arena, {ids_.data(), weights_.data(), ids_.shape(0), ids_.shape(1), here_.data(),
                                     static_cast<int>(here_.size())});
        if (found.count == 0) return;
        int64_t rows = 0;
        for (int i = 0; i < found.count; i++) rows += int64_t{shape_.slices} * found.works[i].count;
        const auto outputs = std::make_shared<Outputs>();
        outputs->values.reset(new float[static_cast<size_t>(rows) * shape_.hidden]);
        gated_ffn(cpu, x, tokens, shape_.hidden, found.works, found.count, shape_.slices, gating, exact,
                  outputs->values.get(), OutputRows::kApart);
        keep(found, outputs);
    }

    void keep(const ExpertWorks& found, const std::shared_ptr<Outputs>& outputs) {
        const ExpertWork& last = found.works[found.count - 1];
        const int32_t* const first = found.works[0].tokens;  // tokens of all works lie one after the other
        outputs->tokens.assign(first, last.tokens + last.count);
        const float* at = outputs->values.get();
        for (int i = 0; i < found.count; i++) {
            const ExpertWork& work = found.works[i];
            const auto id = static_cast<int32_t>((work.slices - slices_.data()) / shape_.slices);
            waiting_[id].owner = outputs;
            waiting_[id].view = {at, outputs->tokens.data() + (work.tokens - first), work.count};
            at += int64_t{shape_.slices} * work.count * shape_.hidden;
        }
    }

    // Adds what is next in order and there.
    void add_finished(Cpu& cpu, float* y) {
        std::vector<ExpertOutputs> ready;
        size_t end = next_;
        for (; end < wanted_.size() && waiting_[wanted_[end]].computed; end++)
            if (waiting_[wanted_[end]].owner) ready.push_back(waiting_[wanted_[end]].view);
        if (!ready.empty())
            add_outputs(cpu, ready.data(), static_cast<int>(ready.size()), shape_.slices, shape_.hidden, y);
        for (; next_ < end; next_++) waiting_[wanted_[next_]].owner.reset();
    }

    const RecordShape shape_;
    const I32 ids_;
    const F32 weights_;
    const std::vector<int32_t> wanted_;
    std::vector<FfnSlice> slices_;       // [experts][shape.slices]
    std::vector<const FfnSlice*> here_;  // by expert; null but for those that a call of compute was given
    std::vector<Waiting> waiting_;       // by expert
    size_t next_ = 0;                    // in wanted_: those before it are in y_
    F32 y_;
};

}  // namespace

void bind_split_experts(py::module_& m) {
    py::class_<SplitExperts>(m, "SplitExperts")
        .def(py::init<const RecordShape&, int, I32, F32, std::vector<int32_t>>(), py::arg("shape"),
             py::arg("experts"), py::arg("ids").noconvert(), py::arg("weights").noconvert(),
             py::arg("wanted"))
        .def("compute", &SplitExperts::compute, py::arg("cpu"), py::arg("x").noconvert(), py::arg("active"),
             py::arg("records"), py::arg("gating"), py::arg("exact"))
        .def("sum", &SplitExperts::sum);
}
