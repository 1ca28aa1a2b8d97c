// Python's view of the KV cache and of the tokens of a forward pass.
#pragma once

#include <vector>

#include "bindings_arrays.h"
#include "cpu/kv_cache.h"
#include "cpu/parts.h"

namespace strata::binding {

// The KV cache of a model: pages anywhere in one piece of memory, which Python owns and this keeps alive.
class KvCache {
  public:
    // layer_bytes: what the caller takes a layer of a page to have; offsets: i64, where each page begins.
    // steps: f32 [layers, 2], per_tensor's scales of each layer's keys and values, else empty.
    KvCache(const cpu::KvGeometry& geometry, size_t layers, size_t layer_bytes, py::array memory,
            const I64& offsets, const F32& steps);

    // ValueError for a layer that is not there.
    cpu::KvLayer layer(size_t index) const;
    size_t pages() const { return pages_.size(); }
    size_t page_tokens() const { return shape_.page_tokens; }

  private:
    size_t layers_;
    cpu::KvLayer shape_;
    py::array memory_;
    std::vector<uint8_t*> pages_;
    std::vector<cpu::KvSteps> steps_;
};

struct Sequence {
    size_t first_row, count, start;
    I32 pages;
};

// Checks every page id against the cache: a wrong one would read or write outside of it.
std::vector<cpu::SequenceView> view_sequences(const std::vector<Sequence>& sequences, const KvCache& cache,
                                              size_t rows);

// The tokens of one forward pass over one cache, checked once for all layers. Keeps alive what it points to.
class Step {
  public:
    // cosines, sines: f32 [rows, rotary_dim / 2].
    Step(py::object cache, std::vector<Sequence> sequences, size_t rows, F32 cosines, F32 sines);

    KvCache& cache() const { return *cache_; }
    size_t rotary_dim() const { return rotary_dim_; }
    const cpu::Step& view() const { return view_; }

  private:
    py::object keep_cache_;
    KvCache* cache_;
    std::vector<Sequence> sequences_;
    std::vector<cpu::SequenceView> views_;
    F32 cosines_, sines_;
    size_t rotary_dim_;
    cpu::Step view_;
};

}  // namespace strata::binding

// Registers both with the module that bindings.cpp opens.
void bind_kv(pybind11::module_& m);
