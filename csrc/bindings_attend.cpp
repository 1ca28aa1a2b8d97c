// Python's view of a layer's attention, run from the residual stream and back into it. What C++ knows of a
// part is read once from its dataclass (strata/backends/parts.py); a call then passes the step's arrays only.
#include <pybind11/stl.h>

#include <memory>

#include "bindings_parts.h"
#include "bindings_tokens.h"

using namespace strata::binding;
namespace cpu = strata::cpu;
using cpu::Cpu;
using cpu::OpGuard;

namespace {

struct GroupedQuery : Attention {
    cpu::GroupedQuery view;
    size_t hidden() const override { return view.norm.dim; }
    void run(Cpu& cpu, const cpu::KvLayer& cache, const cpu::Step& step, bool exact,
             float* residual) const override {
        cpu::attend(cpu, view, cache, step, exact, residual);
    }
};

struct Latent : Attention {
    cpu::Latent view;
    size_t hidden() const override { return view.norm.dim; }
    void run(Cpu& cpu, const cpu::KvLayer& cache, const cpu::Step& step, bool exact,
             float* residual) const override {
        cpu::attend_latent(cpu, view, cache, step, exact, residual);
    }
};

cpu::AttentionArgs read_call(const Reader& part, size_t heads) {
    const Reader call = part.at("call");
    require(call.get<size_t>("heads") == heads, "part", "heads", call.get<size_t>("heads"), heads);
    return {heads, call.get<float>("scale"), call.get<size_t>("window"), call.vector_if("sinks", heads)};
}

// Query or key heads with the norm of that name.
cpu::HeadsSpec read_heads(const Reader& part, const char* norm, size_t heads) {
    const Reader spec = part.at("spec"), rope = spec.at("rope");
    const size_t dim = spec.get<size_t>("head_dim");
    cpu::HeadsSpec found =
        heads_spec(heads, dim, part.get<std::optional<F32>>(norm), part.at("norm").get<float>("eps"),
                   spec.get<std::optional<float>>("clip_qkv"));
    if (part.has(norm)) found.norm = part.vector(norm, size_of(part.get<F32>(norm)));
    found.rotary_dim = rope.get<size_t>("rotary_dim");
    found.interleaved = rope.get<bool>("interleaved");
    check_rotary(found.rotary_dim, dim);
    return found;
}

std::unique_ptr<GroupedQuery> make_grouped_query(const py::object& object) {
    auto made = std::make_unique<GroupedQuery>();
    const Reader part(object, made->keep), spec = part.at("spec");
    const size_t heads = spec.get<size_t>("heads"), kv_heads = spec.get<size_t>("kv_heads");
    const size_t dim = spec.get<size_t>("head_dim"), rows = (heads + 2 * kv_heads) * dim;
    require(kv_heads > 0 && heads % kv_heads == 0, "part", "heads", heads, kv_heads);
    cpu::GroupedQuery& view = made->view;
    view.norm = part.norm("norm");
    view.qkv = {"attn.qkv", part.matrix("qkv", rows, view.norm.dim), part.vector_if("qkv_bias", rows)};
    view.out = {"attn.out", part.matrix("out", view.norm.dim, heads * dim),
                part.vector_if("out_bias", view.norm.dim)};
    view.queries = read_heads(part, "q_norm", heads);
    view.keys = read_heads(part, "k_norm", kv_heads);
    view.values = {kv_heads, dim, nullptr, cpu::HeadNorm::none, 0.0f, view.keys.clip, 0, false};
    view.attention = read_call(part, heads);
    view.scale = part.get<float>("scale");
    made->place = {part.at("call").get<size_t>("layer"), kv_heads, dim, dim, false, view.queries.rotary_dim};
    return made;
}

// Queries through the low rank, where the part has one.
void read_queries(const Reader& part, cpu::Latent& view) {
    const size_t rows = view.heads * (view.nope + view.rope), hidden = view.norm.dim;
    view.low_rank = !part.has("q");
    if (!view.low_rank) {
        view.q = {"attn.q", part.matrix("q", rows, hidden), nullptr};
        return;
    }
    const size_t rank = part.at("mla").get<size_t>("q_lora_rank");
    view.q_a = {"attn.q_a", part.matrix("q_a", rank, hidden), nullptr};
    view.q_norm = {part.vector("q_a_norm", rank), rank, part.at("mla").get<float>("norm_eps")};
    view.q = {"attn.q_b", part.matrix("q_b", rows, rank), nullptr};
}

std::unique_ptr<Latent> make_latent(const py::object& object) {
    auto made = std::make_unique<Latent>();
    const Reader part(object, made->keep), mla = part.at("mla"), rope = part.at("spec").at("rope");
    cpu::Latent& view = made->view;
    view.norm = part.norm("norm");
    view.heads = part.at("spec").get<size_t>("heads");
    view.nope = mla.get<size_t>("qk_nope_head_dim");
    view.rope = mla.get<size_t>("qk_rope_head_dim");
    view.rank = mla.get<size_t>("kv_lora_rank");
    view.interleaved = rope.get<bool>("interleaved");
    read_queries(part, view);
    const size_t hidden = view.norm.dim, values = view.heads * mla.get<size_t>("v_head_dim");
    view.kv_a = {"attn.kv_a", part.matrix("kv_a", view.rank + view.rope, hidden), nullptr};
    view.latent_norm = {part.vector("kv_a_norm", view.rank), view.rank, mla.get<float>("norm_eps")};
    view.k_b = {"attn.k_b", part.matrix("k_b", view.heads * view.rank, view.nope), nullptr};
    view.v_b = {"attn.v_b", part.matrix("v_b", values, view.rank), nullptr};
    view.out = {"attn.out", part.matrix("out", hidden, values), part.vector_if("out_bias", hidden)};
    view.attention = read_call(part, view.heads);
    view.scale = part.get<float>("scale");
    check_rotary(rope.get<size_t>("rotary_dim"), view.rope);
    made->place = {
        part.at("call").get<size_t>("layer"), 1, view.rank + view.rope, view.rank, true, view.rope};
    return made;
}

void run_attend(Cpu& cpu, const Attention& part, const Step& step, F32& residual, bool exact) {
    const cpu::KvLayer cache = layer_of(step, part.place);
    const size_t wanted = step.view().rows * part.hidden();
    require(size_of(residual) == wanted, "attend", "size of the residual", size_of(residual), wanted);
    float* values = writable(residual, "attend");
    const py::gil_scoped_release release;
    const OpGuard guard(cpu);
    part.run(cpu, cache, step.view(), exact, values);
}

}  // namespace

