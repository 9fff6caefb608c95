// The Python face: arguments become C++ values with the GIL held, every wait happens without it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <unordered_map>

#include "copier.h"

namespace py = pybind11;

namespace xllm {
namespace {

constexpr auto kSignalSlice = std::chrono::milliseconds(100);
constexpr auto kDropLimit = std::chrono::seconds(60);

Clock::time_point deadline_after(double seconds) {
  if (std::isnan(seconds)) throw std::invalid_argument("timeout_s is not a number");
  const auto limited = std::chrono::duration<double>(std::min(std::max(seconds, 0.0), 1e9));
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(limited);
}

// Calls `slice(until)` without the GIL until it says true; lets Ctrl-C in between.
template <class Slice>
void wait_in_slices(double timeout_s, const std::string& what, Slice slice) {
  const Clock::time_point deadline = deadline_after(timeout_s);
  for (;;) {
    bool over;
    {
      py::gil_scoped_release release;
      over = slice(std::min(deadline, Clock::now() + kSignalSlice));
    }
    if (over) return;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (Clock::now() >= deadline) {
      throw TransferTimeout(what + " did not come within " + std::string(py::str(py::float_(timeout_s))) + " s");
    }
  }
}

std::vector<std::int64_t> ids_of(const py::buffer& ids, const char* side) {
  const py::buffer_info info = ids.request();
  const bool signed_int = info.format == "l" || info.format == "q" || info.format == "<q" || info.format == "<l";
  if (info.ndim != 1 || info.itemsize != 8 || !signed_int) {
    throw py::type_error(std::string(side) + " ids must be a one-dimensional buffer of int64");
  }
  std::vector<std::int64_t> out(static_cast<std::size_t>(info.shape[0]));
  const char* at = static_cast<const char*>(info.ptr);
  for (std::int64_t& id : out) {
    std::memcpy(&id, at, sizeof id);
    at += info.strides[0];
  }
  return out;
}

void require_owner(const py::object& owner) {
  if (owner.is_none()) throw py::type_error("an owner is required: it keeps the memory alive while it is in use");
}

struct PyRegion {
  std::shared_ptr<Region> core;
};

struct PyTable {
  std::shared_ptr<Table> core;
  py::object copier;
};

class PyCopier {
 public:
  PyCopier(std::string backend, const Options& options) : backend(std::move(backend)) {
    py::gil_scoped_release release;  // opening a driver can take seconds
    if (this->backend == "cpu") {
      core = make_cpu_copier(options);
    } else if (this->backend == "cuda") {
      core = make_cuda_copier(options);
    } else if (this->backend == "ascend") {
      core = make_ascend_copier(options);
    } else {
      throw std::invalid_argument("backend '" + this->backend + "' is unknown; there are: cpu, cuda, ascend");
    }
  }
  ~PyCopier() { close(); }

  void close() {
    {
      py::gil_scoped_release release;
      if (core) core->close();
    }
    owners.clear();
  }

  std::string backend;
  std::shared_ptr<Copier> core;
  std::unordered_map<const Region*, py::object> owners;
};

struct PyTransfer {
  std::shared_ptr<Transfer> core;
  py::object copier, owners;

  // Nobody is left to wait: what has not started never will, and the memory stays until the rest has ended.
  ~PyTransfer() {
    bool ended;
    {
      py::gil_scoped_release release;
      core->cancel();
      ended = core->wait_ended(Clock::now() + kDropLimit);
    }
    if (!ended) {  // a device that hangs may still write: rather keep the memory for ever than free it
      owners.release();
      copier.release();
    }
  }

  std::size_t checked(std::int64_t group) const {
    if (group < 0 || group >= static_cast<std::int64_t>(core->request.groups.size())) {
      throw py::index_error("the transfer has " + std::to_string(core->request.groups.size()) + " groups, not group " +
                            std::to_string(group));
    }
    return static_cast<std::size_t>(group);
  }
};

py::object message_of(const std::exception_ptr& error) {
  if (!error) return py::none();
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return py::str(e.what());
  }
}

// Exceptions with more than one base, which py::exception cannot express; the module keeps them for ever.
PyObject *native_error, *backend_unavailable, *device_error, *transfer_timeout, *transfer_cancelled;

PyObject* make_exception(py::module_& m, const char* name, const char* doc, const py::tuple& bases) {
  const std::string full = "xllm_hier._native." + std::string(name);
  PyObject* made = PyErr_NewExceptionWithDoc(full.c_str(), doc, bases.ptr(), nullptr);
  if (made == nullptr) throw py::error_already_set();
  m.add_object(name, py::reinterpret_borrow<py::object>(made));
  return made;
}

void translate(std::exception_ptr thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const DeviceError& error) {
    py::object value = py::reinterpret_borrow<py::object>(device_error)(error.what());
    value.attr("code") = error.code;
    PyErr_SetObject(device_error, value.ptr());
  } catch (const BackendUnavailable& error) {
    PyErr_SetString(backend_unavailable, error.what());
  } catch (const TransferTimeout& error) {
    PyErr_SetString(transfer_timeout, error.what());
  } catch (const TransferCancelled& error) {
    PyErr_SetString(transfer_cancelled, error.what());
  } catch (const NativeError& error) {
    PyErr_SetString(native_error, error.what());
  }
}

