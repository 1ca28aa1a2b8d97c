// Python's view of a layer's FFN and of the head, run from the residual stream. What C++ knows of a part is
// read once from its dataclass (strata/backends/parts.py); a call then passes the step's arrays only.
#include <pybind11/stl.h>

#include <memory>
#include <utility>

#include "bindings_parts.h"
#include "bindings_tokens.h"

using namespace strata::binding;
namespace cpu = strata::cpu;
using cpu::Cpu;
using cpu::OpGuard;

namespace {

std::unique_ptr<FeedForward> make_feed_forward(const py::object& object) {
    auto made = std::make_unique<FeedForward>();
    const Reader part(object, made->keep);
    made->norm = part.norm("norm");
    made->ffn = part.at("ffn").dense_ffn();
    made->scale = part.get<float>("scale");
    const size_t rows = made->ffn.slice.down.rows;
    require(rows == made->norm.dim, "part", "rows of down", rows, made->norm.dim);
    return made;
}

std::unique_ptr<Router> make_router(const py::object& object) {
    auto made = std::make_unique<Router>();
    const Reader part(object, made->keep);
    cpu::RouterPart& view = made->view;
    view.norm = part.norm("norm");
    view.args = router_args(part.object().attr("spec"));
    const size_t experts = view.args.experts;
    view.matrix = part.vector("matrix", product("router", {experts, view.norm.dim}));
    view.bias = part.vector_if("bias", experts);
    view.args.select_bias = part.vector_if("select_bias", experts);
    return made;
}

std::unique_ptr<Experts> make_experts(const py::object& object, const py::object& table) {
    auto made = std::make_unique<Experts>();
    const Reader part(object, made->keep);
    made->keep.push_back(table);
    made->table = &table.cast<ExpertTable&>();
    const int hidden = made->table->shape().hidden;
    if (part.has("shared")) {
        made->shared = part.at("shared").dense_ffn();
        const size_t rows = made->shared.slice.down.rows, wanted = hidden;
        require(rows == wanted, "part", "rows of the shared expert's down", rows, wanted);
    }
    made->view = {hidden,
                  made->table->shape().slices,
                  made->table->copies(),
                  made->table->shape().payload_bytes(),
                  part.gating(),
                  part.has("shared") ? &made->shared : nullptr,
                  part.vector_if("shared_gate", hidden),
                  part.get<float>("scale")};
    return made;
}

void run_feed_forward(Cpu& cpu, const FeedForward& part, F32& residual, bool exact) {
    const int tokens = rows_of(residual, part.norm.dim);
    float* values = writable(residual, "feed_forward");
    const py::gil_scoped_release release;
    const OpGuard guard(cpu);
    cpu::feed_forward(cpu, part.norm, part.ffn, part.scale, tokens, exact, values);
}

// Fills hidden [rows, hidden]; returns ids and weights, which are new arrays: they outlive the step.
py::tuple run_choose_experts(Cpu& cpu, const Router& part, const F32& residual, F32& hidden) {
    const cpu::RouterPart& view = part.view;
    const size_t rows = rows_of(residual, view.norm.dim);
    require(size_of(hidden) == size_of(residual), "choose_experts", "size of hidden", size_of(hidden),
            size_of(residual));
    I32 ids({rows, view.args.top_k});
    F32 weights({rows, view.args.top_k});
    int32_t* chosen = ids.mutable_data();
    float *shares = weights.mutable_data(), *normed = writable(hidden, "choose_experts");
    {
        const py::gil_scoped_release release;
        const OpGuard guard(cpu);
        cpu::choose_experts(cpu, view, residual.data(), rows, normed, chosen, shares);
    }
    return py::make_tuple(std::move(ids), std::move(weights));
}

void run_apply_experts(Cpu& cpu, const Experts& part, const F32& hidden, const I32& ids, const F32& weights,
                       F32& residual, bool exact) {
    const int tokens = rows_of(hidden, part.view.hidden);
    require(size_of(residual) == size_of(hidden), "apply_experts", "size of the residual", size_of(residual),
            size_of(hidden));
    float* values = writable(residual, "apply_experts");
    part.table->prepare(ids, weights, tokens, {});
    const py::gil_scoped_release release;
    const OpGuard guard(cpu);
    const cpu::ExpertWorks found =
        group_tokens(cpu.arena, part.table->routes(ids.data(), weights.data(), tokens, ids.shape(1)));
    cpu::apply_experts(cpu, part.view, found.works, found.count, hidden.data(), tokens, exact, values);
}

}  // namespace

void bind_ffn(py::module_& m) {
    const auto raw = [](const char* name) { return py::arg(name).noconvert(); };
    py::class_<FeedForward>(m, "FeedForward").def(py::init(&make_feed_forward), py::arg("part"));
    py::class_<Router>(m, "Router").def(py::init(&make_router), py::arg("part"));
    py::class_<Experts>(m, "Experts").def(py::init(&make_experts), py::arg("part"), py::arg("table"));
    m.def("feed_forward", &run_feed_forward, py::arg("cpu"), py::arg("part"), raw("residual"),
          py::arg("exact"));
    m.def("choose_experts", &run_choose_experts, py::arg("cpu"), py::arg("part"), raw("residual"),
          raw("hidden"));
    m.def("apply_experts", &run_apply_experts, py::arg("cpu"), py::arg("part"), raw("hidden"), raw("ids"),
          raw("weights"), raw("residual"), py::arg("exact"));
}
