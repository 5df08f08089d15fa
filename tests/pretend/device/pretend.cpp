// A pretend accelerator for tests: a device of torch (PrivateUse1) that computes on the CPU, to the bit like it,
// and has an accelerator's manners, stricter than a real one. One unit: torch's headers are most of the work.
#include <torch/csrc/utils/pybind.h>

#include <pthread.h>

#include "autocast.h"
#include "group.h"
#include "memory.h"
#include "pending.h"
#include "runtime.h"
#include "tensors.h"

namespace pretend {
REGISTER_ALLOCATOR(kPretend, &pretend_allocator);
C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl);

static void after_fork_in_child() {
  if (!is_used) return;
  is_bad_fork = true;
  new (&accounts()) std::recursive_mutex();  // another thread of the parent may have held them
  new (&execution()) std::recursive_mutex();
}
static std::map<std::string, int64_t> read_counters() {
  Lock lock(accounts());
  std::map<std::string, int64_t> all{{"kernels", counters.kernels}, {"copies_to_host", counters.copies_to_host},
                                     {"copies_from_host", counters.copies_from_host}, {"copies_late", counters.copies_late},
                                     {"collectives", counters.collectives}, {"races", counters.races}};
  int64_t waits = 0;
  for (size_t i = 0; i < counters.waits.size(); ++i) {
    all["waits_" + std::string(kWaitNames[i])] = counters.waits[i];
    waits += counters.waits[i];
  }
  all["synchronizations"] = waits;
  return all;
}
static void reset_counters() {
  Lock lock(accounts());
  counters = Counters();
  kernel_counts.clear();
}
static std::vector<std::string> read_races() {
  Lock lock(accounts());
  return race_log;
}
static std::vector<int> contexts() {
  std::vector<int> all;
  for (int d = 0; d < (int)memories().size(); ++d) if (has_context(d)) all.push_back(d);
  return all;
}
static void set_sync_mode(const std::string& mode) {
  TORCH_CHECK(mode == "default" || mode == "error", "the sync mode is \"default\" or \"error\", not ", mode);
  sync_mode = mode == "error" ? SyncMode::ERROR : SyncMode::DEFAULT;
}

PYBIND11_MODULE(_device, m) {
  usual_allocator = GetCPUAllocator();
  SetCPUAllocator(new KernelAllocator(), 255);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  pthread_atfork(nullptr, nullptr, &after_fork_in_child);
  m.def("init", [] { Lock lock(accounts()); use_runtime(); });
  m.def("is_initialized", [] { return is_used && !is_bad_fork; });
  m.def("is_in_bad_fork", [] { return is_bad_fork; });
  m.def("device_name", &device_name);
  m.def("backend_name", &backend_name);
  m.def("device_count", &device_count);
  m.def("visible_devices", [] { Lock lock(accounts()); return std::vector<int>(visible()); });
  m.def("contexts", &contexts);
  m.def("counters", &read_counters);
  m.def("reset_counters", &reset_counters);
  m.def("kernel_counts", [] { Lock lock(accounts()); return kernel_counts; });
  m.def("races", &read_races);
  m.def("set_sync_mode", &set_sync_mode);
  m.def("default_generator", [](int d) { return default_generator(d); });
  m.def("memory_retries", [](int d) { Lock lock(accounts()); return memory_of(d).stats.num_alloc_retries; });
  py::class_<Group, c10d::Backend, intrusive_ptr<Group>>(m, "Group")
      .def(py::init([](const intrusive_ptr<c10d::Backend>& gloo, int rank, int size) { return make_intrusive<Group>(gloo, rank, size); }))
      .def("is_hanging", &Group::is_hanging, py::call_guard<py::gil_scoped_release>())
      .def("_abort", &Group::abort, py::call_guard<py::gil_scoped_release>());
}
}  // namespace pretend
