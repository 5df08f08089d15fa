// The device as torch asks for it: current device, streams, events, generators.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <ctime>

#include "pending.h"

namespace pretend {
inline int index_or_current(Device d) { return d.index() < 0 ? current_device : d.index(); }

struct EventState {
  Clock clock;
  bool is_recorded = false;
  int asked = 0;
  timespec when{};
};
struct GuardImpl final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kPretend; }
  Device getDevice() const override { return Device(kPretend, (DeviceIndex)current_device); }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < device_count(), "invalid device ordinal ", (int)d.index(), ": there are ", device_count());
    uncheckedSetDevice(d);
  }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.index() >= 0) current_device = d.index(); }
  Device exchangeDevice(Device d) const override {
    auto before = getDevice();
    setDevice(d);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return (DeviceIndex)device_count(); }
  DeviceCapability getDeviceCapability(Device) const override {
    DeviceCapability capability;
    if (refuses_float64()) {
      capability.capability_data.capability_bits &= ~((1ULL << kIndex_Double) | (1ULL << kIndex_ComplexDouble));
    }
    return capability;
  }

  Stream getStream(Device d) const override { Lock lock(accounts()); return as_stream(stream_of(index_or_current(d))); }
  Stream getDefaultStream(Device d) const override { Lock lock(accounts()); return as_stream(default_stream(index_or_current(d))); }
  Stream getNewStream(Device d, int) const override {
    Lock lock(accounts());
    memory_of(index_or_current(d));
    return as_stream(pooled_stream(index_or_current(d)));
  }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override {
    Lock lock(accounts());
    auto before = as_stream(stream_of(s.device_index()));
    current_streams[s.device_index()] = state_of(s).number;
    return before;
  }
  void* getStreamNativeHandle(const Stream s) const override { return (void*)(intptr_t)s.id(); }
  bool queryStream(const Stream& s) const override { Lock lock(accounts()); return is_done(state_of(s).clock); }
  void synchronizeStream(const Stream& s) const override {
    Lock lock(accounts());
    memory_of(s.device_index());
    host_waits(lock, Wait::STREAM, state_of(s).clock);
  }
  void synchronizeDevice(const DeviceIndex d) const override {
    Lock lock(accounts());
    int device = d < 0 ? current_device : d;
    memory_of(device);
    host_waits(lock, Wait::DEVICE, device_clock(device));
  }

  void record(void** event, const Stream& s, const DeviceIndex, const EventFlag) const override {
    Lock lock(accounts());
    use_runtime();
    if (!*event) *event = new EventState();
    auto& state = state_of(s);
    tick(state);
    auto& made = *(EventState*)*event;
    made = {state.clock, true, 0, {}};
    clock_gettime(CLOCK_MONOTONIC, &made.when);
  }
  void block(void* event, const Stream& s) const override {
    Lock lock(accounts());
    if (!event || !((EventState*)event)->is_recorded) return;
    join(state_of(s).clock, ((EventState*)event)->clock);
  }
  // As late as the stream allows, and yet once: whoever asks again and again is told at the third time.
  bool queryEvent(void* event) const override {
    Lock lock(accounts());
    if (!event || !((EventState*)event)->is_recorded) return true;
    auto& asked = *(EventState*)event;
    if (!is_done(asked.clock)) {
      for (auto& f : flights()) if (at_stream(asked.clock, f->stream) >= f->when) return false;
      if (++asked.asked < 3) return false;
    }
    wait_uncounted(lock, asked.clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    Lock lock(accounts());
    if (event && ((EventState*)event)->is_recorded) host_waits(lock, Wait::EVENT, ((EventState*)event)->clock);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete (EventState*)event; }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    auto &a = *(EventState*)from, &b = *(EventState*)to;
    return (double)(b.when.tv_sec - a.when.tv_sec) * 1e3 + (double)(b.when.tv_nsec - a.when.tv_nsec) / 1e6;
  }
  void recordDataPtrOnStream(const DataPtr& p, const Stream& s) const override { pretend_allocator.recordStream(p, s); }
};

// ---------------------------------------------------------------- random numbers
// A generator of the device: the CPU's, under the device's name. Kernels draw from `inner`.
struct PretendGenerator final : GeneratorImpl {
  at::Generator inner;
  PretendGenerator(DeviceIndex d, at::Generator cpu)
      : GeneratorImpl(Device(kPretend, d), DispatchKeySet(DispatchKey::PrivateUse1)), inner(std::move(cpu)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  intrusive_ptr<TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  PretendGenerator* clone_impl() const override { return new PretendGenerator(device().index(), inner.clone()); }
};
inline at::Generator make_pretend_generator(int device) {
  return at::make_generator<PretendGenerator>((DeviceIndex)device, at::detail::createCPUGenerator());
}
inline const at::Generator& default_generator(int device) {
  static auto* all = new std::map<int, at::Generator>();
  Lock lock(accounts());
  TORCH_CHECK(device >= 0 && device < device_count(), "invalid device ordinal ", device);
  auto it = all->find(device);
  if (it == all->end()) it = all->emplace(device, make_pretend_generator(device)).first;
  return it->second;
}
inline at::Generator inner_generator(const at::Generator& g) { return g.get<PretendGenerator>()->inner; }

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override {
    if (is_set("PRETEND_AVAILABLE_POISONS")) use_runtime();  // as cuInit spoils a later fork
    return device_count() > 0;
  }
  bool hasPrimaryContext(DeviceIndex d) const override { return has_context(d < 0 ? current_device : d); }
  void init() const override { Lock lock(accounts()); use_runtime(); }
  DeviceIndex deviceCount() const override { return (DeviceIndex)device_count(); }
  void setCurrentDevice(DeviceIndex d) const override { GuardImpl().setDevice(Device(kPretend, d)); }
  DeviceIndex getCurrentDevice() const override { return (DeviceIndex)current_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    auto before = (DeviceIndex)current_device;
    if (d >= 0) setCurrentDevice(d);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* p) const override { Lock lock(accounts()); return find_pinned(p) != pinned_blocks().end(); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Device getDeviceFromPtr(void* p) const override {
    for (int d = 0; d < (int)memories().size(); ++d)
      if (memories()[d] && (char*)p >= memories()[d]->face && (char*)p < memories()[d]->face + memories()[d]->limit)
        return Device(kPretend, (DeviceIndex)d);
    TORCH_CHECK(false, "not memory of the pretend device");
  }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d < 0 ? current_device : d); }
  at::Generator getNewGenerator(DeviceIndex d) const override { return make_pretend_generator(d < 0 ? current_device : d); }
  void resizePrivateUse1Bytes(const Storage& storage, size_t n) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto made = PretendAllocator::allocate_on(impl->device().index(), n);
    if (n && impl->data_ptr().get())
      std::memcpy(body_of(made.get()), body_of(impl->data_ptr().get()), std::min(n, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(made));
    impl->set_nbytes(n);
  }
};
}  // namespace pretend
