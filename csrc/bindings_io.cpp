// Python's view of files: a mapping that needs no descriptor, and the reader of pieces.
#include "bindings_io.h"

#include <pybind11/stl.h>
#include <sys/mman.h>

#include <cerrno>
#include <memory>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "bindings_arrays.h"
#include "io/direct_read.h"

using namespace strata::binding;
using strata::io::DirectReader;
using strata::io::Finished;
using strata::io::KnownFile;
using strata::io::Piece;
using strata::io::ReadTotals;

namespace {

struct Mapping {
    void* at;
    size_t bytes;
    ~Mapping() { munmap(at, bytes); }
};

// The first `bytes` of an open file, read-only u8. Python's own mmap keeps a descriptor per mapping, which a
// model of 512 experts does not leave to others. OSError where the system refuses.
U8 map_file(int descriptor, size_t bytes) {
    void* const at = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, descriptor, 0);
    if (at == MAP_FAILED) {
        PyErr_SetFromErrno(PyExc_OSError);
        throw py::error_already_set();
    }
    const py::capsule owner(new Mapping{at, bytes}, [](void* made) { delete static_cast<Mapping*>(made); });
    U8 array(static_cast<py::ssize_t>(bytes), static_cast<const uint8_t*>(at), owner);
    array.attr("flags").attr("writeable") = false;
    return array;
}

using FileRow = std::tuple<std::string, uint64_t, uint64_t, int64_t, int64_t>;
using FinishedRow = std::pair<uint64_t, int>;

// Keeps the arrays alive that are read into. One thread of Python owns a reader.
class Reader {
  public:
    Reader(const std::vector<FileRow>& rows, int threads, int most_open, bool direct) : direct_(direct) {
        std::vector<KnownFile> files;
        for (const auto& [path, device, inode, bytes, modified] : rows)
            files.push_back({path, device, inode, bytes, modified});
        reader_ = std::make_unique<DirectReader>(std::move(files), threads, most_open, direct);
    }

    uint64_t submit(size_t file, int64_t offset, U8& into, bool urgent) {
        require(file < reader().files(), "submit", "a file", file, reader().files());
        const int64_t bytes = into.size(), room = reader().file(file).bytes;
        if (offset < 0 || bytes == 0 || bytes > room || offset > room - bytes)
            throw py::value_error("submit: bytes " + std::to_string(offset) + " to " +
                                  std::to_string(offset + bytes) + " of a file of " + std::to_string(room));
        if (!into.writeable()) throw py::value_error("submit: the array is read-only");
        uint8_t* const at = into.mutable_data();
        for (const int64_t value : {offset, bytes, static_cast<int64_t>(reinterpret_cast<intptr_t>(at))})
            if (direct_ && value % DirectReader::kAlign != 0)
                throw py::value_error("submit: " + std::to_string(value) + " is no multiple of " +
                                      std::to_string(DirectReader::kAlign));
        const uint64_t ticket = reader().submit({file, offset, bytes, at}, urgent);
        kept_.emplace(ticket, into);
        return ticket;
    }

    void hurry(uint64_t ticket) { reader().hurry(ticket); }

    bool cancel(uint64_t ticket) {
        const bool cancelled = reader().cancel(ticket);
        if (cancelled) kept_.erase(ticket);
        return cancelled;
    }

    // Waits in short pieces, so that Ctrl-C ends it.
    std::vector<FinishedRow> finished(double seconds) {
        constexpr double kSlice = 0.05;
        std::vector<Finished> found;
        for (;;) {
            const double slice = std::min(seconds, kSlice);
            {
                const py::gil_scoped_release release;
                found = reader().finished(static_cast<int64_t>(slice * 1e9));
            }
            seconds -= slice;
            if (!found.empty() || seconds <= 0) break;
            if (PyErr_CheckSignals() != 0) throw py::error_already_set();
            if (kept_.empty()) break;
        }
        std::vector<FinishedRow> rows;
        for (const Finished& one : found) {
            kept_.erase(one.ticket);
            rows.emplace_back(one.ticket, one.outcome);
        }
        return rows;
    }

    py::dict totals() const {
        const ReadTotals found = reader().totals();
        return py::dict(py::arg("reads") = found.reads, py::arg("bytes") = found.bytes,
                        py::arg("busy_seconds") = found.busy_ns * 1e-9, py::arg("buffered") = found.buffered,
                        py::arg("reason") = found.reason);
    }

    int open_files() const { return reader().open_files(); }

    // Waits for reads that run; afterwards nothing writes into any array.
    void close() {
        std::unique_ptr<DirectReader> ended = std::move(reader_);
        const py::gil_scoped_release release;
        ended.reset();
    }

    ~Reader() {
        if (reader_) close();
    }

  private:
    DirectReader& reader() const {
        if (!reader_) throw py::value_error("the reader is closed");
        return *reader_;
    }

    const bool direct_;
    std::unordered_map<uint64_t, U8> kept_;  // destroyed after the threads that write there
    std::unique_ptr<DirectReader> reader_;
};

}  // namespace

void bind_io(py::module_& m) {
    m.def("map_file", &map_file, py::arg("descriptor"), py::arg("bytes"));
    py::class_<Reader>(m, "DirectReader")
        .def(py::init<const std::vector<FileRow>&, int, int, bool>(), py::arg("files"), py::arg("threads"),
             py::arg("most_open"), py::arg("direct"))
        .def("submit", &Reader::submit, py::arg("file"), py::arg("offset"), py::arg("into").noconvert(),
             py::arg("urgent"))
        .def("hurry", &Reader::hurry, py::arg("ticket"))
        .def("cancel", &Reader::cancel, py::arg("ticket"))
        .def("finished", &Reader::finished, py::arg("seconds"))
        .def("totals", &Reader::totals)
        .def_property_readonly("open_files", &Reader::open_files)
        .def("close", &Reader::close);
    m.attr("READ") = strata::io::kRead;
    m.attr("READ_SHORT") = strata::io::kShort;
    m.attr("READ_CHANGED") = strata::io::kChanged;
    m.attr("READ_ALIGN") = DirectReader::kAlign;
}
