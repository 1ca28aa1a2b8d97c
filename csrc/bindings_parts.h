// The parts of a decoder layer as C++ keeps them, and the ops that run them from end to end.
#pragma once

#include "bindings_experts.h"
#include "bindings_kv.h"
#include "bindings_reader.h"
#include "cpu/attend.h"
#include "cpu/attend_latent.h"
#include "cpu/choose_experts.h"
#include "cpu/cpu.h"

namespace strata::binding {

// What the cache must hold for a layer's attention.
struct Place {
    size_t layer, kv_heads, key_dim, value_dim;
    bool value_in_key;
    size_t rotary_dim;
};

// Either kind of attention.
struct Attention {
    virtual ~Attention() = default;
    virtual size_t hidden() const = 0;
    // residual += attention; the cache's layer is what `layer_of` returned.
    virtual void run(cpu::Cpu& cpu, const cpu::KvLayer& cache, const cpu::Step& step, bool exact,
                     float* residual) const = 0;

    Keep keep;
    Place place;
};

// The cache's layer, if it is what the part needs, and the step's rotation is the part's; else ValueError.
cpu::KvLayer layer_of(const Step& step, const Place& place);

struct FeedForward {
    Keep keep;
    cpu::Norm norm;
    cpu::DenseFfn ffn;
    float scale;
};

struct Router {
    Keep keep;
    cpu::RouterPart view;
};

struct Experts {
    Keep keep;
    cpu::DenseFfn shared;
    cpu::RoutedFfn view;
    ExpertTable* table;  // kept
};

}  // namespace strata::binding

// Register the parts and their ops with the module that bindings.cpp opens, layers last.
void bind_attend(pybind11::module_& m);
void bind_ffn(pybind11::module_& m);
void bind_layers(pybind11::module_& m);
