// Pieces of files read past the page cache, several at once, by threads of their own.
//
// One thread of a drive's user waits for one read at a time, and an NVMe drive needs several in flight to
// give what it can; so a long read goes in parts. Files are opened when they are first read, a bounded number
// at a time.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace strata::io {

// A file as it was when it was checked. What is read must still come from that one.
struct KnownFile {
    std::string path;
    uint64_t device, inode;
    int64_t bytes, modified_ns;
};

// A piece of file number `file`. into: room for `bytes`; it belongs to the reader until the read has finished
// or was cancelled. With direct reads offset, bytes and into are multiples of kAlign.
struct Piece {
    size_t file;
    int64_t offset, bytes;
    uint8_t* into;
};

// How a read ended: kRead, an errno (positive), or one of the others.
constexpr int kRead = 0, kShort = -1, kChanged = -2;

struct Finished {
    uint64_t ticket;
    int outcome;
};

// Sums over the reader's life. busy_ns: time in which at least one read was running. buffered: files that had
// to be read through the page cache, reason: the errno that the first of them gave.
struct ReadTotals {
    int64_t reads = 0, bytes = 0, busy_ns = 0;
    int64_t buffered = 0;
    int reason = 0;
};

class DirectReader {
  public:
    static constexpr int64_t kAlign = 4096;
    // The longest part. An expert of 2.5 MB alone came 1.4 times as fast in 4 parts as in one, three at a
    // time 1.1 times (virtual disk of 2.5 GB/s; medians of 25, other programs running).
    static constexpr int64_t kPart = 640 * 1024;

    // most_open: descriptors at a time, no fewer than threads. direct false: through the page cache.
    DirectReader(std::vector<KnownFile> files, int threads, int most_open, bool direct);
    // Reads that run are waited for, others never begin.
    ~DirectReader();
    DirectReader(const DirectReader&) = delete;
    DirectReader& operator=(const DirectReader&) = delete;

    const KnownFile& file(size_t index) const { return files_[index].known; }
    size_t files() const { return files_.size(); }

    // Queues a read of at least a byte. Urgent ones go before all others; among equals the first comes first.
    uint64_t submit(const Piece& piece, bool urgent);
    // Makes a queued read urgent; nothing happens when it has begun.
    void hurry(uint64_t ticket);
    // True: the read had not begun and never will. False: it runs or has finished, and will be reported.
    bool cancel(uint64_t ticket);
    // What has finished since the last call, each read once. Waits for the first one, for timeout_ns at most,
    // unless nothing is queued or running.
    std::vector<Finished> finished(int64_t timeout_ns);

    ReadTotals totals() const;
    // Descriptors open at this moment.
    int open_files() const;

  private:
    struct File {
        KnownFile known;
        int descriptor = -1;
        bool direct;
        int users = 0;
        uint64_t used = 0;  // when last, counted in uses
    };
    // A part of a read.
    struct Job {
        uint64_t ticket;
        Piece piece;
    };
    // What was asked for with one ticket. parts: not ended yet; outcome: of the first part that failed.
    struct Whole {
        int64_t bytes;
        int parts;
        bool begun;
        int outcome;
    };
    class Lease;

    void work();
    void end(const Job& job, int outcome);
    int read(const Piece& piece);
    int read_once(const Piece& piece, bool* refused);
    int open_locked(File& file);
    void close_idle_locked();
    void make_buffered(File& file, int reason);

    const int most_open_;
    const int born_;  // the process that has the threads
    std::vector<File> files_;
    mutable std::mutex file_mutex_;  // guards descriptors and uses of files_
    int open_ = 0;
    uint64_t uses_ = 0;

    mutable std::mutex mutex_;  // guards all below
    std::condition_variable wanted_, done_;
    std::deque<Job> urgent_, patient_;
    std::unordered_map<uint64_t, Whole> asked_;  // by ticket, until it has finished or was cancelled
    std::vector<Finished> finished_;
    ReadTotals totals_;
    uint64_t next_ticket_ = 1;
    int running_ = 0;
    int64_t busy_since_ = 0;
    bool stop_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace strata::io
