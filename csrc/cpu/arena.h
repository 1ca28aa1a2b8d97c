// Scratch memory of the ops: grows to the largest op seen and is reused, so a step allocates nothing.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

namespace strata::cpu {

class Arena {
  public:
    static constexpr size_t kAlign = 64;

    Arena() = default;
    ~Arena() {
        rewind(0);
        std::free(block_);
    }
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // Forgets everything taken so far; what had to be allocated beyond the block is merged into it.
    void reset() {
        rewind(0);
        if (peak_ > capacity_) {
            std::free(block_);
            block_ = nullptr;
            capacity_ = 0;
            block_ = allocate(peak_);
            capacity_ = peak_;
        }
    }

    // Forgets what was taken since `mark` was asked for: an op that consists of many uses the same memory for
    // each of them.
    size_t mark() const { return used_; }
    void rewind(size_t mark) {
        while (!extra_.empty() && extra_.back().start >= mark) {
            std::free(extra_.back().memory);
            extra_.pop_back();
        }
        used_ = mark;
    }

    // Uninitialised room for n values, 64-byte aligned, valid until the next reset.
    template <class T>
    T* take(size_t n) {
        const size_t bytes = (n * sizeof(T) + kAlign - 1) / kAlign * kAlign + kAlign;
        const size_t start = used_;
        used_ += bytes;
        peak_ = std::max(peak_, used_);
        if (used_ <= capacity_) return reinterpret_cast<T*>(block_ + start);
        extra_.push_back({allocate(bytes), start});
        return reinterpret_cast<T*>(extra_.back().memory);
    }

  private:
    static uint8_t* allocate(size_t bytes) {
        void* memory = std::aligned_alloc(kAlign, bytes);
        if (memory == nullptr) throw std::bad_alloc();
        return static_cast<uint8_t*>(memory);
    }
    struct Extra {
        uint8_t* memory;
        size_t start;
    };

    uint8_t* block_ = nullptr;
    size_t capacity_ = 0;
    size_t used_ = 0, peak_ = 0;
    std::vector<Extra> extra_;
};

}  // namespace strata::cpu