namespace strata::binding {

cpu::KvLayer layer_of(const Step& step, const Place& place) {
    const cpu::KvLayer found = step.cache().layer(place.layer);
    require(found.kv_heads == place.kv_heads, "attend", "KV heads", found.kv_heads, place.kv_heads);
    require(found.key_dim == place.key_dim, "attend", "key_dim", found.key_dim, place.key_dim);
    require(found.value_dim == place.value_dim, "attend", "value_dim", found.value_dim, place.value_dim);
    require(found.value_in_key == place.value_in_key, "attend", "value_in_key", found.value_in_key,
            place.value_in_key);
    require(step.rotary_dim() == place.rotary_dim || step.view().rows == 0, "attend", "rotary width",
            step.rotary_dim(), place.rotary_dim);
    return found;
}

}  // namespace strata::binding

void bind_attend(py::module_& m) {
    py::class_<Attention>(m, "Attention");
    py::class_<GroupedQuery, Attention>(m, "GroupedQuery")
        .def(py::init(&make_grouped_query), py::arg("part"));
    py::class_<Latent, Attention>(m, "Latent").def(py::init(&make_latent), py::arg("part"));
    const auto raw = [](const char* name) { return py::arg(name).noconvert(); };
    m.def("attend", &run_attend, py::arg("cpu"), py::arg("part"), py::arg("step"), raw("residual"),
          py::arg("exact"));
}
