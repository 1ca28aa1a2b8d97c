#include "io/direct_read.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <system_error>

namespace strata::io {
namespace {

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// kRead, kChanged, or the errno that says why nobody knows.
int compare(int descriptor, const KnownFile& known) {
    struct stat found;
    if (fstat(descriptor, &found) != 0) return errno;
    if (found.st_size < known.bytes) return kShort;
    const int64_t modified = found.st_mtim.tv_sec * int64_t{1000000000} + found.st_mtim.tv_nsec;
    const bool same = found.st_dev == known.device && found.st_ino == known.inode &&
                      found.st_size == known.bytes && modified == known.modified_ns;
    return same ? kRead : kChanged;
}

}  // namespace

// The right to use a file's descriptor; outcome tells whether there is one.
class DirectReader::Lease {
  public:
    Lease(DirectReader& reader, size_t index) : reader_(reader), file_(reader.files_[index]) {
        const std::lock_guard<std::mutex> lock(reader_.file_mutex_);
        outcome = file_.descriptor >= 0 ? kRead : reader_.open_locked(file_);
        file_.users++;
        file_.used = ++reader_.uses_;
        descriptor = file_.descriptor;
        direct = file_.direct;
    }
    ~Lease() {
        const std::lock_guard<std::mutex> lock(reader_.file_mutex_);
        file_.users--;
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    int outcome, descriptor;
    bool direct;

  private:
    DirectReader& reader_;
    File& file_;
};

DirectReader::DirectReader(std::vector<KnownFile> files, int threads, int most_open, bool direct)
    : most_open_(most_open), born_(getpid()) {
    if (threads < 1 || most_open < threads)
        throw std::invalid_argument("a reader of " + std::to_string(threads) + " threads may open " +
                                    std::to_string(most_open) + " files; it needs one per thread");
    files_.reserve(files.size());
    for (KnownFile& known : files) {
        files_.emplace_back();
        files_.back().known = std::move(known);
        files_.back().direct = direct;
    }
    try {
        for (int i = 0; i < threads; i++) threads_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
        if (threads_.empty()) throw;  // fewer than asked for are slower, none would wait for ever
    }
}

DirectReader::~DirectReader() {
    if (born_ != getpid()) {  // a forked child has the objects but not the threads
        for (std::thread& thread : threads_) thread.detach();
    } else {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
        }
        wanted_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }
    for (const File& file : files_)
        if (file.descriptor >= 0) close(file.descriptor);
}

uint64_t DirectReader::submit(const Piece& piece, bool urgent) {
    uint64_t ticket;
    int parts;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        ticket = next_ticket_++;
        Whole& whole = asked_[ticket] = {piece.bytes, 0, false, kRead};
        for (int64_t at = 0; at < piece.bytes; at += kPart, whole.parts++) {
            const Piece part{piece.file, piece.offset + at, std::min(kPart, piece.bytes - at),
                             piece.into + at};
            (urgent ? urgent_ : patient_).push_back({ticket, part});
        }
        parts = whole.parts;
    }
    for (int i = 0; i < parts; i++) wanted_.notify_one();
    return ticket;
}

void DirectReader::hurry(uint64_t ticket) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto others = std::stable_partition(patient_.begin(), patient_.end(),
                                              [=](const Job& job) { return job.ticket != ticket; });
    urgent_.insert(urgent_.end(), others, patient_.end());
    patient_.erase(others, patient_.end());
}

bool DirectReader::cancel(uint64_t ticket) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto asked = asked_.find(ticket);
    if (asked == asked_.end() || asked->second.begun) return false;
    asked_.erase(asked);
    for (std::deque<Job>* jobs : {&urgent_, &patient_})
        jobs->erase(
            std::remove_if(jobs->begin(), jobs->end(), [=](const Job& job) { return job.ticket == ticket; }),
            jobs->end());
    return true;
}

std::vector<Finished> DirectReader::finished(int64_t timeout_ns) {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [this] {
        return !finished_.empty() || (running_ == 0 && urgent_.empty() && patient_.empty());
    });
    std::vector<Finished> found;
    found.swap(finished_);
    return found;
}

ReadTotals DirectReader::totals() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    ReadTotals found = totals_;
    if (running_ > 0) found.busy_ns += now_ns() - busy_since_;
    return found;
}

