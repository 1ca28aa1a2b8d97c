// strata._C: the only file that knows Python. Compiled for plain x86-64, so importing it never needs AVX2.
//
// Every array is checked here (dtype, layout, shape) before its pointer goes on; ops run without the GIL.
#include "bindings_experts.h"
#include "bindings_io.h"
#include "bindings_kv.h"
#include "bindings_parts.h"
#include "bindings_split_experts.h"
#include "bindings_tokens.h"
#include "bindings_weights.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/bandwidth.h"
#include "cpu/cpu.h"
#include "cpu/features.h"
#include "cpu/int8_peak.h"

namespace py = pybind11;
using namespace strata::cpu;

namespace {

// A step loop in Python leaves gaps of 20 to 100 us between ops; waking a parked thread costs 50 us and more
// in a virtual machine, which took 15 % of the decode speed with a spin of 50 us.
constexpr int64_t kSpinNs = 200000;

const Kernels& kernels_for(const std::string& isa) {
    const Features found = detect_features();
    if (!found.avx2) throw py::value_error("this processor has no AVX2: " + found.brand);
    if (isa == "avx2") return avx2::kKernels;
    if (isa != "avx512") throw py::value_error("isa is '" + isa + "'; known are 'avx2' and 'avx512'");
    if (!found.avx512) throw py::value_error("this processor has no AVX-512 with VNNI: " + found.brand);
    return avx512::kKernels;
}

void start_clock(Cpu& cpu) {
    const std::lock_guard<std::mutex> lock(cpu.busy);
    cpu.clock.take();
    cpu.clock.on = true;
}

using OpRow = std::tuple<std::string, std::string, int64_t, double, int64_t, int64_t, bool>;

// (op, shape, calls, seconds, bytes, multiply-adds, quantized) of what ran since start_clock.
std::vector<OpRow> stop_clock(Cpu& cpu) {
    const std::lock_guard<std::mutex> lock(cpu.busy);
    cpu.clock.on = false;
    std::vector<OpRow> found;
    for (const OpTotal& total : cpu.clock.take())
        found.emplace_back(total.op, total.cost.shape, total.calls, total.seconds, total.cost.bytes,
                           total.cost.macs, total.cost.quantized);
    return found;
}

// nodes: the memory node of each thread, numbered from 0 without gaps.
void start_trace(Cpu& cpu, const std::vector<int>& nodes) {
    const std::lock_guard<std::mutex> lock(cpu.busy);
    if (nodes.size() != static_cast<size_t>(cpu.pool.size()))
        throw py::value_error(std::to_string(nodes.size()) + " nodes for " + std::to_string(cpu.pool.size()) +
                              " threads");
    for (const int node : nodes)
        if (node < 0 || node >= cpu.pool.size())
            throw py::value_error("node " + std::to_string(node) + " of " + std::to_string(cpu.pool.size()) +
                                  " threads");
    cpu.clock.take_spans();
    cpu.clock.trace(cpu.pool, nodes);
}

void stop_trace(Cpu& cpu) {
    const std::lock_guard<std::mutex> lock(cpu.busy);
    cpu.clock.end_trace(cpu.pool);
}

using SpanRow =
    std::tuple<std::string, std::string, int, double, double, int64_t, int64_t, std::vector<double>>;

// (op, shape, layer, begin, end, bytes, multiply-adds, end by node) of every call since the last time asked.
std::vector<SpanRow> take_spans(Cpu& cpu) {
    const std::lock_guard<std::mutex> lock(cpu.busy);
    std::vector<SpanRow> found;
    for (OpSpan& span : cpu.clock.take_spans())
        found.emplace_back(span.op, std::move(span.cost.shape), span.layer, span.begin, span.end,
                           span.cost.bytes, span.cost.macs, std::move(span.node_end));
    return found;
}

void bind_cpu(py::module_& m) {
    m.def("features", [] {
        const Features found = detect_features();
        return py::dict(py::arg("avx2") = found.avx2, py::arg("avx512") = found.avx512,
                        py::arg("brand") = found.brand);
    });
    py::class_<Cpu>(m, "Cpu")
        .def(py::init([](const std::vector<int>& cpus, const std::string& isa, bool bind, int64_t spin_ns,
                         const std::vector<int>& nodes) {
                 return std::make_unique<Cpu>(cpus, bind, spin_ns, kernels_for(isa), nodes);
             }),
             py::arg("cpus"), py::arg("isa"), py::arg("bind") = true, py::arg("spin_ns") = kSpinNs,
             py::arg("nodes") = std::vector<int>())
        .def_property_readonly("threads", [](const Cpu& cpu) { return cpu.pool.size(); })
        .def_property_readonly("bound", [](const Cpu& cpu) { return cpu.pool.bound(); })
        .def_readwrite("token_scales", &Cpu::token_scales)
        .def_property_readonly("isa", [](const Cpu& cpu) { return cpu.kernels.name; })
        .def("read_bandwidth", &read_bandwidth, py::arg("bytes"), py::arg("seconds"),
             py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("native_seconds", [](const Cpu& cpu) { return cpu.clock.native; })
        .def("start_clock", &start_clock, py::call_guard<py::gil_scoped_release>())
        .def("stop_clock", &stop_clock, py::call_guard<py::gil_scoped_release>())
        .def("start_trace", &start_trace, py::arg("nodes"), py::call_guard<py::gil_scoped_release>())
        .def("stop_trace", &stop_trace, py::call_guard<py::gil_scoped_release>())
        .def("take_spans", &take_spans, py::call_guard<py::gil_scoped_release>());
    m.def("int8_peak", &int8_peak, py::arg("cpu"), py::arg("seconds"),
          py::call_guard<py::gil_scoped_release>());
}

}  // namespace

PYBIND11_MODULE(_C, m) {
    m.doc() = "C++ ops of Strata; use strata.backends.cpu";
    bind_cpu(m);
    bind_io(m);
    bind_kv(m);
    bind_token_ops(m);
    bind_weight_ops(m);
    bind_experts(m);
    bind_split_experts(m);
    bind_attend(m);
    bind_ffn(m);
    bind_layers(m);
}