std::unique_ptr<PyTransfer> submit(const py::object& self, const std::string& direction, const py::sequence& parts,
                                   std::vector<std::pair<int, int>> groups, const py::object& owners,
                                   std::optional<Address> after_stream, std::int64_t fail_at_piece) {
  require_owner(owners);
  if (direction != "load" && direction != "offload") {
    throw std::invalid_argument("direction must be 'load' (host to device) or 'offload', not '" + direction + "'");
  }
  Request request{
      direction == "load" ? Direction::kLoad : Direction::kOffload, {}, std::move(groups), after_stream, fail_at_piece};
  for (const py::handle item : parts) {
    const auto part = item.cast<std::tuple<py::object, py::buffer, py::buffer>>();
    request.parts.push_back({std::get<0>(part).cast<const PyTable&>().core, ids_of(std::get<1>(part), "device"),
                             ids_of(std::get<2>(part), "host")});
  }
  auto& copier = self.cast<PyCopier&>();
  std::shared_ptr<Transfer> core;
  {
    py::gil_scoped_release release;
    core = copier.core->submit(std::move(request));
  }
  return std::unique_ptr<PyTransfer>(new PyTransfer{std::move(core), self, owners});
}

PyTable make_table(const py::object& self, std::vector<Address> device_bases, std::size_t device_stride,
                   std::int64_t device_blocks, Address host_base, std::size_t host_stride, std::int64_t host_blocks,
                   std::size_t piece_bytes, std::optional<std::vector<std::size_t>> host_offsets,
                   std::optional<std::vector<int>> layers) {
  const std::size_t rows = device_bases.size();
  if (!host_offsets) {
    host_offsets.emplace(rows);
    for (std::size_t row = 0; row < rows; ++row) (*host_offsets)[row] = row * piece_bytes;
  }
  if (!layers) {
    layers.emplace(rows);
    for (std::size_t row = 0; row < rows; ++row) (*layers)[row] = static_cast<int>(row);
  }
  auto& copier = self.cast<PyCopier&>();
  return {copier.core->table({std::move(device_bases), device_stride, device_blocks, host_base, host_stride,
                              host_blocks, std::move(*host_offsets), piece_bytes, std::move(*layers)}),
          self};
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Layered copies of cache blocks between host and device; see _native.pyi.";

  const py::tuple runtime = py::make_tuple(py::reinterpret_borrow<py::object>(PyExc_RuntimeError));
  native_error = make_exception(m, "NativeError", "A native copy or its set-up failed.", runtime);
  const py::object native = py::reinterpret_borrow<py::object>(native_error);
  const py::tuple bases = py::make_tuple(native);
  backend_unavailable = make_exception(m, "BackendUnavailable", "The device's library is not there.", bases);
  device_error = make_exception(m, "DeviceError", "The device's runtime reported `code`.", bases);
  transfer_cancelled = make_exception(m, "TransferCancelled", "The transfer was cancelled.", bases);
  transfer_timeout = make_exception(m, "TransferTimeout", "A wait reached its time limit; the transfer goes on.",
                                    py::make_tuple(native, py::reinterpret_borrow<py::object>(PyExc_TimeoutError)));
  py::register_exception_translator(translate);

  py::class_<PyRegion>(m, "Region", py::is_final())
      .def_property_readonly("address", [](const PyRegion& self) { return self.core->begin; })
      .def_property_readonly("nbytes", [](const PyRegion& self) { return self.core->bytes; })
      .def_property_readonly("pinned", [](const PyRegion& self) { return self.core->pinned; });

  py::class_<PyTable>(m, "Table", py::is_final())
      .def_property_readonly("piece_bytes", [](const PyTable& self) { return self.core->piece_bytes; })
      .def_property_readonly("layers", [](const PyTable& self) { return py::tuple(py::cast(self.core->layers)); });

  py::class_<PyTransfer>(m, "Transfer", py::is_final())
      .def(
          "wait_group",
          [](PyTransfer& self, std::int64_t group, double timeout_s) {
            const std::size_t index = self.checked(group);
            wait_in_slices(timeout_s, "layer group " + std::to_string(group),
                           [&](Clock::time_point until) { return self.core->wait_group(index, until); });
          },
          py::arg("group"), py::arg("timeout_s"))
      .def(
          "wait_all",
          [](PyTransfer& self, double timeout_s) {
            wait_in_slices(timeout_s, "the end of the transfer",
                           [&](Clock::time_point until) { return self.core->wait_all(until); });
          },
          py::arg("timeout_s"))
      .def(
          "stream_wait_group",
          [](PyTransfer& self, std::int64_t group, Address stream, double timeout_s) {
            const std::size_t index = self.checked(group);
            Copier& copier = *self.copier.cast<PyCopier&>().core;
            wait_in_slices(
                timeout_s, "the event of layer group " + std::to_string(group),
                [&](Clock::time_point until) { return copier.stream_wait_group(*self.core, index, stream, until); });
          },
          py::arg("group"), py::arg("stream"), py::arg("timeout_s"))
      .def(
          "done", [](PyTransfer& self, std::int64_t group) { return self.core->done(self.checked(group)); },
          py::arg("group"))
      .def("cancel", [](PyTransfer& self) { self.core->cancel(); })
      .def_property_readonly("ended", [](PyTransfer& self) { return self.core->ended(); })
      .def_property_readonly("error", [](PyTransfer& self) { return message_of(self.core->error()); })
      .def_property_readonly("num_groups", [](PyTransfer& self) { return self.core->request.groups.size(); })
      .def_property_readonly("num_pieces", [](PyTransfer& self) { return self.core->pieces; })
      .def_property_readonly("nbytes", [](PyTransfer& self) { return self.core->bytes; });

  py::class_<PyCopier>(m, "Copier", py::is_final())
      .def(py::init([](std::string backend, int threads, int device, std::string method, double bytes_per_second,
                       std::string library) {
             const Options options{threads, device, std::move(method), bytes_per_second, std::move(library)};
             return std::make_unique<PyCopier>(std::move(backend), options);
           }),
           py::arg("backend"), py::kw_only(), py::arg("threads") = 1, py::arg("device") = 0, py::arg("method") = "auto",
           py::arg("bytes_per_second") = 0.0, py::arg("library") = "")
      .def_property_readonly("backend", [](const PyCopier& self) { return self.backend; })
      .def_property_readonly("method", [](const PyCopier& self) { return self.core->method(); })
      .def_property(
          "bytes_per_second", [](const PyCopier& self) { return self.core->bytes_per_second(); },
          [](PyCopier& self, double rate) { self.core->set_bytes_per_second(rate); })
      .def(
          "register_region",
          [](PyCopier& self, Address address, std::size_t nbytes, const std::string& kind, const py::object& owner) {
            require_owner(owner);
            if (kind != "host" && kind != "device") {
              throw std::invalid_argument("kind must be 'host' or 'device', not '" + kind + "'");
            }
            std::shared_ptr<Region> region;
            {
              py::gil_scoped_release release;  // pinning takes long
              region = self.core->register_region(address, nbytes, kind == "host" ? Kind::kHost : Kind::kDevice);
            }
            self.owners.emplace(region.get(), owner);
            return PyRegion{std::move(region)};
          },
          py::arg("address"), py::arg("nbytes"), py::kw_only(), py::arg("kind"), py::arg("owner"))
      .def(
          "unregister_region",
          [](PyCopier& self, PyRegion& region) {
            {
              py::gil_scoped_release release;
              self.core->unregister_region(*region.core);
            }
            self.owners.erase(region.core.get());
          },
          py::arg("region"))
      .def("table", &make_table, py::arg("device_bases"), py::kw_only(), py::arg("device_stride"),
           py::arg("device_blocks"), py::arg("host_base"), py::arg("host_stride"), py::arg("host_blocks"),
           py::arg("piece_bytes"), py::arg("host_offsets") = py::none(), py::arg("layers") = py::none())
      .def("submit", &submit, py::arg("direction"), py::arg("parts"), py::arg("groups"), py::kw_only(),
           py::arg("owners"), py::arg("after_stream") = py::none(), py::arg("fail_at_piece") = -1)
      .def("close", &PyCopier::close);
}

}  // namespace xllm
