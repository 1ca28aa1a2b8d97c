// Reads of a file by several threads while others cancel, hurry and wait; every byte is checked.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>

#include "io/direct_read.h"

using namespace strata::io;

static void check(bool sound, const char* what) {
    if (sound) return;
    std::printf("%s\n", what);
    std::exit(1);
}

static uint8_t byte_at(int file, int64_t offset) {
    return static_cast<uint8_t>(offset * 7 + offset / 4096 + file);
}

static KnownFile make_file(const std::string& path, int number, int64_t bytes) {
    std::vector<uint8_t> data(bytes);
    for (int64_t i = 0; i < bytes; i++) data[i] = byte_at(number, i);
    const int descriptor = open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600);
    check(write(descriptor, data.data(), bytes) == bytes, "write");
    struct stat found;
    fstat(descriptor, &found);
    close(descriptor);
    return {path, found.st_dev, found.st_ino, bytes,
            found.st_mtim.tv_sec * int64_t{1000000000} + found.st_mtim.tv_nsec};
}

int main(int, char** arguments) {
    constexpr int kFiles = 5, kPlaces = 12;
    constexpr int64_t kBytes = DirectReader::kPart + 16 * 4096;  // two parts
    const std::string folder = arguments[1];
    std::vector<KnownFile> files;
    for (int i = 0; i < kFiles; i++) files.push_back(make_file(folder + "/" + std::to_string(i), i, kBytes));
    files.push_back({folder + "/none", 0, 0, kBytes, 0});
    std::mt19937 chance(1);
    const auto below = [&](int64_t n) { return static_cast<int64_t>(chance() % n); };
    auto* memory = static_cast<uint8_t*>(std::aligned_alloc(4096, kPlaces * kBytes));
    {
        DirectReader reader(files, 4, 4, true);
        std::map<uint64_t, std::pair<Piece, int>> under_way;
        std::vector<int> free;
        for (int i = 0; i < kPlaces; i++) free.push_back(i);
        int64_t read = 0, failed = 0;
        while (read < 100) {
            while (!free.empty() && below(4) != 0) {
                const int place = free.back();
                const int64_t pages = kBytes / 4096, from = below(pages), count = 1 + below(pages - from);
                const Piece piece{static_cast<size_t>(below(kFiles + 1)), from * 4096, count * 4096,
                                  memory + place * kBytes};
                std::memset(piece.into, 0xA5, piece.bytes);
                under_way[reader.submit(piece, below(2) == 0)] = {piece, place};
                free.pop_back();
            }
            if (!under_way.empty() && below(3) == 0) {
                const auto some = std::next(under_way.begin(), below(under_way.size()));
                if (below(2) == 0) reader.hurry(some->first);
                if (below(2) == 0 && reader.cancel(some->first)) {
                    const Piece& piece = some->second.first;
                    for (int64_t i = 0; i < piece.bytes; i++)
                        check(piece.into[i] == 0xA5, "cancelled, but written");
                    free.push_back(some->second.second);
                    under_way.erase(some);
                }
            }
            for (const Finished& one : reader.finished(below(2) * 1000000)) {
                const auto [piece, place] = under_way.at(one.ticket);
                under_way.erase(one.ticket);
                free.push_back(place);
                if (piece.file == kFiles) {
                    check(one.outcome == ENOENT, "a file that is not there was read");
                    failed++;
                    continue;
                }
                check(one.outcome == kRead, "a read failed");
                for (int64_t i = 0; i < piece.bytes; i++)
                    check(piece.into[i] == byte_at(static_cast<int>(piece.file), piece.offset + i), "a byte");
                read++;
            }
            check(reader.open_files() <= 4, "too many files are open");
        }
        check(failed > 0, "nothing failed");  // what is cancelled in time depends on the machine
        // The destructor comes while reads run and wait.
    }
    std::free(memory);
    std::puts("ok");
    return 0;
}
