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

#include "cpu/attention.h"
#include "cpu/cpu.h"
#include "cpu/heads.h"
#include "cpu/kv_append.h"
#include "cpu/norm.h"
#include "cpu/plain_linear.h"
#include "cpu/router.h"

namespace py = pybind11;
using namespace strata::cpu;

namespace {

using F32 = py::array_t<float, py::array::c_style>;
using I32 = py::array_t<int32_t, py::array::c_style>;

void require(bool ok, const std::string& op, const std::string& what, size_t have, size_t want) {
    if (!ok)
        throw py::value_error(op + ": " + what + " is " + std::to_string(have) + ", expected " +
                              std::to_string(want));
}

// pybind11 would copy an array of another dtype or layout and then write results into the copy.
float* writable(F32& array, const char* op) {
    if (!array.writeable()) throw py::value_error(std::string(op) + ": the array is read-only");
    return array.mutable_data();
}

// Sizes are multiplied to find where elements lie; none may wrap around.
size_t product(const char* op, std::initializer_list<size_t> sizes) {
    size_t result = 1;
    for (const size_t size : sizes)
        if (__builtin_mul_overflow(result, size, &result))
            throw py::value_error(std::string(op) + ": the product of its sizes, one being " +
                                  std::to_string(size) + ", is beyond 64 bits");
    return result;
}

size_t size_of(const py::array& array) { return static_cast<size_t>(array.size()); }

void py_rms_norm(Cpu& cpu, const F32& x, const F32& weight, F32& y, float eps) {
    const size_t dim = size_of(weight);
    require(dim > 0 && size_of(x) % dim == 0, "rms_norm", "size of x", size_of(x), dim);
    require(size_of(y) == size_of(x), "rms_norm", "size of y", size_of(y), size_of(x));
    float* out = writable(y, "rms_norm");
    py::gil_scoped_release release;
    const OpGuard guard(cpu);
    rms_norm(cpu.pool, x.data(), weight.data(), out, size_of(x) / dim, dim, eps);
}

void py_add_rms_norm(Cpu& cpu, F32& residual, const F32& branch, float scale, const F32& weight, F32& y,
                     float eps) {
    const size_t dim = size_of(weight), total = size_of(residual);
    require(dim > 0 && total % dim == 0, "add_rms_norm", "size of residual", total, dim);
    require(size_of(branch) == total, "add_rms_norm", "size of branch", size_of(branch), total);
    require(size_of(y) == total, "add_rms_norm", "size of y", size_of(y), total);
    float* sum = writable(residual, "add_rms_norm");
    float* out = writable(y, "add_rms_norm");
    py::gil_scoped_release release;
    const OpGuard guard(cpu);
    add_rms_norm(cpu.pool, sum, branch.data(), scale, weight.data(), out, total / dim, dim, eps);
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
    HeadsSpec spec{};
    spec.rows = rows;
    spec.heads = heads;
    spec.dim = width / heads;
    spec.rotary_dim = rows ? 2 * size_of(cosines) / rows : 0;
    require(size_of(cosines) == size_of(sines) && spec.rotary_dim * rows == 2 * size_of(cosines) &&
                spec.rotary_dim <= spec.dim,
            "prepare_heads", "rotary width", spec.rotary_dim, spec.dim);
    if (norm) {
        const size_t n = size_of(*norm);
        require(n == spec.dim || n == width, "prepare_heads", "length of the norm", n, spec.dim);
        spec.norm = norm->data();
        spec.norm_kind = n == spec.dim ? HeadNorm::per_head : HeadNorm::all_heads;
    }
    spec.eps = eps;
    spec.clip = clip.value_or(std::numeric_limits<float>::infinity());
    spec.cosines = cosines.data();
    spec.sines = sines.data();
    spec.interleaved = interleaved;
    float* data = writable(x, "prepare_heads");
    py::gil_scoped_release release;
    const OpGuard guard(cpu);
    prepare_heads(cpu.pool, spec, data, width);
}

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

void py_route(Cpu& cpu, const F32& logits, const py::object& spec, const std::optional<F32>& select_bias,
              I32& ids, F32& weights) {
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
    args.rows = size_of(logits) / args.experts;
    require(size_of(logits) == args.rows * args.experts, "route", "size of the logits", size_of(logits),
            args.rows * args.experts);
    require(size_of(ids) == args.rows * args.top_k, "route", "size of ids", size_of(ids),
            args.rows * args.top_k);
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
    route(cpu.pool, args, logits.data(), chosen, shares);
}

// The KV cache of a model. Python owns the arrays (one allocation each, all layers); this keeps them alive.
class KvCache {
  public:
    KvCache(const std::string& dtype, size_t layers, size_t pages, size_t kv_heads, size_t key_dim,
            size_t value_dim, size_t page_tokens, bool value_in_key, py::array keys, py::array values,
            F32 key_scales, F32 value_scales)
        : layers_(layers),
          pages_(pages),
          keys_(std::move(keys)),
          values_(std::move(values)),
          key_scales_(std::move(key_scales)),
          value_scales_(std::move(value_scales)) {
        const KvType type = dtype == "int8" ? KvType::int8 : dtype == "bf16" ? KvType::bf16 : KvType::f32;
        if (type == KvType::f32 && dtype != "f32") throw py::value_error("kv dtype '" + dtype + "'");
        geometry_ = {type,         kv_heads, key_dim, value_dim, page_tokens,
                     value_in_key, nullptr,  nullptr, nullptr,   nullptr};
        require(page_tokens > 0 && page_tokens % 8 == 0, "kv_cache", "page_tokens", page_tokens, 8);
        require(kv_heads > 0 && key_dim > 0 && value_dim > 0, "kv_cache", "its smallest size",
                std::min({kv_heads, key_dim, value_dim}), 1);
        require(!value_in_key || value_dim <= key_dim, "kv_cache", "value_dim", value_dim, key_dim);
        const size_t element = geometry_.element_bytes();
        const size_t slots = product("kv_cache", {layers, pages, kv_heads, page_tokens});
        const size_t value_bytes = product("kv_cache", {slots, value_dim, element});
        check(keys_, product("kv_cache", {slots, key_dim, element}), "keys");
        check(values_, value_in_key ? 0 : value_bytes, "values");
        check(key_scales_, type == KvType::int8 ? slots * sizeof(float) : 0, "key_scales");
        check(value_scales_, type == KvType::int8 && !value_in_key ? slots * sizeof(float) : 0,
              "value_scales");
    }

