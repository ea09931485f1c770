// Python bindings of the CPU core: the only file that knows pybind11.
//
// Tensors come as addresses; the caller keeps them alive and says sizes that fit.  Calls that may wait or work for long
// release the GIL.  A long wait takes it again to let Python's signal handlers run (Ctrl-C), and then waits for whoever
// has it: so it does that only when a signal has come, if somebody says so (`signals_are_told`), else every 20 ms.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/channel.h"
#include "cpu/collectives.h"
#include "cpu/few_rows.h"
#include "cpu/reduce.h"
#include "cpu/residual_norm.h"
#include "cpu/tree_sum.h"
#include "cpu/watchdog.h"

namespace py = pybind11;
using namespace tpk;

namespace {

// Ranks compare this when they meet; change it with the layout of the control segment or the protocol.
constexpr int kAbi = 6;
// Below this many bytes a sum or copy takes less time than giving up the GIL may cost.
constexpr std::int64_t kKeepGilBytes = 64 * 1024;

void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

std::atomic<bool> signals_are_told{false};
std::atomic<std::uint64_t> signals_told{0};

// The hook of one channel's waits.
class SignalHandlers {
public:
    void operator()(bool by_signal) {
        const std::uint64_t told = signals_told.load(std::memory_order_acquire);
        if (!by_signal && told == seen_ && signals_are_told.load(std::memory_order_relaxed)) return;
        seen_ = told;
        const py::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }

private:
    std::uint64_t seen_ = signals_told.load(std::memory_order_acquire);
};

// Mapped memory as a Python buffer; it stays mapped while a tensor uses it.  Peers' segments are mapped read-only,
// which the buffer does not say: torch warns about read-only buffers, and nothing of ours writes there.
struct Segment {
    std::shared_ptr<Mapping> mapping;
};

std::unique_ptr<Channel> open_channel(int rank, int size, int control_fd, const std::vector<int>& data_fds,
                                      double timeout_s, double spin_us) {
    if (data_fds.size() != static_cast<std::size_t>(size)) {
        throw std::invalid_argument("expected " + std::to_string(size) + " data segments, got " +
                                    std::to_string(data_fds.size()));
    }
    Memory memory;
    check_sealed(control_fd, Control::bytes_for(size), "the control segment");
    memory.control = std::make_shared<Mapping>(control_fd, Control::bytes_for(size), true);
    for (int r = 0; r < size; ++r) {
        const int fd = data_fds[static_cast<std::size_t>(r)];
        check_sealed(fd, 0, "the data segment of rank " + std::to_string(r));
        memory.data.push_back(std::make_shared<Mapping>(fd, kSegmentBytes, r == rank));
    }
    memory.own_file = duplicate(data_fds[static_cast<std::size_t>(rank)]);
    auto liveness = std::make_unique<Liveness>(control_fd, rank);
    return std::make_unique<Channel>(rank, size, std::move(memory), std::move(liveness),
                                     Patience{timeout_s, spin_us, SignalHandlers()});
}

template <typename Work>
void without_gil(std::int64_t bytes, Work work) {
    if (bytes < kKeepGilBytes) {
        work();
        return;
    }
    const py::gil_scoped_release release;
    work();
}

void bind_reduce(py::module_& m) {
    py::enum_<Dtype>(m, "Dtype")
        .value("float32", Dtype::kFloat32)
        .value("bfloat16", Dtype::kBFloat16)
        .value("float16", Dtype::kFloat16)
        .value("float64", Dtype::kFloat64);
    py::enum_<Isa>(m, "Isa").value("portable", Isa::kPortable).value("avx2", Isa::kAvx2).value("avx512", Isa::kAvx512);
    m.def("active_isa", [] { return name_of(active_isa()); });
    m.def("best_isa", [] { return name_of(best_isa()); });
    m.def("force_isa", &force_isa);
    m.def(
        "sum_rows",
        [](Dtype dtype, const std::vector<std::uintptr_t>& parts, std::int64_t stride, std::uintptr_t bias,
           std::uintptr_t out, std::int64_t out_stride, std::int64_t rows, std::int64_t columns) {
            std::vector<ConstRows> sources;
            sources.reserve(parts.size());
            for (const std::uintptr_t part : parts) sources.push_back({pointer(part), stride});
            without_gil(rows * columns * static_cast<std::int64_t>(size_of(dtype)), [&] {
                sum_rows(dtype, sources.data(), static_cast<int>(sources.size()), pointer(bias), pointer(out),
                         out_stride, rows, columns);
            });
        },
        "out[i, j] = parts[0][i, j] + parts[1][i, j] + ... + bias[j], in this order, in fp32, rounded once.");
    m.def(
        "copy_rows",
        [](std::uintptr_t from, std::int64_t from_stride, std::uintptr_t to, std::int64_t to_stride, std::int64_t rows,
           std::int64_t row_bytes) {
            without_gil(rows * row_bytes,
                        [&] { copy_rows(pointer(from), from_stride, pointer(to), to_stride, rows, row_bytes); });
        },
        "Copy `rows` rows of `row_bytes` bytes; strides in bytes.");
}

std::vector<ConstRows> rows_at(const std::vector<std::pair<std::uintptr_t, std::int64_t>>& places) {
    std::vector<ConstRows> found;
    found.reserve(places.size());
    for (const auto& [address, stride] : places) found.push_back({pointer(address), stride});
    return found;
}

void bind_tree_sum(py::module_& m) {
    using Places = std::vector<std::pair<std::uintptr_t, std::int64_t>>;
    m.def(
        "tree_of_products",
        [](Dtype dtype, const Places& parts, int terms, std::uintptr_t sums, std::int64_t sums_stride,
           std::int64_t rows, std::int64_t columns) {
            const std::vector<ConstRows> from = rows_at(parts);
            without_gil(rows * columns * static_cast<std::int64_t>(size_of(dtype)), [&] {
                tree_of_products(dtype, from.data(), static_cast<int>(from.size()), terms, pointer(sums), sums_stride,
                                 rows, columns);
            });
        },
        "sums[i, j] = tree over blocks of parts, (address, stride) each, in fp32; a block has `terms` parts.");
    m.def(
        "tree_of_sums",
        [](Dtype dtype, const Places& parts, std::uintptr_t bias, std::uintptr_t out, std::int64_t out_stride,
           std::int64_t rows, std::int64_t columns) {
            const std::vector<ConstRows> from = rows_at(parts);
            without_gil(rows * columns * static_cast<std::int64_t>(size_of(dtype)), [&] {
                tree_of_sums(dtype, from.data(), static_cast<int>(from.size()), pointer(bias), pointer(out), out_stride,
                             rows, columns);
            });
        },
        "out[i, j] = tree over fp32 parts, (address, stride) each, + bias[j], rounded once.");
}

// A product reads its weight, which a core does at some ten bytes per nanosecond.
std::int64_t weight_bytes(Dtype dtype, std::int64_t columns, std::int64_t contraction) {
    return columns * contraction * static_cast<std::int64_t>(size_of(dtype));
}

void bind_few_rows(py::module_& m) {
    py::enum_<FewRowsIsa>(m, "FewRowsIsa")
        .value("portable", FewRowsIsa::kPortable)
        .value("avx2", FewRowsIsa::kAvx2)
        .value("avx512", FewRowsIsa::kAvx512)
        .value("amx", FewRowsIsa::kAmx);
    m.attr("MAX_FEW_ROWS") = kMaxFewRows;
    m.def("best_few_rows_isa", [] { return best_few_rows_isa(); });
    m.def("force_few_rows_isa", &force_few_rows_isa);
    m.def("few_rows_isa_of", &few_rows_isa_of, "The instruction set that multiplies few rows of a dtype, or None.");
    m.def(
        "multiply_few_rows",
        [](Dtype dtype, std::uintptr_t x, std::int64_t x_stride, std::uintptr_t w, std::int64_t w_stride,
           std::uintptr_t bias, std::uintptr_t y, std::int64_t y_stride, std::int64_t rows, std::int64_t columns,
           std::int64_t contraction) {
            without_gil(weight_bytes(dtype, columns, contraction), [&] {
                multiply_few_rows({dtype, pointer(x), x_stride, pointer(w), w_stride, pointer(bias), pointer(y),
                                   y_stride, rows, columns, contraction});
            });
        },
        "y[i, j] = sum over k of x[i, k] * w[j, k] + bias[j], in fp32, rounded once; strides in elements.");
}

void bind_residual_norm(py::module_& m) {
    m.def(
        "residual_norm",
        [](Dtype dtype, std::int64_t rows, std::int64_t columns, std::uintptr_t weight, double eps, std::uintptr_t y,
           std::uintptr_t residual, std::uintptr_t sums, std::uintptr_t normed, std::uintptr_t scales) {
            without_gil(rows * columns * static_cast<std::int64_t>(size_of(dtype)), [&] {
                residual_norm({dtype, rows, columns, pointer(weight), eps}, pointer(y), pointer(residual),
                              pointer(sums), pointer(normed), pointer(scales));
            });
        },
        "sums = y + residual, normed = sums / sqrt(mean(sums^2) + eps) * weight, both rounded once; rows back to "
        "back.");
    m.def(
        "residual_norm_backward",
        [](Dtype dtype, std::int64_t rows, std::int64_t columns, std::uintptr_t weight, std::uintptr_t dn,
           std::uintptr_t dr, std::uintptr_t sums, std::uintptr_t scales, std::uintptr_t d, std::uintptr_t dweight) {
            without_gil(rows * columns * static_cast<std::int64_t>(size_of(dtype)), [&] {
                residual_norm_backward({dtype, rows, columns, pointer(weight), 0.0}, pointer(dn), pointer(dr),
                                       pointer(sums), pointer(scales), pointer(d), pointer(dweight));
            });
        },
        "The gradients of residual_norm: d of y and of the residual, dweight in fp32 (fp64).");
}

void bind_channel(py::module_& m) {
    py::enum_<Failure>(m, "Failure")
        .value("peer_lost", Failure::kPeerLost)
        .value("mismatch", Failure::kMismatch)
        .value("timeout", Failure::kTimeout)
        .value("interrupted", Failure::kInterrupted)
        .value("refused", Failure::kRefused)
        .value("other", Failure::kOther);
    py::class_<Segment>(m, "Segment", py::buffer_protocol()).def_buffer([](Segment& segment) {
        return py::buffer_info(segment.mapping->data(), 1, py::format_descriptor<unsigned char>::format(), 1,
                               {static_cast<py::ssize_t>(segment.mapping->bytes())}, {1}, /*readonly=*/false);
    });
    py::class_<Channel>(m, "Channel")
        .def(py::init(&open_channel), py::arg("rank"), py::arg("size"), py::arg("control_fd"), py::arg("data_fds"),
             py::arg("timeout_s"), py::arg("spin_us"))
        .def_property_readonly("call", &Channel::call)
        .def_property_readonly("epoch", &Channel::epoch)
        .def_property_readonly("capacity", &Channel::capacity)
        .def("segment", [](const Channel& channel, int rank) { return Segment{channel.segment(rank)}; })
        .def("begin", &Channel::begin, py::arg("fingerprint"), py::arg("text"))
        .def("end", &Channel::end)
        .def("signal", &Channel::signal)
        .def("address",
             [](const Channel& channel, int rank) { return reinterpret_cast<std::uintptr_t>(channel.slot(rank)); })
        .def("wait",
             [](Channel& channel, int peer, Epoch signals) {
                 if (channel.has_arrived(peer, signals)) return;
                 const py::gil_scoped_release release;
                 channel.wait(peer, signals);
             })
        .def("wait_for_all",
             [](Channel& channel, Epoch signals) {
                 const py::gil_scoped_release release;
                 channel.wait_for_all(signals);
             })
        .def("grow", &Channel::grow, py::arg("bytes"), py::call_guard<py::gil_scoped_release>())
        .def("poison", &Channel::poison, py::arg("kind"), py::arg("blamed"), py::arg("text"))
        .def("interrupt", &Channel::interrupt)
        .def_property_readonly("failed_at", &Channel::failed_at)
        .def("reduce_slots",
             [](Channel& channel, Dtype dtype, std::size_t offset, std::int64_t stride, std::int64_t rows,
                std::int64_t columns, Epoch signals, std::uintptr_t bias, std::uintptr_t out, std::int64_t out_stride) {
                 const py::gil_scoped_release release;
                 reduce_slots(channel, {dtype, offset, stride, rows, columns}, signals, pointer(bias), pointer(out),
                              out_stride);
             })
        .def("all_reduce",
             [](Channel& channel, std::uint64_t fingerprint, const std::string& text, Dtype dtype, std::uintptr_t x,
                std::uintptr_t out, std::int64_t count) {
                 const py::gil_scoped_release release;
                 all_reduce(channel, fingerprint, text, dtype, pointer(x), pointer(out), count);
             })
        .def("gather_slots", [](Channel& channel, std::int64_t rows, std::vector<std::int64_t> row_bytes,
                                std::uintptr_t own, std::uintptr_t out) {
            const py::gil_scoped_release release;
            gather_slots(channel, {rows, std::move(row_bytes)}, pointer(own), pointer(out));
        });
    py::class_<RepeatedSum>(m, "RepeatedSum")
        .def(py::init([](Channel& channel, std::uint64_t fingerprint, std::string text, Dtype dtype, std::int64_t rows,
                         std::int64_t columns) {
                 return std::make_unique<RepeatedSum>(channel, fingerprint, std::move(text),
                                                      SlotRows{dtype, 0, columns, rows, columns});
             }),
             py::keep_alive<1, 2>())
        // With the GIL: this spins for some microseconds, and giving it up and taking it back costs more.
        .def("start", [](RepeatedSum& sum, std::uintptr_t x,
                         std::uintptr_t bias) { return sum.start(pointer(x), pointer(bias)); })
        .def("start_product",
             [](RepeatedSum& sum, std::uintptr_t x, std::uintptr_t w, std::int64_t w_stride, std::int64_t contraction,
                std::uintptr_t out, std::uintptr_t bias) {
                 bool ended = false;
                 without_gil(weight_bytes(sum.matrix().dtype, sum.matrix().columns, contraction), [&] {
                     ended = sum.start(pointer(x), pointer(w), w_stride, contraction, pointer(out), pointer(bias));
                 });
                 return ended;
             })
        .def("finish", [](RepeatedSum& sum, std::uintptr_t x, std::uintptr_t bias) {
            const py::gil_scoped_release release;
            sum.finish(pointer(x), pointer(bias));
        });
}

void bind_watchdog(py::module_& m) {
    py::class_<Watch>(m, "Watch")
        .def(py::init([](const std::vector<std::pair<int, int>>& peers,
                         const std::vector<std::pair<int, std::uint64_t>>& connections, double grace_s) {
                 std::vector<Watch::Peer> watched;
                 for (const auto& [rank, pid] : peers) watched.push_back({rank, pid});
                 std::vector<Connection> owned;
                 for (const auto& [fd, cookie] : connections) owned.push_back({fd, cookie});
                 return std::make_unique<Watch>(watched, std::move(owned), grace_s);
             }),
             py::arg("peers"), py::arg("connections"), py::arg("grace_s"),
             "peers: (rank, process number) each; connections: (descriptor, cookie) each.")
        .def("enter", &Watch::enter)
        .def("leave", &Watch::leave)
        .def_property_readonly("deaths", &Watch::deaths)
        .def_property_readonly("ended", &Watch::ended)
        .def_property_readonly("ended_at", &Watch::ended_at);
    m.def("cookie_of", &cookie_of, "The kernel's number of a socket, never used twice; 0 for what is no socket.");
    m.def("tell_signals", [](bool whether) { signals_are_told.store(whether, std::memory_order_relaxed); });
    m.def("signals_have_come", [] { signals_told.fetch_add(1, std::memory_order_acq_rel); });
}

}  // namespace

