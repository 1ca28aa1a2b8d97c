// The fused ops of decoder layers, one behind the other as `run_layers` calls them, with buffers of exactly
// the size they may touch, under a sanitizer. From the same input, int8 activations must come close to f32
// ones, and the number of threads must not change a bit.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "buffers.h"
#include "cpu/attend.h"
#include "cpu/attend_latent.h"
#include "cpu/choose_experts.h"
#include "cpu/feed_forward.h"
#include "cpu/grouping.h"

namespace {

constexpr int kHidden = 70, kWidth = 20, kGateUpRows = 48, kExperts = 5, kTopK = 2;
constexpr size_t kHeads = 3, kDim = 18, kRotary = 8, kPageTokens = 8, kPages = 8;
constexpr size_t kNope = 10, kRank = 22;
constexpr size_t kSizes[] = {0, 1, 2, 5, 13, 29};
constexpr float kNoClip = std::numeric_limits<float>::infinity();

// Weights of one matrix, and the view of them.
struct Weights {
    std::unique_ptr<uint8_t[]> bytes;
    Matrix matrix;

    Weights(int code, int rows, int cols)
        : bytes(exact(packed_bytes(code, rows, cols))), matrix(make_matrix(bytes.get(), code, rows, cols)) {}
    Projection named(const char* name) const { return {name, matrix, nullptr}; }
};

// Vectors around 1, as norms have them.
std::unique_ptr<float[]> gains(size_t n) {
    std::unique_ptr<float[]> values = activations(n);
    for (size_t i = 0; i < n; i++) values[i] = 1.0f + 0.1f * values[i];
    return values;
}

struct Ffn {
    Weights gate_up, down;
    FfnSlice slice;

    explicit Ffn(int code)
        : gate_up(code, kGateUpRows, kHidden),
          down(code, kHidden, kWidth),
          slice{gate_up.matrix, down.matrix, nullptr, nullptr} {}
};

// One of everything that a layer may have.
struct Parts {
    std::unique_ptr<float[]> norm = gains(kHidden), head_norm = gains(kDim), latent_norm = gains(kRank);
    std::unique_ptr<float[]> router = activations(kExperts * kHidden), shared_gate = activations(kHidden);
    Weights qkv, out, q, kv_a, k_b, v_b, latent_out;
    Ffn dense;
    std::vector<std::unique_ptr<Ffn>> experts;
    std::vector<const FfnSlice*> slices;

    explicit Parts(int code)
        : qkv(code, (kHeads + 2) * kDim, kHidden),
          out(code, kHidden, kHeads * kDim),
          q(code, kHeads * (kNope + kRotary), kHidden),
          kv_a(code, kRank + kRotary, kHidden),
          k_b(code, kHeads * kRank, kNope),
          v_b(code, kHeads * kNope, kRank),
          latent_out(code, kHidden, kHeads * kNope),
          dense(code) {
        for (int i = 0; i < kExperts; i++) {
            experts.push_back(std::make_unique<Ffn>(code));
            slices.push_back(&experts.back()->slice);
        }
    }

    Norm input() const { return {norm.get(), kHidden, 1e-6f}; }

    GroupedQuery grouped() const {
        const HeadsSpec queries{kHeads, kDim,    head_norm.get(), HeadNorm::per_head,
                                1e-6f,  kNoClip, kRotary,         false};
        HeadsSpec keys = queries;
        keys.heads = 1;
        const HeadsSpec values{1, kDim, nullptr, HeadNorm::none, 0, kNoClip, 0, false};
        return {input(), qkv.named("qkv"), out.named("out"),           queries,
                keys,    values,           {kHeads, 0.2f, 0, nullptr}, 0.5f};
    }

    Latent latent() const {
        const Projection none{"", q.matrix, nullptr};
        return {input(),
                false,
                none,
                q.named("q"),
                {},
                kv_a.named("kv_a"),
                {latent_norm.get(), kRank, 1e-6f},
                k_b.named("k_b"),
                v_b.named("v_b"),
                latent_out.named("out"),
                kHeads,
                kNope,
                kRotary,
                kRank,
                true,
                {kHeads, 0.01f, 0, nullptr},
                0.5f};
    }
};

constexpr Gating kSilu{Gate::kSilu, 1.7f, 7.0f};

// Router and experts, as bindings_layers.cpp has them.
void routed(Cpu& cpu, const Parts& parts, size_t rows, bool exact_inputs, float* residual) {
    const RouterPart router{
        parts.input(),
        parts.router.get(),
        nullptr,
        {kExperts, kTopK, RouterScore::softmax, true, 0, 1, 1, 1, GroupScore::max, nullptr}};
    const std::unique_ptr<float[]> hidden(new float[rows * kHidden]), weights(new float[rows * kTopK]);
    const std::unique_ptr<int32_t[]> ids(new int32_t[rows * kTopK]);
    choose_experts(cpu, router, residual, rows, hidden.get(), ids.get(), weights.get());
    const ExpertWorks found = group_tokens(cpu.arena, {ids.get(), weights.get(), static_cast<int64_t>(rows),
                                                       kTopK, parts.slices.data(), kExperts});
    const DenseFfn shared{parts.dense.slice, kSilu};
    const RoutedFfn experts{kHidden, 1, 1, 1000, kSilu, &shared, parts.shared_gate.get(), 0.5f};
    apply_experts(cpu, experts, found.works, found.count, hidden.get(), static_cast<int>(rows), exact_inputs,
                  residual);
}

// Pages of two sequences; each block ends where its page does.
struct Cache {
    std::vector<std::unique_ptr<uint8_t[]>> blocks;
    std::vector<uint8_t*> pages;
    KvLayer grouped, latent;