    KvLayer layer(size_t index) {
        require(index < layers_, "kv_cache", "layer", index, layers_);
        KvLayer view = geometry_;
        const size_t slots = pages_ * view.kv_heads * view.page_tokens;
        const size_t element = view.element_bytes();
        view.keys = static_cast<uint8_t*>(keys_.mutable_data()) + index * slots * view.key_dim * element;
        view.values = static_cast<uint8_t*>(values_.mutable_data()) +
                      (view.value_in_key ? 0 : index * slots * view.value_dim * element);
        if (view.type == KvType::int8) {
            view.key_scales = key_scales_.mutable_data() + index * slots;
            if (!view.value_in_key) view.value_scales = value_scales_.mutable_data() + index * slots;
        }
        return view;
    }
    size_t pages() const { return pages_; }

  private:
    static void check(const py::array& array, size_t bytes, const char* what) {
        if (!(array.flags() & py::array::c_style))
            throw py::value_error(std::string("kv_cache: ") + what + " are not contiguous");
        if (!array.writeable()) throw py::value_error(std::string("kv_cache: ") + what + " are read-only");
        require(static_cast<size_t>(array.nbytes()) == bytes, "kv_cache", std::string("bytes of ") + what,
                static_cast<size_t>(array.nbytes()), bytes);
    }

