// All layers of a decoder in one call. Between two calls Python runs on caches that the weights have emptied:
// each of the three ops of a layer cost 20 to 33 us that way, 3 % of a decode step of Qwen3-30B-A3B's layers.
#include <pybind11/stl.h>

#include <memory>
#include <vector>

#include "bindings_parts.h"

using namespace strata::binding;
namespace cpu = strata::cpu;
using cpu::Cpu;
using cpu::OpGuard;

namespace {

// Either dense, or a router and its experts.
struct Layer {
    const Attention* attention;
    const FeedForward* dense;
    const Router* router;
    const Experts* experts;
};

class Layers {
  public:
    // layers: (attention, FeedForward) or (attention, Router, Experts) of each layer.
    explicit Layers(const py::list& layers) : keep_(layers) {
        for (const py::handle& item : layers) {
            const auto parts = item.cast<py::tuple>();
            Layer layer{parts[0].cast<const Attention*>(), nullptr, nullptr, nullptr};
            if (parts.size() == 2) layer.dense = parts[1].cast<const FeedForward*>();
            if (parts.size() == 3) {
                layer.router = parts[1].cast<const Router*>();
                layer.experts = parts[2].cast<const Experts*>();
                require(top_k_ == 0 || top_k_ == top_k(layer), "layers", "top_k", top_k(layer), top_k_);
                top_k_ = top_k(layer);
                routed_++;
            }
            check(layer);
            layers_.push_back(layer);
        }
    }

    const std::vector<Layer>& all() const { return layers_; }
    size_t hidden() const { return layers_.empty() ? 0 : layers_[0].attention->hidden(); }
    size_t routed() const { return routed_; }
    size_t top_k() const { return top_k_; }

  private:
    static size_t top_k(const Layer& layer) { return layer.router->view.args.top_k; }

    void check(const Layer& layer) const {
        const size_t hidden = layer.attention->hidden();
        const size_t other = layer.dense ? layer.dense->norm.dim : layer.router->view.norm.dim;
        require(other == hidden, "layers", "hidden size of the FFN", other, hidden);
        if (!layers_.empty())
            require(hidden == this->hidden(), "layers", "hidden size", hidden, this->hidden());
        if (layer.experts == nullptr) return;
        const size_t experts = layer.experts->table->count(), wanted = layer.router->view.args.experts;
        require(experts == wanted, "layers", "experts", experts, wanted);
        require(static_cast<size_t>(layer.experts->view.hidden) == hidden, "layers",
                "hidden size of the experts", layer.experts->view.hidden, hidden);
    }

    py::list keep_;
    std::vector<Layer> layers_;
    size_t routed_ = 0, top_k_ = 0;
};

// One layer's FFN by its router; returns how many experts were used.
int run_routed(Cpu& cpu, const Layer& layer, size_t rows, bool exact, float* residual, int32_t* ids) {
    const cpu::RouterPart& router = layer.router->view;
    float* hidden = cpu.arena.take<float>(rows * router.norm.dim);
    float* weights = cpu.arena.take<float>(rows * router.args.top_k);
    cpu::choose_experts(cpu, router, residual, rows, hidden, ids, weights);
    ExpertTable& table = *layer.experts->table;
    table.touch_all(ids, rows * router.args.top_k);
    const cpu::Routes routes = table.routes(ids, weights, rows, router.args.top_k);
    const cpu::ExpertWorks found = group_tokens(cpu.arena, routes);
    cpu::apply_experts(cpu, layer.experts->view, found.works, found.count, hidden, static_cast<int>(rows),
                       exact, residual);
    return found.count;
}

// residual passes all layers. Returns ids i32 [routed layers, rows, top_k], what the routers chose, and of
// each of those layers how many experts that were.
py::tuple run_layers(Cpu& cpu, const Layers& layers, const Step& step, F32& residual, bool exact) {
    const size_t rows = step.view().rows, wanted = rows * layers.hidden();
    require(size_of(residual) == wanted, "layers", "size of the residual", size_of(residual), wanted);
    std::vector<cpu::KvLayer> caches;
    for (const Layer& layer : layers.all()) caches.push_back(layer_of(step, layer.attention->place));
    I32 ids({layers.routed(), rows, layers.top_k()});
    std::vector<int> used;
    used.reserve(layers.routed());
    float* stream = writable(residual, "layers");
    int32_t* chosen = ids.mutable_data();
    {
        const py::gil_scoped_release release;
        const OpGuard guard(cpu);
        for (size_t i = 0; i < caches.size(); ++i) {
            const Layer& layer = layers.all()[i];
            const size_t mark = cpu.arena.mark();
            cpu.clock.layer = static_cast<int>(i);
            layer.attention->run(cpu, caches[i], step.view(), exact, stream);
            cpu.arena.rewind(mark);
            if (layer.dense != nullptr) {
                const FeedForward& part = *layer.dense;
                cpu::feed_forward(cpu, part.norm, part.ffn, part.scale, static_cast<int>(rows), exact,
                                  stream);
            } else {
                used.push_back(run_routed(cpu, layer, rows, exact, stream, chosen));
                chosen += rows * layers.top_k();
            }
            cpu.arena.rewind(mark);
        }
        cpu.clock.layer = -1;
    }
    return py::make_tuple(std::move(ids), std::move(used));
}

}  // namespace

void bind_layers(py::module_& m) {
    py::class_<Layers>(m, "Layers").def(py::init<const py::list&>(), py::arg("layers"));
    m.def("run_layers", &run_layers, py::arg("cpu"), py::arg("layers"), py::arg("step"),
          py::arg("residual").noconvert(), py::arg("exact"));
}