int DirectReader::open_files() const {
    const std::lock_guard<std::mutex> lock(file_mutex_);
    return open_;
}

void DirectReader::work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        wanted_.wait(lock, [this] { return stop_ || !urgent_.empty() || !patient_.empty(); });
        if (stop_) return;
        std::deque<Job>& jobs = urgent_.empty() ? patient_ : urgent_;
        const Job job = jobs.front();
        jobs.pop_front();
        asked_.at(job.ticket).begun = true;
        if (running_++ == 0) busy_since_ = now_ns();
        lock.unlock();
        const int outcome = read(job.piece);
        lock.lock();
        end(job, outcome);
    }
}

// Under the lock.
void DirectReader::end(const Job& job, int outcome) {
    if (--running_ == 0) totals_.busy_ns += now_ns() - busy_since_;
    Whole& whole = asked_.at(job.ticket);
    if (whole.outcome == kRead) whole.outcome = outcome;
    if (--whole.parts > 0) return;
    totals_.reads++;
    if (whole.outcome == kRead) totals_.bytes += whole.bytes;
    finished_.push_back({job.ticket, whole.outcome});
    asked_.erase(job.ticket);
    done_.notify_all();
}

// File systems without direct reads refuse them at open or at the first read; then the page cache serves.
int DirectReader::read(const Piece& piece) {
    bool refused = false;
    const int outcome = read_once(piece, &refused);
    if (!refused) return outcome;
    make_buffered(files_[piece.file], outcome);
    return read_once(piece, &refused);
}

int DirectReader::read_once(const Piece& piece, bool* refused) {
    const Lease lease(*this, piece.file);
    *refused = lease.direct && lease.outcome == EINVAL;
    if (lease.outcome != kRead) return lease.outcome;
    for (int64_t done = 0; done < piece.bytes;) {
        const ssize_t count = pread(lease.descriptor, piece.into + done,
                                    static_cast<size_t>(piece.bytes - done), piece.offset + done);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0 && errno == EINVAL && done > 0)
            return kShort;  // off the grid after a file's last bytes
        if (count < 0) {
            *refused = lease.direct && errno == EINVAL;
            return errno;
        }
        if (count == 0) return kShort;
        done += count;
    }
    // Kept in memory by the caller: the page cache need not keep it as well.
    if (!lease.direct) posix_fadvise(lease.descriptor, piece.offset, piece.bytes, POSIX_FADV_DONTNEED);
    return compare(lease.descriptor, files_[piece.file].known);
}

int DirectReader::open_locked(File& file) {
    if (open_ >= most_open_) close_idle_locked();
    const int flags = O_RDONLY | O_CLOEXEC | (file.direct ? O_DIRECT : 0);
    int descriptor;
    do descriptor = open(file.known.path.c_str(), flags);
    while (descriptor < 0 && errno == EINTR);
    if (descriptor < 0) return errno;
    const int outcome = compare(descriptor, file.known);
    if (outcome != kRead) {
        close(descriptor);
        return outcome;
    }
    if (!file.direct) posix_fadvise(descriptor, 0, 0, POSIX_FADV_RANDOM);
    file.descriptor = descriptor;
    open_++;
    return kRead;
}

// Closes the file whose last use is longest ago among those that nobody reads.
void DirectReader::close_idle_locked() {
    File* oldest = nullptr;
    for (File& file : files_)
        if (file.descriptor >= 0 && file.users == 0 && (oldest == nullptr || file.used < oldest->used))
            oldest = &file;
    if (oldest == nullptr) return;
    close(oldest->descriptor);
    oldest->descriptor = -1;
    open_--;
}

void DirectReader::make_buffered(File& file, int reason) {
    const std::lock_guard<std::mutex> lock(file_mutex_);
    if (!file.direct) return;  // another thread found out first
    file.direct = false;
    // Who reads it by the direct descriptor at this moment is refused as well and comes here in turn; a
    // descriptor in use must stay open until then, so it is turned into a buffered one in place.
    if (file.descriptor >= 0) fcntl(file.descriptor, F_SETFL, fcntl(file.descriptor, F_GETFL) & ~O_DIRECT);
    const std::lock_guard<std::mutex> totals(mutex_);
    if (totals_.buffered++ == 0) totals_.reason = reason;
}

}  // namespace strata::io