    Cache(KvType type, size_t count)
        : grouped({type, 1, kDim, kDim, kPageTokens, false}),
          latent({type, 1, kRank + kRotary, kRank, kPageTokens, true}) {
        latent.layer_at = grouped.layer_bytes;
        for (size_t i = 0; i < count; i++) {
            blocks.emplace_back(new uint8_t[grouped.layer_bytes + latent.layer_bytes]());
            pages.push_back(blocks.back().get());
        }
        grouped.pages = latent.pages = pages.data();
    }
};

// The ops of two layers, in turn.
void layer_op(int op, Cpu& cpu, const Parts& parts, const Cache& cache, const Step& step, bool exact_inputs,
              float* residual) {
    const OpGuard guard(cpu);
    const DenseFfn dense{parts.dense.slice, kSilu};
    if (op == 0) attend(cpu, parts.grouped(), cache.grouped, step, exact_inputs, residual);
    if (op == 1)
        feed_forward(cpu, parts.input(), dense, 0.5f, static_cast<int>(step.rows), exact_inputs, residual);
    if (op == 2) attend_latent(cpu, parts.latent(), cache.latent, step, exact_inputs, residual);
    if (op == 3) routed(cpu, parts, step.rows, exact_inputs, residual);
}

constexpr const char* kOps[] = {"attend", "feed_forward", "attend_latent", "choose and apply experts"};

// Two cpus and a cache for each way to compute.
struct Sides {
    Cpu one{{0}, false, 1000, STRATA_ISA::kKernels}, three{{0, 0, 0}, false, 1000, STRATA_ISA::kKernels};
    Cache fast, alone, truth;

    explicit Sides(KvType type) : fast(type, kPages), alone(type, kPages), truth(type, kPages) {}

    // Each op from the same residual in all three ways, then on from the truth.
    void run(const Parts& parts, const Step& step, int code) {
        const size_t n = step.rows * kHidden;
        auto residual = activations(n);
        for (int op = 0; op < 4; op++) {
            const std::vector<float> before(residual.get(), residual.get() + n);
            const auto by_three = exact(before), by_one = exact(before);
            layer_op(op, three, parts, fast, step, false, by_three.get());
            layer_op(op, one, parts, alone, step, false, by_one.get());
            layer_op(op, three, parts, truth, step, true, residual.get());
            close(by_three.get(), residual.get(), n, kOps[op], code);
            if (n == 0 || std::memcmp(by_three.get(), by_one.get(), n * sizeof(float)) == 0) continue;
            std::fprintf(stderr, "%s of %s: threads change the result\n", kOps[op], kFormats[code].name);
            std::exit(1);
        }
    }
};

// A prompt in two sequences, then one more token of each.
void try_layers(const Parts& parts, KvType type, size_t tokens, int code) {
    const size_t second = tokens / 3, first = tokens - second;
    Sides sides(type);
    const int32_t table[kPages] = {3, 0, 1, 7, 2, 6, 5, 4};
    const SequenceView prompt[] = {{0, first, 0, table}, {first, second, 0, table + kPages / 2}};
    const SequenceView next[] = {{0, 1, first, table}, {1, 1, second, table + kPages / 2}};
    for (const SequenceView* sequences : {prompt, next}) {
        const size_t rows = sequences[0].count + sequences[1].count;
        const auto cosines = activations(rows * kRotary / 2), sines = activations(rows * kRotary / 2);
        sides.run(parts, {rows, sequences, 2, {cosines.get(), sines.get()}}, code);
    }
}

}  // namespace

int main() {
    for (int code = 0; code < kFormatCount; code++) {
        const Parts parts(code);
        for (const size_t tokens : kSizes)
            try_layers(parts, static_cast<KvType>((code + tokens) % 3), tokens, code);
    }
    std::puts("ok");
}
