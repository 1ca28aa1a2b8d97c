// What the ops inside of a fused one cost, for those who want to know. Off, an op pays one comparison.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace strata::cpu {

// Weights and KV that an op reads, and its multiply-adds. shape: for people. quantized: its weights are
// integers.
struct OpCost {
    std::string shape;
    int64_t bytes = 0, macs = 0;
    bool quantized = false;
};

// All calls of one op with one shape.
struct OpTotal {
    const char* op;
    OpCost cost;
    int64_t calls = 0;
    double seconds = 0;
};

class OpClock {
  public:
    using Clock = std::chrono::steady_clock;

    bool on = false;
    // Seconds in calls from outside, whether on or not.
    double native = 0;

    static double since(Clock::time_point begin) {
        return std::chrono::duration<double>(Clock::now() - begin).count();
    }

    void note(const char* op, OpCost cost, double seconds) {
        OpTotal* total = find(op, cost.shape);
        total->calls++;
        total->seconds += seconds;
        total->cost.bytes += cost.bytes;
        total->cost.macs += cost.macs;
        total->cost.quantized = cost.quantized;
    }

    // What was noted so far, which is then forgotten.
    std::vector<OpTotal> take() {
        std::vector<OpTotal> taken;
        taken.swap(totals_);
        return taken;
    }

  private:
    OpTotal* find(const char* op, const std::string& shape) {
        for (OpTotal& total : totals_)
            if (std::string(total.op) == op && total.cost.shape == shape) return &total;
        totals_.push_back({op, {shape, 0, 0, false}, 0, 0.0});
        return &totals_.back();
    }

    std::vector<OpTotal> totals_;
};

// Runs an op, and notes its time with the OpCost that `cost()` tells if the clock is on.
template <class Cost, class Op>
void timed(OpClock& clock, const char* name, const Cost& cost, const Op& op) {
    if (!clock.on) return op();
    const auto begin = OpClock::Clock::now();
    op();
    const double seconds = OpClock::since(begin);
    clock.note(name, cost(), seconds);
}

}  // namespace strata::cpu
