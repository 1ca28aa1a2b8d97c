#include "bindings_kv.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <utility>

namespace strata::binding {

using cpu::KvLayer;
using cpu::KvType;
using cpu::SequenceView;

static void check(const py::array& array, size_t bytes, const char* what) {
    if (!(array.flags() & py::array::c_style))
        throw py::value_error(std::string("kv_cache: ") + what + " are not contiguous");
    if (!array.writeable()) throw py::value_error(std::string("kv_cache: ") + what + " are read-only");
    const std::string bytes_of = std::string("bytes of ") + what;
    require(static_cast<size_t>(array.nbytes()) == bytes, "kv_cache", bytes_of.c_str(),
            static_cast<size_t>(array.nbytes()), bytes);
}

static KvType kv_type(const std::string& dtype) {
    if (dtype == "int8") return KvType::int8;
    if (dtype == "bf16") return KvType::bf16;
    if (dtype == "f32") return KvType::f32;
    throw py::value_error("kv dtype '" + dtype + "'");
}

static KvLayer kv_geometry(const std::string& dtype, size_t kv_heads, size_t key_dim, size_t value_dim,
                           size_t page_tokens, bool value_in_key) {
    return {kv_type(dtype), kv_heads, key_dim, value_dim, page_tokens,
            value_in_key,   nullptr,  nullptr, nullptr,   nullptr};
}

KvCache::KvCache(const std::string& dtype, size_t layers, size_t pages, size_t kv_heads, size_t key_dim,
                 size_t value_dim, size_t page_tokens, bool value_in_key, py::array keys, py::array values,
                 F32 key_scales, F32 value_scales)
    : layers_(layers),
      pages_(pages),
      keys_(std::move(keys)),
      values_(std::move(values)),
      key_scales_(std::move(key_scales)),
      value_scales_(std::move(value_scales)) {
    geometry_ = kv_geometry(dtype, kv_heads, key_dim, value_dim, page_tokens, value_in_key);
    const KvType type = geometry_.type;
    require(page_tokens > 0 && page_tokens % 8 == 0, "kv_cache", "page_tokens", page_tokens, 8);
    require(kv_heads > 0 && key_dim > 0 && value_dim > 0, "kv_cache", "its smallest size",
            std::min({kv_heads, key_dim, value_dim}), 1);
    require(!value_in_key || value_dim <= key_dim, "kv_cache", "value_dim", value_dim, key_dim);
    const size_t element = geometry_.element_bytes();
    const size_t slots = product("kv_cache", {layers, pages, kv_heads, page_tokens});
    const size_t value_bytes = product("kv_cache", {slots, geometry_.stored_value_dim(), element});
    check(keys_, product("kv_cache", {slots, geometry_.stored_key_dim(), element}), "keys");
    check(values_, value_in_key ? 0 : value_bytes, "values");
    check(key_scales_, type == KvType::int8 ? slots * sizeof(float) : 0, "key_scales");
    check(value_scales_, type == KvType::int8 && !value_in_key ? slots * sizeof(float) : 0, "value_scales");
}

KvLayer KvCache::layer(size_t index) {
    require(index < layers_, "kv_cache", "layer", index, layers_);
    KvLayer view = geometry_;
    const size_t slots = pages_ * view.kv_heads * view.page_tokens;
    const size_t element = view.element_bytes();
    view.keys = static_cast<uint8_t*>(keys_.mutable_data()) + index * slots * view.stored_key_dim() * element;
    view.values = static_cast<uint8_t*>(values_.mutable_data()) +
                  (view.value_in_key ? 0 : index * slots * view.stored_value_dim() * element);
    if (view.type == KvType::int8) {
        view.key_scales = key_scales_.mutable_data() + index * slots;
        if (!view.value_in_key) view.value_scales = value_scales_.mutable_data() + index * slots;
    }
    return view;
}

std::vector<SequenceView> view_sequences(const std::vector<Sequence>& sequences, const KvCache& cache,
                                         size_t rows) {
    const size_t page_tokens = cache.page_tokens();
    std::vector<SequenceView> views;
    for (const Sequence& seq : sequences) {
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

Step::Step(py::object cache, std::vector<Sequence> sequences, size_t rows, F32 cosines, F32 sines)
    : keep_cache_(std::move(cache)),
      cache_(&keep_cache_.cast<KvCache&>()),
      sequences_(std::move(sequences)),
      views_(view_sequences(sequences_, *cache_, rows)),
      cosines_(std::move(cosines)),
      sines_(std::move(sines)),
      rotary_dim_(rows ? 2 * size_of(cosines_) / rows : 0),
      view_{rows, views_.data(), views_.size(), {cosines_.data(), sines_.data()}} {
    require(size_of(cosines_) == size_of(sines_) && rotary_dim_ * rows == 2 * size_of(cosines_), "step",
            "size of the rotation's tables", size_of(sines_), rows * rotary_dim_ / 2);
}

}  // namespace strata::binding

using namespace strata::binding;

void bind_kv(py::module_& m) {
    const auto raw = [](const char* name) { return py::arg(name).noconvert(); };
    py::class_<Sequence>(m, "Sequence")
        .def(py::init([](size_t first_row, size_t count, size_t start, I32 pages) {
                 return Sequence{first_row, count, start, std::move(pages)};
             }),
             py::arg("first_row"), py::arg("count"), py::arg("start"), raw("pages"));
    py::class_<KvCache>(m, "KvCache")
        .def(py::init<const std::string&, size_t, size_t, size_t, size_t, size_t, size_t, bool, py::array,
                      py::array, F32, F32>(),
             py::arg("dtype"), py::arg("layers"), py::arg("pages"), py::arg("kv_heads"), py::arg("key_dim"),
             py::arg("value_dim"), py::arg("page_tokens"), py::arg("value_in_key"), raw("keys"),
             raw("values"), raw("key_scales"), raw("value_scales"));
    m.def(
        "stored_kv_dims",
        [](const std::string& dtype, size_t key_dim, size_t value_dim) {
            const KvLayer shape = kv_geometry(dtype, 1, key_dim, value_dim, strata::cpu::kOctet, false);
            return py::make_tuple(shape.stored_key_dim(), shape.stored_value_dim());
        },
        py::arg("dtype"), py::arg("key_dim"), py::arg("value_dim"));
    py::class_<Step>(m, "Step").def(py::init<py::object, std::vector<Sequence>, size_t, F32, F32>(),
                                    py::arg("cache"), py::arg("sequences"), py::arg("rows"), raw("cosines"),
                                    raw("sines"));
}
