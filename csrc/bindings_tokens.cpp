// Python's view of the ops that work on tokens rather than on packed weights: norms, heads, router, KV cache,
// attention. Plain x86-64 like bindings.cpp; arrays are checked here, the GIL is released around each op.
#include "bindings_tokens.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings_kv.h"
#include "cpu/attention.h"
#include "cpu/best_logits.h"
#include "cpu/cpu.h"
#include "cpu/heads.h"
#include "cpu/kv_append.h"
#include "cpu/norm.h"
#include "cpu/plain_linear.h"
#include "cpu/router.h"
#include "cpu/sigmoid_gate.h"

using namespace strata::binding;
using namespace strata::cpu;

namespace {

void check_router(const RouterArgs& args) {
    require(args.top_k >= 1 && args.top_k <= args.experts, "route", "top_k", args.top_k, args.experts);
    require(args.groups >= 1 && args.experts % args.groups == 0, "route", "groups", args.groups,
            args.experts);
    require(args.top_groups >= 1 && args.top_groups <= args.groups, "route", "top_groups", args.top_groups,
            args.groups);
}

size_t router_size(const py::object& spec, const char* name) {
    try {
        return spec.attr(name).cast<size_t>();
    } catch (const py::cast_error&) {
        throw py::value_error(std::string("route: ") + name + " is " +
                              py::repr(spec.attr(name)).cast<std::string>() + ", no size");
    }
}

RouterScore router_score(const std::string& name) {
    if (name == "softmax") return RouterScore::softmax;
    if (name == "sigmoid") return RouterScore::sigmoid;
    if (name == "softmax_topk") return RouterScore::softmax_topk;
    throw py::value_error("route: unknown score '" + name + "'");
}

}  // namespace

namespace strata::binding {

RouterArgs router_args(const py::object& spec) {
    RouterArgs args{};
    args.experts = router_size(spec, "experts");
    args.top_k = router_size(spec, "top_k");
    args.score = router_score(spec.attr("score").cast<std::string>());
    args.normalize = spec.attr("normalize").cast<bool>();
    args.normalize_eps = spec.attr("normalize_eps").cast<float>();
    args.scale = spec.attr("scale").cast<float>();
    args.groups = router_size(spec, "groups");
    args.top_groups = router_size(spec, "top_groups");
    args.group_score =
        spec.attr("group_score").cast<std::string>() == "max" ? GroupScore::max : GroupScore::top2;
    check_router(args);
    return args;
}

HeadsSpec heads_spec(size_t heads, size_t dim, const std::optional<F32>& norm, float eps,
                     std::optional<float> clip) {
    HeadsSpec spec{};
    spec.heads = heads;
    spec.dim = dim;
    spec.eps = eps;
    spec.clip = clip.value_or(std::numeric_limits<float>::infinity());
    if (norm) {
        const size_t n = size_of(*norm);
        require(n == dim || n == heads * dim, "prepare_heads", "length of the norm", n, dim);
        spec.norm = norm->data();
        spec.norm_kind = n == dim ? HeadNorm::per_head : HeadNorm::all_heads;
    }
    return spec;
}

void check_rotary(size_t rotary_dim, size_t dim) {
    require(rotary_dim <= std::min(dim, kMaxRotary), "prepare_heads", "rotary width", rotary_dim,
            std::min(dim, kMaxRotary));
}

}  // namespace strata::binding