PYBIND11_MODULE(_native, m) {
    m.doc() = "Compiled CPU core of tpkernels: shared-memory channels and vectorised reductions.";
    m.attr("ABI") = kAbi;
    m.attr("MAX_RANKS") = kMaxRanks;
    m.attr("SLOT_BYTES") = kSlotBytes;
    // ChannelError(kind, blamed ranks, call, epoch, message)
    static PyObject* error = py::exception<ChannelError>(m, "ChannelError").release().ptr();
    py::register_exception_translator([](std::exception_ptr thrown) {
        try {
            if (thrown) std::rethrow_exception(thrown);
        } catch (const ChannelError& failure) {
            std::vector<int> blamed;
            for (int rank = 0; rank < kMaxRanks; ++rank) {
                if ((failure.blamed >> rank & 1) != 0) blamed.push_back(rank);
            }
            const py::tuple arguments =
                py::make_tuple(failure.kind, blamed, failure.call, failure.epoch, std::string(failure.what()));
            PyErr_SetObject(error, arguments.ptr());
        }
    });
    bind_reduce(m);
    bind_few_rows(m);
    bind_residual_norm(m);
    bind_tree_sum(m);
    bind_channel(m);
    bind_watchdog(m);
    m.def(
        "make_control", [](int size, Epoch first) { return make_control(size, first).release(); }, py::arg("size"),
        py::arg("first") = 0, "File descriptor of a new control segment; the caller closes it.");
    m.def("all_reduce_bytes", &all_reduce_bytes, py::arg("bytes"), "What an all-reduce needs of a slot.");
    m.def(
        "make_data", [] { return make_data_file().release(); },
        "File descriptor of a new data segment; the caller closes it.");
}
