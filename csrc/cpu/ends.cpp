#include "cpu/ends.h"

#include <cstring>
#include <string>
#include <utility>

#include "cpu/linear.h"

namespace strata::cpu {
namespace {

class FineScales {
  public:
    explicit FineScales(Cpu& cpu) : cpu_(cpu), before_(std::exchange(cpu.token_scales, false)) {}
    ~FineScales() { cpu_.token_scales = before_; }

  private:
    Cpu& cpu_;
    const bool before_;
};

}  // namespace

void embed(Cpu& cpu, const Matrix& matrix, const int32_t* ids, size_t tokens, float scale, float* out) {
    const auto cost = [&] {
        const int64_t row_bytes = matrix.block_bytes / kRowBlock;
        return OpCost{std::string(matrix.format().name) + " " + std::to_string(matrix.cols),
                      static_cast<int64_t>(tokens) * row_bytes};
    };
    timed(cpu.clock, "embedding", cost,
          [&] { embedding(cpu, matrix, ids, static_cast<int>(tokens), scale, out); });
}

void logits(Cpu& cpu, const Norm& norm, const Matrix& head, const float* residual, const int32_t* rows,
            size_t count, bool exact, float* out) {
    float* wanted = cpu.arena.take<float>(count * norm.dim);
    for (size_t i = 0; i < count; i++)
        std::memcpy(wanted + i * norm.dim, residual + rows[i] * norm.dim, norm.dim * sizeof(float));
    normalize(cpu, norm, wanted, count, wanted);
    const FineScales fine(cpu);
    project(cpu, {"head", head, nullptr}, wanted, count, exact, out);
}

}  // namespace strata::cpu