namespace {

void py_rms_norm(Cpu& cpu, const F32& x, const F32& weight, F32& y, float eps) {
    const size_t dim = size_of(weight);
    require(dim > 0 && size_of(x) % dim == 0, "rms_norm", "size of x", size_of(x), dim);
    require(size_of(y) == size_of(x), "rms_norm", "size of y", size_of(y), size_of(x));
    float* out = writable(y, "rms_norm");
    py::gil_scoped_release release;
    const OpGuard guard(cpu);
    rms_norm(cpu.pool, x.data(), weight.data(), out, size_of(x) / dim, dim, eps);
}

void py_add(Cpu& cpu, F32& residual, const F32& branch, float scale) {
    const size_t total = size_of(residual);
    require(size_of(branch) == total, "add", "size of branch", size_of(branch), total);
    require(residual.ndim() == 2, "add", "rank of residual", static_cast<size_t>(residual.ndim()), 2);
    const size_t rows = static_cast<size_t>(residual.shape(0)), cols = static_cast<size_t>(residual.shape(1));
    float* sum = writable(residual, "add");
    py::gil_scoped_release release;
    const OpGuard guard(cpu);
    add_scaled(cpu.pool, sum, branch.data(), scale, rows, cols);
}

void py_scale_by_sigmoid(Cpu& cpu, F32& x, const F32& gate) {
    const size_t rows = size_of(gate);
    require(rows > 0 ? size_of(x) % rows == 0 : size_of(x) == 0, "scale_by_sigmoid", "size of x", size_of(x),
            rows);
    float* out = writable(x, "scale_by_sigmoid");
    py::gil_scoped_release release;
    const OpGuard guard(cpu);
    scale_by_sigmoid(cpu.pool, out, gate.data(), rows, rows > 0 ? size_of(x) / rows : 0);
}

void py_plain_linear(Cpu& cpu, const F32& x, const F32& matrix, const std::optional<F32>& bias, F32& y) {
    require(matrix.ndim() == 2, "plain_linear", "rank of the matrix", static_cast<size_t>(matrix.ndim()), 2);
    const size_t outputs = static_cast<size_t>(matrix.shape(0)), cols = static_cast<size_t>(matrix.shape(1));
    require(cols > 0 && size_of(x) % cols == 0, "plain_linear", "size of x", size_of(x), cols);
    const size_t rows = size_of(x) / cols;
    require(size_of(y) == rows * outputs, "plain_linear", "size of y", size_of(y), rows * outputs);
    if (bias) require(size_of(*bias) == outputs, "plain_linear", "size of bias", size_of(*bias), outputs);
    const float* offsets = bias ? bias->data() : nullptr;
    float* out = writable(y, "plain_linear");
    py::gil_scoped_release release;
    const OpGuard guard(cpu);
    plain_linear(cpu.pool, x.data(), matrix.data(), offsets, out, rows, cols, outputs);
}

void py_prepare_heads(Cpu& cpu, F32& x, size_t heads, const std::optional<F32>& norm, float eps,
                      std::optional<float> clip, const F32& cosines, const F32& sines, bool interleaved) {
    require(x.ndim() == 2, "prepare_heads", "rank of x", static_cast<size_t>(x.ndim()), 2);
    const size_t rows = static_cast<size_t>(x.shape(0)), width = static_cast<size_t>(x.shape(1));
    require(heads > 0 && width % heads == 0, "prepare_heads", "columns of x", width, heads);
    HeadsSpec spec = heads_spec(heads, width / heads, norm, eps, clip);
    spec.rotary_dim = rows ? 2 * size_of(cosines) / rows : 0;
    spec.interleaved = interleaved;
    require(size_of(cosines) == size_of(sines) && spec.rotary_dim * rows == 2 * size_of(cosines),
            "prepare_heads", "size of the sines", size_of(sines), size_of(cosines));
    check_rotary(spec.rotary_dim, spec.dim);
    float* data = writable(x, "prepare_heads");
    const HeadsJob job{spec, {data, width, spec.dim}, {data, width, spec.dim}};
    py::gil_scoped_release release;
    const OpGuard guard(cpu);
    prepare_heads(cpu.pool, &job, 1, rows, {cosines.data(), sines.data()});
}

void py_route(Cpu& cpu, const F32& logits, const py::object& spec, const std::optional<F32>& select_bias,
              I32& ids, F32& weights) {
    RouterArgs args = router_args(spec);
    const size_t rows = size_of(logits) / args.experts;
    require(size_of(logits) == rows * args.experts, "route", "size of the logits", size_of(logits),
            rows * args.experts);
    require(size_of(ids) == rows * args.top_k, "route", "size of ids", size_of(ids), rows * args.top_k);
    require(size_of(weights) == size_of(ids), "route", "size of weights", size_of(weights), size_of(ids));
    if (select_bias) {
        require(size_of(*select_bias) == args.experts, "route", "size of select_bias", size_of(*select_bias),
                args.experts);
        args.select_bias = select_bias->data();
    }
    int32_t* chosen = ids.mutable_data();
    float* shares = writable(weights, "route");
    py::gil_scoped_release release;
    const OpGuard guard(cpu);
    route(cpu, args, logits.data(), rows, chosen, shares);
}

void py_attention(Cpu& cpu, KvCache& cache, size_t layer, const std::vector<Sequence>& sequences,
                  const F32& q, const F32& k, const std::optional<F32>& v, size_t heads, float scale,
                  size_t window, const std::optional<F32>& sinks, F32& out) {
    const KvLayer view = cache.layer(layer);
    require(heads > 0 && heads % view.kv_heads == 0, "attention", "heads", heads, view.kv_heads);
    const size_t query = product("attention", {heads, view.key_dim});
    const size_t rows = size_of(q) / query;
    require(size_of(q) == rows * query, "attention", "size of q", size_of(q), query);
    require(size_of(k) == rows * view.kv_heads * view.key_dim, "attention", "size of k", size_of(k),
            rows * view.kv_heads * view.key_dim);
    if (!view.value_in_key)
        require(v && size_of(*v) == rows * view.kv_heads * view.value_dim, "attention", "size of v",
                v ? size_of(*v) : 0, rows * view.kv_heads * view.value_dim);
    const size_t outputs = product("attention", {rows, heads, view.value_dim});
    require(size_of(out) == outputs, "attention", "size of out", size_of(out), outputs);
    if (sinks) require(size_of(*sinks) == heads, "attention", "size of sinks", size_of(*sinks), heads);
    const auto views = view_sequences(sequences, cache, rows);
    const AttentionArgs args{heads, scale, window, sinks ? sinks->data() : nullptr};
    const float* values = view.value_in_key ? nullptr : v->data();
    float* result = writable(out, "attention");
    py::gil_scoped_release release;
    const OpGuard guard(cpu);
    kv_append(cpu.pool, view, views.data(), views.size(), k.data(), values);
    attention(cpu, args, view, views.data(), views.size(), q.data(), result);
}

// Values and ids of the best, or None where best_logits.h says so.
py::object py_best_logits(Cpu& cpu, const F32& logits, size_t columns, size_t count) {
    require(logits.ndim() == 2, "best_logits", "rank of the logits", static_cast<size_t>(logits.ndim()), 2);
    const size_t rows = static_cast<size_t>(logits.shape(0)), stride = static_cast<size_t>(logits.shape(1));
    require(columns <= stride, "best_logits", "columns that count", columns, stride);
    require(count >= 1 && count <= columns, "best_logits", "logits wanted of a row", count, columns);
    F32 values({rows, count});
    I32 ids({rows, count});
    float* best = values.mutable_data();
    int32_t* places = ids.mutable_data();
    bool sound = false;
    {
        const py::gil_scoped_release release;
        const OpGuard guard(cpu);
        sound = best_logits(cpu, logits.data(), rows, stride, columns, count, best, places);
    }
    if (!sound) return py::none();
    return py::make_tuple(std::move(values), std::move(ids));
}

}  // namespace

