// All layers of a decoder in one call. Between two calls Python runs on caches that the weights have emptied:
// each of the three ops of a layer cost 20 to 33 us that way, 3 % of a decode step of Qwen3-30B-A3B's layers.
#include <pybind11/stl.h>

#include <memory>
#include <vector>

#include "bindings_parts.h"
#include "cpu/ends.h"

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

// What the routers of a pass chose: ids i32 [routed layers, rows, top_k], and of each of those layers how
// many experts that were.
struct Chosen {
    Chosen(const Layers& layers, size_t rows) : ids({layers.routed(), rows, layers.top_k()}) {
        used.reserve(layers.routed());
    }
    I32 ids;
    std::vector<int> used;
};

// The cache of every layer.
std::vector<cpu::KvLayer> caches_of(const Layers& layers, const Step& step) {
    std::vector<cpu::KvLayer> found;
    found.reserve(layers.all().size());
    for (const Layer& layer : layers.all()) found.push_back(layer_of(step, layer.attention->place));
    return found;
}

// residual passes all layers. chosen: of the first layer that routes.
void pass(Cpu& cpu, const Layers& layers, const std::vector<cpu::KvLayer>& caches, const cpu::Step& step,
          bool exact, float* residual, int32_t* chosen, std::vector<int>& used) {
    for (size_t i = 0; i < caches.size(); ++i) {
        const Layer& layer = layers.all()[i];
        const size_t mark = cpu.arena.mark();
        cpu.clock.layer = static_cast<int>(i);
        layer.attention->run(cpu, caches[i], step, exact, residual);
        cpu.arena.rewind(mark);
        if (layer.dense != nullptr) {
            const FeedForward& part = *layer.dense;
            cpu::feed_forward(cpu, part.norm, part.ffn, part.scale, static_cast<int>(step.rows), exact,
                              residual);
        } else {
            used.push_back(run_routed(cpu, layer, step.rows, exact, residual, chosen));
            chosen += step.rows * layers.top_k();
        }
        cpu.arena.rewind(mark);
    }
    cpu.clock.layer = -1;
}

py::tuple run_layers(Cpu& cpu, const Layers& layers, const Step& step, F32& residual, bool exact) {
    const size_t rows = step.view().rows, wanted = rows * layers.hidden();
    require(size_of(residual) == wanted, "layers", "size of the residual", size_of(residual), wanted);
    const std::vector<cpu::KvLayer> caches = caches_of(layers, step);
    Chosen chosen(layers, rows);
    float* stream = writable(residual, "layers");
    int32_t* ids = chosen.ids.mutable_data();
    {
        const py::gil_scoped_release release;
        const OpGuard guard(cpu);
        pass(cpu, layers, caches, step.view(), exact, stream, ids, chosen.used);
    }
    return py::make_tuple(std::move(chosen.ids), chosen.used);
}

// What stands behind the layers. ValueError where its parts, the rows (of `tokens`) and `out`, f32
// [len(rows), vocab], do not fit each other.
struct Ending {
    Ending(size_t tokens, const I32& wanted, const F32& norm, float eps, const PackedMatrix& head, F32& out)
        : norm{norm.data(), size_of(norm), eps},
          head(head.matrix),
          rows(wanted.data()),
          count(size_of(wanted)),
          out(writable(out, "logits")) {
        const size_t hidden = head.matrix.cols, vocab = head.matrix.rows;
        require(size_of(norm) == hidden, "logits", "length of the norm", size_of(norm), hidden);
        require(size_of(out) == count * vocab, "logits", "size of out", size_of(out), count * vocab);
        for (size_t i = 0; i < count; i++)
            require(rows[i] >= 0 && static_cast<size_t>(rows[i]) < tokens, "logits", "a row", rows[i],
                    tokens);
    }
    void run(Cpu& cpu, const float* residual, bool exact) const {
        if (count > 0) cpu::logits(cpu, norm, head, residual, rows, count, exact, out);
    }
    cpu::Norm norm;
    const cpu::Matrix& head;
    const int32_t* rows;
    size_t count;
    float* out;
};

// Logits of some rows of the residual stream, into out f32 [len(rows), vocab].
void run_logits(Cpu& cpu, const F32& residual, const I32& rows, const F32& norm, float eps,
                const PackedMatrix& head, F32& out, bool exact) {
    const size_t tokens = rows_of(residual, head.matrix.cols);
    const Ending ending(tokens, rows, norm, eps, head, out);
    const py::gil_scoped_release release;
    const OpGuard guard(cpu);
    ending.run(cpu, residual.data(), exact);
}

// A whole pass: embedding of the step's tokens, all layers, logits of some rows.
py::tuple run_forward(Cpu& cpu, const PackedMatrix& embedding, const I32& ids, float scale,
                      const Layers& layers, const Step& step, const I32& rows, const F32& norm, float eps,
                      const PackedMatrix& head, F32& out, bool exact) {
    const size_t tokens = step.view().rows, hidden = layers.hidden();
    require(size_of(ids) == tokens, "forward", "tokens", size_of(ids), tokens);
    require(static_cast<size_t>(embedding.matrix.cols) == hidden, "forward", "width of the embedding",
            embedding.matrix.cols, hidden);
    require(static_cast<size_t>(head.matrix.cols) == hidden, "forward", "width of the head", head.matrix.cols,
            hidden);
    check_ids(embedding, ids);
    const Ending ending(tokens, rows, norm, eps, head, out);
    const std::vector<cpu::KvLayer> caches = caches_of(layers, step);
    Chosen chosen(layers, tokens);
    int32_t* routes = chosen.ids.mutable_data();
    {
        const py::gil_scoped_release release;
        const OpGuard guard(cpu);
        float* residual = cpu.arena.take<float>(tokens * hidden);
        cpu::embed(cpu, embedding.matrix, ids.data(), tokens, scale, residual);
        pass(cpu, layers, caches, step.view(), exact, residual, routes, chosen.used);
        ending.run(cpu, residual, exact);
    }
    return py::make_tuple(std::move(chosen.ids), chosen.used);
}

}  // namespace

void bind_layers(py::module_& m) {
    py::class_<Layers>(m, "Layers").def(py::init<const py::list&>(), py::arg("layers"));
    const auto raw = [](const char* name) { return py::arg(name).noconvert(); };
    m.def("logits", &run_logits, py::arg("cpu"), raw("residual"), raw("rows"), raw("norm"), py::arg("eps"),
          py::arg("head"), raw("out"), py::arg("exact"));
    m.def("forward", &run_forward, py::arg("cpu"), py::arg("embedding"), raw("ids"), py::arg("scale"),
          py::arg("layers"), py::arg("step"), raw("rows"), raw("norm"), py::arg("eps"), py::arg("head"),
          raw("out"), py::arg("exact"));
    m.def("run_layers", &run_layers, py::arg("cpu"), py::arg("layers"), py::arg("step"),
          py::arg("residual").noconvert(), py::arg("exact"));
}
