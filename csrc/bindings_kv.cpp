#include "bindings_kv.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <utility>

namespace strata::binding {

using cpu::kKvAlignment;
using cpu::KvGeometry;
using cpu::KvLayer;
using cpu::KvType;
using cpu::SequenceView;

static KvType kv_type(const std::string& dtype, size_t group) {
    require(group == 0 || dtype == "int8", "kv_cache", "group of a dtype without scales", group, 0);
    if (dtype == "int8") return group != 0 ? KvType::int8_groups : KvType::int8;
    if (dtype == "bf16") return KvType::bf16;
    if (dtype == "f32") return KvType::f32;
    throw py::value_error("kv dtype '" + dtype + "'");
}

// All that a layer holds is less than the product of its sizes, 4 bytes each and padded.
static void check(const KvGeometry& shape, size_t layers) {
    require(shape.page_tokens > 0 && shape.page_tokens % 8 == 0, "kv_cache", "page_tokens", shape.page_tokens,
            8);
    require(shape.kv_heads > 0 && shape.key_dim > 0 && shape.value_dim > 0, "kv_cache", "its smallest size",
            std::min({shape.kv_heads, shape.key_dim, shape.value_dim}), 1);
    require(!shape.value_in_key || shape.value_dim <= shape.key_dim, "kv_cache", "value_dim", shape.value_dim,
            shape.key_dim);
    require(shape.group % 16 == 0 && shape.group <= 1 << 16, "kv_cache", "elements of a group", shape.group,
            16);
    require(!shape.per_tensor || shape.type == KvType::int8, "kv_cache", "scales of a tensor without any", 1,
            0);
    const size_t widest = std::max(shape.key_dim, shape.value_dim);
    product("kv_cache", {layers, shape.kv_heads, shape.page_tokens, widest, 4 * kKvAlignment});
}

// Where each page begins. Every one lies inside the memory, on a multiple of kKvAlignment.
static std::vector<uint8_t*> page_table(py::array& memory, const I64& offsets, size_t page_bytes) {
    if (!(memory.flags() & py::array::c_style) || memory.itemsize() != 1)
        throw py::value_error("kv_cache: the memory is not one piece of bytes");
    if (!memory.writeable()) throw py::value_error("kv_cache: the memory is read-only");
    const size_t total = size_of(memory);
    uint8_t* base = static_cast<uint8_t*>(memory.mutable_data());
    std::vector<uint8_t*> pages;
    for (size_t i = 0; i < size_of(offsets); ++i) {
        const int64_t at = offsets.data()[i];
        require(at >= 0 && page_bytes <= total && static_cast<size_t>(at) <= total - page_bytes, "kv_cache",
                "offset of a page", static_cast<size_t>(at), total);
        const size_t astray = reinterpret_cast<uintptr_t>(base + at) % kKvAlignment;
        require(astray == 0, "kv_cache", "bytes from a multiple of 64 to a page", astray, 0);
        pages.push_back(base + at);
    }
    return pages;
}

// As every octet of tokens meets them.
static std::vector<cpu::KvSteps> spread(const F32& steps, size_t layers) {
    require(size_of(steps) == 0 || size_of(steps) == 2 * layers, "kv_cache", "steps", size_of(steps),
            2 * layers);
    std::vector<cpu::KvSteps> found(size_of(steps) / 2);
    for (size_t i = 0; i < found.size(); ++i) {
        std::fill_n(found[i].keys, cpu::kOctet, steps.data()[2 * i]);
        std::fill_n(found[i].values, cpu::kOctet, steps.data()[2 * i + 1]);
    }
    return found;
}

KvCache::KvCache(const KvGeometry& geometry, size_t layers, size_t layer_bytes, py::array memory,
                 const I64& offsets, const F32& steps)
    : layers_(layers),
      shape_((check(geometry, layers), geometry)),
      memory_(std::move(memory)),
      steps_(spread(steps, layers)) {
    require(layer_bytes == shape_.layer_bytes, "kv_cache", "bytes of a layer", layer_bytes,
            shape_.layer_bytes);
    pages_ = page_table(memory_, offsets, layers * layer_bytes);
}

KvLayer KvCache::layer(size_t index) const {
    require(index < layers_, "kv_cache", "layer", index, layers_);
    KvLayer view = shape_;
    view.pages = pages_.data();
    view.layer_at = index * view.layer_bytes;
    view.steps = steps_.empty() ? nullptr : &steps_[index];
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
        .def(py::init([](const std::string& dtype, size_t layers, size_t kv_heads, size_t key_dim,
                         size_t value_dim, size_t page_tokens, bool value_in_key, size_t layer_bytes,
                         py::array memory, const I64& offsets, size_t group, const F32& steps) {
                 const strata::cpu::KvGeometry shape{
                     kv_type(dtype, group), kv_heads,     key_dim, value_dim,
                     page_tokens,           value_in_key, group,   size_of(steps) != 0};
                 return KvCache(shape, layers, layer_bytes, std::move(memory), offsets, steps);
             }),
             py::arg("dtype"), py::arg("layers"), py::arg("kv_heads"), py::arg("key_dim"),
             py::arg("value_dim"), py::arg("page_tokens"), py::arg("value_in_key"), py::arg("layer_bytes"),
             raw("memory"), raw("offsets"), py::arg("group"), raw("steps"));
    py::class_<Step>(m, "Step").def(py::init<py::object, std::vector<Sequence>, size_t, F32, F32>(),
                                    py::arg("cache"), py::arg("sequences"), py::arg("rows"), raw("cosines"),
                                    raw("sines"));
}