void bind_token_ops(py::module_& m) {
    const auto raw = [](const char* name) { return py::arg(name).noconvert(); };
    m.def("rms_norm", &py_rms_norm, py::arg("cpu"), raw("x"), raw("weight"), raw("y"), py::arg("eps"));
    m.def("add", &py_add, py::arg("cpu"), raw("residual"), raw("branch"), py::arg("scale"));
    m.def("scale_by_sigmoid", &py_scale_by_sigmoid, py::arg("cpu"), raw("x"), raw("gate"));
    m.def("plain_linear", &py_plain_linear, py::arg("cpu"), raw("x"), raw("matrix"), raw("bias").none(true),
          raw("y"));
    m.def("prepare_heads", &py_prepare_heads, py::arg("cpu"), raw("x"), py::arg("heads"),
          raw("norm").none(true), py::arg("eps"), py::arg("clip"), raw("cosines"), raw("sines"),
          py::arg("interleaved"));
    m.def("route", &py_route, py::arg("cpu"), raw("logits"), py::arg("spec"), raw("select_bias").none(true),
          raw("ids"), raw("weights"));
    m.def("best_logits", &py_best_logits, py::arg("cpu"), raw("logits"), py::arg("columns"),
          py::arg("count"));
    m.def("attention", &py_attention, py::arg("cpu"), py::arg("cache"), py::arg("layer"),
          py::arg("sequences"), raw("q"), raw("k"), raw("v").none(true), py::arg("heads"), py::arg("scale"),
          py::arg("window"), raw("sinks").none(true), raw("out"));
}
