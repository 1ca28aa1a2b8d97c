// Scratch memory of the ops: grows to the largest op seen and is reused, so a step allocates nothing.
#pragma once

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
    ~Arena() { release(); }
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // Forgets everything taken so far; what had to be allocated beyond the block is merged into it.
    void reset() {
        if (!extra_.empty()) {
            const size_t wanted = used_;
            release();
            block_ = allocate(wanted);
            capacity_ = wanted;
        }
        used_ = 0;
    }

    // Uninitialised room for n values, 64-byte aligned, valid until the next reset.
    template <class T>
    T* take(size_t n) {
        const size_t bytes = (n * sizeof(T) + kAlign - 1) / kAlign * kAlign + kAlign;
        const size_t start = used_;
        used_ += bytes;
        if (used_ <= capacity_) return reinterpret_cast<T*>(block_ + start);
        extra_.push_back(allocate(bytes));
        return reinterpret_cast<T*>(extra_.back());
    }

  private:
    static uint8_t* allocate(size_t bytes) {
        void* memory = std::aligned_alloc(kAlign, bytes);
        if (memory == nullptr) throw std::bad_alloc();
        return static_cast<uint8_t*>(memory);
    }
    void release() {
        std::free(block_);
        for (uint8_t* memory : extra_) std::free(memory);
        extra_.clear();
        block_ = nullptr;
        capacity_ = 0;
    }

    uint8_t* block_ = nullptr;
    size_t capacity_ = 0;
    size_t used_ = 0;
    std::vector<uint8_t*> extra_;
};

}  // namespace strata::cpu
