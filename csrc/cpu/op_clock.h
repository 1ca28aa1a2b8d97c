// What the ops inside of a fused one cost, for those who want to know: totals by shape (`on`), or every
// single call with its begin and end (`tracing`). Off, an op pays two comparisons.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cpu/thread_pool.h"

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

// One call. begin, end: seconds of the steady clock; node_end: when the last thread of each memory node was
// done with it, 0 where none took part. layer: the decoder's, -1 outside of `run_layers`.
struct OpSpan {
    const char* op;
    OpCost cost;
    int layer;
    double begin, end;
    std::vector<double> node_end;
};

class OpClock {
  public:
    using Clock = std::chrono::steady_clock;

    bool on = false, tracing = false;
    int layer = -1;
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

    // Keep every call from now on. nodes: of each worker, numbered from 0.
    void trace(ThreadPool& pool, const std::vector<int>& nodes) {
        node_of_ = nodes;
        stamps_.assign(nodes.size(), Stamp{});
        nodes_ = 0;
        for (const int node : nodes) nodes_ = std::max(nodes_, node + 1);
        pool.stamp(stamps_.data());
        tracing = true;
    }

    void end_trace(ThreadPool& pool) {
        pool.stamp(nullptr);
        tracing = false;
    }

    void keep(const char* op, OpCost cost, Clock::time_point begin, Clock::time_point end) {
        OpSpan span{op, std::move(cost), layer, seconds(begin), seconds(end), {}};
        span.node_end.assign(nodes_, 0.0);
        for (size_t worker = 0; worker < stamps_.size(); worker++) {
            double& last = span.node_end[node_of_[worker]];
            const double ended = 1e-9 * static_cast<double>(stamps_[worker].end);
            if (ended >= span.begin) last = std::max(last, std::min(ended, span.end));
        }
        spans_.push_back(std::move(span));
    }

    // The calls kept so far, which are then forgotten.
    std::vector<OpSpan> take_spans() {
        std::vector<OpSpan> taken;
        taken.swap(spans_);
        return taken;
    }

    // What was noted so far, which is then forgotten.
    std::vector<OpTotal> take() {
        std::vector<OpTotal> taken;
        taken.swap(totals_);
        return taken;
    }

  private:
    static double seconds(Clock::time_point at) {
        return std::chrono::duration<double>(at.time_since_epoch()).count();
    }

    OpTotal* find(const char* op, const std::string& shape) {
        for (OpTotal& total : totals_)
            if (std::string(total.op) == op && total.cost.shape == shape) return &total;
        totals_.push_back({op, {shape, 0, 0, false}, 0, 0.0});
        return &totals_.back();
    }

    std::vector<OpTotal> totals_;
    std::vector<OpSpan> spans_;
    std::vector<Stamp> stamps_;
    std::vector<int> node_of_;
    int nodes_ = 0;
};

// Runs an op, and notes its time with the OpCost that `cost()` tells if the clock is on.
template <class Cost, class Op>
void timed(OpClock& clock, const char* name, const Cost& cost, const Op& op) {
    if (!clock.on && !clock.tracing) return op();
    const auto begin = OpClock::Clock::now();
    op();
    const auto end = OpClock::Clock::now();
    if (clock.on) clock.note(name, cost(), std::chrono::duration<double>(end - begin).count());
    if (clock.tracing) clock.keep(name, cost(), begin, end);
}

}  // namespace strata::cpu