    size_t layers_, pages_;
    KvLayer geometry_{};
    py::array keys_, values_;
    F32 key_scales_, value_scales_;
};

struct PySequence {
    size_t first_row, count, start;
    I32 pages;
};

// Checks every page id against the cache: a wrong one would read or write outside of it.
std::vector<SequenceView> view_sequences(const std::vector<PySequence>& sequences, const KvCache& cache,
                                         size_t page_tokens, size_t rows) {
    std::vector<SequenceView> views;
    for (const PySequence& seq : sequences) {
        // Differences, because sums of such numbers may wrap around.
        require(seq.count <= rows && seq.first_row <= rows - seq.count, "attention",
                "first row of a sequence", seq.first_row, rows);
        const size_t held = size_of(seq.pages) * page_tokens;
        require(seq.count <= held && seq.start <= held - seq.count, "attention",
                "start of a sequence in the tokens of its pages", seq.start, held);
        const size_t needed = (seq.start + seq.count + page_tokens - 1) / page_tokens;
        for (size_t i = 0; i < needed; ++i) {
            const int32_t page = seq.pages.data()[i];
            require(page >= 0 && static_cast<size_t>(page) < cache.pages(), "attention", "page id",
                    static_cast<size_t>(page), cache.pages());
        }
        views.push_back({seq.first_row, seq.count, seq.start, seq.pages.data()});
    }
    return views;
}

void py_attention(Cpu& cpu, KvCache& cache, size_t layer, const std::vector<PySequence>& sequences,
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
    const auto views = view_sequences(sequences, cache, view.page_tokens, rows);
    const AttentionArgs args{heads, scale, window, sinks ? sinks->data() : nullptr};
    const float* values = view.value_in_key ? nullptr : v->data();
    float* result = writable(out, "attention");
    py::gil_scoped_release release;
    const OpGuard guard(cpu);
    kv_append(cpu.pool, view, views.data(), views.size(), k.data(), values);
    attention(cpu.pool, args, view, views.data(), views.size(), q.data(), result);
}

}  // namespace

void bind_token_ops(py::module_& m) {
    const auto raw = [](const char* name) { return py::arg(name).noconvert(); };
    m.def("rms_norm", &py_rms_norm, py::arg("cpu"), raw("x"), raw("weight"), raw("y"), py::arg("eps"));
    m.def("add_rms_norm", &py_add_rms_norm, py::arg("cpu"), raw("residual"), raw("branch"), py::arg("scale"),
          raw("weight"), raw("y"), py::arg("eps"));
    m.def("plain_linear", &py_plain_linear, py::arg("cpu"), raw("x"), raw("matrix"), raw("bias").none(true),
          raw("y"));
    m.def("prepare_heads", &py_prepare_heads, py::arg("cpu"), raw("x"), py::arg("heads"),
          raw("norm").none(true), py::arg("eps"), py::arg("clip"), raw("cosines"), raw("sines"),
          py::arg("interleaved"));
    m.def("route", &py_route, py::arg("cpu"), raw("logits"), py::arg("spec"), raw("select_bias").none(true),
          raw("ids"), raw("weights"));
    py::class_<PySequence>(m, "Sequence")
        .def(py::init([](size_t first_row, size_t count, size_t start, I32 pages) {
                 return PySequence{first_row, count, start, std::move(pages)};
             }),
             py::arg("first_row"), py::arg("count"), py::arg("start"), raw("pages"));
    py::class_<KvCache>(m, "KvCache")
        .def(py::init<const std::string&, size_t, size_t, size_t, size_t, size_t, size_t, bool, py::array,
                      py::array, F32, F32>(),
             py::arg("dtype"), py::arg("layers"), py::arg("pages"), py::arg("kv_heads"), py::arg("key_dim"),
             py::arg("value_dim"), py::arg("page_tokens"), py::arg("value_in_key"), raw("keys"),
             raw("values"), raw("key_scales"), raw("value_scales"));
    m.def("attention", &py_attention, py::arg("cpu"), py::arg("cache"), py::arg("layer"),
          py::arg("sequences"), raw("q"), raw("k"), raw("v").none(true), py::arg("heads"), py::arg("scale"),
          py::arg("window"), raw("sinks").none(true), raw("out"));
}
