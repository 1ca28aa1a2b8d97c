#include "cpu/bandwidth.h"

#include <immintrin.h>
#include <sys/mman.h>

#include <chrono>
#include <cstring>
#include <new>

namespace strata::cpu {
namespace {

constexpr size_t kPage = 4096;

// Anonymous memory in huge pages where the system has them; unmapped at the end.
class Buffer {
  public:
    explicit Buffer(size_t bytes) : bytes_(bytes) {
        void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        madvise(memory, bytes, MADV_HUGEPAGE);
        data_ = static_cast<uint8_t*>(memory);
    }
    ~Buffer() { munmap(data_, bytes_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    uint8_t* data() const { return data_; }

  private:
    uint8_t* data_;
    size_t bytes_;
};

uint64_t read_all(const uint8_t* data, size_t bytes) {
    constexpr size_t kStep = 128;
    __m256i sum[4] = {};
    for (size_t at = 0; at + kStep <= bytes; at += kStep)
        for (int i = 0; i < 4; i++)
            sum[i] = _mm256_xor_si256(
                sum[i], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + at + 32 * i)));
    sum[0] = _mm256_xor_si256(_mm256_xor_si256(sum[0], sum[1]), _mm256_xor_si256(sum[2], sum[3]));
    return static_cast<uint64_t>(_mm256_extract_epi64(sum[0], 0));
}

double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

std::vector<double> read_bandwidth(Cpu& cpu, size_t bytes, double seconds) {
    const OpGuard guard(cpu);
    const int workers = cpu.pool.size();
    const size_t part = bytes / workers / kPage * kPage;
    const Buffer buffer(part * workers);
    std::vector<uint64_t> sums(workers);
    // All bytes differ from zero, else the kernel might map one page everywhere.
    cpu.pool.run([&](int w) { std::memset(buffer.data() + part * w, w + 1, part); });
    std::vector<double> speeds;
    const double stop = seconds_now() + seconds;
    do {
        const double start = seconds_now();
        cpu.pool.run([&](int w) { sums[w] ^= read_all(buffer.data() + part * w, part); });
        speeds.push_back(static_cast<double>(part * workers) / (seconds_now() - start));
    } while (seconds_now() < stop);
    // The sums have to be used, or the compiler drops the reads.
    volatile uint64_t sink = sums[0];
    (void)sink;
    return speeds;
}

}  // namespace strata::cpu
